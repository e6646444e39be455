"""Which GPUs multiply in 8 bits."""

from __future__ import annotations

import pytest
import torch

from pentad.kernels.fp8.fp8_tensor import Recipe, Scaling
from pentad.schedules.ir.errors import PentadError
from pentad.workers.linear.casts import Casts


@pytest.mark.parametrize(
    ("scaling", "capability", "expected"),
    [
        ("tensor", (8, 0), "= compute"),
        ("block", (8, 9), "= compute, fp8-tensor or fp8-row"),
        ("block", (10, 0), "= compute, fp8-tensor or fp8-row"),
        ("row", (8, 9), None),
        ("block", (9, 0), None),
    ],
)
def test_a_rank_refuses_a_gpu_without_the_products_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch, scaling: Scaling, capability: tuple[int, int], expected: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    Casts(Recipe(scaling), torch.device("cpu"), torch.float32)
    if expected is None:
        Casts(Recipe(scaling), torch.device("cuda"), torch.float32)
        return
    with pytest.raises(PentadError, match=f"fp8-{scaling} on a GPU, which has no such products: .* {expected}$"):
        Casts(Recipe(scaling), torch.device("cuda"), torch.float32)
