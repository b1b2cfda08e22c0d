"""Compile every kernel ahead of time, without a GPU, and read what it costs and its machine code."""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from tested_kernels import KERNELS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from speed.launches import Launch, recorded_launches

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may use."""
ONE_TARGET = "sm_90"
"""Where variants are compiled whose code differs before the target matters."""
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


class _ReadTable(dict[str, Any]):
    """The launch table; remembers what was read before which launch."""

    def __init__(self, table: dict[str, Any], launches: list[Launch]) -> None:
        super().__init__(table)
        self.launches = launches
        self.reads: list[tuple[int, str]] = []

    def __getitem__(self, name: str) -> Any:
        self.reads.append((len(self.launches), name))
        return super().__getitem__(name)

    def entry_of(self, launch: Launch, index: int) -> str | None:
        """The entry that launch number `index` has the shape of, among those that its launcher read."""
        last = max((at for at, _ in self.reads if at <= index), default=None)
        constants = [launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr]
        numbers = {1, *(value for value in constants if type(value) is int)}
        # a block may have two dimensions
        blocks = {a * b for a in numbers for b in numbers}
        for at, name in self.reads:
            entry = self.get(name)
            if at == last and entry.options == launch.options and entry.block in blocks:
                return name
        return None


@dataclass(frozen=True)
class Capture:
    """What the launchers launch, had they a GPU."""

    launches: list[Launch]
    entries: set[str]
    """Entries of the launch table that a kernel was launched with."""
    off_table: list[str]
    """Launches whose shape is not what the table says."""


def captured(calls: Callable[[], object]) -> Capture:
    """Records the launches of `calls` on CPU tensors; nothing runs, and what the kernels would fill stays unset."""
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET leaves nothing to compile"
    modules = [importlib.import_module(f"megatron_rc.kernels.{path.stem}") for path in sorted(KERNELS.glob("*.py"))]
    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope(), recorded_launches() as launches:
        # the kernels are defined already, and stay compiled ones: this is what lets CPU tensors through
        triton.knobs.runtime.interpret = True
        table = _ReadTable(importlib.import_module("megatron_rc.kernels.launch_table").LAUNCH, launches)
        for module in modules:
            if hasattr(module, "LAUNCH"):
                patch.setattr(module, "LAUNCH", table)
        calls()
    entries = [table.entry_of(launch, index) for index, launch in enumerate(launches)]
    off_table = [f"{one.name} {one.options}" for one, entry in zip(launches, entries, strict=True) if entry is None]
    return Capture(launches, {entry for entry in entries if entry is not None}, off_table)


class Source(NamedTuple):
    """One kernel, specialised as Triton specialises it at run time, for one target."""

    target: str
    variant: str
    source: ASTSource
    options: Any
    arguments: str

    def __str__(self) -> str:
        return f"{self.arguments} {self.options.num_warps} warps, {self.variant}, {self.target}"

    @property
    def key(self) -> str:
        return f"{self.source.hash()} {self.options}"


def natural(launch: Launch, target: str) -> Source:
    return _specialised("aligned", launch, target)


def specialised(launch: Launch, target: str) -> Iterator[Source]:
    """The kernel for these arguments, and for all others that it can be given where its code differs."""
    yield natural(launch, target)
    yield _specialised("unaligned", launch, target)
    if target == ONE_TARGET:
        # an integer argument of 1 is a constant of the compiled kernel, with other methods than a number on the device
        yield _specialised("integers of 1", _with_integers(launch, 1, lambda name: True), target)
        yield _specialised("int64 strides", _with_integers(launch, 2**33, lambda name: "stride" in name), target)


def _specialised(variant: str, launch: Launch, target: str) -> Source:
    kernel, backend = launch.kernel, make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(backend, launch.options, bound, specialization, None)
    types = ", ".join(f"{name}: {kind}" for name, kind in signature.items() if kind != "constexpr")
    fixed = ", ".join(f"{name}={launch.arguments[name]!r}" for name, kind in signature.items() if kind == "constexpr")
    source = ASTSource(kernel, signature, constants, {} if variant == "unaligned" else attributes)
    return Source(target, variant, source, options, f"{launch.name}({types}; {fixed})")


def _with_integers(launch: Launch, value: int, selects: Callable[[str], bool]) -> Launch:
    """The launch with other values of its integer arguments; constexprs stay."""

    def replaced(name: str, given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(replaced(name, part) for part in given)
        return value if type(given) is int and selects(name) else given

    runtime = {param.name for param in launch.kernel.params if not param.is_constexpr}
    changed = {name: replaced(name, launch.arguments[name]) for name in launch.arguments if name in runtime}
    return replace(launch, arguments=launch.arguments | changed)


class Resources(NamedTuple):
    registers: int
    """A thread."""
    spilled: int
    """Bytes of stack and local memory a thread."""
    shared: int
    """Bytes of shared memory a program."""


def compiled(source: Source) -> Resources:
    kernel = triton.compile(source.source, target=TARGETS[source.target], options=source.options.__dict__)
    asm = kernel.asm
    registers, spilled = _cuda_resources(asm["cubin"]) if "cubin" in asm else _hip_resources(asm["amdgcn"])
    return Resources(registers, spilled, kernel.metadata.shared)


def cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    printed = cuobjdump(cubin, "--dump-resource-usage")
    functions = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", printed)
    assert functions, printed
    return max(int(f[0]) for f in functions), sum(int(f[1]) + int(f[2]) for f in functions)


def _hip_resources(assembly: str) -> tuple[int, int]:
    def field(name: str) -> int:
        return int(re.findall(rf"^\s*\.{name}:\s+(\d+)$", assembly, re.MULTILINE)[0])

    return field("vgpr_count"), field("private_segment_fixed_size")


@contextmanager
def fresh_cache(folder: Path) -> Iterator[None]:
    """Nothing counts that was compiled before, but by a test that was given the same folder."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield


@cache
def capture() -> Capture:
    from kernel_calls import every_call

    return captured(every_call)


def resources(name: str, target: str, variants: str = "all") -> list[tuple[Source, Resources]]:
    """Resources of every different specialisation of one kernel.

    Args:
        variants: "all", those that the calls ask for ("natural"), or of those the one with the most to do ("one").
    """
    unique: dict[str, Source] = {}
    for launch in capture().launches:
        if launch.name == name:
            for source in specialised(launch, target) if variants == "all" else [natural(launch, target)]:
                unique.setdefault(source.key, source)
    found = list(unique.values())
    if variants == "one":
        # what a variant has to do is spelled out in its constants
        found = [max(found, key=lambda source: len(source.arguments))]
    return [(source, compiled(source)) for source in found]


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
