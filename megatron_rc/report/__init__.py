"""Curves, the live display and the self-contained HTML report."""
