"""QUANTIZATIONS: the ways to round what a sampler computes with. To add one, add a row."""

from typing import Annotated, NamedTuple

from megatron_rc.schema.choice import Choice


class Grid(NamedTuple):
    """Levels of numbers, and the block of a matrix whose largest number becomes the largest level."""

    largest: float
    rounded_by: str
    """dtype of torch whose numbers are the levels."""
    rows: int | None = 1
    """Rows of a block; None: all."""
    columns: int | None = None
    """Columns of a block; None: all."""


class Quantization(NamedTuple):
    sentence: str
    weights: Grid | None
    """Levels of the matrices of attention, MLP and experts, [out, in]."""
    inputs: Grid | None = None
    """Levels of what these matrices multiply, [tokens, in]; only an engine that `rounds_inputs` can."""
    cache: str = ""
    """dtype of torch that keys and values have in the cache, without a scale; empty: that of the model."""

    @property
    def rounds_inputs(self) -> bool:
        """It rounds more than weights."""
        return bool(self.inputs or self.cache)


_INT8 = Grid(127.0, "int8")
_FP8 = Grid(448.0, "float8_e4m3fn")
_INT4 = Grid(7.0, "int8")
QUANTIZATIONS = {
    "int8": Quantization("weights, per output channel.", _INT8),
    "int8-tensor": Quantization("weights, per tensor.", _INT8._replace(rows=None)),
    "int3": Quantization("weights in 3 bits, per output channel.", _INT8._replace(largest=3.0)),
    "int4-32": Quantization("weights in 4 bits, per 32 inputs of a channel.", _INT4._replace(columns=32)),
    "int4-128": Quantization("weights in 4 bits, per 128 inputs of a channel.", _INT4._replace(columns=128)),
    "fp8": Quantization("weights in e4m3, per output channel.", _FP8),
    "fp8-tensor": Quantization(
        "weights and inputs in e4m3, per tensor.", _FP8._replace(rows=None), inputs=_FP8._replace(rows=None)
    ),
    "fp8-block": Quantization(
        "weights in e4m3 per 128 x 128, their inputs per token and 128 features.",
        _FP8._replace(rows=128, columns=128),
        inputs=_FP8._replace(columns=128),
    ),
    "fp8-cache": Quantization("keys and values in e4m3, without a scale.", None, cache="float8_e4m3fn"),
}
Quantize = Annotated[str, Choice({"none": "", **QUANTIZATIONS})]
