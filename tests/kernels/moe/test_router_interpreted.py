"""The router's kernels on a machine without a GPU, in Triton's interpreter; see test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("runs without a GPU", allow_module_level=True)
pytest.importorskip("triton")

from routing_cases import GATES, SORTS, check_backward, check_choice, check_sort

from pentad.kernels.moe import moe_router_triton
from pentad.kernels.moe.moe_router import Gate

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentad.kernels.moe.moe_router_triton.TILE", 64)
    monkeypatch.setattr("pentad.kernels.moe.moe_permute_triton.TILE", 64)
    monkeypatch.setattr("pentad.kernels.moe.moe_permute_triton.VALUES", 16)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("num_experts", "gate", "biased"), GATES)
def test_experts_are_chosen_as_by_torch(num_experts: int, gate: Gate, biased: bool) -> None:
    check_choice(13, num_experts, gate, biased, "cpu")


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("num_experts", "gate", "more"), GATES)
def test_gradients_of_logits_are_those_of_float64(num_experts: int, gate: Gate, more: bool) -> None:
    check_backward(13, num_experts, gate, more, torch.float32, "cpu")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("sizes", SORTS)
def test_rows_are_sorted_as_by_torch(sizes: tuple[int, int, int, int, int]) -> None:
    check_sort(*sizes, "cpu")


def test_a_token_without_numbers_visits_distinct_experts() -> None:
    logits = torch.full((3, 5), torch.nan)
    _, experts, _, load = moe_router_triton.choose_experts(logits, None, Gate(3))
    assert experts.tolist() == [[0, 1, 2]] * 3 and load.tolist() == [3, 3, 3, 0, 0]


def test_ties_go_to_the_lowest_expert() -> None:
    _, experts, _, _ = moe_router_triton.choose_experts(torch.zeros(2, 8), None, Gate(3, num_groups=4, topk_groups=2))
    assert experts.tolist() == [[0, 1, 2]] * 2
