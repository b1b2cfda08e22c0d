"""Triton's interpreter, without its most repeated work."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from triton.language import core
from triton.runtime import interpreter


@contextlib.contextmanager
def interpreter_that_remembers() -> Iterator[None]:
    """Keeps what the interpreter makes anew at every launch, call of a helper or operation, and always the same.

    That is: the interpreted functions of triton.language, the numpy type of a Triton type, and the shape of a tensor.
    """
    patch_language, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    scopes: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = patch_language(fn)
        # a launch restores what it gets from here
        return interpreter._LangPatchScope()

    numpy_type_of_number = functools.cache(numpy_type)

    def remembered_type(triton_type: Any) -> Any:
        scalar = triton_type.scalar
        return numpy_type(scalar) if scalar.is_ptr() else numpy_type_of_number(scalar)

    @functools.cache
    def shape_and_size(lengths: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(math.prod(lengths))

    def make_tensor(self: Any, handle: Any, triton_type: Any) -> None:
        self.handle, self.type, self.dtype = handle, triton_type, triton_type.scalar
        self.shape, self.numel = shape_and_size(triton_type.shape if triton_type.is_block() else ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", remembered_type)
        patch.setattr(core.tensor, "__init__", make_tensor)
        try:
            yield
        finally:
            while scopes:
                scopes.popitem()[1].restore()
