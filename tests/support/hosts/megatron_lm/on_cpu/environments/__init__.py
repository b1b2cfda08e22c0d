"""Environments of the job; the registry of megatron/rl lists this path, and its repository has no such file."""
