"""Products that tensor ranks share: overlapped with messages they have the same bits as when they wait for them, in 8
bits too, and every message begins before the product that hides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from pentad.kernels.fp8.fp8_tensor import TILE, Fp8Forms, Recipe
from pentad.workers.linear.amax_history import AmaxHistory
from pentad.workers.linear.casts import Casts, SplitOver
from pentad.workers.linear.fp8_samples import Fp8Samples
from pentad.workers.linear.linear import Axes, Linear
from pentad.workers.linear.weight_grad import Param
from pentad.workers.parallel import tensor_parallel
from pentad.workers.parallel.async_ops import AsyncResult
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup

CPU = torch.device("cpu")
# In float64 the sums of products of such numbers are exact in any order.
RECIPES = {
    "block": Recipe("block", power_of_two=True),
    "row": Recipe("row", "e5m2", power_of_two=True),
    "tensor": Recipe("tensor", power_of_two=True),
    "delayed, first step": Recipe("tensor", "e5m2", power_of_two=True),
    "delayed": Recipe("tensor", power_of_two=True),
}


@pytest.fixture(params=[1, 1000], ids=["split", "whole"])
def split_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "SPLIT_ROWS", request.param)


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_products_over_ranks_equal_those_of_one(count: int) -> None:
    tokens, inner, outer = 3 * count, 5, 7
    x, w, bias = random(tokens, inner), random(outer, inner, seed=1), random(outer, seed=2)
    terms = random(count, tokens, inner, seed=3)
    dterms, dy = random(count, tokens, outer, seed=4), random(tokens, outer, seed=5)

    def work(tp: TensorParallelGroup) -> list[Any]:
        axes, layer, rank = Axes(tp, ContextParallelGroup()), Linear(Param(w, None)), tp.rank
        own, found = x.view(count, -1, inner)[rank], []
        for _ in range(3):  # more exchanges than slots
            full, finish = layer.gather_forward(axes, own).wait()
            found += [
                (tp.all_gather(own).wait(), x),
                (full, x),
                (finish(), x @ w.t()),
                (layer.forward_gathered(axes, own, bias).wait(), x @ w.t() + bias),
                (tp.reduce_scatter(terms[rank]).wait(), of_rank(terms.sum(0), rank, count)),
                (layer.forward_scattered(axes, terms[rank]).wait(), of_rank(terms.sum(0) @ w.t(), rank, count)),
                (layer.input_grad_scattered(axes, dterms[rank]).wait(), of_rank(dterms.sum(0) @ w, rank, count)),
            ]
            for scatter, each, matrix in (
                (layer.forward_scattered, terms, w.t()),
                (layer.input_grad_scattered, dterms, w),
            ):
                product = each @ matrix
                found.append(
                    (
                        scatter(axes, each[rank], product[rank].sin()).wait(),
                        of_rank((product + product.sin()).sum(0), rank, count),
                    )
                )
            found += zip(layer.input_grad_gathered(axes, of_rank(dy, rank, count)).wait(), (dy, dy @ w), strict=True)
        return found

    for pairs in on_ranks(count, tokens * outer, work):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 2) for name in RECIPES),
        *(pytest.param(name, 4, marks=[] if name == "delayed" else [pytest.mark.slow]) for name in RECIPES),
    ],
)
def test_products_in_8_bits_have_the_bits_of_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """So have the operands of W, the recorded maxima and the samples."""
    results = []
    for rows in (1, 10**6):
        monkeypatch.setattr(tensor_parallel, "SPLIT_ROWS", rows)
        results.append(on_ranks(count, 2 * count * TILE * 3 * TILE, lambda tp: products(tp, name)))
    assert len(results[0][0]) == 11
    for overlapped, waiting in zip(*results, strict=True):
        for found, expected in zip(overlapped, waiting, strict=True):
            assert torch.equal(found, expected)


def products(tp: TensorParallelGroup, name: str) -> list[torch.Tensor]:
    """All products of a column-parallel and a row-parallel matrix, with 2 tiles of tokens a rank and 3 of features."""
    count, rank, axes = tp.size, tp.rank, Axes(tp, ContextParallelGroup())
    tokens, wide, narrow = 2 * count * TILE, 3 * TILE, TILE
    casts = casts_of(name)
    casts.begin_step(Fp8Samples())
    column = Linear(Param(random(narrow, wide, seed=rank), None), casts, name="column")
    row = Linear(Param(random(wide, narrow, seed=rank + 10), None), casts, row_parallel=True, name="row")
    x, dy = (random(tokens, wide, seed=seed) for seed in (20, 21))
    own, own_dy = of_rank(x, rank, count), of_rank(dy, rank, count)
    normed = casts.cast(own, "activation", "column", SplitOver(tokens=tp), columns=False)
    if casts.recipe.scaling == "row":
        normed = casts.cast(own, "activation", "column", SplitOver(), columns=False)
    bias = random(narrow, seed=22)
    found = [column.forward_gathered(axes, each, bias).wait() for each in (own, normed)]
    operand, dx = row.input_grad_gathered(axes, own_dy).wait()
    assert isinstance(operand, Fp8Forms)
    assert operand.columns is not None
    found += [dx, operand.columns.values.view(torch.uint8), operand.columns.scales]
    given = random(tokens, narrow, seed=rank + 30)
    found.append(row.forward_scattered(axes, row.input(axes, given, rows=True)).wait())
    found.append(column.input_grad_scattered(axes, column.output_grad(axes, given)).wait())
    if casts.history is not None:
        maxima = casts.history.maxima.amax(2)
        found.append(torch.stack([tp.maximum(maxima[i]).wait() for i in range(len(maxima))]))
    else:
        found.append(torch.zeros(()))
    assert casts.samples is not None
    sampled = casts.samples._found
    return found + [sampled[key] for key in (("column", "activation"), ("row", "gradient"), ("row", "activation"))]


def casts_of(name: str) -> Casts:
    """`delayed` has maxima of an earlier step that are less than those of this one."""
    history = AmaxHistory(["column", "row"], CPU) if name.startswith("delayed") else None
    if history is not None and name == "delayed":
        history.load({each: torch.full((2,), 1.5) for each in history.by_name})
    return Casts(RECIPES[name], CPU, torch.float64, history)


class LoggedRows:
    """The rows of two ranks, of which this is the first; logs what begins and what is awaited."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def fits(self, elements: int, like: torch.Tensor) -> bool:
        return True

    def gather(self, own: torch.Tensor, full: torch.Tensor, *, keep: bool) -> LoggedRows:
        full.copy_(own.expand_as(full))
        return self._begins("gather" if own.numel() > 1 else "gather of one")

    def slot(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(*shape)

    def scatter(self, parts: Any, write: Callable[[int], object]) -> LoggedRows:
        write(1)
        parts[0][2].zero_()
        return self._begins("scatter")

    def _begins(self, what: str) -> LoggedRows:
        self.log.append(what)
        return self

    def wait(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("name", ["compute", *RECIPES])
def test_own_rows_are_multiplied_while_others_arrive_and_last_while_a_peer_reads(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    log, multiply = list[str](), Linear._multiply

    def logged(*given: Any, **more: Any) -> torch.Tensor:
        log.append("product")
        return multiply(*given, **more)

    monkeypatch.setattr(tensor_parallel, "SPLIT_ROWS", TILE)
    monkeypatch.setattr(Linear, "_multiply", logged)
    group: Any = object()
    tp = TensorParallelGroup(group, 2, 0, LoggedRows(log))  # type: ignore[arg-type]
    axes, casts = Axes(tp, ContextParallelGroup()), None if name == "compute" else casts_of(name)
    if casts is not None:
        casts.begin_step(None)
    weight, own, full = (random(rows, TILE) for rows in (TILE, TILE, 2 * TILE))
    column, row = Linear(Param(weight, None), casts), Linear(Param(weight.clone(), None), casts, row_parallel=True)
    if casts is not None and casts.history is not None:
        column, row = column._replace(name="column"), row._replace(name="row")
    x, dy = row.input(axes, full, rows=True), column.output_grad(axes, full)
    normed = column.input(axes, own, rows=True)
    row.forward(axes, x)  # casts the weights
    column.input_grad(axes, dy)
    messages = 2 if name in ("block", "row") else 1  # scales are a message of their own
    agreed = ["gather of one", "wait"] if name in ("tensor", "delayed, first step") else []
    arrive = [*["gather"] * messages, "product", *["wait"] * messages, "product"]
    runs: list[tuple[Callable[[], AsyncResult[Any]], list[str]]] = [
        (lambda: column.forward_gathered(axes, normed), arrive),
        (lambda: row.input_grad_gathered(axes, own), [*agreed, "gather", "product", "wait", "product"]),
        (lambda: row.forward_scattered(axes, x), ["product", "scatter", "product", "wait"]),
        (lambda: column.input_grad_scattered(axes, dy), ["product", "scatter", "product", "wait"]),
    ]
    for run, expected in runs:
        log.clear()
        run().wait()
        assert log == expected


def of_rank(x: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """A rank's rows."""
    return x.view(count, -1, x.shape[1])[rank]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
