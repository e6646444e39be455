"""The router's arithmetic in Triton: a program takes some tokens with the scores of all experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.backend import ceil_div
from pentad.kernels.moe.moe_router import TINY, Gate

TILE = 512  # scores of a program


@triton.jit
def _best(values, columns, E: tl.constexpr):
    """The index of each row's highest value, the lowest of equal ones; a value of -inf is no candidate."""
    highest = tl.max(values, 1)
    return tl.min(tl.where(values == highest[:, None], columns, E), 1)


@triton.jit
def _scores(logits, valid, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        powers = tl.where(valid, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
        return powers / tl.sum(powers, 1)[:, None]
    return tl.where(valid, 1 / (1 + tl.exp(-logits)), 0.0)


@triton.jit
def _eligible(candidates, columns, E: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, G: tl.constexpr):
    """The candidates in the groups with the highest sums of their two best; -inf for the others."""
    groups = tl.arange(0, G)[None, :]
    size: tl.constexpr = E // GROUPS
    sums = tl.full((candidates.shape[0], G), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(columns // size == group, candidates, float("-inf"))
        total = tl.max(members, 1)
        if size > 1:
            best = _best(members, columns, E)
            total += tl.max(tl.where(columns == best[:, None], float("-inf"), members), 1)
        sums = tl.where(groups == group, total[:, None], sums)
    allowed = columns < 0
    for _ in tl.static_range(CHOSEN):
        best = _best(sums, groups, G)
        allowed = allowed | (columns // size == best[:, None])
        sums = tl.where(groups == best[:, None], float("-inf"), sums)
    return tl.where(allowed, candidates, float("-inf"))


@triton.jit
def _choose(
    logits, bias, scores, experts, weights, load, T, factor,
    E: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, G: tl.constexpr, SMALL: tl.constexpr,
    TOKENS: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
    columns = tl.arange(0, EP)[None, :]
    valid = (columns < E) & (tokens < T)
    value = tl.load(logits + tokens * E + columns, mask=valid, other=0.0).to(tl.float32)
    score = _scores(tl.where(columns < E, value, float("-inf")), columns < E, SOFTMAX)
    tl.store(scores + tokens * E + columns, score, mask=valid)
    candidates = score
    if BIAS:
        candidates += tl.load(bias + columns, mask=columns < E, other=0.0).to(tl.float32)
    # NaN scores are chosen last, so that the experts of a token are always distinct.
    candidates = tl.where(candidates == candidates, tl.maximum(candidates, -3e38), -3e38)
    candidates = tl.where(columns < E, candidates, float("-inf"))
    if GROUPS > 1:
        candidates = _eligible(candidates, columns, E, GROUPS, CHOSEN, G)
    choices = tl.arange(0, KP)[None, :]
    chosen = tl.zeros((TOKENS, KP), tl.int64)
    weight = tl.zeros((TOKENS, KP), tl.float32)
    visited = columns < 0
    for choice in tl.static_range(K):
        best = _best(candidates, columns, E)[:, None]
        is_best = columns == best
        chosen = tl.where(choices == choice, best.to(tl.int64), chosen)
        weight = tl.where(choices == choice, tl.sum(tl.where(is_best, score, 0.0), 1)[:, None], weight)
        visited = visited | is_best
        candidates = tl.where(is_best, float("-inf"), candidates)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 1)[:, None] + SMALL)
    written = (choices < K) & (tokens < T)
    tl.store(experts + tokens * K + choices, chosen, mask=written)
    tl.store(weights + tokens * K + choices, weight * factor, mask=written)
    visits = tl.sum((visited & valid).to(tl.int64), 0)
    # Sums of integers do not depend on their order.
    tl.atomic_add(load + tl.arange(0, EP), visits, mask=tl.arange(0, EP) < E)


@triton.jit
def _backward(
    scores, experts, weights, dweights, dshares, logits, dlogits, T, factor, z_scale,
    E: tl.constexpr, K: tl.constexpr, SHARES: tl.constexpr, Z: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, SMALL: tl.constexpr, TOKENS: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
    columns, choices = tl.arange(0, EP)[None, :], tl.arange(0, KP)[None, :]
    valid, written = (columns < E) & (tokens < T), (choices < K) & (tokens < T)
    score = tl.load(scores + tokens * E + columns, mask=valid, other=0.0)
    dchosen = tl.load(dweights + tokens * K + choices, mask=written, other=0.0).to(tl.float32) * factor
    mean = tl.zeros((TOKENS, 1), tl.float32)
    share = tl.full((TOKENS, 1), 1.0, tl.float32)
    if NORMALIZE:
        weight = tl.load(weights + tokens * K + choices, mask=written, other=0.0)
        mean = tl.sum(dchosen * weight, 1)[:, None] / factor
        total = tl.zeros((TOKENS, 1), tl.float32)
        for choice in tl.static_range(K):
            expert = tl.load(experts + tokens * K + choice, mask=tokens < T, other=0)
            total += tl.sum(tl.where(columns == expert, score, 0.0), 1)[:, None]
        share = 1 / (total + SMALL)
    dscore = tl.zeros((TOKENS, EP), tl.float32)
    for choice in tl.static_range(K):
        expert = tl.load(experts + tokens * K + choice, mask=tokens < T, other=0)
        dweight = tl.load(dweights + tokens * K + choice, mask=tokens < T, other=0.0).to(tl.float32) * factor
        dscore = tl.where(columns == expert, (dweight - mean) * share, dscore)
    if SHARES:
        dshare = tl.load(dshares + columns, mask=columns < E, other=0.0)
        if SOFTMAX:
            dscore += dshare
        else:
            total = tl.sum(score, 1)[:, None] + SMALL
            dscore += (dshare - tl.sum(dshare * score, 1)[:, None] / total) / total
    dlogit = score * (dscore - tl.sum(dscore * score, 1)[:, None] if SOFTMAX else (1 - score) * dscore)
    if Z:
        value = tl.load(logits + tokens * E + columns, mask=valid, other=float("-inf"))
        value = tl.where(tokens < T, value, 0.0)
        highest = tl.max(value, 1)[:, None]
        powers = tl.exp(value - highest)
        total = tl.sum(powers, 1)[:, None]
        dlogit += 2 * z_scale * (highest + tl.log(total)) * powers / total
    tl.store(dlogits + tokens * E + columns, dlogit.to(dlogits.dtype.element_ty), mask=valid)


def _blocks(tokens: int, experts: int, gate: Gate) -> tuple[int, dict[str, int]]:
    """(programs, sizes of a program's block)."""
    width = max(16, triton.next_power_of_2(experts))
    rows = max(1, TILE // width)
    choices = triton.next_power_of_2(gate.top_k)
    return ceil_div(tokens, rows), {"TOKENS": rows, "EP": width, "KP": choices}


def choose_experts(logits: Tensor, bias: Tensor | None, gate: Gate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel; see `pentad.kernels.moe.moe_router.choose_experts`."""
    tokens, num_experts = logits.shape
    scores = torch.empty_like(logits, dtype=torch.float32)
    experts = torch.empty(tokens, gate.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, gate.top_k, dtype=torch.float32, device=logits.device)
    load = torch.zeros(num_experts, dtype=torch.int64, device=logits.device)
    programs, sizes = _blocks(tokens, num_experts, gate)
    if programs:
        _choose[(programs,)](
            logits, bias, scores, experts, weights, load, tokens, gate.routed_scaling_factor,
            E=num_experts, K=gate.top_k, BIAS=bias is not None, SOFTMAX=gate.scoring_func == "softmax",
            NORMALIZE=gate.norm_topk_prob, GROUPS=gate.num_groups, CHOSEN=gate.topk_groups,
            G=triton.next_power_of_2(gate.num_groups), SMALL=TINY, **sizes,
        )  # fmt: skip
    return scores, experts, weights, load


def router_backward(
    scores: Tensor,
    experts: Tensor,
    weights: Tensor,
    dweights: Tensor,
    dshares: Tensor | None,
    logits: Tensor | None,
    z_scale: float,
    gate: Gate,
    dtype: torch.dtype,
) -> Tensor:
    """Launches the kernel; see `pentad.kernels.moe.moe_router.router_backward`."""
    tokens, num_experts = scores.shape
    dlogits = torch.empty(tokens, num_experts, dtype=dtype, device=scores.device)
    programs, sizes = _blocks(tokens, num_experts, gate)
    if programs:
        _backward[(programs,)](
            scores, experts, weights, dweights, dshares, logits, dlogits, tokens, gate.routed_scaling_factor, z_scale,
            E=num_experts, K=gate.top_k, SHARES=dshares is not None, Z=logits is not None,
            SOFTMAX=gate.scoring_func == "softmax", NORMALIZE=gate.norm_topk_prob, SMALL=TINY, **sizes,
        )  # fmt: skip
    return dlogits
