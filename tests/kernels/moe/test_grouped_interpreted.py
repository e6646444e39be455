"""The Triton kernels of MoE layers on a machine without a GPU, in Triton's interpreter; see test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

if torch.cuda.is_available():
    pytest.skip("runs without a GPU", allow_module_level=True)
pytest.importorskip("triton")

from pentad.kernels.moe import grouped_gemm_triton, moe_permute_triton
from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.moe.moe_permute import gather_rows, sort_by_expert, sum_rows, weighted_glu, weighted_glu_backward

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
# The interpreter multiplies bf16 numbers as if they were integers, so GEMMs are tested with fp16.
PRODUCTS = [(torch.float32, 1e-5), (torch.float16, 1e-2)]
COUNTS = [(3, 0, 5), (0, 0, 0), (1, 130, 0, 2, 65), (4,)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "bound"), PRODUCTS)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm(counts: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    total, experts = sum(counts), len(counts)
    x, dy = torch.randn(total + 3, 33, dtype=dtype), torch.randn(total + 3, 70, dtype=dtype)
    x[total:], dy[total:] = torch.nan, torch.nan
    weights, offsets = torch.randn(experts, 70, 33, dtype=dtype), torch.tensor(counts).cumsum(0).to(torch.int32)
    for rows, matrices in ((x, weights), (dy, weights.transpose(1, 2))):
        found = grouped_gemm_triton.grouped_gemm(rows, matrices, offsets)[:total]
        assert relative_error(found, grouped_gemm(rows.double(), matrices.double(), offsets)[:total]) < bound


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("k", [33, grouped_gemm_triton.WIDE + 9])
def test_grouped_weight_gradients(counts: tuple[int, ...], dtype: torch.dtype, k: int) -> None:
    total = sum(counts)
    dy, x = torch.randn(total + 3, 70, dtype=dtype), torch.randn(total + 3, k, dtype=dtype)
    dy[total:], x[total:] = torch.nan, torch.nan
    main, offsets = torch.randn(len(counts), 70, k), torch.tensor(counts).cumsum(0).to(torch.int32)
    expected = main.double()
    accumulate_grouped_gradient_(expected, dy.double(), x.double(), offsets)
    grouped_gemm_triton.accumulate_grouped_gradient_(main, dy, x, offsets)
    assert relative_error(main, expected) < 1e-5
    again = torch.zeros_like(main)
    grouped_gemm_triton.accumulate_grouped_gradient_(again, dy, x, offsets)
    grouped_gemm_triton.accumulate_grouped_gradient_(main.fill_(torch.nan), dy, x, offsets, overwrite=True)
    assert torch.equal(main, again), "also of an expert without rows"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("width", [5, 2100])
def test_rows(width: int, dtype: torch.dtype, bound: float) -> None:
    experts = torch.tensor([[5, 2], [2, 3], [7, 0], [3, 5]])
    rows = sort_by_expert(experts, torch.rand(4, 2), first=2, local=3)
    x, total = torch.randn(4, width, dtype=dtype), 4
    gathered = moe_permute_triton.gather_rows(x, rows.tokens, rows.offsets)
    assert torch.equal(gathered[:total], gather_rows(x, rows.tokens, rows.offsets)[:total])
    summed = moe_permute_triton.sum_rows(gathered, rows.positions)
    assert relative_error(summed, sum_rows(gathered, rows.positions)) < bound
    gate_up, dy = torch.randn(8, 2 * width, dtype=dtype), torch.randn(8, width, dtype=dtype)
    expected = weighted_glu(gate_up.double(), rows.weights.double(), rows.offsets)
    found = moe_permute_triton.weighted_glu(gate_up, rows.weights, rows.offsets)
    assert relative_error(found[:total], expected[:total]) < bound
    back = moe_permute_triton.weighted_glu_backward(dy, gate_up, rows.weights, rows.offsets)
    there = weighted_glu_backward(dy.double(), gate_up.double(), rows.weights.double(), rows.offsets)
    for mine, other in zip(back, there, strict=True):
        assert relative_error(mine[:total], other[:total]) < bound
