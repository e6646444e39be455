"""Overlapped pairs of a forward and a backward: interleaved, with the bits of running one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from bits import same_bits
from exactness import with_tied_copies
from fake_communication import Event, Log, fake_communication, stage_of
from fleet import assemble, losses_of
from plans import is_close, plan_of, reference, without_overlap
from small_models import HEADS, MOE

from pentad.schedules.ir.instruction import Overlap
from pentad.schedules.spec.model import MLA
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import Task, interleave, on_yield, run_to_completion
from pentad.workers.parallel.expert_parallel import DispatchMode

slow = pytest.mark.slow
MLA_MOE = replace(MOE, mla=MLA(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4))
CASES = [
    ({"ep": 2}, "all_to_all", MOE, "ring"),
    ({"ep": 2}, "all_gather", MOE, "ring"),
    ({"tp": 2}, "all_to_all", HEADS, "ring"),
    ({"tp": 2}, "all_to_all", MLA_MOE, "ring"),
    ({"cp": 2}, "all_to_all", HEADS, "ring"),
    ({"cp": 2}, "all_to_all", HEADS, "all_gather"),
    ({"cp": 2}, "all_to_all", MOE, "ulysses"),
]


@pytest.mark.parametrize("sizes", [{"ep": 2}, pytest.param({"tp": 2}, marks=slow), pytest.param({"cp": 2}, marks=slow)])
@pytest.mark.parametrize("name", ["dualpipe", pytest.param("dualpipev", marks=slow)])
def test_overlap_changes_no_bit_and_equals_one_process(fleet, corpus, name, sizes) -> None:
    model = replace(MOE if "ep" in sizes else HEADS, layers=4)
    plan = plan_of(name, 1, 2, 4, corpus, model=model, **sizes)
    losses, gradients, _, weights = reference(plan)
    overlapped, sequential = (fleet.run(each, [(0, 1)]) for each in (plan, without_overlap(plan)))
    found = assemble([outcome.gradients[0] for outcome in overlapped], with_tied_copies(weights))
    for key, gradient in found.items():
        assert is_close(gradient, gradients[0][key]), key
    total = sum(losses_of(overlapped).values())
    assert total / plan.batch.tokens == pytest.approx(losses[0], rel=1e-10)
    for one, other in zip(overlapped, sequential, strict=True):
        assert same_bits(one.gradients[0], other.gradients[0])
        assert same_bits(one.state, other.state)
        assert one.results[0].losses == other.results[0].losses


def test_the_times_of_a_pair_hold_no_wait(fleet, corpus) -> None:
    """Where layers do not communicate, the forward of a pair follows its backward."""
    plan, pairs = plan_of("dualpipev", 1, 2, 8, corpus), 0
    for outcome, stream in zip(fleet.run(plan, [(0, 1)]), plan.program.streams, strict=True):
        times = {span.name: (span.start, span.end) for span in outcome.results[0].spans}
        for action in stream:
            if isinstance(action, Overlap):
                (began, _), (start, end) = (times[str(part.key)] for part in action.parts)
                assert start < end <= began
                assert all(times[str(key)][1] <= start for key in action.waits)
                pairs += 1
    assert pairs


def forward(stage: Stage, microbatch: int, received: torch.Tensor) -> Task[None]:
    yield from stage.forward(microbatch, StageInputs(received))


def backward(stage: Stage, microbatch: int, dy: torch.Tensor, with_weights: bool) -> Task[None]:
    task = stage.backward_input(microbatch, dy)
    yield from on_yield(task, partial(stage.backward_weight, microbatch)) if with_weights else task


def run_pair(
    plan: Plan, mode: DispatchMode, with_weights: bool, run: Callable[..., None]
) -> tuple[list[Event], torch.Tensor]:
    """The events while `run` executes a backward and the forward of the next microbatch, and the gradients of both."""
    log = Log()
    activations = torch.randn(
        3, plan.slice_tokens // plan.mesh.cp // plan.mesh.tp, plan.model.hidden, dtype=torch.float64
    )
    with fake_communication(log):
        stage = stage_of(plan, mode)
        stage.begin(0, plan.batch.microbatches, plan.batch.tokens)
        run_to_completion(forward(stage, 0, activations[0]))
        before = len(log.events)
        tasks = backward(stage, 0, activations[1], with_weights), forward(stage, 1, activations[2])
        run(log.of("B", tasks[0]), log.of("F", tasks[1]))
        events = log.events[before:]
        if not with_weights:
            stage.backward_weight(0)
        run_to_completion(backward(stage, 1, activations[1], True))
    return events, torch.cat([buffers.parameters.gradient.flatten() for buffers in stage.param_buffers])


def run_sequentially(*tasks: Task[None]) -> None:
    for task in tasks:
        run_to_completion(task)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("with_weights", [False, True], ids=["B", "BW"])
@pytest.mark.parametrize(("sizes", "mode", "model", "method"), CASES)
def test_one_half_computes_while_the_other_communicates(corpus, sizes, mode, model, method, with_weights) -> None:
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=replace(model, layers=6), cp_method=method, **sizes)
    torch.manual_seed(1)
    events, found = run_pair(plan, mode, with_weights, interleave)
    torch.manual_seed(1)
    sequential, expected = run_pair(plan, mode, with_weights, run_sequentially)
    assert torch.isfinite(found).all() and torch.equal(found, expected)
    for name in "FB":
        assert [e.what for e in events if e.task == name] == [e.what for e in sequential if e.task == name]
    last = {name: max(i for i, event in enumerate(events) if event.task == name) for name in "FB"}
    # A ring's communication is also overlapped with computation of the same half.
    others = {"F": "FB", "B": "FB"} if method == "ring" and "cp" in sizes else {"F": "B", "B": "F"}
    waits = [at for at, event in enumerate(events[: min(last.values())]) if event.what == "waits"]
    assert waits
    for at in waits:
        name, _, operation = events[at]
        in_flight = events[events.index(Event(name, "starts", operation)) : at]
        assert any(e.what == "computes" and e.task in others[name] for e in in_flight), events[: at + 1]


def test_when_one_half_fails_the_other_is_closed() -> None:
    closed = []

    def task(name: str, yields: int) -> Task[None]:
        try:
            for _ in range(yields):
                yield
            raise ValueError(name)
        finally:
            closed.append(name)

    with pytest.raises(ValueError, match="short"):
        interleave(task("long", 5), task("short", 2))
    assert closed == ["short", "long"]
