"""Rules that slow the optimizer: length decay with its surge detector, and the mismatch rule."""
