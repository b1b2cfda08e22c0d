"""Checks that compare a rollout server or a host codebase with a trainer before anything trains."""
