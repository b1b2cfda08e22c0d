"""Estimates of the policy gradient against the exact one: `benchmarks/gradient_truth.py`."""
