"""What Triton's interpreter needs around a test of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def index_by_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 takes int() of an array of one element, which NumPy 2.4 no longer gives."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
