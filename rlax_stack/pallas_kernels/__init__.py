"""Kernels, each with its plain reference and one dispatch function."""
