"""RECOMPUTE, OFFLOAD and RELOAD: the same bits as without, in the memory that the plan estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from exactness import assert_equals_one_process
from fleet import BadGradient, Fleet
from plans import SHALLOW, plan_of

from pentad.orchestrator.activations.activation_peaks import activation_peaks, activations_of
from pentad.orchestrator.activations.offloaded_tensors import cuts_of, slots_of
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.passes.offload_arena import Arena
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.lanes.streams import HostStreams
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime.activation_offload import ActivationOffload

MODES = ("none", "selective", "attention", "full")
# (schedule, pp) -> resident microbatches, where that is fewer than the schedule keeps
RESIDENT = {("1f1b", 4): 2.0, ("zb-h2", 2): 2.0, ("zb-h2", 4): 3.0, ("dualpipe", 4): 3.0, ("seq-1f1b", 4): 1.5}
SCHEDULES = [("1f1b", 5, None), ("zb-h2", 5, None), ("dualpipe", 8, None), ("seq-1f1b", 3, 2)]  # microbatches, slices
ALWAYS: list[Any] = [("dualpipe", 2, "selective", None), ("seq-1f1b", 2, "full", None)]
ALWAYS += [("1f1b", 4, "none", 2.0), ("zb-h2", 2, "attention", None)]


def cases() -> list[Any]:
    """(schedule, pp, microbatches, slices, recompute, max_resident)."""
    found = []
    for name, m, slices in SCHEDULES:
        for pp in (1, 2, 4):
            if name == "dualpipe" and pp == 1:
                continue
            resident = [("none", RESIDENT[name, pp])] if (name, pp) in RESIDENT else []
            for mode, max_resident in (("full", None), ("attention", None), ("selective", None), *resident):
                marks = [] if (name, pp, mode, max_resident) in ALWAYS else [pytest.mark.slow]
                found.append(pytest.param(name, pp, m, slices, mode, max_resident, marks=marks))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "pp", "m", "slices", "recompute", "max_resident"), cases())
def test_saving_memory_changes_no_bit(fleet, corpus, name, pp, m, slices, recompute, max_resident):
    given: dict[str, Any] = {"slices": slices, "model": SHALLOW}
    plan = plan_of(name, 1, pp, m, corpus, recompute=recompute, max_resident=max_resident, **given)
    ops = {part.op for stream in plan.program.streams for part in instructions_of(stream)}
    assert ops > ({Op.OFFLOAD, Op.RELOAD} if max_resident else {Op.RECOMPUTE})
    assert_equals_one_process(fleet, plan)
    expected = fleet.run(plan_of(name, 1, pp, m, corpus, **given), [(0, 3)])
    for one, other in zip(fleet.run(plan, [(0, 1), (1, 2)]), expected, strict=True):
        assert same_bits(one.state, other.state)
        assert all(same_bits(*pair) for pair in zip(one.gradients, other.gradients, strict=True))
        assert [r.losses for r in one.results] == [r.losses for r in other.results]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "max_resident"), [("full", None), ("attention", None), ("selective", None), ("none", 3.0)]
)
def test_a_rollback_discards_offloaded_activations(fleet: Fleet, corpus: str, recompute, max_resident) -> None:
    """A non-finite gradient and clipping make forwards run again."""
    runs = []
    for options in ({"recompute": recompute, "max_resident": max_resident}, {}):
        plan = plan_of("1f1b", 1, 4, 8, corpus, "float32", clip=0.01, post_validation=True, **options)
        runs.append(fleet.run(plan, [(0, 4)], bad_gradient=BadGradient(1, 1, float("nan"))))
    for one, other in zip(*runs, strict=True):
        assert same_bits(one.state, other.state)
        assert [r.skipped for r in one.results] == [False, True, False, False]


def make_stage(plan: Plan, index: int = 0) -> Stage:
    parameters = {ParamShard(index): create_parameters(plan, ParamShard(index), torch.device("cpu"))}
    return Stage(plan, index, make_param_buffers(plan, 0, index, parameters))


def storages(nested: object) -> Iterator[torch.UntypedStorage]:
    """Storages of all float tensors, including those that autograd graphs refer to."""
    if isinstance(nested, torch.Tensor):
        if nested.is_floating_point():
            yield nested.untyped_storage()
        if nested.grad_fn is not None:
            yield nested.grad_fn._saved_logsumexp.untyped_storage()  # type: ignore[attr-defined]
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from storages(each)


def saved_bytes(stage: Stage, slots: list[torch.Tensor | None]) -> int:
    """The bytes that a stage keeps, transfer slots excluded."""
    excluded = {slot.untyped_storage().data_ptr() for slot in slots if slot is not None}
    kv_buffers = [cache.buffer for caches in stage.kv_caches.values() for cache in caches]
    found = {each.data_ptr(): each.nbytes() for each in storages([*stage.saved.values(), kv_buffers])}
    return sum(size for address, size in found.items() if address not in excluded)


def run_forward(stage: Stage, plan: Plan, index: int) -> torch.Tensor | None:
    """F of one slice; returns what it received."""
    tokens = torch.arange(plan.slice_tokens) + index
    received = None if stage.first else torch.randn(plan.slice_tokens, plan.model.hidden, dtype=torch.float64)
    inputs = StageInputs(received, tokens if stage.first else None, tokens if stage.last else None)
    run_to_completion(stage.forward(index, inputs))
    return received


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("name", "slices"), [("gpipe", None), ("seq-1f1b", 4)])
def test_a_stage_saves_the_estimated_bytes(corpus: str, name: str, slices: int | None, index: int) -> None:
    sizes = []
    for mode in MODES:
        plan = plan_of(name, 1, 3, 1, corpus, slices=slices, recompute=mode)
        stage, num_slices = make_stage(plan, index), plan.program.total_slices
        slots = [run_forward(stage, plan, slice_index) for slice_index in range(num_slices)]
        estimate = activations_of(plan, index)
        received = estimate.input if index else 0
        full = estimate.saved - received
        per_slice = estimate.kept(mode) - received
        sizes.append(saved_bytes(stage, slots))
        assert sizes[-1] == pytest.approx(num_slices * per_slice + estimate.kv_cache, rel=0.02)
        if mode != "none":
            stage.recompute(num_slices - 1)
            expected = full + (num_slices - 1) * per_slice + estimate.kv_cache
            assert saved_bytes(stage, slots) == pytest.approx(expected, rel=0.02)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize(("name", "slices"), [("gpipe", None), ("seq-1f1b", 4)])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_offloading_frees_the_device_and_reloading_restores_all_bits(corpus, name, slices, index, fraction) -> None:
    plan = plan_of(name, 1, 3, 1, corpus, slices=slices)
    plan = replace(plan, offload=(fraction,) * plan.program.stages)
    stage, estimate, (moved, rest) = make_stage(plan, index), activations_of(plan, index), slots_of(plan)[index]
    slots = [run_forward(stage, plan, slice_index) for slice_index in range(plan.program.total_slices)]
    offsets = {(index, key): (key * moved, key * rest) for key in stage.saved}
    layout = Arena(offsets, (len(offsets) * moved, len(offsets) * rest), (0, 0))
    activations = ActivationOffload([layout], slots_of(plan), plan.offload, HostStreams(), torch.device("cpu"))
    activations.reserve()
    before = saved_bytes(stage, slots)
    bits = [each.clone() for each in saved_tensors(stage)]
    offloadable = {key: stage.offloadable(key) for key in stage.saved}
    for key, found in offloadable.items():
        activations.offload((index, key), found)
        activations.release([Key(Op.OFFLOAD, index, key)])
    copies = [each for found in activations.offloaded.values() for each in found]
    assert sum(each.host.nbytes for each in copies) == len(slots) * moved
    assert sum(each.rest.nbytes for each in copies if each.rest is not None) == len(slots) * rest
    received = estimate.input if index else 0
    assert fraction < 1 or moved == estimate.saved - estimate.not_offloadable - received
    assert saved_bytes(stage, slots) == before - len(slots) * (moved + rest)
    assert all(slot is None or slot.untyped_storage().nbytes() for slot in slots)
    for key in reversed(offloadable):
        activations.reload((index, key))
        activations.release([Key(Op.RELOAD, index, key)])
    assert saved_bytes(stage, slots) == before
    assert not activations.offloaded
    assert all(torch.equal(*pair) for pair in zip(saved_tensors(stage), bits, strict=True))


def saved_tensors(stage: Stage) -> list[torch.Tensor]:
    """The residual stream and its norm statistics, of all layers."""
    layers = [layer for saved in stage.saved.values() for layer in saved.layers]
    sublayers = [sublayer for layer in layers for sublayer in (layer.attention, layer.mlp)]
    return [each for sublayer in sublayers for each in (sublayer.stream, sublayer.rstd)]


@pytest.mark.parametrize("mode", MODES[1:])
def test_recomputation_does_not_count_losses_again(corpus: str, mode: str) -> None:
    plain, stage = (make_stage(plan_of("gpipe", 1, 1, 1, corpus, recompute=each)) for each in ("none", mode))
    for each in (plain, stage):
        run_forward(each, plan_of("gpipe", 1, 1, 1, corpus), 0)
    before = stage.loss_sums.clone()
    assert torch.equal(before, plain.loss_sums)
    stage.recompute(0)
    assert torch.equal(stage.loss_sums, before)


@pytest.mark.parametrize(("name", "slices"), [("gpipe", None), ("seq-1f1b", 4)])
@pytest.mark.parametrize("mode", MODES[1:])
def test_b_and_then_w_of_a_recomputed_stage_give_the_same_gradients(
    corpus: str, mode: str, name: str, slices: int | None
) -> None:
    gradients = []
    for each in ("none", mode):
        plan = plan_of(name, 1, 1, 1, corpus, slices=slices, recompute=each)
        stage, indices = make_stage(plan), range(plan.program.total_slices)
        for index in indices:
            run_forward(stage, plan, index)
        for index in reversed(indices):
            if each != "none":
                stage.recompute(index)
            run_to_completion(stage.backward_input(index, None))
        for index in indices:
            stage.backward_weight(index)
        parameters = stage.param_buffers[0].parameters
        gradients.append(parameters.views(parameters.gradient))
    assert same_bits(*gradients)
    assert all(each.any() for each in gradients[0].values())


def test_the_peak_falls_with_what_is_saved(corpus: str) -> None:
    plans = [plan_of("gpipe", 1, 4, 8, corpus, recompute=mode) for mode in MODES]
    for rank in range(4):
        sizes = [activation_peaks(plan, rank)[0] for plan in plans]
        assert sizes[0] > sizes[1] > sizes[2] > sizes[3]
    plain, offloading = plans[0], plan_of("gpipe", 1, 4, 8, corpus, max_resident=3.0)
    estimate = activations_of(offloading, 1)
    moved = cuts_of(offloading)[1].bytes
    assert moved == estimate.saved - estimate.not_offloadable - estimate.input
    count = sum(part.op is Op.OFFLOAD for part in instructions_of(offloading.program.streams[1]))
    device, host = activation_peaks(offloading, 1)
    assert 0 < host <= count * moved
    assert device <= activation_peaks(plain, 1)[0] - (8 - 3) * moved + estimate.deferred
    assert activation_peaks(replace(offloading, recompute=()), 1) == (device, host)
