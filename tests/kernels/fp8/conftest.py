"""Casts of Triton's interpreter that round as GPUs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


@pytest.fixture
def nearest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter forgets to carry from the significand to the exponent when it rounds."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_to_nearest(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name not in DTYPES:
            return convert(x, source, target, mode)
        assert x.dtype == np.float32
        rounded = torch.from_numpy(x.copy()).to(DTYPES[target.name])
        return rounded.view(torch.uint16 if rounded.itemsize == 2 else torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_to_nearest)
