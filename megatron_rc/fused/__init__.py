"""The mathematics on Triton kernels: every module has the functions of its twin in `reference`."""
