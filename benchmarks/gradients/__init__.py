"""Estimates of the policy gradient against the exact one: `benchmarks/gradients/truth.py`."""
