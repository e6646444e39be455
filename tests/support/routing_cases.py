"""Cases of the router's kernels, for a GPU and for Triton's interpreter, against torch in float64."""

from __future__ import annotations

import torch
from closeness import relative_error

from pentad.kernels.moe import moe_permute_triton, moe_router, moe_router_triton
from pentad.kernels.moe.moe_permute import ExpertRows, sort_by_expert, values_of_choices
from pentad.kernels.moe.moe_router import Gate

GATES = [
    (8, Gate(3), False),
    (5, Gate(1, norm_topk_prob=False), False),
    (60, Gate(4, "sigmoid", True, 2.5), True),
    (16, Gate(3, "sigmoid", True, 2.5, num_groups=4, topk_groups=2), True),
    (12, Gate(4, "softmax", False, 16.0, num_groups=3, topk_groups=2), False),
    (6, Gate(2, "sigmoid", num_groups=6, topk_groups=3), True),
]
# Tokens, experts, experts of a token, first local expert, local experts.
SORTS = [(4, 8, 2, 2, 3), (1, 4, 4, 0, 4), (70, 8, 3, 4, 4), (33, 5, 2, 0, 1), (9, 6, 1, 3, 3)]


def check_choice(tokens: int, num_experts: int, gate: Gate, biased: bool, device: str) -> None:
    """Asserts that scores and weights are close to float64's, and that experts are those torch chooses by the kernel's
    scores."""
    logits = torch.randn(tokens, num_experts, device=device)
    bias = torch.randn(num_experts, device=device) / 10 if biased else None
    scores, experts, weights, load = moe_router_triton.choose_experts(logits, bias, gate)
    wide = moe_router.choose_experts(logits.double(), bias if bias is None else bias.double(), gate)
    assert relative_error(scores, wide[0]) < 1e-6
    assert torch.equal(experts, moe_router.top_experts(scores if bias is None else scores + bias, gate))
    assert torch.equal(load, torch.bincount(experts.flatten(), minlength=num_experts))
    chosen = scores.double().gather(1, experts)
    if gate.norm_topk_prob:
        chosen = chosen / chosen.sum(1, keepdim=True)
    assert relative_error(weights, chosen * gate.routed_scaling_factor) < 1e-6


def check_backward(tokens: int, num_experts: int, gate: Gate, more: bool, dtype: torch.dtype, device: str) -> None:
    """`more`: with gradients of a load-balancing loss and of a z-loss."""
    logits = torch.randn(tokens, num_experts, device=device)
    scores, experts, weights, _ = moe_router.choose_experts(logits.double(), None, gate)
    dweights = torch.randn(tokens, gate.top_k, device=device)
    dshares = torch.rand(num_experts, device=device) if more else None
    narrow = (scores.float(), experts, weights.float(), dweights, dshares, logits if more else None)
    wide = [each.double() if each is not None and each.is_floating_point() else each for each in narrow]
    found = moe_router_triton.router_backward(*narrow, 0.3, gate, dtype)
    expected = moe_router.router_backward(*wide, 0.3, gate, torch.float64)  # type: ignore[call-arg, arg-type]
    assert found.dtype == dtype
    assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


def check_sort(tokens: int, num_experts: int, top_k: int, first: int, local: int, device: str) -> None:
    """Asserts that the rows in use, and the row of each choice, are exactly torch's."""
    experts = torch.rand(tokens, num_experts, device=device).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    found, expected = (
        moe_permute_triton.sort_by_expert(experts, weights, first, local),
        _sorted(experts, weights, first, local),
    )
    used = int(expected.offsets[-1])
    assert torch.equal(found.offsets, expected.offsets) and found.offsets.dtype == torch.int32
    assert torch.equal(found.positions, expected.positions)
    assert found.tokens.shape == expected.tokens.shape and torch.equal(found.tokens[:used], expected.tokens[:used])
    assert torch.equal(found.weights[:used], expected.weights[:used])
    assert not found.tokens[used:].any(), "unused rows are of a token that exists"
    values = torch.randn(found.tokens.shape[0], device=device)
    assert torch.equal(moe_permute_triton.values_of_choices(values, found.positions), _values(values, found.positions))


def _sorted(experts: torch.Tensor, weights: torch.Tensor, first: int, local: int) -> ExpertRows:
    rows = sort_by_expert(experts.cpu(), weights.cpu(), first, local)
    return ExpertRows(*(each.to(experts.device) for each in rows))


def _values(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return values_of_choices(values.cpu(), positions.cpu()).to(values.device)
