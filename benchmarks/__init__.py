"""Measured figures, each a program such as `python -m benchmarks.rollout`.

A package of its own: installed ones may bear the same name (google-jetstream has one) and would hide a bare folder.
"""
