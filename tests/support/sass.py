"""The machine code of a kernel, compiled without a GPU: the instructions of its loops and its barriers."""

import re
from typing import NamedTuple

import torch
import triton
from aot import ONE_TARGET, TARGETS, Source, captured, cuobjdump, natural

from megatron_rc.logprobs.logits import vocab_parallel_logprobs

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


class Instruction(NamedTuple):
    address: int
    opcode: str
    """With its suffixes: LDG.E.128.CONSTANT."""
    operands: str


def instructions(source: Source) -> list[Instruction]:
    """Every instruction of a kernel for an NVIDIA target, in order."""
    kernel = triton.compile(source.source, target=TARGETS[source.target], options=source.options.__dict__)
    printed = cuobjdump(kernel.asm["cubin"], "-sass")
    found = [Instruction(int(a, 16), opcode, operands) for a, opcode, operands in _INSTRUCTION.findall(printed)]
    assert found, printed
    return found


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Every innermost loop: from the target of a branch backwards to the branch."""
    spans = []
    for one in code:
        target = re.search(r"0x([0-9a-f]+)", one.operands) if one.opcode == "BRA" else None
        # a branch to itself stands behind the end of every kernel
        if target is not None and int(target[1], 16) < one.address:
            spans.append((int(target[1], 16), one.address))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[one for one in code if begin <= one.address <= end] for begin, end in innermost]


def number_of(code: list[Instruction], opcode: str) -> int:
    """Instructions whose opcode begins with these parts."""
    return sum(one.opcode == opcode or one.opcode.startswith(f"{opcode}.") for one in code)


class LoopOfRows(NamedTuple):
    """The loop of a program over the whole tiles of its row."""

    kernel: str
    columns: int
    with_entropy: bool
    instructions: float
    """For every logit."""
    loads: str
    """The opcode that loads logits."""


def loops_of_rows(columns: int, entropy: bool) -> list[LoopOfRows]:
    """The loops of forward and backward over bf16 rows of so many columns, none of which crosses lanes."""
    found = []
    for launch in captured(lambda: _rows(columns, entropy)).launches:
        # the loop behind it, if there is one, is that of masked tiles
        loop = loops(instructions(natural(launch, ONE_TARGET)))[0]
        given = launch.arguments
        tile = given["LANES"] * given["VECTOR"] if "LANES" in given else given["BLOCK"]
        (loads,) = {one.opcode for one in loop if one.opcode.startswith("LDG")}
        per_thread = tile / (32 * launch.options["num_warps"])
        assert number_of(loop, "SHFL") == 0
        found.append(LoopOfRows(launch.name, columns, entropy, len(loop) / per_thread, loads))
    return found


def _rows(columns: int, entropy: bool) -> None:
    logits = torch.zeros(2, columns, dtype=torch.bfloat16, requires_grad=True)
    found = vocab_parallel_logprobs(logits, torch.zeros(2, dtype=torch.int64), with_entropy=entropy, backend="triton")
    parts = found if isinstance(found, tuple) else (found,)
    torch.autograd.grad(parts, logits, [torch.ones(2)] * len(parts))
