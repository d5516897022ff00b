"""Prompt sources with exact iterator state."""
