"""Weights, gates and metrics of a rollout batch: its settings, `correct`, and both backends."""
