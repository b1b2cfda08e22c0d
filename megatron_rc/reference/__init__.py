"""The mathematics in plain PyTorch: the oracle of every kernel, and the backend of machines without a GPU."""
