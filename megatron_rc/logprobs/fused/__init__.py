"""Softmax rows and the head on Triton kernels, behind the functions of `reference`."""
