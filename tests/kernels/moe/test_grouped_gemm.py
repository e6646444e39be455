"""Grouped GEMM and token permutation: each expert's rows, and unused rows are never read."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.moe.moe_permute import gather_rows, sort_by_expert, sum_rows, weighted_glu, weighted_glu_backward
from pentad.workers.linear.weight_grad import GroupedWgrad, accumulate_wgrads
from pentad.workers.params.param_buffers import Unwritten

COUNTS = [(3, 0, 5), (0, 0, 0), (0, 9, 0), (1, 70, 2), (4,)]


def rows_of(counts: tuple[int, ...], unused: int, n: int, k: int, dtype: torch.dtype = torch.float64):
    """(x [R, K], dy [R, N], weights [E, N, K], offsets), with NaN in unused rows."""
    total = sum(counts)
    x, dy = torch.randn(total + unused, k, dtype=dtype), torch.randn(total + unused, n, dtype=dtype)
    x[total:], dy[total:] = torch.nan, torch.nan
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return x, dy, torch.randn(len(counts), n, k, dtype=dtype), offsets


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_are_multiplied_by_the_matrix_of_their_expert(counts: tuple[int, ...]) -> None:
    x, dy, weights, offsets = rows_of(counts, 3, 4, 6)
    total = sum(counts)
    each = weights[torch.repeat_interleave(torch.tensor(counts))]
    expected = torch.einsum("rnk,rk->rn", each, x[:total])
    assert torch.allclose(grouped_gemm(x, weights, offsets)[:total], expected, rtol=1e-12)
    back = torch.einsum("rnk,rn->rk", each, dy[:total])
    assert torch.allclose(grouped_gemm(dy, weights.transpose(1, 2), offsets)[:total], back, rtol=1e-12)


@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_add_to_the_main_gradients(counts: tuple[int, ...]) -> None:
    x, dy, main, offsets = rows_of(counts, 3, 4, 6)
    expected = main.clone()
    for row, expert in enumerate(torch.repeat_interleave(torch.tensor(counts)).tolist()):
        expected[expert] += torch.outer(dy[row], x[row])
    accumulate_grouped_gradient_(main, dy, x, offsets)
    assert torch.allclose(main, expected, rtol=1e-12)
    accumulate_grouped_gradient_(expected.zero_(), dy, x, offsets)
    accumulate_grouped_gradient_(main.fill_(torch.nan), dy, x, offsets, overwrite=True)
    assert torch.equal(main, expected), "also of an expert without rows"


def test_rows_of_a_weight_gradient_may_be_indexed() -> None:
    x, dy, main, offsets = rows_of((3, 0, 5), 3, 4, 6)
    rows, expected = torch.tensor([2, 1, 0, 2, 2, 1, 0, 0, 9, 9, 9]), main.clone()
    accumulate_grouped_gradient_(expected, dy[rows], x, offsets)
    accumulate_grouped_gradient_(expected, dy, x[rows], offsets)
    accumulate_wgrads(
        [GroupedWgrad(main, dy, x, offsets, rows, None), GroupedWgrad(main, dy, x, offsets, None, rows)], Unwritten()
    )
    assert torch.equal(main, expected)


def test_rows_are_sorted_by_expert_and_then_by_token() -> None:
    experts = torch.tensor([[5, 2], [2, 3], [7, 0], [3, 5]])
    rows = sort_by_expert(experts, torch.arange(8.0).view(4, 2), first=2, local=3)
    assert rows.offsets.tolist() == [2, 4, 4]
    assert rows.tokens[:4].tolist() == [0, 1, 1, 3] and rows.weights[:4].tolist() == [1, 2, 3, 6]
    assert rows.positions.tolist() == [[-1, 0], [1, 2], [-1, -1], [3, -1]]
    assert rows.tokens.shape == (8,)  # a token chooses two experts, at most two of the three local ones
    x = torch.randn(4, 3)
    y = gather_rows(x, rows.tokens, rows.offsets)
    y[4:] = torch.nan
    assert torch.equal(sum_rows(y, rows.positions), x * torch.tensor([1.0, 2, 0, 1])[:, None])


def test_glu_is_weighted() -> None:
    rows = sort_by_expert(torch.tensor([[1, 0], [0, 2]]), torch.rand(2, 2, dtype=torch.float64), 0, 3)
    gate_up = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    weights = rows.weights.clone().requires_grad_()
    gate, up = gate_up.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up * weights[:, None]
    dy = torch.randn(4, 5, dtype=torch.float64)
    dgate_up, dweights = torch.autograd.grad(expected, (gate_up, weights), dy)
    weighting = rows.weights, rows.offsets
    assert torch.allclose(weighted_glu(gate_up.detach(), *weighting), expected)
    back = weighted_glu_backward(dy, gate_up.detach(), *weighting)
    for found, there in zip(back, (dgate_up, expected, dweights), strict=True):
        assert torch.allclose(found, there)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (1, 130, 2)])
def test_narrow_dtypes_are_close(counts: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    x, dy, weights, offsets = rows_of(counts, 2, 4, 6, dtype)
    total, main = sum(counts), torch.zeros(len(counts), 4, 6)
    wide = main.double()
    found = grouped_gemm(x, weights, offsets)[:total]
    assert relative_error(found, grouped_gemm(x.double(), weights.double(), offsets)[:total]) < bound
    accumulate_grouped_gradient_(main, dy, x, offsets)
    accumulate_grouped_gradient_(wide, dy.double(), x.double(), offsets)
    assert relative_error(main, wide) < 1e-5
