"""The correction in plain PyTorch: the oracle of the kernels, and the backend of machines without a GPU."""
