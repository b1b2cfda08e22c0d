"""Bounds of a pickle, checked before it is loaded, because loading runs in C and cannot be stopped.

A few bytes can keep a loader busy for ever or fill the memory: a key that is a tuple of shared tuples is hashed item by
item, which takes 2^depth steps; a memo is allocated up to its largest index; an empty dictionary is one byte in the
file and 64 in memory. So every instruction is looked at once, and nothing is built.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from typing import NamedTuple

MAX_MEMORY = 1 << 30
"""Bytes that the values of a pickle may take in memory, as VALUE_BYTES and OBJECT_BYTES estimate them."""
VALUE_BYTES, OBJECT_BYTES = 40, 400
"""Bytes of a number or text, and of anything that holds others: of CPython's objects with their place in a list, the
largest that a single instruction makes."""
MAX_INSTRUCTIONS = 5_000_000
"""Instructions, of which a run of numbers is one and a tensor about 30; more are no dump, and as many are seconds."""
MAX_NUMBER = 1024
"""Bytes of one number; a longer integer is no value of a dump, and each use as a key hashes all of it."""

_PLAIN = {
    *("int", "long", "int_or_bool", "bool", "float", "None", "str", "bytes", "bytes_or_str", "unicode"),
}
"""Kinds of values, in the words of pickletools, that hold no other and that a key may be."""
_PLAIN_FLAG, _OBJECT_FLAG = 1, 0
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_INTEGERS = re.compile(rb"K.|M..|J.{4}", re.DOTALL)
_RUN = re.compile(rb"((?:G.{8})+)|((?:K.|M..|J.{4})+)", re.DOTALL)
"""Numbers one after the other, as the lists of a dump hold them by the million."""


class _Instruction(NamedTuple):
    name: str
    argument: int
    """Bytes of the argument, or how pickletools says where it ends."""
    lines: int
    """Lines of the argument, where it ends with a line."""
    pops: int
    """Values that it takes from the stack below the mark, or at all where it takes none down to a mark."""
    to_mark: bool
    pushes: bytes
    """One flag per value that it puts on the stack."""
    memory: int
    """Bytes that it makes, its argument left out; an instruction that fills what is there makes none."""


def _instruction(code: pickletools.OpcodeInfo) -> _Instruction:
    before = [kind.name for kind in code.stack_before]
    argument = code.arg.n if code.arg else 0
    to_mark = "mark" in before
    lines = (2 if code.name in ("GLOBAL", "INST") else 1) if argument == pickletools.UP_TO_NEWLINE else 0
    flags = bytes(_PLAIN_FLAG if kind.name in _PLAIN else _OBJECT_FLAG for kind in code.stack_after)
    fills = code.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
    memory = 0 if fills else sum(VALUE_BYTES if flag else OBJECT_BYTES for flag in flags)
    return _Instruction(code.name, argument, lines, len(before) - 2 * to_mark, to_mark, flags, memory)


_INSTRUCTIONS = {ord(code.code): _instruction(code) for code in pickletools.opcodes}


def check(raw: bytes | memoryview) -> None:
    """Look at every instruction of a pickle.

    Raises:
        pickle.UnpicklingError: it takes more than MAX_MEMORY or MAX_INSTRUCTIONS, a key is no number or text, a number
            is longer than MAX_NUMBER, a memo index skips some, or it is no whole pickle.
    """
    _Bounds(raw).check()


class _Bounds:
    def __init__(self, raw: bytes | memoryview) -> None:
        self._raw = raw
        self._at = 0
        self._stack = bytearray()
        """One flag per value, marks left out."""
        self._marks: list[int] = []
        self._memo = bytearray()
        self._memory = 0

    def check(self) -> None:
        count = 0
        try:
            while self._step():
                count += 1
                if count > MAX_INSTRUCTIONS:
                    raise pickle.UnpicklingError(f"it has more than {MAX_INSTRUCTIONS} instructions")
                if self._memory > MAX_MEMORY:
                    raise pickle.UnpicklingError(f"its values take more than {MAX_MEMORY >> 20} MiB of memory")
        except (IndexError, KeyError):
            raise pickle.UnpicklingError(f"byte {self._at} is no instruction that can follow") from None

    def _step(self) -> bool:
        """Look at one instruction, or at a run of numbers; False at the last one."""
        if run := _RUN.match(self._raw, self._at):
            floats, integers = run.groups()
            count = len(floats) // 9 if floats is not None else len(_INTEGERS.findall(integers))
            self._push(bytes([_PLAIN_FLAG]) * count, VALUE_BYTES * count)
            self._at = run.end()
            return True
        instruction = _INSTRUCTIONS[self._raw[self._at]]
        argument = self._argument(instruction)
        name = instruction.name
        if name.endswith(("PUT", "MEMOIZE")):
            self._put(argument if name != "MEMOIZE" else None, name)
        elif name.endswith("GET"):
            self._push(self._memo[self._index(argument, name) :][:1], VALUE_BYTES)
        elif name == "MARK":
            self._marks.append(len(self._stack))
        elif name == "DUP":
            self._push(self._stack[-1:], VALUE_BYTES)
        elif name == "POP" and self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop(instruction)
            self._push(instruction.pushes, instruction.memory)
        return name != "STOP"

    def _argument(self, instruction: _Instruction) -> bytes | memoryview:
        """The argument of the instruction, behind which the next one begins; of a text, no byte is copied."""
        begin = self._at + 1
        size = instruction.argument
        if instruction.lines:
            size = 0
            for _ in range(instruction.lines):
                line = re.compile(rb"[^\n]*\n").match(self._raw, begin + size)
                if line is None:
                    raise IndexError
                size += line.end() - line.start()
        elif size < 0:
            width = _LENGTH_BYTES[size]
            size = int.from_bytes(self._raw[begin : begin + width], "little")
            begin += width
        if begin + size > len(self._raw):
            raise IndexError
        if size > MAX_NUMBER and instruction.name in ("INT", "LONG", "LONG1", "LONG4", "FLOAT"):
            raise pickle.UnpicklingError(f"a number has {size} bytes, at most {MAX_NUMBER}")
        self._memory += size
        self._at = begin + size
        return self._raw[begin : begin + size]

    @staticmethod
    def _index(argument: bytes | memoryview, name: str) -> int:
        try:
            return int(bytes(argument)) if name in ("PUT", "GET") else int.from_bytes(argument, "little")
        except ValueError:
            raise IndexError from None

    def _put(self, argument: bytes | memoryview | None, name: str) -> None:
        index = len(self._memo) if argument is None else self._index(argument, name)
        if not 0 <= index <= len(self._memo):
            raise pickle.UnpicklingError(f"memo index {index} skips those from {len(self._memo)}")
        self._memo[index : index + 1] = self._stack[-1:]
        self._memory += VALUE_BYTES

    def _push(self, flags: bytes | bytearray, memory: int) -> None:
        self._stack += flags
        self._memory += memory

    def _pop(self, instruction: _Instruction) -> None:
        """Take what an instruction takes, after a look at its keys."""
        start = self._marks.pop() if instruction.to_mark else len(self._stack)
        taken = self._stack[start:]
        if instruction.name in ("SETITEMS", "DICT"):
            keys = taken[::2]
        elif instruction.name in ("ADDITEMS", "FROZENSET"):
            keys = taken
        else:
            keys = self._stack[-2:-1] if instruction.name == "SETITEM" else bytearray()
        if _OBJECT_FLAG in keys:
            raise pickle.UnpicklingError("a key of a dictionary is neither a number nor a text")
        if start < instruction.pops:
            raise IndexError
        del self._stack[start - instruction.pops :]
