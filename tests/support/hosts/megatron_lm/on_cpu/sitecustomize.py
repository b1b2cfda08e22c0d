"""Ranks of a Megatron-LM job on a machine without CUDA: what its files ask of a GPU is answered here.

Every process that has this folder on PYTHONPATH imports it at its start. Only processes with RANK get the stand-ins.
"""

import os

if "RANK" in os.environ:
    import cuda_names

    cuda_names.install()
