"""Bounds of time with lanes that gather and reduce, and of memory with interleaved microbatches: computed without
compiling anything, and never above what a plan takes."""

from __future__ import annotations

import random

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import pipeline_memories, simulated_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.layout import Work
from pentad.orchestrator.search.memory_bounds import MemoryBounds
from pentad.orchestrator.search.space import Order, Setting, with_setting
from pentad.orchestrator.search.time_bounds import Timed
from pentad.schedules.spec.mesh import Mesh

SIZES = ["layers=20", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=32000"]
WORDS = ["cluster.device=cuda", "cluster.gpu=NVIDIA H200", "batch.global_batch_size=128", "batch.sequence_length=2048"]
CONFIG = load(None, [*(f"model.{each}" for each in SIZES), *WORDS, "mesh.pp=1", "schedule.name=1f1b"])


def bound_and_seconds(setting: Setting) -> tuple[float, float]:
    timed = Timed(Work(CONFIG).layout_of(setting), setting.order, setting.microbatches)
    plan = make_plan(with_setting(CONFIG, setting), "cuda", proved=False)
    return timed.bound(setting.zero, setting.max_gathered), simulated_seconds(plan)


@pytest.mark.parametrize(("name", "zero", "count", "least"), [("zb-h1", 2, 8, 0.85), ("dualpipe", 3, 4, 0.8)])
def test_waits_for_lanes_are_counted_action_by_action(name: str, zero: int, count: int, least: float) -> None:
    """On four hosts, where lanes take longer than some actions and not as long as others."""
    bound, seconds = bound_and_seconds(Setting(Mesh(16, 2), count, Order(name), zero, unit_layers=1))
    assert least * seconds < bound <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zb-v", "dualpipe", "dualpipev", "seq-1f1b", "looped-bfs"])
def test_no_step_with_zero_is_shorter_than_its_bound(name: str) -> None:
    """Even with DualPipe, where a rank runs each of its stages for half of the microbatches."""
    rng = random.Random(name)
    for mesh in (Mesh(4, 2), Mesh(2, 2, tp=2), Mesh(4, 2, tp=2), Mesh(16, 2), Mesh(2, 4)):
        zero, gathered, layers = rng.choice([2, 3]), rng.choice([None, 3, 99]), rng.choice([None, 1, 2])
        setting = Setting(mesh, 8, Order(name), zero, gathered if zero == 3 else None, layers)
        bound, seconds = bound_and_seconds(setting)
        assert bound <= seconds * (1 + 1e-9), setting


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("mesh", [Mesh(1, 4, 2), Mesh(1, 2, tp=2), Mesh(2, 2)])
def test_no_plan_of_interleaved_microbatches_needs_less_memory_than_its_bound(name: str, mesh: Mesh) -> None:
    """If layers wait for other ranks, units of a forward run between those of a backward, which free memory."""
    setting = Setting(mesh, 8, Order(name), 1)
    layout = Work(CONFIG).layout_of(setting)
    bound = MemoryBounds(layout, Timed(layout, setting.order, setting.microbatches)).least(setting)
    plan = make_plan(with_setting(CONFIG, setting), "cuda", proved=False)
    needed = max(each["total"] for each in pipeline_memories(plan))
    assert 0.9 * needed < bound <= needed


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(pp=2)])
def test_forwards_wait_for_the_copies_of_what_they_save(mesh: Mesh) -> None:
    """The bound includes this before the order is simulated with copies, which take longer than their layers' F."""
    setting = Setting(mesh, 32, Order("1f1b"), zero=3 * (mesh.pp == 1), offload=1.0)
    layout = Work(CONFIG).layout_of(setting)
    timed = Timed(layout, setting.order, setting.microbatches)
    plain = timed.bound(setting.zero, None)
    assert layout.offload("none", 1.0)[1] > layout.plain.forward[1]
    bound, simulated = timed.bound_with(plain, setting), timed.simulated_with(setting)
    seconds = simulated_seconds(make_plan(with_setting(CONFIG, setting), "cuda", proved=False))
    assert 1.1 * plain < bound and 0.85 * seconds < bound <= simulated <= seconds * (1 + 1e-9)
