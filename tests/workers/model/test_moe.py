"""Experts on one rank and on several, by both ways of dispatch: what one process and autograd make of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from closeness import relative_error
from expert_ranks import Ranks, case_of, check, reference, run_rank

from pentad.schedules.spec.model import Experts
from pentad.workers.params.router_bias import moved_bias

SHAPE = Experts(num_experts=8, top_k=2, intermediate_size=5, shared_intermediate_size=3, aux_loss_coef=0.3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.stop()


@pytest.mark.parametrize("ways", [(1, "all_to_all"), *product((2, 4), ("all_to_all", "all_gather"))], ids=str)
@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_give_what_one_process_gives(ranks: Ranks, ways, active: int, score) -> None:
    shape = replace(SHAPE, top_k=active, scoring_func=score, routed_scaling_factor=1.5, norm_topk_prob=active != 2)
    case = case_of(shape, ways[0], 7, way=ways[1], remake=active == 3)
    check(case, ranks.run(case))


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_rank_whose_experts_get_nothing(ranks: Ranks, way, tokens: int) -> None:
    bias = torch.tensor([0.0, 0, -9, -9, 0, 0, 0, 0])
    case = case_of(SHAPE, 4, tokens, bias, way=way)
    found = ranks.run(case)
    check(case, found)
    assert not found[1].gradients["gate_up"].any() and not found[1].gradients["down"].any()
    assert way == "all_gather" or found[1].came == 0


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
def test_all_tokens_to_one_expert(ranks: Ranks, way) -> None:
    bias = torch.zeros(8)
    bias[5] = 9
    case = case_of(replace(SHAPE, top_k=1), 4, 5, bias, way=way)
    found = ranks.run(case)
    check(case, found)
    assert torch.stack([answer.load for answer in found]).sum(0).tolist() == [0, 0, 0, 0, 0, 20, 0, 0]


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_without_a_shared_network(ranks: Ranks, way, groups: int) -> None:
    shape = replace(
        SHAPE,
        top_k=3,
        num_groups=groups,
        topk_groups=max(2, groups // 2),
        scoring_func="sigmoid",
        shared_intermediate_size=0,
    )
    case = case_of(shape, 4, 7, torch.randn(8) / 8, way=way)
    check(case, ranks.run(case))


def test_a_token_travels_once_to_a_rank(ranks: Ranks) -> None:
    shape = replace(SHAPE, top_k=8)  # all four experts of each of two ranks
    assert [answer.came for answer in ranks.run(case_of(shape, 2, 7))] == [14, 14]
    one = replace(SHAPE, top_k=2, num_groups=4, topk_groups=1)  # both experts of one rank
    assert sum(answer.came for answer in ranks.run(case_of(one, 4, 7))) == 28


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_near_and_two_runs_have_the_same_bits(ranks: Ranks, way, dtype: torch.dtype) -> None:
    wide = case_of(SHAPE, 4, 9, way=way)
    bias = {"bias": torch.tensor([0.0, 3, 0, 3, 0, 0, 0, 0])}  # rounding must not change the choice
    state = {name: each.to(dtype) for name, each in wide.state.items()} | bias
    case = wide._replace(state=state, tokens=wide.tokens.to(dtype), gradients=wide.gradients.to(dtype))
    first, second = ranks.run(case), ranks.run(case)
    lifted = {name: each.double() for name, each in case.state.items()}
    expected = reference(case._replace(state=lifted, tokens=case.tokens.double(), gradients=case.gradients.double()))
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, again, there in zip(first, second, expected, strict=True):
        assert torch.equal(mine.mixed, again.mixed) and torch.equal(mine.dnormed, again.dnormed)
        assert all(torch.equal(mine.gradients[name], again.gradients[name]) for name in mine.gradients)
        assert relative_error(mine.mixed, there.mixed) < bound
        assert relative_error(mine.dnormed, there.dnormed) < bound
    for name in ("gate_up", "down"):
        whole = torch.cat([mine.gradients[name] for mine in first])
        assert whole.dtype == torch.float32 and relative_error(whole, expected[0].gradients[name]) < bound


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_the_bias_after_a_step_does_not_depend_on_how_the_step_is_cut(ranks: Ranks, cut: int) -> None:
    whole = case_of(SHAPE, 2, 12, torch.linspace(-0.1, 0.1, 8))
    load = torch.zeros(8, dtype=torch.int64)
    for tokens, gradients in zip(whole.tokens.chunk(cut, 1), whole.gradients.chunk(cut, 1), strict=True):
        for answer in ranks.run(whole._replace(tokens=tokens, gradients=gradients)):
            load += answer.load
    expected = torch.stack([answer.load for answer in reference(whole)]).sum(0)
    assert torch.equal(load, expected)
    assert torch.equal(moved_bias(whole.state["bias"], load, 1e-3), moved_bias(whole.state["bias"], expected, 1e-3))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_parts_of_the_width_make_the_whole_together(score) -> None:
    """What tensor parallelism cuts: results, gradients of tokens and of the router are sums over the parts."""
    whole = case_of(replace(SHAPE, intermediate_size=6, shared_intermediate_size=4, scoring_func=score), 1, 7)
    found = []
    for part in range(2):

        def half(gate_up: torch.Tensor, part: int = part) -> torch.Tensor:
            return torch.cat([each.chunk(2, -2)[part] for each in gate_up.chunk(2, -2)], -2).contiguous()

        state = {name: half(each) if "gate_up" in name else each for name, each in whole.state.items()}
        state |= {name: state[name].chunk(2, -1)[part].contiguous() for name in ("down", "shared_down")}
        found.append(run_rank(whole._replace(state=state, scale=whole.scale / 2), 0, 1, None))
    (expected,) = reference(whole)
    assert relative_error(found[0].mixed + found[1].mixed, expected.mixed) < 1e-10
    assert relative_error(found[0].dnormed + found[1].dnormed, expected.dnormed) < 1e-10
    router = sum((answer.gradients["router"] for answer in found), torch.zeros(()))
    assert relative_error(router, expected.gradients["router"]) < 1e-10
    down = torch.cat([answer.gradients["down"] for answer in found], -1)
    assert relative_error(down, expected.gradients["down"]) < 1e-10
