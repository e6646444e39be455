"""memory.recompute: auto and zero.max_gathered: auto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, product
from typing import Any

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.memory.choice import choose, with_choices
from pentad.orchestrator.memory.first_microbatches import estimated_seconds, shortened
from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.planning import planning
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError

DENSE_PARTS = ("mlp", "core_attn", "qkv_linear", "attn_proj")
EXPERT_PARTS = ("mlp", "moe", "core_attn", "mla_up_proj", "attn_proj")
SCHEDULES = ("1f1b", "zb-h2", "zb-v", "dualpipe", "dualpipev", "looped-bfs")
SIZES = ["model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.ffn=4096", "model.layers=6", "mesh.pp=1"]
BATCH = ["schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=8", "batch.sequence_length=2048"]

EXPERTS = "num_experts=8 top_k=2 intermediate_size=1024 shared_intermediate_size=1024 first_k_dense=1"
LATENTS = "kv_lora_rank=256 q_lora_rank=384 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128"
LATENT_EXPERTS = [
    "model.family=deepseek-v3",
    *(f"model.experts.{word}" for word in EXPERTS.split()),
    *(f"model.mla.{word}" for word in LATENTS.split()),
]


def config_of(*words: str) -> RunConfig:
    return load(None, [*SIZES, *BATCH, "model.vocab=4096", "cluster.device=cuda", *words])


def room_of(*words: str, share: float) -> DeviceMemory:
    """Memory between what is needed with full recomputation (share 0) and with none (share 1)."""
    least, most = (needed(config_of(*words, f"memory.recompute={mode}")) for mode in ("full", "none"))
    return DeviceMemory(int(least + share * (most - least)), "of a test")


def choices(config: RunConfig, room: DeviceMemory) -> tuple[str, ...]:
    found = choose(config, "cuda", room)
    assert found is not None
    return found.words


def needed(config: RunConfig) -> int:
    return fit_of(make_plan(config, "cuda"), DeviceMemory(2**50, "")).needed


def every_choice(parts: tuple[str, ...], layers: int, gathered: list[list[str]]) -> Iterator[list[str]]:
    """The overrides of every choice, listed by hand."""
    sets = (names for count in range(1, len(parts) + 1) for names in combinations(parts, count))
    for count, mode in product(gathered, [*(f"[{','.join(names)}]" for names in sets), "full"]):
        yield from ([f"memory.recompute={mode}", f"memory.recompute_layers={n + 1}", *count] for n in range(layers))
    yield from (["memory.recompute=none", *count] for count in gathered)


@pytest.mark.parametrize("share", [0.7, *(pytest.param(share, marks=pytest.mark.slow) for share in (1.0, 0.5, 0.2))])
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "parts"), [((), DENSE_PARTS), pytest.param(LATENT_EXPERTS, EXPERT_PARTS, marks=pytest.mark.slow)]
)
def test_what_fits_is_chosen_and_nothing_that_fits_is_faster(family, parts, zero: int, share: float) -> None:
    given = [*family, "model.layers=3", f"mesh.dp={1 + (zero > 0)}", f"zero.stage={zero}", "memory.unit_layers=1"]
    gathered = [["zero.max_gathered=2"], ["zero.max_gathered=5"]] if zero else [[]]
    room = room_of(*given, share=share)
    auto = config_of(*given, "memory.recompute=auto", *(["zero.max_gathered=auto"] if zero else []))
    chosen = make_plan(with_choices(auto, "cuda", room), "cuda")
    assert fit_of(chosen, room).ok
    others = [make_plan(config_of(*given, *words), "cuda") for words in every_choice(parts, 3, gathered)]
    least = min(simulated_seconds(plan) for plan in others if fit_of(plan, room).ok)
    assert simulated_seconds(chosen) <= least * (1 + 1e-9)
    assert (set(chosen.recompute) - {"none"} != set()) == (share < 1)


@pytest.mark.parametrize(
    ("name", "zero"),
    [("1f1b", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in product(SCHEDULES, range(4)))],
)
def test_plans_that_share_a_program_need_and_take_what_they_do_with_their_own(name: str, zero: int) -> None:
    given = [f"schedule.name={name}", "mesh.dp=2", f"mesh.pp={2 + 2 * (name == 'dualpipe')}", f"zero.stage={zero}"]
    given += ["schedule.microbatches=8", "batch.global_batch_size=16", "model.layers=12", "memory.unit_layers=1"]
    room = DeviceMemory(2**50, "")
    variants = Variants(config_of(*given), "cuda", room)
    for mode, layers in [
        ("none", None),
        ("selective", 1),
        ("attention", 2),
        ("core_attn", 1),
        ("full", 1),
        ("full", None),
    ]:
        plan, own = variants.plan(mode, layers), make_plan(config_of(*given, *variants.words(mode, layers)), "cuda")
        assert variants.fit(plan).needed == fit_of(own, room).needed
        assert variants.seconds(plan) == pytest.approx(simulated_seconds(own), rel=1e-9)


def test_a_choice_compiles_one_program_for_each_number_of_gathered_units_and_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = Counter[str]()

    def counted(*args: Any, **more: Any) -> Any:
        compiled[args[0]] += 1
        return compile_program(*args, **more)

    monkeypatch.setattr(planning, "compile_program", counted)
    given = ["mesh.dp=2", "zero.stage=3", "memory.unit_layers=1"]
    room = room_of(*given, share=0.4)
    compiled.clear()
    assert choices(config_of(*given, "memory.recompute=auto", "zero.max_gathered=auto"), room)
    assert compiled.total() == 3


def test_a_run_with_a_choice_is_the_run_with_these_values() -> None:
    config = config_of("mesh.dp=2", "zero.stage=3", "memory.recompute=auto", "zero.max_gathered=auto")
    room = room_of("mesh.dp=2", "zero.stage=3", share=0.5)
    words = choices(config, room)
    resolved = with_choices(config, "cuda", room)
    assert "auto" not in (resolved.memory.recompute, resolved.zero.max_gathered) and words
    assert make_plan(resolved, "cuda") == make_plan(config_of("mesh.dp=2", "zero.stage=3", *words), "cuda")
    assert load({**resolved.model_dump()}) == resolved and "recompute: auto" not in dump(resolved)
    assert with_choices(resolved, "cuda", room) == resolved


def test_a_part_by_itself_is_chosen_where_nothing_that_fits_is_faster() -> None:
    """Here the result of attention, with short sequences and microbatches that keep the GPU busier than the host."""
    given = ["batch.sequence_length=512", "batch.global_batch_size=64", "memory.unit_layers=1"]
    least = ("memory.recompute=[core_attn]", "memory.recompute_layers=1")
    room = DeviceMemory(needed(config_of(*given, *least)), "")
    assert choices(config_of(*given, "memory.recompute=auto"), room) == least


def test_weights_stay_gathered_through_the_microbatches_where_they_fit() -> None:
    """With room, all units of a rank are gathered once a step; with less, two at a time, for each reader."""
    config = config_of("mesh.dp=2", "zero.stage=3", "zero.max_gathered=auto", "memory.unit_layers=1")
    plain = config_of("mesh.dp=2", "zero.stage=3", "memory.unit_layers=1")
    assert choices(config, DeviceMemory(2**40, "")) == ("zero.max_gathered=8",)
    assert choices(config, DeviceMemory(needed(plain) + 2**20, "")) == ("zero.max_gathered=2",)


def test_where_nothing_fits_the_plan_is_that_with_the_least_memory() -> None:
    words = choices(config_of("mesh.dp=2", "memory.recompute=auto"), DeviceMemory(2**20, ""))
    assert needed(config_of("mesh.dp=2", *words)) <= needed(config_of("mesh.dp=2", "memory.recompute=full"))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipe"])
def test_the_first_microbatches_need_what_all_need_and_tell_their_time(name: str) -> None:
    sizes = [
        f"schedule.name={name}",
        "mesh.pp=2",
        "mesh.dp=1",
        "schedule.microbatches=24",
        "batch.global_batch_size=24",
    ]
    config = config_of(*sizes, "model.layers=8")
    short = shortened(config)
    assert short.schedule.microbatches < 24
    assert needed(short) == pytest.approx(needed(config), rel=0.01)
    seconds = simulated_seconds(make_plan(config, "cuda"))
    assert estimated_seconds(config, "cuda") == pytest.approx(seconds, rel=0.03)


def test_plan_prints_the_choice(pentad: Pentad) -> None:
    arguments = ("plan", *SIZES, *BATCH, "--device", "cuda", "memory.recompute=auto")
    facts = json.loads(pentad(*arguments, "--memory", "100", "--json")[1])
    assert facts["chosen"] == ["memory.recompute=none"]
    status, out, _ = pentad(*arguments, "--memory", f"{facts['fits']['needed'] * 0.8 / 2**30:.3f}")
    assert status == 0 and " chosen: memory.recompute=" in out


@pytest.mark.parametrize("key", ["recompute_layers=1", "recompute_stages=[0]"])
def test_the_layers_of_a_choice_are_the_planners(key: str) -> None:
    with suppress(PentadError):
        config_of("memory.recompute=auto", f"memory.{key}")
        pytest.fail("not refused")
