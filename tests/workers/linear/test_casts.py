"""Which GPUs multiply in 8 bits, and what ranks agree on before they cast."""

from __future__ import annotations

import pytest
import torch

from pentad.kernels.fp8.fp8_tensor import Recipe, Scaling
from pentad.schedules.ir.errors import PentadError
from pentad.workers.linear.casts import Casts, SplitOver
from pentad.workers.parallel.async_ops import AsyncResult, ready
from pentad.workers.parallel.row_exchange import RowGroup


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


class Doubling(RowGroup):
    """A group in which another rank has twice the maximum."""

    def maximum(self, values: torch.Tensor) -> AsyncResult[torch.Tensor]:
        return ready(2 * values)


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_ranks_agree_on_the_maxima_of_the_forms_that_are_cast(rows: bool, columns: bool) -> None:
    """Row maxima with ranks that hold other features, column maxima with ranks that hold other tokens."""
    x = torch.randn(128, 256)
    found = SplitOver(RowGroup(), Doubling()).amax(x, Recipe("row"), rows=rows, columns=columns)
    assert found is not None
    assert torch.equal(found.rows, 2 * x.abs().amax(1, keepdim=True) if rows else torch.empty(0, 1))
    assert torch.equal(found.columns, x.abs().amax(0)[:, None] if columns else torch.empty(0, 1))
    casts = Casts(Recipe("row"), torch.device("cpu"), torch.float32)
    forms = casts.cast(x, "activation", "", SplitOver(), rows=rows, columns=columns)
    assert [each is not None for each in forms] == [rows, columns]
