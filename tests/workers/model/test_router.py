"""The router against transformers' blocks, its gradients, and load balancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import relative_error
from expert_ranks import NO_SEQUENCE, State, bind, gradients_of, layer_context
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pentad.kernels.moe.moe_router import Gate, top_experts
from pentad.schedules.spec.model import Experts
from pentad.workers.linear.weight_grad import accumulate_wgrads
from pentad.workers.model import router
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import Unwritten
from pentad.workers.params.router_bias import updated_bias

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


def random_block(name: str) -> tuple[Any, Experts]:
    """A block with random weights, large enough for distinct scores, and its shape."""
    block, shape = BLOCKS[name]()
    for each in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(each, std=0.3)
    return block, shape


def moe_state(p: dict[str, torch.Tensor], bias: torch.Tensor | None = None) -> State:
    """Weights or gradients of a block, by name."""
    state = {"router": p["gate.weight"], "gate_up": p["experts.gate_up_proj"], "down": p["experts.down_proj"]}
    if "shared_experts.up_proj.weight" in p:
        gate, up, down = (p[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
        state |= {"shared_gate_up": torch.cat([gate, up]), "shared_down": down}
    if bias is not None:
        state["bias"] = bias
    return {name: each.detach() for name, each in state.items()}


def bias_of(block: Any) -> torch.Tensor | None:
    return dict(block.named_buffers()).get("gate.e_score_correction_bias")


@pytest.mark.parametrize("name", BLOCKS)
def test_logits_choice_and_weights_are_those_of_transformers(name: str) -> None:
    block, shape = random_block(name)
    weight = block.gate.weight.detach()
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, chosen = block.gate(x)
    routing = router.route(x, weight, bias_of(block), shape)
    assert torch.allclose(router.router_logits(x, weight), logits, rtol=1e-5, atol=1e-6)
    ours, theirs = routing.experts.sort(1), chosen.sort(1)
    assert torch.equal(ours.values, theirs.values)
    assert torch.allclose(routing.weights.gather(1, ours.indices), weights.gather(1, theirs.indices), rtol=1e-5)
    assert torch.equal(routing.load, torch.bincount(chosen.flatten(), minlength=shape.num_experts))


@pytest.mark.parametrize("name", BLOCKS)
def test_results_and_gradients_are_those_of_transformers(name: str) -> None:
    block, shape = random_block(name)
    p = dict(block.named_parameters())
    x, dy = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(TOKENS, HIDDEN)
    expected = block(x[None])[0]
    expected_dx, *expected_gradients = torch.autograd.grad(expected, (x, *p.values()), dy)
    moe, context = bind(moe_state(p, bias_of(block))), layer_context(shape)
    y, saved, recomputable = run_to_completion(moe.forward(context, NO_SEQUENCE, x.detach()))
    dx, work = run_to_completion(moe.backward(context, NO_SEQUENCE, x.detach(), saved, recomputable, dy))
    accumulate_wgrads(work, Unwritten())
    assert relative_error(y, expected.detach()) < 1e-5 and relative_error(dx, expected_dx) < 1e-5
    for name, gradient in moe_state(dict(zip(p, expected_gradients, strict=True))).items():
        assert relative_error(gradients_of(moe)[name], gradient) < 1e-5, name


def aux_loss(routing: router.Routing, shape: Experts, load: torch.Tensor | None = None) -> torch.Tensor:
    """coef E sum_e (share of visits) (mean normalized score), a scalar (arXiv 2101.03961, section 2.2); `load` counts
    the visits of a full microbatch where these tokens are a part of it."""
    counts = (routing.load if load is None else load).to(routing.scores.dtype)
    shares = routing.scores / routing.scores.sum(1, keepdim=True)
    return shape.aux_loss_coef * shape.num_experts * (counts / counts.sum() * shares.mean(0)).sum()


def aux_loss_dlogits(
    routing: router.Routing, weight: torch.Tensor, shape: Experts, tokens: int, load: torch.Tensor | None = None
) -> torch.Tensor:
    dshares = router.aux_loss_grad(routing, shape, 1 / tokens, load)
    return router.backward(routing, weight, shape, torch.zeros_like(routing.weights), dshares)[0]


def test_the_balancing_loss_is_that_of_transformers() -> None:
    shape = Experts(num_experts=8, top_k=2, intermediate_size=1, aux_loss_coef=0.5)
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(8, HIDDEN)
    logits = (x @ weight.T).requires_grad_()
    theirs = load_balancing_loss_func((logits,), 8, 2)
    assert isinstance(theirs, torch.Tensor)
    expected = 0.5 * theirs / 2  # theirs adds up the choices of each token
    routing = router.route(x, weight, None, shape)
    assert torch.allclose(aux_loss(routing, shape), expected.detach())
    (dlogits,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(aux_loss_dlogits(routing, weight, shape, TOKENS), dlogits, atol=1e-7)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_z_loss_has_the_gradient_of_autograd(scoring) -> None:
    """The loss of ST-MoE (arXiv 2202.08906, eq. 5), also where sigmoids are saturated."""
    shape = Experts(num_experts=8, top_k=2, intermediate_size=1, router_z_loss_coef=0.3, scoring_func=scoring)
    x, weight = 9 * torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.randn(8, HIDDEN, dtype=torch.float64)
    logits = (x @ weight.T).requires_grad_()
    (expected,) = torch.autograd.grad(0.3 * logits.logsumexp(1).square().mean(), logits)
    routing = router.route(x, weight, None, shape)
    zero = torch.zeros_like(routing.weights)
    dlogits, dx = router.backward(routing, weight, shape, zero, None, 0.3 / TOKENS)
    assert relative_error(dlogits, expected) < 1e-12 and relative_error(dx, expected @ weight) < 1e-12


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gradients_of_parts_of_a_microbatch_are_those_of_its_balancing_loss(scoring) -> None:
    shape = Experts(num_experts=8, top_k=2, intermediate_size=1, aux_loss_coef=0.5, scoring_func=scoring)
    x, weight = torch.randn(12, HIDDEN, dtype=torch.float64), torch.randn(8, HIDDEN, dtype=torch.float64)
    full = router.route(x, weight, None, shape)
    parts = [router.route(part, weight, None, shape) for part in x.chunk(3)]
    load = sum(part.load for part in parts)
    assert isinstance(load, torch.Tensor) and torch.equal(load, full.load)
    losses = torch.stack([aux_loss(part, shape, load) for part in parts])
    assert torch.allclose(losses.mean(), aux_loss(full, shape))
    found = torch.cat([aux_loss_dlogits(part, weight, shape, 12, load) for part in parts])
    assert torch.allclose(found, aux_loss_dlogits(full, weight, shape, 12), rtol=1e-12, atol=1e-15)


def test_the_gradient_of_the_balancing_loss_is_even_where_the_load_is() -> None:
    shape = Experts(num_experts=4, top_k=1, intermediate_size=1, aux_loss_coef=1.0)
    even = router.route(10 * torch.eye(4), torch.eye(4), None, shape)
    one = router.route(10 * torch.eye(4)[:1].expand(4, 4), torch.eye(4), None, shape)
    assert even.load.tolist() == [1, 1, 1, 1] and one.load.tolist() == [4, 0, 0, 0]
    assert aux_loss(even, shape).item() == pytest.approx(1.0)
    assert aux_loss(one, shape).item() == pytest.approx(4.0, rel=1e-3)
    assert router.aux_loss_grad(even, shape, 1.0).tolist() == [1, 1, 1, 1]
    assert router.aux_loss_grad(one, shape, 1.0).tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize(
    "shape", [Experts(8, 3, 1), Experts(8, 3, 1, num_groups=4, topk_groups=2, scoring_func="sigmoid")]
)
def test_ties_go_to_the_lowest_expert(shape: Experts) -> None:
    found = router.route(torch.ones(5, 4), torch.zeros(8, 4), None, shape)
    assert found.experts.tolist() == [[0, 1, 2]] * 5


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.data())
def test_experts_are_the_best_of_the_best_groups(seed: int, size: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(2, 6))
    topk_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, topk_groups * size))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 4, (9, groups * size), generator=generator) / 4  # with many ties
    chosen = top_experts(scores, Gate(top_k, num_groups=groups, topk_groups=topk_groups))
    for row, picked in zip(scores, chosen.tolist(), strict=True):
        assert len(set(picked)) == top_k
        assert len({expert // size for expert in picked}) <= topk_groups
        sums = [sum(sorted(row[g * size :][:size].tolist())[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-sums[g], g))[:topk_groups]
        allowed = [e for e in range(groups * size) if e // size in best]
        assert picked == sorted(allowed, key=lambda e: (-row[e].item(), e))[:top_k]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=16))
def test_the_bias_moves_towards_an_even_load(load: list[int]) -> None:
    moved = updated_bias(torch.zeros(len(load)), torch.tensor(load), 0.5)
    for count, step in zip(load, moved.tolist(), strict=True):
        less, more = count * len(load) < sum(load), count * len(load) > sum(load)
        assert step == (0.5 if less else -0.5 if more else 0.0)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    shape = Experts(num_experts=4, top_k=2, intermediate_size=1, scoring_func="sigmoid", norm_topk_prob=False)
    x, weights = torch.randn(5, 3), torch.randn(4, 3)
    bias = torch.tensor([0.0, 5.0, 0.0, 4.0])
    found = router.route(x, weights, bias, shape)
    assert found.experts.tolist() == [[1, 3]] * 5
    assert torch.allclose(found.weights, (x @ weights.T).sigmoid()[:, [1, 3]])
