"""Readers of rollout dumps and what-if replay of corrections."""
