"""The router: what transformers' blocks choose and weigh, their gradients, and the laws of balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import relative_error
from expert_ranks import State, bound
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pentad.schedules.spec.model import Experts
from pentad.workers.model import experts, router
from pentad.workers.model.weight_grad import accumulate
from pentad.workers.parallel import expert_parallel
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params import router_bias

HIDDEN, TOKENS = 16, 11


def mixtral() -> tuple[Any, Experts]:
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=12, num_local_experts=8, num_experts_per_tok=2)
    return MixtralSparseMoeBlock(config), Experts(num_experts=8, top_k=2, intermediate_size=12)


def qwen(normalized: bool) -> tuple[Any, Experts]:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=normalized)
    return Qwen3MoeSparseMoeBlock(config), Experts(
        num_experts=8, top_k=3, intermediate_size=12, norm_topk_prob=normalized
    )


def deepseek(normalized: bool) -> tuple[Any, Experts]:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=6,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
    )
    shape = Experts(16, 3, 6, 12, "sigmoid", normalized, 2.5, num_groups=4, topk_groups=2, bias_update_rate=1e-3)
    return DeepseekV3MoE(config), shape


BLOCKS = {
    "mixtral": mixtral,
    "qwen3": lambda: qwen(True),
    "qwen3 not normalized": lambda: qwen(False),
    "deepseek": lambda: deepseek(True),
    "deepseek not normalized": lambda: deepseek(False),
}


def filled(name: str) -> tuple[Any, Experts]:
    """A block with random weights, in the width that transformers makes scores in, and its shape."""
    block, shape = BLOCKS[name]()
    for each in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(each, std=0.3)
    return block, shape


def ours(p: dict[str, torch.Tensor]) -> State:
    """Weights or gradients of a block by pentad's names."""
    found = {"router": p["gate.weight"], "gate_up": p["experts.gate_up_proj"], "down": p["experts.down_proj"]}
    if "shared_experts.up_proj.weight" in p:
        gate, up, down = (p[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
        found |= {"shared_gate_up": torch.cat([gate, up]), "shared_down": down}
    return {name: each.detach() for name, each in found.items()}


def bias_of(block: Any) -> torch.Tensor | None:
    return dict(block.named_buffers()).get("gate.e_score_correction_bias")


@pytest.mark.parametrize("name", BLOCKS)
def test_logits_choice_and_weights_are_those_of_transformers(name: str) -> None:
    block, shape = filled(name)
    p = dict(block.named_parameters())
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        products, weights, chosen = block.gate(x)
    found = router.route(x, ours(p)["router"], bias_of(block), shape)
    assert torch.allclose(router.logits(x, ours(p)["router"]), products, rtol=1e-5, atol=1e-6)
    order, there = found.experts.sort(1), chosen.sort(1)
    assert torch.equal(order.values, there.values)
    assert torch.allclose(found.weights.gather(1, order.indices), weights.gather(1, there.indices), rtol=1e-5)
    assert torch.equal(found.load, torch.bincount(chosen.flatten(), minlength=shape.num_experts))


@pytest.mark.parametrize("name", BLOCKS)
def test_results_and_gradients_are_those_of_transformers(name: str) -> None:
    block, shape = filled(name)
    p = dict(block.named_parameters())
    x, dy = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(TOKENS, HIDDEN)
    expected = block(x[None])[0]
    dx, *gradients = torch.autograd.grad(expected, (x, *p.values()), dy)
    w, g = bound(ours(p))
    mixed, kept, remade = run_to_completion(
        experts.forward(w, shape, x.detach(), bias_of(block), expert_parallel.ExpertParallelGroup())
    )
    dnormed, work = run_to_completion(experts.backward(w, g, shape, x.detach(), kept, remade, dy))
    accumulate(work)
    assert relative_error(mixed, expected.detach()) < 1e-5 and relative_error(dnormed, dx) < 1e-5
    for part, gradient in ours(dict(zip(p, gradients, strict=True))).items():
        assert relative_error(getattr(g, part), gradient) < 1e-5, part


def test_the_balance_loss_is_that_of_transformers() -> None:
    shape = Experts(num_experts=8, top_k=2, intermediate_size=1, aux_loss_coef=0.5)
    x, weights = torch.randn(TOKENS, HIDDEN), torch.randn(8, HIDDEN)
    products = (x @ weights.T).requires_grad_()
    theirs = load_balancing_loss_func((products,), 8, 2)
    assert isinstance(theirs, torch.Tensor)
    expected = 0.5 * theirs / 2  # theirs adds up the choices of a token
    routed = router.route(x, weights, None, shape)
    assert torch.allclose(router.balance_loss(routed, shape), expected.detach())
    (dproducts,) = torch.autograd.grad(expected, products)
    pull = router.aux_loss_grad(routed, shape, 1 / TOKENS)
    dlogits, _ = router.backward(routed, weights, shape, torch.zeros_like(routed.weights), pull)
    assert torch.allclose(dlogits, dproducts, atol=1e-7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_parts_of_a_microbatch_make_its_balance_loss_together(score) -> None:
    shape = Experts(num_experts=8, top_k=2, intermediate_size=1, aux_loss_coef=0.5, scoring_func=score)
    x, weights = torch.randn(12, HIDDEN, dtype=torch.float64), torch.randn(8, HIDDEN, dtype=torch.float64)
    whole = router.route(x, weights, None, shape)
    parts = [router.route(part, weights, None, shape) for part in x.chunk(3)]
    load = sum(part.load for part in parts)
    assert isinstance(load, torch.Tensor) and torch.equal(load, whole.load)
    losses = torch.stack([router.balance_loss(part, shape, load) for part in parts])
    assert torch.allclose(losses.mean(), router.balance_loss(whole, shape))

    def gradient(routed: router.Routed) -> torch.Tensor:
        pull = router.aux_loss_grad(routed, shape, 1 / 12, load)
        return router.backward(routed, weights, shape, torch.zeros_like(routed.weights), pull)[0]

    assert torch.allclose(torch.cat([gradient(part) for part in parts]), gradient(whole), rtol=1e-12, atol=1e-15)


def test_the_balance_loss_is_least_where_the_load_is_even() -> None:
    shape = Experts(num_experts=4, top_k=1, intermediate_size=1, aux_loss_coef=1.0)
    even = router.route(10 * torch.eye(4), torch.eye(4), None, shape)
    one = router.route(10 * torch.eye(4)[:1].expand(4, 4), torch.eye(4), None, shape)
    assert even.load.tolist() == [1, 1, 1, 1] and one.load.tolist() == [4, 0, 0, 0]
    assert router.balance_loss(even, shape).item() == pytest.approx(1.0)
    assert router.balance_loss(one, shape).item() == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(
    "shape", [Experts(8, 3, 1), Experts(8, 3, 1, num_groups=4, topk_groups=2, scoring_func="sigmoid")]
)
def test_equal_scores_go_to_the_lowest_experts(shape: Experts) -> None:
    found = router.route(torch.ones(5, 4), torch.zeros(8, 4), None, shape)
    assert found.experts.tolist() == [[0, 1, 2]] * 5


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_no_token_visits_more_than_its_groups(seed: int, size: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(2, 6))
    active_groups = data.draw(st.integers(1, groups))
    active = data.draw(st.integers(1, active_groups * size))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 4, (9, groups * size), generator=generator) / 4  # with many equal ones
    shape = Experts(groups * size, active, 1, num_groups=groups, topk_groups=active_groups)
    chosen = router.choose(scores, shape)
    for row, picked in zip(scores, chosen.tolist(), strict=True):
        assert len(set(picked)) == active
        assert len({expert // size for expert in picked}) <= active_groups
        sums = [sum(sorted(row[g * size :][:size].tolist())[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-sums[g], g))[:active_groups]
        allowed = [e for e in range(groups * size) if e // size in best]
        assert picked == sorted(allowed, key=lambda e: (-row[e].item(), e))[:active]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=16))
def test_the_bias_moves_towards_an_even_load(load: list[int]) -> None:
    moved = router_bias.moved_bias(torch.zeros(len(load)), torch.tensor(load), 0.5)
    for count, step in zip(load, moved.tolist(), strict=True):
        less, more = count * len(load) < sum(load), count * len(load) > sum(load)
        assert step == (0.5 if less else -0.5 if more else 0.0)


def test_the_bias_counts_for_the_choice_alone() -> None:
    shape = Experts(num_experts=4, top_k=2, intermediate_size=1, scoring_func="sigmoid", norm_topk_prob=False)
    x, weights = torch.randn(5, 3), torch.randn(4, 3)
    bias = torch.tensor([0.0, 5.0, 0.0, 4.0])
    found = router.route(x, weights, bias, shape)
    assert found.experts.tolist() == [[1, 3]] * 5
    assert torch.allclose(found.weights, (x @ weights.T).sigmoid()[:, [1, 3]])
