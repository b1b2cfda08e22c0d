"""What a checkout offers by its public names, called in one way, and the results that are kept of it.

Whatever depends on the version of the checkout is here: `find` looks for names that have moved, `call` hands arguments
over that have been grouped into an object of options, `choices` reads the values of a setting, and `kernel_calls` asks
the checkout's own calls.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RENAMED = {"LRGate": "MismatchLR", "LRGateSettings": "MismatchSettings", "rule": "action"}
"""Old name -> new name, of a class or of an argument, for what is not found by its old one."""
TWINS = {"reference", "fused", "kernels"}
"""Folders whose functions have the names of those that call them."""

Value = tuple[str, tuple[int, ...], str]
"""dtype, shape, and the bytes in hexadecimal; a text has dtype "text" and stands as it is."""


@functools.cache
def find(name: str) -> Any:
    """A public name of the package, or the name that one of its modules defines, wherever that is."""
    import megatron_rc

    if name in megatron_rc.__all__:
        return getattr(megatron_rc, name)
    package = Path(str(megatron_rc.__file__)).parent
    definition = re.compile(rf"^(?:def |class )?{name}\b( =|[\[(:])", re.MULTILINE)
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if not TWINS & {*parts} and definition.search(path.read_text()):
            return getattr(importlib.import_module(".".join(("megatron_rc", *parts)).removesuffix(".__init__")), name)
    if name in RENAMED:
        return find(RENAMED[name])
    raise LookupError(f"{package} defines no {name}")


def call(function: Callable[..., Any], **given: Any) -> Any:
    """Call with arguments by name; those that are no parameters go into the parameter whose class has such fields."""
    parameters = inspect.signature(function).parameters
    given = {name if name in parameters else RENAMED.get(name, name): value for name, value in given.items()}
    arguments = {name: value for name, value in given.items() if name in parameters}
    left = {name: value for name, value in given.items() if name not in parameters}
    hints = typing.get_type_hints(function) if left else {}
    for name, hint in hints.items():
        for kind in (hint, *typing.get_args(hint)):
            own = {field: left[field] for field in getattr(kind, "__annotations__", ()) if field in left}
            if own and name not in arguments:
                arguments[name] = kind(**own)
                left = {field: value for field, value in left.items() if field not in own}
    if left:
        raise TypeError(f"{function.__name__} takes no {', '.join(left)}")
    return function(**arguments)


def choices(settings: Any, field: str, **others: Any) -> list[str]:
    """The values of a setting: of its table or its Literal, or those that the error names when it has another value."""
    ways = (typing.get_type_hints(where, include_extras=True) for where in (settings, settings.__init__))
    hints = {**next(ways), **next(ways)}
    hint = hints[field if field in hints else RENAMED[field]]
    if hasattr(hint, "__metadata__"):
        return list(hint.__metadata__[0].table)
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    try:
        settings(**others, **{field: "?"})
    except ValueError as error:
        return [name for name in re.findall(r"'([\w-]+)'", str(error)) if name != field]
    raise LookupError(f"{settings.__name__} does not say what {field} may be")


def product(**values: Any) -> Iterator[dict[str, Any]]:
    """Every combination of one value per name."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def label(settings: dict[str, Any]) -> str:
    """Settings as a part of a name, without those that are not set."""
    text = " ".join(f"{name}={value}" for name, value in settings.items() if value not in (None, (), False))
    return re.sub(r"[\[\]*?/]", "", text.replace("torch.", "")) or "plain"


def encoded(value: Any) -> Value:
    """Numbers as fp64; the bytes of a tensor, whatever its strides."""
    if isinstance(value, str):
        return "text", (), value
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes().hex() if flat.numel() else ""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and texts in a result, by name; settings and None are no results."""
    if isinstance(value, Tensor | int | float | str):
        yield name, value
    elif callable(getattr(value, "values", None)) and not isinstance(value, dict):
        yield from flattened(name, value.values())
    else:
        fields: dict[str, Any] = {}
        if isinstance(value, dict):
            fields = value
        elif hasattr(value, "_fields"):
            fields = value._asdict()
        elif isinstance(value, list | tuple):
            fields = {str(index): part for index, part in enumerate(value)}
        elif dataclasses.is_dataclass(value) and not hasattr(value, "to_dict"):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif value is not None and not hasattr(value, "to_dict"):
            raise TypeError(f"{name} is a {type(value).__name__}, which is no result")
        for part, inner in fields.items():
            yield from flattened(f"{name}/{part}", inner)


class Results(dict[str, Value]):
    """Name -> result; a name is area/case/part."""

    def add(self, name: str, value: Any) -> None:
        for part, inner in flattened(name, value):
            assert part not in self, f"two results have the name {part}"
            self[part] = encoded(inner)

    def case(self, name: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """What a case gives; a combination that is refused, and an error, are results too."""
        try:
            self.add(name, compute(*args, **kwargs))
        except Exception as error:
            refused = isinstance(error, ValueError)
            self.add(f"{name}/{'refused' if refused else 'error'}", "" if refused else repr(error))


def kernel_calls(out: Results, backend: str) -> None:
    """The calls of this checkout that reach every kernel, and with Triton what each launch wrote."""
    from kernel_calls import CALLS, SMALL

    for name, answer in CALLS.items():
        with launches_in(out, name) if backend == "triton" else contextlib.nullcontext():
            out.case(f"calls/{name}", answer, backend, SMALL)


@contextlib.contextmanager
def launches_in(out: Results, case: str) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run, counts = InterpretedFunction.run, Counter[str]()

    def tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            for index, part in enumerate(value):
                yield from tensors(f"{name}.{index}", part)

    def recording(kernel: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
        every = [pair for name, value in bound.items() for pair in tensors(name, value)]
        before = [encoded(value) for _, value in every]
        run(kernel, *args, **kwargs)
        counts[kernel.__name__] += 1
        for (name, value), old in zip(every, before, strict=True):
            if encoded(value) != old:
                out.add(f"kernels/{kernel.__name__}/{case} {counts[kernel.__name__]}/{name}", value)

    InterpretedFunction.run = recording
    try:
        yield
    finally:
        InterpretedFunction.run = run
