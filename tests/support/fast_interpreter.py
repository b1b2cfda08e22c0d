"""Triton's interpreter, without its most repeated work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime import interpreter


@contextlib.contextmanager
def language_patched_once_a_launch() -> Iterator[None]:
    """Replaces the functions of triton.language once a launch; the interpreter does so at every call of a helper."""
    patch_language, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch_language(fn)

    def run_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_afresh)
        yield
