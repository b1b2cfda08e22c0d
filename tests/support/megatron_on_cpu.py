"""What the training programs of megatron.training need on a machine without CUDA, and in a Python older than 3.12."""

import contextlib
import functools
import typing
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions

from megatron_rc.training import emulation


class Stream:
    def wait_stream(self, other: object) -> None: ...


emulation.emulate_cuda_on_cpu()
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0)
torch.cuda.Stream = lambda *args, **kwargs: Stream()
torch.cuda.current_stream = lambda device=None: Stream()
torch.cuda.stream = lambda stream: contextlib.nullcontext()
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override


def allow(training: Any) -> None:
    """Let the module megatron.training.training start without CUDA and without a compiler."""
    from megatron.core.datasets import utils

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # the wheels bring compiled helpers, and not the Makefile that pretrain asks to make them again
    utils.compile_helpers = lambda: None
