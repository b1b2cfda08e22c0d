"""Rollout correction in codebases that people already run: one folder per host, and what the hosts share."""
