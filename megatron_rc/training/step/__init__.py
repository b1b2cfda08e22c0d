"""One training step: sampling, micro-batches, loss, routes."""
