"""The router's kernels on a GPU, at the sizes of published mixtures."""

from __future__ import annotations

import pytest
import torch
from routing_cases import GATES, SORTS, check_backward, check_choice, check_sort

from pentad.kernels.moe.moe_router import Gate

pytestmark = pytest.mark.gpu
SIZES = [
    *(pytest.param(77, *each, id=f"{each[0]} experts") for each in GATES),
    pytest.param(8192, 128, Gate(8), False, id="Qwen3"),
    pytest.param(8192, 64, Gate(6, norm_topk_prob=False), True, id="DeepSeek-V2-Lite"),
    pytest.param(4096, 256, Gate(8, "sigmoid", True, 2.5, num_groups=8, topk_groups=4), True, id="DeepSeek-V3"),
]


@pytest.mark.parametrize(("tokens", "num_experts", "gate", "biased"), SIZES)
def test_experts_are_chosen_as_by_torch(tokens: int, num_experts: int, gate: Gate, biased: bool) -> None:
    check_choice(tokens, num_experts, gate, biased, "cuda")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "num_experts", "gate", "more"), SIZES)
def test_gradients_of_logits_are_those_of_float64(
    tokens: int, num_experts: int, gate: Gate, more: bool, dtype: torch.dtype
) -> None:
    check_backward(tokens, num_experts, gate, more, dtype, "cuda")


@pytest.mark.parametrize("sizes", [*SORTS, (16384, 128, 8, 32, 32), (8192, 128, 8, 0, 128), (16384, 64, 6, 16, 16)])
def test_rows_are_sorted_as_by_torch(sizes: tuple[int, int, int, int, int]) -> None:
    check_sort(*sizes, "cuda")
