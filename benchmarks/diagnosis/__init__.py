"""The committed dumps, faults of engines, and what `megatron-rc analyze` says of them."""
