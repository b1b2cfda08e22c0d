"""Softmax rows and the head in plain PyTorch: the oracle of the kernels, and the backend without a GPU."""
