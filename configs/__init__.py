"""Configs: data only. base.py names every field; the others change a few."""
