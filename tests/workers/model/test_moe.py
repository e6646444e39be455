"""The MoE sublayer on one rank and on several, in every dispatch mode, against one process with autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from closeness import relative_error
from expert_ranks import Ranks, case_of, check, reference, run_rank

from pentad.schedules.spec.model import Experts
from pentad.workers.params.router_bias import updated_bias

SHAPE = Experts(num_experts=8, top_k=2, intermediate_size=5, shared_intermediate_size=3, aux_loss_coef=0.3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.stop()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("size", "mode"), [(1, "all_to_all"), *product((2, 4), ("all_to_all", "all_gather", "slots"))])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_results_and_gradients_equal_one_process(ranks: Ranks, size: int, mode, top_k: int, scoring) -> None:
    shape = replace(SHAPE, top_k=top_k, scoring_func=scoring, routed_scaling_factor=1.5, norm_topk_prob=top_k != 2)
    shape = replace(shape, router_z_loss_coef=0.2 * (top_k - 1))
    case = case_of(shape, size, 7, mode=mode, recompute=top_k == 3)
    check(case, ranks.run(case))


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "slots"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_rank_whose_experts_get_no_tokens(ranks: Ranks, mode, tokens: int) -> None:
    bias = torch.tensor([0.0, 0, -9, -9, 0, 0, 0, 0])
    case = case_of(SHAPE, 4, tokens, bias, mode=mode)
    answers = ranks.run(case)
    check(case, answers)
    assert not answers[1].gradients["gate_up"].any() and not answers[1].gradients["down"].any()
    assert mode != "all_to_all" or answers[1].received == 0


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather"])
def test_ranks_with_unequal_numbers_of_tokens(ranks: Ranks, mode) -> None:
    shape = replace(SHAPE, aux_loss_coef=0.0)
    case = case_of(shape, 4, 7, mode=mode, held=[3, 1, 7, 5])
    answers = ranks.run(case)
    check(case, answers)
    assert mode == "all_to_all" or [answer.received for answer in answers] == [16] * 4
    for first, again in zip(answers, ranks.run(case), strict=True):
        assert torch.equal(first.y, again.y) and torch.equal(first.dx, again.dx)


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "slots"])
def test_all_tokens_to_one_expert(ranks: Ranks, mode) -> None:
    bias = torch.zeros(8)
    bias[5] = 9
    case = case_of(replace(SHAPE, top_k=1), 4, 5, bias, mode=mode)
    answers = ranks.run(case)
    check(case, answers)
    assert torch.stack([answer.load for answer in answers]).sum(0).tolist() == [0, 0, 0, 0, 0, 20, 0, 0]


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "slots"])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_group_limited_routing_without_a_shared_expert(ranks: Ranks, mode, groups: int) -> None:
    shape = replace(
        SHAPE,
        top_k=3,
        num_groups=groups,
        topk_groups=max(2, groups // 2),
        scoring_func="sigmoid",
        shared_intermediate_size=0,
    )
    case = case_of(shape, 4, 7, torch.randn(8) / 8, mode=mode)
    check(case, ranks.run(case))


def test_a_token_is_sent_once_to_each_rank(ranks: Ranks) -> None:
    all_experts = replace(SHAPE, top_k=8)  # four experts on each of two ranks
    assert [answer.received for answer in ranks.run(case_of(all_experts, 2, 7))] == [14, 14]
    one_rank = replace(SHAPE, top_k=2, num_groups=4, topk_groups=1)  # both experts of a token are on one rank
    assert sum(answer.received for answer in ranks.run(case_of(one_rank, 4, 7))) == 28


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_close_and_reproducible(ranks: Ranks, mode, dtype: torch.dtype) -> None:
    wide = case_of(SHAPE, 4, 9, mode=mode)
    bias = {"bias": torch.tensor([0.0, 3, 0, 3, 0, 0, 0, 0])}  # rounding must not change the choice of experts
    state = {name: each.to(dtype) for name, each in wide.state.items()} | bias
    case = wide._replace(state=state, tokens=wide.tokens.to(dtype), gradients=wide.gradients.to(dtype))
    first, second = ranks.run(case), ranks.run(case)
    exact = {name: each.double() for name, each in case.state.items()}
    expected = reference(case._replace(state=exact, tokens=case.tokens.double(), gradients=case.gradients.double()))
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, again, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(mine.y, again.y) and torch.equal(mine.dx, again.dx)
        assert all(torch.equal(mine.gradients[name], again.gradients[name]) for name in mine.gradients)
        assert relative_error(mine.y, theirs.y) < bound
        assert relative_error(mine.dx, theirs.dx) < bound
    for name in ("gate_up", "down"):
        full = torch.cat([mine.gradients[name] for mine in first])
        assert full.dtype == torch.float32 and relative_error(full, expected[0].gradients[name]) < bound


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_the_bias_update_does_not_depend_on_the_number_of_microbatches(ranks: Ranks, chunks: int) -> None:
    case = case_of(SHAPE, 2, 12, torch.linspace(-0.1, 0.1, 8))
    load = torch.zeros(8, dtype=torch.int64)
    for tokens, gradients in zip(case.tokens.chunk(chunks, 1), case.gradients.chunk(chunks, 1), strict=True):
        for answer in ranks.run(case._replace(tokens=tokens, gradients=gradients)):
            load += answer.load
    expected = torch.stack([answer.load for answer in reference(case)]).sum(0)
    assert torch.equal(load, expected)
    bias = case.state["bias"]
    assert torch.equal(updated_bias(bias, load, 1e-3), updated_bias(bias, expected, 1e-3))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_results_of_a_split_intermediate_size_are_partial_sums(scoring) -> None:
    """As under tensor parallelism: results and gradients of tokens and router are sums over the parts."""
    case = case_of(replace(SHAPE, intermediate_size=6, shared_intermediate_size=4, scoring_func=scoring), 1, 7)
    answers = []
    for part in range(2):

        def half(gate_up: torch.Tensor, part: int = part) -> torch.Tensor:
            return torch.cat([each.chunk(2, -2)[part] for each in gate_up.chunk(2, -2)], -2).contiguous()

        state = {name: half(each) if "gate_up" in name else each for name, each in case.state.items()}
        state |= {name: state[name].chunk(2, -1)[part].contiguous() for name in ("down", "shared_down")}
        answers.append(run_rank(case._replace(state=state, scale=case.scale / 2), 0, 1, None))
    (expected,) = reference(case)
    assert relative_error(answers[0].y + answers[1].y, expected.y) < 1e-10
    assert relative_error(answers[0].dx + answers[1].dx, expected.dx) < 1e-10
    router = sum((answer.gradients["router"] for answer in answers), torch.zeros(()))
    assert relative_error(router, expected.gradients["router"]) < 1e-10
    down = torch.cat([answer.gradients["down"] for answer in answers], -1)
    assert relative_error(down, expected.gradients["down"]) < 1e-10
