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
    """Makes Triton 3.6's interpreter work with NumPy 2.4, which converts no array of one element by int()."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
