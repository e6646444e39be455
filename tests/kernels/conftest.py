"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def fresh_memory_holds_nan() -> Iterator[None]:
    """Torch fills uninitialized memory with NaN in its deterministic mode, which exposes reads of it. Its own setter
    imports torch._inductor, which takes three seconds."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton 3.6's interpreter work with NumPy 2.4, whose one-element arrays int() rejects, and patch its
    language once per launch and module, not per function call, which would take longer than most calls."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    patch_language, launch, modules = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[str]()

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        launch(executor, *args, **kwargs)

    def patched_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in modules:
            return interpreter._LangPatchScope()
        modules.add(module)
        return patch_language(function)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter, "_patch_lang", patched_once)
