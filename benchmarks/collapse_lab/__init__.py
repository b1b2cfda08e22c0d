"""The parts of benchmarks/collapse.py: rows of finished runs, statistics, claims and their rules, figures, the page."""
