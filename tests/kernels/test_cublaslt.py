"""Only what cuBLAS does not support is left to others; any other fault is raised."""

from collections.abc import Callable
from ctypes import c_void_p

import pytest
import torch
from torch.nn.functional import ScalingType

from pentad.kernels import cublaslt
from pentad.kernels.cublaslt import Scaled, add_product_


class Library:
    """cuBLASLt whose heuristics answer with a status and no algorithm."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self.status * (name == "cublasLtMatmulAlgoGetHeuristic")


@pytest.mark.parametrize("status", [0, cublaslt.NOT_SUPPORTED, 7])
def test_only_what_is_not_supported_is_left_to_others(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_library", lambda: Library(status))
    monkeypatch.setattr(cublaslt, "_handle", lambda device: c_void_p(1))
    monkeypatch.setattr(cublaslt, "_prepared", cublaslt._prepared.__wrapped__)  # without its cache
    one = Scaled(torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(1), ScalingType.TensorWise)
    if status == 7:
        with pytest.raises(RuntimeError, match="status 7"):
            add_product_(torch.zeros(16, 16), one, one)
    else:
        assert not add_product_(torch.zeros(16, 16), one, one)
