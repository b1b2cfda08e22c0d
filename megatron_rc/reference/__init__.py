"""The mathematics in plain PyTorch: what every kernel is tested against, and the backend of machines without a GPU."""
