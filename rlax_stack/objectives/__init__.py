"""Objectives: pure functions that a config composes into a loss."""
