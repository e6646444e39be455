"""Pairs of a forward and a backward: by turns, and yet as one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from axes_cases import HEADS, MIXED, with_tied_copies
from fleet import assemble, losses_of
from late import Event, Log, fake_communication, stage_of
from overlap_cases import MESHES, without_overlap
from plans import is_close, plan_of, reference

from pentad.schedules.spec.model import MLA
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import Task, interleave, on_yield, run_to_completion
from pentad.workers.parallel.expert_parallel import DispatchMode

LATENT = replace(MIXED, mla=MLA(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4))
SLOW = pytest.mark.slow
CASES = [
    ({"ep": 2}, "all_to_all", MIXED, "ring"),
    ({"ep": 2}, "all_gather", MIXED, "ring"),
    ({"tp": 2}, "all_to_all", HEADS, "ring"),
    ({"tp": 2}, "all_to_all", LATENT, "ring"),
    ({"cp": 2}, "all_to_all", HEADS, "ring"),
    ({"cp": 2}, "all_to_all", HEADS, "all_gather"),
    ({"cp": 2}, "all_to_all", MIXED, "ulysses"),
]


@pytest.mark.parametrize(
    "sizes", [MESHES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in MESHES[1:])], ids=str
)
@pytest.mark.parametrize("name", ["dualpipe", pytest.param("dualpipev", marks=SLOW)])
def test_pairs_have_the_bits_of_one_after_the_other_and_give_what_one_process_does(fleet, corpus, name, sizes) -> None:
    plan = plan_of(name, 1, 2, 4, corpus, model=MIXED if "ep" in sizes else HEADS, **sizes)
    losses, gradients, _, weights = reference(plan)
    both, each = (fleet.run(run, [(0, 1)]) for run in (plan, without_overlap(plan)))
    found = assemble([outcome.gradients[0] for outcome in both], with_tied_copies(weights))
    for key, gradient in found.items():
        assert is_close(gradient, gradients[0][key]), key
    total = sum(losses_of(both).values())
    assert total / plan.batch.tokens == pytest.approx(losses[0], rel=1e-10)
    for mine, other in zip(both, each, strict=True):
        assert mine.gradients[0].keys() == other.gradients[0].keys()
        assert all(torch.equal(value, other.gradients[0][key]) for key, value in mine.gradients[0].items())
        assert all(torch.equal(value, other.state[key]) for key, value in mine.state.items())
        assert mine.results[0].losses == other.results[0].losses


def forward(stage: Stage, piece: int, received: torch.Tensor) -> Task[None]:
    yield from stage.forward(piece, received, None, None)


def backward(stage: Stage, piece: int, dy: torch.Tensor, whole: bool) -> Task[None]:
    turns = stage.backward_input(piece, dy)
    yield from on_yield(turns, partial(stage.backward_weight, piece)) if whole else turns


def pair(plan: Plan, way: DispatchMode, whole: bool, run: Callable[..., None]) -> tuple[list[Event], torch.Tensor]:
    """What happens while `run` has a backward and the forward of the next microbatch, and the gradients of both."""
    log = Log()
    streams = torch.randn(3, plan.slice_tokens // plan.mesh.cp // plan.mesh.tp, plan.model.hidden, dtype=torch.float64)
    with fake_communication(log):
        stage = stage_of(plan, way)
        stage.begin(0)
        run_to_completion(forward(stage, 0, streams[0]))
        before = len(log.events)
        run(log.of("B", backward(stage, 0, streams[1], whole)), log.of("F", forward(stage, 1, streams[2])))
        events = log.events[before:]
        if not whole:
            stage.backward_weight(0)
        run_to_completion(backward(stage, 1, streams[1], True))
    return events, torch.cat([bank.parameters.gradient.flatten() for bank in stage.param_buffers])


def in_order(*works: Task[None]) -> None:
    for work in works:
        run_to_completion(work)


@pytest.mark.parametrize("whole", [False, True], ids=["B", "BW"])
@pytest.mark.parametrize(("sizes", "way", "model", "context"), CASES, ids=str)
def test_while_one_of_a_pair_has_operations_under_way_the_other_computes(
    corpus: str, sizes, way, model, context, whole: bool
) -> None:
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=replace(model, layers=6), context=context, **sizes)
    torch.manual_seed(1)
    events, found = pair(plan, way, whole, interleave)
    torch.manual_seed(1)
    lonely, expected = pair(plan, way, whole, in_order)
    assert torch.isfinite(found).all() and torch.equal(found, expected)
    for who in "FB":
        assert [e.what for e in events if e.who == who] == [e.what for e in lonely if e.who == who]
    last = {who: max(i for i, event in enumerate(events) if event.who == who) for who in "FB"}
    # a ring's operations have computations of their own beside them too
    others = {"F": "FB", "B": "FB"} if context == "ring" and "cp" in sizes else {"F": "B", "B": "F"}
    waits = [at for at, event in enumerate(events[: min(last.values())]) if event.what == "waits"]
    assert waits
    for at in waits:
        who, _, number = events[at]
        meanwhile = events[events.index(Event(who, "starts", number)) : at]
        assert any(e.what == "computes" and e.who in others[who] for e in meanwhile), events[: at + 1]


def test_when_one_of_a_pair_fails_the_other_ends() -> None:
    ended = []

    def long(name: str, turns: int) -> Task[None]:
        try:
            for _ in range(turns):
                yield
            raise ValueError(name)
        finally:
            ended.append(name)

    with pytest.raises(ValueError, match="short"):
        interleave(long("long", 5), long("short", 2))
    assert ended == ["short", "long"]
