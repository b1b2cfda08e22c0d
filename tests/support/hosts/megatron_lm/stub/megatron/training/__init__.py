"""The patch points of megatron.training."""
