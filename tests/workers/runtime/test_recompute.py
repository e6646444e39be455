"""RECOMPUTE, OFFLOAD and RELOAD: the same bits as without, in the memory that the estimate says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from determinism_cases import same_bits
from exactness_cases import assert_equals_one_process
from fleet import Fleet, BadGradient
from plans import plan_of

from pentad.orchestrator.planning.activation_peaks import activation_peaks, activations_of
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import Parameters, create_parameters
from pentad.workers.runtime.activation_offload import ActivationOffload
from pentad.workers.runtime.streams import HostStreams

CPU = torch.device("cpu")
MODES = ("none", "selective", "full")
# schedule, ranks -> activations that stay, where any go
KEEPS = {("1f1b", 4): 2.0, ("zb-h2", 2): 2.0, ("zb-h2", 4): 3.0, ("dualpipe", 4): 3.0, ("seq-1f1b", 4): 1.5}
# schedule, microbatches, slices
SCHEDULES = [("1f1b", 5, None), ("zb-h2", 5, None), ("dualpipe", 8, None), ("seq-1f1b", 3, 2)]


def runs() -> list[Any]:
    """(schedule, pp, microbatches, slices, mode, keep); the first ones always, the others where time does not count."""
    always: list[Any] = [("zb-h2", 2, "full", None), ("dualpipe", 2, "selective", None)]
    always += [("seq-1f1b", 4, "full", None), ("1f1b", 4, "none", 2.0)]
    found = []
    for name, m, slices in SCHEDULES:
        for pp in (1, 2, 4):
            if name == "dualpipe" and pp == 1:
                continue
            keeps = [("none", KEEPS[name, pp])] if (name, pp) in KEEPS else []
            for mode, keep in (("full", None), ("selective", None), *keeps):
                marks = [] if (name, pp, mode, keep) in always else [pytest.mark.slow]
                found.append(pytest.param(name, pp, m, slices, mode, keep, marks=marks))
    return found


@pytest.mark.parametrize(("name", "pp", "m", "slices", "mode", "keep"), runs())
def test_what_is_kept_elsewhere_or_made_again_changes_no_bit(fleet, corpus, name, pp, m, slices, mode, keep):
    plan = plan_of(name, 1, pp, m, corpus, slices=slices, recompute=mode, keep=keep)
    ops = {part.op for stream in plan.program.streams for part in instructions_of(stream)}
    assert ops > ({Op.OFFLOAD, Op.RELOAD} if keep else {Op.RECOMPUTE})
    assert_equals_one_process(fleet, plan)
    without = fleet.run(plan_of(name, 1, pp, m, corpus, slices=slices), [(0, 3)])
    assert_same(fleet.run(plan, [(0, 1), (1, 2)]), without)


def assert_same(found: list, expected: list) -> None:
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one.state, other.state)
        assert all(same_bits(*pair) for pair in zip(one.gradients, other.gradients, strict=True))
        assert [r.losses for r in one.results] == [r.losses for r in other.results]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "keep"), [("full", None), ("selective", None), ("none", 3.0)])
def test_a_step_that_is_begun_once_more_forgets_what_is_on_the_host(fleet: Fleet, corpus: str, mode, keep) -> None:
    """A gradient that is not finite, and clipping at times: the forwards ahead run again."""
    ends = []
    for less in ({"recompute": mode, "keep": keep}, {}):
        plan = plan_of("1f1b", 1, 4, 8, corpus, "float32", clip=0.01, post_validation=True, **less)
        ends.append(fleet.run(plan, [(0, 4)], poison=BadGradient(1, 1, float("nan"))))
    for one, other in zip(*ends, strict=True):
        assert same_bits(one.state, other.state)
        assert [r.skipped for r in one.results] == [False, True, False, False]


def made(plan: Plan, index: int = 0) -> tuple[Stage, Parameters]:
    parameters = create_parameters(plan, ParamShard(index), CPU)
    return Stage(plan, index, make_param_buffers(plan, 0, index, {ParamShard(index): parameters})), parameters


def storages(nested: object) -> Iterator[torch.UntypedStorage]:
    """What can be reached, of autograd's graphs as well; tokens belong to the feed."""
    if isinstance(nested, torch.Tensor):
        if nested.is_floating_point():
            yield nested.untyped_storage()
        if nested.grad_fn is not None:
            yield nested.grad_fn._saved_logsumexp.untyped_storage()  # type: ignore[attr-defined]
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from storages(each)


def held(stage: Stage, *besides: torch.Tensor | None) -> int:
    """Bytes that a stage keeps, without those of `besides`."""
    out = {each.untyped_storage().data_ptr() for each in besides if each is not None}
    rooms = [past.buffer for pasts in stage.kv_caches.values() for past in pasts]
    found = {each.data_ptr(): each.nbytes() for each in storages([*stage.saved.values(), rooms])}
    return sum(size for address, size in found.items() if address not in out)


def through(stage: Stage, plan: Plan, piece: int) -> torch.Tensor | None:
    """F of one piece; returns what lies in the slot of a transfer."""
    tokens = torch.arange(plan.slice_tokens) + piece
    received = None if stage.first else torch.randn(plan.slice_tokens, plan.model.hidden, dtype=torch.float64)
    run_to_completion(stage.forward(piece, received, tokens if stage.first else None, tokens if stage.last else None))
    return received


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("name", "slices"), [("gpipe", None), ("seq-1f1b", 4)])
def test_what_a_stage_keeps_is_what_the_estimate_says(corpus: str, name: str, slices: int | None, index: int) -> None:
    sizes = []
    for mode in MODES:
        plan = plan_of(name, 1, 3, 1, corpus, slices=slices, recompute=mode)
        stage, _ = made(plan, index)
        slots = [through(stage, plan, piece) for piece in range(plan.program.total_slices)]
        of, pieces = activations_of(plan, index), plan.program.total_slices
        entry = of.input if index else 0
        said = {"none": of.saved - entry, "selective": (of.saved - of.recomputable) - entry, "full": 0}[mode]
        sizes.append(held(stage, *slots))
        assert sizes[-1] == pytest.approx(pieces * said + of.kv_cache, rel=0.02)
        if mode != "none":
            stage.recompute(pieces - 1)
            whole = of.saved - entry + (pieces - 1) * said + of.kv_cache
            assert held(stage, *slots) == pytest.approx(whole, rel=0.02)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(("name", "slices"), [("gpipe", None), ("seq-1f1b", 4)])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_is_on_the_host_is_on_the_device_no_more(corpus, name, slices, index) -> None:
    plan = plan_of(name, 1, 3, 1, corpus, slices=slices)
    stage, _ = made(plan, index)
    slots = [through(stage, plan, piece) for piece in range(plan.program.total_slices)]
    before, away, of = held(stage, *slots), ActivationOffload(HostStreams()), activations_of(plan, index)
    bits = [each.clone() for each in tensors(stage)]
    movable = {piece: stage.offloadable(piece) for piece in stage.saved}
    for piece, found in movable.items():
        away.send((index, piece), found)
        assert {each.nbytes() for each in found} == {0}
    on_host = sum(there.nbytes for pairs in away.held.values() for _, there in pairs)
    entry = of.input if index else 0
    assert on_host == pytest.approx(len(slots) * (of.saved - of.not_offloadable - entry), rel=0.02)
    assert held(stage, *slots) == pytest.approx(before - on_host)
    assert all(slot is None or slot.untyped_storage().nbytes() for slot in slots)
    for piece in reversed(movable):
        away.bring_back((index, piece))
    assert held(stage, *slots) == before
    assert not away.held
    assert all(torch.equal(*pair) for pair in zip(tensors(stage), bits, strict=True))
    addresses = {there.data_ptr() for found in away.spare.values() for there in found}
    for piece, found in movable.items():  # buffers are used again
        away.send((index, piece), found)
    assert {there.data_ptr() for pairs in away.held.values() for _, there in pairs} == addresses
    away.forget()
    assert not away.held


def tensors(stage: Stage) -> list[torch.Tensor]:
    return [each for kept in stage.saved.values() for roots in kept.layers for each in roots if torch.is_tensor(each)]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_loss_is_counted_once(corpus: str, mode: str) -> None:
    (plain, _), (stage, _) = (made(plan_of("gpipe", 1, 1, 1, corpus, recompute=each)) for each in ("none", mode))
    for each in (plain, stage):
        through(each, plan_of("gpipe", 1, 1, 1, corpus), 0)
    before = stage.loss_sums.clone()
    assert torch.equal(before, plain.loss_sums)
    stage.recompute(0)
    assert torch.equal(stage.loss_sums, before)


def test_the_peak_of_a_program_falls_with_what_is_kept(corpus: str) -> None:
    plans = [plan_of("gpipe", 1, 4, 8, corpus, recompute=mode) for mode in MODES]
    for rank in range(4):
        sizes = [activation_peaks(plan, rank)[0] for plan in plans]
        assert sizes[0] > sizes[1] > sizes[2]
    whole, kept = plans[0], plan_of("gpipe", 1, 4, 8, corpus, keep=3.0)
    of = activations_of(kept, 1)
    moved = of.saved - of.not_offloadable - of.input
    trips = [part for part in instructions_of(kept.program.streams[1]) if part.op is Op.OFFLOAD]
    assert 0 < activation_peaks(kept, 1)[1] <= len(trips) * moved
    assert activation_peaks(kept, 1)[0] <= activation_peaks(whole, 1)[0] - (8 - 3) * moved + of.deferred
    assert activation_peaks(replace(kept, recompute=()), 1) == activation_peaks(kept, 1)
