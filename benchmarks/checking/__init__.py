"""The parts of benchmarks/gpu_check.py: every kernel against fp64, on whatever a caller may give it."""
