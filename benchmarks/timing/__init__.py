"""The parts of benchmarks/kernels.py: what is timed, how, beside which peers, and what it should reach."""
