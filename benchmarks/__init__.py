"""Measurements to run by hand. A package, so that another `benchmarks` that is installed does not stand before it."""
