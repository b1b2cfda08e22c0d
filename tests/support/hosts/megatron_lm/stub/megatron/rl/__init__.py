"""The patch points of megatron/rl: their signatures, and the layouts of what they take and give."""
