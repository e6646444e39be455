"""What `pentad plan` advises if a run does not fit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from pentad.orchestrator.api.plans import Device, planned
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.memory import advice as advices
from pentad.orchestrator.memory.advice import changes, memory_advice
from pentad.orchestrator.memory.copy_slots import NCCL, most_copied
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.planning.estimate import costs_of, step_seconds
from pentad.orchestrator.planning.fit import device_memory, fit_of
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import Plan

SIZES = ["model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.ffn=4096", "model.layers=8", "mesh.pp=1"]
BATCH = ["schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=16", "batch.sequence_length=2048"]


def seconds(plan: Plan) -> float:
    return step_seconds(simulate(plan.program, costs_of(plan)))


def config_of(*words: str) -> RunConfig:
    """A configuration without CUDA graphs, which by default depend on the free memory."""
    return load(None, [*SIZES, *BATCH, "model.vocab=4096", "cluster.device=cuda", "cluster.cuda_graphs=false", *words])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.9, pytest.param(0.7, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_advised_change_fits_and_costs_least_of_those_with_less(dp: int, share: float) -> None:
    """The sentence is a promise: with its overrides the plan fits, and no faster change does."""
    config = config_of(f"mesh.dp={dp}")
    plan = make_plan(config, "cuda")
    device = device_memory("cuda", share * fit_of(plan, device_memory("cuda", 1000)).needed / 2**30)
    advice = memory_advice(config, plan, fit_of(plan, device))
    words = re.search(r"^it fits with ([^:]*): .*, at assumed rates$", advice)
    assert words is not None, advice
    changed = make_plan(load(config, words[1].split()), "cuda")
    assert fit_of(changed, device).ok and not fit_of(plan, device).ok
    for each in changes(config):
        with suppress(PentadError):
            other = make_plan(load(config, each), "cuda")
            assert seconds(other) >= seconds(changed) or not fit_of(other, device).ok


def test_shards_in_groups_may_be_told_to_be_cut_over_all_ranks() -> None:
    """If weights, gradients and optimizer state are already sharded over groups."""
    config = config_of("mesh.dp=4", "zero.stage=3", "zero.shards=2", "memory.recompute=full", "schedule.microbatches=4")
    plan, smaller = (make_plan(each, "cuda") for each in (config, with_words(config, ("zero.shards=null",))))
    needed = [fit_of(each, device_memory("cuda", 1000)).needed for each in (plan, smaller)]
    device = device_memory("cuda", sum(needed) / 2 / 2**30)
    assert not fit_of(plan, device).ok and fit_of(smaller, device).ok
    assert memory_advice(config, plan, fit_of(plan, device)).startswith("it fits with zero.shards=null: ")


@pytest.mark.slow
def test_a_run_that_no_change_makes_fit_is_told_the_least_it_needs() -> None:
    config = config_of("mesh.dp=2")
    plan = make_plan(config, "cuda")
    advice = memory_advice(config, plan, fit_of(plan, device_memory("cuda", 0.1)))
    assert re.search(r"^no ZeRO stage, .* makes it fit: [0-9.]+ GiB is the least$", advice)


GPIPE = "mesh.dp=2", "schedule.name=gpipe", "schedule.microbatches=8"
LARGE = "mesh.pp=64", "model.layers=1500", "model.hidden=64", "model.ffn=128"


@pytest.mark.parametrize("words", [("mesh.pp=2",), pytest.param(LARGE, marks=pytest.mark.slow)])
def test_advice_for_a_large_program_takes_seconds_and_says_that_it_tried_little(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words != LARGE:
        monkeypatch.setattr(advices, "MOST_PLANNED", 8)
    config = config_of(*GPIPE, *words)
    plan, layers = make_plan(config, "cuda"), f"{config.model.layers:,}"
    needed = fit_of(plan, device_memory("cuda", 1000)).needed
    for share, sentence in (
        (0.9, r"it fits with ([a-z_.]+=\S+ ?)+: [0-9.]+ [GM]iB, and a step takes .*"),
        (0.1, r"it does not fit with zero\.stage=3 memory\.recompute=full .* either: [0-9.]+ [GM]iB is the least"),
    ):
        fit, begin = fit_of(plan, device_memory("cuda", share * needed / 2**30)), time.process_time()
        advice = memory_advice(config, plan, fit)
        assert time.process_time() - begin < 20
        few = f"{layers} layers x 8 microbatches are too many to try more than a few changes"
        assert re.fullmatch(rf"{sentence}; {few}", advice), advice
        if (advised := re.search("^it fits with ([^:]*):", advice)) is not None:
            assert fit_of(make_plan(load(config, advised[1].split()), "cuda"), fit.device).ok


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_large_program_that_saves_all_it_can_is_told_so(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advices, "MOST_PLANNED", 8)
    words = "zero.stage=3", "memory.recompute=full", "memory.offload_fraction=1.0", "memory.optimizer=host"
    config = config_of(*GPIPE, "mesh.pp=2", *words[: 2 if device == "cpu" else 4])
    plan = make_plan(config, device)
    advice = memory_advice(config, plan, fit_of(plan, device_memory(device, 1e-5)))
    assert re.match(r"all that saves memory is in use: [0-9.]+ [GMK]iB is the least; .* are too many", advice), advice


def test_host_memory_is_advised_where_nothing_else_suffices() -> None:
    words = "memory.recompute=full", "schedule.microbatches=16"
    config = config_of(*words)
    plan, on_host = (make_plan(each, "cuda") for each in (config, config_of(*words, "memory.optimizer=host")))
    needed, least = (fit_of(each, device_memory("cuda", 1000)).needed for each in (plan, on_host))
    device = device_memory("cuda", (needed + least) / 2 / 2**30)
    advice = memory_advice(config, plan, fit_of(plan, device))
    sentence = r"it fits with memory\.optimizer=host: [0-9.]+ GiB, [0-9.]+ [GM]iB a rank in host memory, and a step "
    assert re.match(sentence, advice), advice
    small = config.model_copy(update={"memory": config.memory.model_copy(update={"host_gib": 0.01})})
    assert memory_advice(small, plan, fit_of(plan, device)).startswith("no ZeRO stage, recomputation, host memory or ")


def test_no_change_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If host memory has to help, each kind of change is considered several times."""
    words = "memory.recompute=full", "schedule.microbatches=16"
    plan, on_host = (make_plan(config_of(*words, *more), "cuda") for more in ((), ("memory.optimizer=host",)))
    needed, least = (fit_of(each, device_memory("cuda", 1000)).needed for each in (plan, on_host))
    room = device_memory("cuda", (needed + least) / 2 / 2**30)
    asked, fitting = list[RunConfig](), advices._fitting

    def counted(changed: RunConfig, *rest: Any) -> Iterator[tuple[float, tuple[str, ...]]]:
        asked.append(changed)
        return fitting(changed, *rest)

    monkeypatch.setattr(advices, "_fitting", counted)
    assert " in host memory" in memory_advice(config_of(*words), plan, fit_of(plan, room))
    assert len(asked) > 4 and all(asked.count(each) == 1 for each in asked)


def test_a_plan_says_so_only_where_it_does_not_fit() -> None:
    config = config_of("mesh.dp=2", "model.layers=2")
    assert planned(config, "cuda", 1000).remedy == "" and "remedy" not in planned(config, "cuda", 1000).facts()["fits"]
    refused = planned(config, "cuda", 1)
    assert refused.facts()["fits"]["remedy"] == refused.remedy != ""


# By axis: meshes on which four ranks of a host exchange rows, in messages that are large for so small a model.
COPIED = {
    "cp": ("mesh.cp=4", "batch.sequence_length=16384", "batch.global_batch_size=2", "mesh.cp_method=all_gather"),
    "ep": (
        *("mesh.ep=4", "model.family=mixtral", "model.experts.num_experts=4", "model.experts.top_k=2"),
        "model.experts.intermediate_size=1024",
    ),
    "tp": ("mesh.tp=4",),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", COPIED)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_nccl_is_advised_only_where_the_slots_of_peer_copies_are_too_much(axis: str, share: float) -> None:
    """For any memory: with the advised overrides the plan fits, and without the one for NCCL it would not."""
    config = config_of("model.layers=2", "zero.stage=0" if axis == "tp" else "zero.stage=3", *COPIED[axis])
    plan, over_nccl = (make_plan(each, "cuda") for each in (config, with_words(config, NCCL)))
    needed, least = (fit_of(each, device_memory("cuda", 1000)).needed for each in (plan, over_nccl))
    assert needed > least
    for bytes_ in (least + share * (needed - least), least, least - share * least / 2):
        room = device_memory("cuda", bytes_ / 2**30)
        advice = memory_advice(config, plan, fit_of(plan, room))
        advised = [found.split() for found in re.findall(r"with ((?:[a-z_.]+=\S+ ?)+):", advice)]
        assert advised or advice.startswith("no ZeRO stage, recomputation, transport, "), advice
        for words in advised:
            assert fit_of(make_plan(with_words(config, words), "cuda"), room).ok
            if NCCL[0] in words:
                others = [word for word in words if word not in NCCL]
                assert not fit_of(make_plan(with_words(config, others), "cuda"), room).ok
        assert bytes_ < least - 1 or list(NCCL) in advised, "the slots are all that is too much"


def test_where_nothing_is_copied_nccl_is_not_advised() -> None:
    config = config_of("mesh.pp=2")
    plan = make_plan(config, "cuda")
    needed = fit_of(plan, device_memory("cuda", 1000)).needed
    assert most_copied(plan) == 0
    assert "nccl" not in memory_advice(config, plan, fit_of(plan, device_memory("cuda", 0.9 * needed / 2**30)))


def test_the_advice_names_what_the_slots_take_and_so_does_the_table() -> None:
    config = config_of("model.layers=2", "zero.stage=3", *COPIED["cp"])
    plan = make_plan(config, "cuda")
    needed, copied = fit_of(plan, device_memory("cuda", 1000)).needed, most_copied(plan)
    advice = memory_advice(config, plan, fit_of(plan, device_memory("cuda", (needed - copied) / 2**30)))
    kept = f"{format_bytes(needed - copied)}, {format_bytes(copied)} less for slots of peer copies, and a step takes "
    assert f"with cluster.transport=nccl: {kept}" in advice
    assert f"slots {format_bytes(copied)} ({format_bytes(copied)} for peer copies)" in repr(planned(config, "cuda"))


def test_the_planner_says_where_it_recomputes_for_slots_of_peer_copies() -> None:
    config = config_of("model.layers=2", "zero.stage=3", "memory.recompute=auto", *COPIED["cp"])
    plain = config_of("model.layers=2", "zero.stage=3", *COPIED["cp"])
    plan, over_nccl = (make_plan(each, "cuda") for each in (plain, with_words(plain, NCCL)))
    needed, least = (fit_of(each, device_memory("cuda", 1000)).needed for each in (plan, over_nccl))
    found = planned(config, "cuda", (needed + least) / 2 / 2**30)
    assert found.fit.ok and found.plan.recomputation != "none"
    keys = "cluster.transport=nccl memory.recompute=none"
    slots = f"it fits without {format_bytes(needed - least)} of slots of peer copies"
    assert re.match(rf"with {keys}(?: \S+)* {slots}: a step takes .* less, at assumed rates$", found.note), found.note
    assert "slots" not in planned(config, "cuda", 1.01 * needed / 2**30).note, "there is room for both"
