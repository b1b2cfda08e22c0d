"""The reinforcement-learning loop on megatron-core."""
