"""`pentad plan --search` finds what planning every setting finds, quickly, and says why."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from commands import Pentad
from search_times import CASES, measure

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.memory.copy_slots import NCCL, most_copied
from pentad.orchestrator.memory.first_microbatches import with_words
from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.planning.estimate import memories, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, device_memory
from pentad.orchestrator.planning.formatting import format_bytes, format_percent
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search import reasons
from pentad.orchestrator.search.layout import Work
from pentad.orchestrator.search.memory_bounds import MemoryBounds
from pentad.orchestrator.search.placement_bounds import order_bound, placement_bound, shape_bound
from pentad.orchestrator.search.reasons import describe, flips, nearest_fits
from pentad.orchestrator.search.result import plan_setting
from pentad.orchestrator.search.search import LISTED, Missed, SearchResult, search, search_space
from pentad.orchestrator.search.space import (
    AXES,
    Order,
    Setting,
    Space,
    given_and_changed,
    space_of,
    with_setting,
)
from pentad.orchestrator.search.time_bounds import Timed
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.passes.units import split_into_units
from pentad.schedules.simulate.events import acyclic_events
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan

EIGHT = ("layers=32", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=128256")
H200 = device_memory("cuda", 139)


def config_of(model: Sequence[str], sequences: int = 64, length: int = 4096, *more: str) -> RunConfig:
    batch = [f"batch.global_batch_size={sequences}", f"batch.sequence_length={length}", "schedule.name=1f1b"]
    words = ["mesh.pp=1", "cluster.device=cuda", "cluster.gpu=NVIDIA H200", *more]
    return load(None, [*(f"model.{each}" for each in model), *batch, *words])


class Case(NamedTuple):
    """A small model, and some of the settings on a few GPUs."""

    config: RunConfig
    space: Space


def case(seed: int, held: str = "") -> Case:
    """A random case. `held`: 'recompute' or 'offload' has one given value in all settings."""
    draw, matmul = random.Random(seed), "compute" if seed % 5 else "fp8-block"
    layers, hidden = draw.choice([2, 3, 4]), draw.choice([256, 1024, 4096])
    model = [f"layers={layers}", f"hidden={hidden}", f"heads={hidden // 64}", f"ffn={3 * hidden}"]
    model += [f"kv_heads={draw.choice([hidden // 64, 2])}", f"vocab={draw.choice([1024, 32768, 131072])}"]
    if draw.random() < 0.3:
        model += ["family=mixtral", "experts.num_experts=4", "experts.top_k=2", f"experts.intermediate_size={hidden}"]
    quiet = "data.holdout=0", "eval.every=0"  # the search ignores evaluation, too
    precision = f"precision.reduce={'bfloat16' if seed % 2 else 'float32'}", f"precision.matmul={matmul}"
    config = config_of(model, draw.choice([8, 16]), draw.choice([512, 2048]), *quiet, *precision)
    every = space_of(config, draw.choice([2, 4]))
    space = replace(
        every,
        meshes=tuple(draw.sample(every.meshes, min(4, len(every.meshes)))),
        microbatches=(2, 4) if draw.random() < 0.5 else None,
        orders=(Order("1f1b"), *draw.sample(every.orders[1:], 3)),
        zero=tuple(sorted(draw.sample(range(4), 2))),
        max_gathered=draw.choice([(None,), every.max_gathered]),
        unit_layers=draw.choice([(None,), (None, 1)]),
        recompute=("none", draw.choice(every.recompute[1:])),
        recompute_layers=draw.choice([(1, 2, None), (None,)]),
        offload=draw.choice([(0.0,), (0.0, 0.5), (0.0, 0.5, 1.0)]),
    )
    if held == "recompute":
        space = replace(space, recompute=space.recompute[1:], recompute_layers=(None,), offload=(0.0, 0.5, 1.0))
    if held == "offload":
        space = replace(space, offload=(0.5,))
    return Case(config, space)


class Brute(NamedTuple):
    setting: Setting
    seconds: float
    bytes: int


def brute_force(config: RunConfig, space: Space, graphs: str) -> Iterator[Brute]:
    """Plans of every setting by `make_plan`, with this value of cluster.cuda_graphs."""
    config = with_words(config, (f"cluster.cuda_graphs={graphs}",))
    for setting in space.settings(config):
        with suppress(PentadError, ScheduleError):
            plan = make_plan(with_setting(config, setting), "cuda", proved=False)
            if plan.zero == setting.zero:  # plans with nothing to shard have stage 0
                needed = max(each["total"] for each in memories(plan))
                yield Brute(setting, simulated_seconds(plan), needed)


SEEDS = [1, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))]
HELD = ("", "recompute", "offload")
QUICK = [(35, held) for held in HELD]
SLOW = [(1, ""), *((seed, held) for held in HELD for seed in (5, *range(10, 40)) if seed != 35)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("seed", "held"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_the_search_finds_what_brute_force_finds(seed: int, held: str) -> None:
    config, space = case(seed, held)
    transports = [config, with_words(config, NCCL)]
    pairs, over_nccl = (
        list(zip(*(brute_force(each, space, graphs) for graphs in ("null", "false")), strict=True))
        for each in transports
    )
    needed = sorted(each.bytes for pair in pairs for each in set(pair))
    for share in (0.0, 0.02, 0.2, 0.5, 1.0):
        room = DeviceMemory(needed[int(share * (len(needed) - 1))] - (share == 0), "of a test")
        # By default, CUDA graphs are used if there is room for them.
        plans, plans_over_nccl = ([a if a.bytes <= room.bytes else b for a, b in each] for each in (pairs, over_nccl))
        best = fastest(plans, room)
        best = fastest(plans_over_nccl, room) | best  # NCCL: only on meshes where nothing else fits
        found = search_space(config, space, room)
        assert [each.seconds for each in found.choices] == pytest.approx(sorted(best.values())[:LISTED], rel=1e-8)
        assert found.refusals.keys() == set(space.meshes) - best.keys()
        for mesh, refusal in found.refusals.items():  # stated minima are lower bounds
            least = [each.bytes for each in plans if each.setting.mesh == mesh]
            assert refusal.least_bytes <= min(least, default=math.inf)


def fastest(plans: Sequence[Brute], room: DeviceMemory) -> dict[Mesh, float]:
    """Mesh -> seconds of the fastest plan that fits."""
    best = dict[Mesh, float]()
    for each in plans:
        if each.bytes <= room.bytes:
            best[each.setting.mesh] = min(each.seconds, best.get(each.setting.mesh, math.inf))
    return best


def test_a_mesh_is_planned_over_nccl_only_where_no_slots_fit() -> None:
    """The mesh and most options are given; among them offloading, which would leave room for the slots."""
    keys = "schedule.name", "schedule.microbatches", "zero.stage", "memory.unit_layers", "memory.offload_fraction"
    held = [*(f"mesh.{axis}" for axis in AXES), *keys]
    sizes = ("family=mixtral", "layers=2", "hidden=1024", "heads=16", "kv_heads=16", "ffn=1024", "vocab=4096")
    experts = "experts.num_experts=4", "experts.top_k=2", "experts.intermediate_size=1024"
    counts = "mesh.ep=4", "schedule.microbatches=2"
    config = config_of((*sizes, *experts), 16, 4096, *counts, "data.holdout=0", "eval.every=0")
    large = search(config, 4, H200, held)
    assert [each.config.cluster.transport for each in large.choices] == ["auto"]
    least = min(each.bytes for each in brute_force(config, large.space, "false"))
    slots = most_copied(large.choices[0].plan)
    room = DeviceMemory(least - slots // 2, "of a test")
    (small,) = search(config, 4, room, held).choices
    assert small.config.cluster.transport == "nccl" and small.bytes <= room.bytes and "over NCCL" in describe(small)
    _, words = given_and_changed([], config, small.config)
    assert make_plan(with_words(config, words), "cuda") == small.plan
    assert not search(config, 4, room, [*held, "cluster.transport"]).choices, "the key is given"
    assert not search(config, 4, replace(room, bytes=least - 2 * slots), held).choices


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("shards", "held"), [(2, ""), (None, ""), (None, "recompute")])
def test_no_plan_takes_less_than_its_bounds(seed: int, shards: int | None, held: str) -> None:
    config, space = case(seed, held)
    settings = list(replace(space, shards=(shards,)).settings(config))
    work = Work(config, space.recompute if held else ("none",))
    settings = [each for each in settings if shards is None or each.mesh.dp * each.mesh.cp % shards == 0]
    for setting in random.Random(seed).sample(settings, min(60, len(settings))):
        try:
            plan = make_plan(with_setting(config, setting), "cuda", proved=False)
        except (PentadError, ScheduleError):
            continue
        mesh, count, order = setting[:3]
        layout = work.layout_of(setting)
        timed = Timed(layout, order, count)
        plain = timed.bound(setting.zero, setting.max_gathered)
        coarse = work.layout(mesh, count, order, None, by_layer=False, shards=setting.shards or 0)
        bounds = [shape_bound(work, mesh, count, work.slices(order)), placement_bound(coarse, order, count), plain]
        seconds, needed = simulated_seconds(plan), max(each["total"] for each in memories(plan))
        bounds += [order_bound(layout, order, count), timed.bound_with(plain, setting), timed.simulated_with(setting)]
        assert max(bounds) <= seconds * (1 + 1e-9), setting
        least = MemoryBounds(layout, timed).least(setting)
        assert least <= needed, setting


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p", "v-half", "v-min"])
def test_bounds_are_those_of_the_order_that_a_plan_has(name: str) -> None:
    """Schedules are planned with costs without CUDA graphs, although time bounds assume graphs: here it matters."""
    config = config_of(("layers=4", "hidden=256", "heads=4", "kv_heads=4", "ffn=768", "vocab=131072"), 16, 512)
    setting = Setting(Mesh(pp=2), 8, Order(name))
    plan, layout = plan_setting(config, setting, ()).plan, Work(config).layout_of(setting)
    order = Timed(layout, setting.order, setting.microbatches).program
    assert split_into_units(order, layout.units.counts).streams == plan.program.compute().streams


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_to_shard_or_gather_more_never_makes_a_step_faster(seed: int) -> None:
    """So the search plans it only if less does not fit. ZeRO-3 that gathers in 8 bits is apart, as it sends less."""
    config, space = case(seed)
    settings = [each for each in space.settings(config) if each.mesh.size > each.mesh.pp * each.mesh.tp]
    for setting in random.Random(seed).sample(settings, min(8, len(settings))):
        rows: dict[bool, list[float]] = {False: [], True: []}  # key: weights are gathered in 8 bits
        for zero, gathered in ((1, None), (2, None), (3, 2**10), (3, 3), (3, 2)):
            with suppress(PentadError, ScheduleError):
                changed = with_setting(config, setting._replace(zero=zero, max_gathered=gathered))
                plan = make_plan(changed, "cuda", proved=False)
                rows[zero == 3 and bool(plan.fp8 and plan.fp8.gathers)].append(simulated_seconds(plan))
        assert all(less <= more * (1 + 1e-9) for row in rows.values() for less, more in pairwise(row)), (setting, rows)


@pytest.fixture(scope="module")
def eight() -> SearchResult:
    return search(config_of(EIGHT), 8, H200)


def test_listed_plans_fit_are_proven_and_come_best_first(eight: SearchResult) -> None:
    seconds = [each.seconds for each in eight.choices]
    assert len(seconds) == LISTED and seconds == sorted(seconds)
    assert len({each.plan.mesh for each in eight.choices}) == LISTED
    best = eight.choices[0]
    plan = make_plan(with_setting(config_of(EIGHT), best.setting), "cuda")
    assert plan == best.plan and simulated_seconds(plan) == best.seconds
    assert max(each["total"] for each in memories(plan)) == best.bytes <= H200.bytes


def test_keys_that_are_held_stay_as_they_are() -> None:
    held = ("mesh.pp=2", "schedule.name=zb-h1", "zero.stage=1", "memory.recompute=full")
    config = config_of(["layers=4", "hidden=1024", "heads=16", "kv_heads=16", "ffn=4096"], 16, 1024, *held)
    found = search(config, 4, H200, [word.partition("=")[0] for word in held])
    assert found.choices
    for each in found.choices:
        setting = each.setting
        assert (setting.mesh.pp, setting.order.name, setting.zero, setting.recompute) == (2, "zb-h1", 1, "full")


def test_experts_may_be_sharded_over_ep_ranks() -> None:
    sizes = ("family=mixtral", "experts.num_experts=8", "experts.top_k=2", "experts.intermediate_size=3584", *EIGHT)
    config = config_of(sizes, 8, 4096, "mesh.ep=8", "schedule.microbatches=1")
    assert search(config, 8, H200, ["mesh.ep"]).choices[0].plan.mesh.ep == 8


def test_tp_ranks_share_a_node_unless_allowed_to_span_several() -> None:
    held = ["mesh.tp"]
    inside, across = (
        search(config_of(EIGHT, 64, 4096, "mesh.tp=16", f"mesh.tp_across_nodes={value}"), 16, H200, held)
        for value in ("false", "true")
    )
    assert any("mesh.tp is 16: expected at most 8" in each.why for each in inside.refusals.values())
    assert not inside.choices and across.choices


@pytest.mark.quiet
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("8B on 8", 1.0),
        pytest.param("8B on 64", 2.0, marks=pytest.mark.slow),
        pytest.param("70B on 1,024", 6.0, marks=pytest.mark.slow),
        pytest.param("DeepSeek-V3 on 1,024", 15.0, marks=pytest.mark.slow),
    ],
)
def test_a_search_takes_seconds(name: str, most: float) -> None:
    """CPU seconds. Other processes slow tests down, so twice as long may pass; docs/parallelism.md has the figures."""
    found = measure(CASES[name])
    assert found["meshes"] == LISTED and found["cpu_seconds"] < 2 * most


def test_the_command_prints_ten_lines_and_commands_that_plan_what_they_say(pentad: Pentad) -> None:
    words = ("mesh.pp=2", "run.name=here", "--gpus", "4", "--memory", "80")
    status, out, err = pentad("plan", *words)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    facts = json.loads(pentad("plan", *words, "--json")[1])
    best, count = facts["choices"][0], len(facts["choices"])
    assert [line.split()[0] for line in lines[: 2 * count : 2]] == [str(1 + number) for number in range(count)]
    assert lines[1].strip() == best["command"] and f"{best['mfu']:.1%}".replace("%", " %") in lines[0]
    for each in facts["choices"]:
        command = shlex.split(each["command"])
        assert command[:2] == ["pentad", "train"] and {"mesh.pp=2", "run.name=here"} <= set(command)
        planned = json.loads(pentad("plan", *command[2:], "--device", "cuda", "--json")[1])
        assert planned["predicted"]["step_seconds"] == pytest.approx(each["step_seconds"], rel=1e-9)
        assert planned["fits"]["needed"] == each["peak_bytes"]
    assert facts["flips"] and all(each["command"].startswith("pentad train") for each in facts["flips"])
    assert sum(best["shares"].values()) == pytest.approx(best["step_seconds"])


@pytest.mark.slow
def test_where_nothing_fits_it_says_with_how_much_more_it_would(pentad: Pentad) -> None:
    sizes = [f"model.{each}" for each in (*EIGHT, "layers=4")]
    words = (*sizes, "mesh.dp=2", "schedule.name=1f1b", "--gpus", "2", "--memory", "4")
    status, out, err = pentad("plan", *words)
    assert (status, err) == (1, "")
    assert " nothing fits on 2 GPUs" in out and " it fits with " in out and " it fits on " in out
    facts = json.loads(pentad("plan", *words, "--json")[1])
    assert not facts["choices"] and facts["refused"]
    memory, gpus = facts["nearest"]
    assert memory["peak_bytes"] > 4 * 2**30 >= gpus["peak_bytes"]


TINY = ("layers=4", "hidden=1024", "heads=16", "kv_heads=16", "ffn=4096", "vocab=32768")


def two_plans() -> tuple[RunConfig, SearchResult]:
    """Plans of a small model on two GPUs, with tp=2 and with pp=2; the host is not the bottleneck."""
    config = config_of((*TINY, "hidden=4096", "ffn=16384"), 16, 2048, "data.holdout=0", "eval.every=0")
    settings = [Setting(mesh, 4, Order("1f1b")) for mesh in (Mesh(tp=2), Mesh(pp=2))]
    plans = sorted((plan_setting(config, each, ()) for each in settings), key=lambda each: each.seconds)
    return config, SearchResult(H200, space_of(config, 2), choices=plans)


def test_at_the_rate_that_is_said_to_make_another_mesh_the_fastest_both_take_as_long() -> None:
    config, found = two_plans()
    (flip,) = flips(config, found)
    assert flip.other is found.choices[1] and describe(flip.other) in flip.sentence
    said = re.match(r"with (less|more) than (\d+) (GB|TFLOP)/s .*\(assumed: (\d+)\)", flip.sentence)
    assert said is not None, flip.sentence
    name, factor = ("intra_host" if said[3] == "GB" else "flops"), int(said[2]) / int(said[4])
    assert (said[1] == "less") == (factor < 1)
    seconds = list[float]()
    for each in found.choices:
        assert each.plan.rates is not None
        changed = each.plan.rates.scaled(name, factor)
        seconds.append(simulated_seconds(each.plan, acyclic_events(each.plan.program), changed))
    assert seconds[0] == pytest.approx(seconds[1], rel=0.03)


def test_a_faster_setting_that_needs_more_memory_is_named_with_it() -> None:
    config, found = two_plans()
    fast, slow = found.choices
    found.choices, found.missed = [slow], Missed(fast.setting, fast.seconds / 2)
    (flip,) = flips(config, found)
    gain, memory = format_percent(1 - fast.seconds / slow.seconds), format_bytes(fast.bytes)
    assert flip.sentence == f"with {memory} of memory, {describe(fast)} would be {gain} faster"
    found.missed = Missed(fast.setting, slow.seconds)
    assert not list(flips(config, found)), "it cannot be faster"


def test_where_nothing_fits_little_more_memory_or_twice_the_gpus_are_tried_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, int]] = []

    def fits(config: RunConfig, gpus: int, device: DeviceMemory, held: frozenset[str], listed: int) -> Any:
        tried.append((gpus, device.bytes))
        return SimpleNamespace(choices=[SimpleNamespace(bytes=115 * 2**30)] if device.bytes > 115 or gpus > 4 else [])

    monkeypatch.setattr(reasons, "search", fits)
    refusals = {number: SimpleNamespace(least_bytes=least) for number, least in enumerate((0, 100, 130))}
    found: Any = SimpleNamespace(refusals=refusals, device=DeviceMemory(90, "of a test"))
    texts = [text for text, _ in nearest_fits(config_of(TINY), 2, found, frozenset())]
    assert texts == ["with 115.0 GiB of memory a GPU", "on 8 GPUs"]
    assert tried == [(2, 100), (2, 110), (2, 121), (4, 90), (8, 90)]
    refusals.clear()
    assert not list(nearest_fits(config_of(TINY), 2, found, frozenset())), "memory is not what is missing"


def test_only_schedules_of_the_catalogue_are_searched(pentad: Pentad) -> None:
    status, _, err = pentad("plan", "schedule.name=my.py:eager", "--search")
    assert status == 1 and "schedule.name is my.py:eager: expected one of gpipe, 1f1b" in err


def test_an_order_that_deadlocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are proven only once listed, so a simulation may find the deadlock first."""
    config = config_of(("layers=4", "hidden=64", "heads=4", "kv_heads=2", "ffn=128", "vocab=512"), 16, 64)
    space = replace(space_of(config, 4), meshes=(Mesh(pp=4),), microbatches=(8,), orders=(Order("1f1b"),))
    assert search_space(config, space, H200).choices

    def deadlocks(_: Variants, plan: Plan) -> float:
        raise ScheduleError(f"program {plan.program.name} deadlocks")

    monkeypatch.setattr(Variants, "seconds", deadlocks)
    found = search_space(config, space, H200)
    assert not found.choices
    assert "deadlocks" in found.refusals[Mesh(pp=4)].why
