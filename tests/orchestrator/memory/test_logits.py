"""memory.logits: what it saves and costs, and what auto resolves to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Pentad
from custom_models import GPT

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.memory.advice import memory_advice
from pentad.orchestrator.memory.choice import choose, with_choices
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of
from pentad.orchestrator.planning.layout import LOGIT_BYTES
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

SIZES = ["model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.ffn=4096", "model.layers=4", "mesh.pp=1"]
BATCH = ["schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=8", "batch.sequence_length=2048"]
RECOMPUTE = "memory.logits=recompute"


def config_of(*words: str) -> RunConfig:
    """Two microbatches of 8,192 tokens, whose logits take 2 GiB; without CUDA graphs, which take memory."""
    given = [*SIZES, *BATCH, "model.vocab=131072", "cluster.device=cuda", "cluster.cuda_graphs=false"]
    return load(None, [*given, *words])


def plan_with(*words: str) -> Plan:
    return make_plan(config_of(*words), "cuda")


def needed(*words: str) -> int:
    return fit_of(plan_with(*words), DeviceMemory(2**50, "")).needed


def room_between(*words: str, share: float = 0.5) -> DeviceMemory:
    """Memory that is too little to keep logits, but enough to compute them in chunks."""
    kept, chunked = needed(*words), needed(*words, RECOMPUTE)
    assert chunked < kept - 2**30
    return DeviceMemory(int(chunked + share * (kept - chunked)), "of a test")


@pytest.mark.parametrize(("vocab", "dtype"), [(131072, "bfloat16"), (128256, "float32"), (2**25, "float32")])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_chunk_has_at_most_512_mib_in_full_tiles(vocab: int, dtype: str, tp: int) -> None:
    given = f"model.vocab={vocab}", f"precision.compute={dtype}", f"mesh.tp={tp}"
    rows, row = plan_with(*given, RECOMPUTE).logit_rows, vocab // tp * (2 if dtype == "bfloat16" else 4)
    assert rows * row <= LOGIT_BYTES < (rows + (128 if rows > 128 else 1)) * row
    assert rows % 128 == 0 or 128 * row > LOGIT_BYTES
    assert plan_with(*given, "memory.logits=keep").logit_rows == plan_with(*given).logit_rows == 0


def test_chunks_cost_one_product_with_the_head() -> None:
    kept, chunked = (costs_of(plan_with(f"memory.logits={each}")) for each in ("keep", "recompute"))
    forward, backward, weight = (
        sum(getattr(chunked, name)) - sum(getattr(kept, name)) for name in ("forward", "backward", "weight")
    )
    assert forward > 0 > backward
    assert forward + backward == pytest.approx(0, abs=0.1 * forward)  # products of fewer rows are a little slower
    plan = plan_with()
    assert plan.rates is not None
    product = 2 * plan.slice_tokens * plan.model.vocab * plan.model.hidden / plan.rates.flops
    assert product < weight < 2.2 * product  # and the loss's gradient, and adding up the weight's
    repeated = [costs_of(plan_with(f"memory.logits={each}", "memory.recompute=full", "memory.unit_layers=4"))
                for each in ("keep", "recompute")]  # fmt: skip
    assert repeated[0].forward == repeated[1].forward
    assert sum(repeated[1].recompute) - sum(repeated[0].recompute) == pytest.approx(forward)


def test_what_fits_keeps_its_logits_and_its_program() -> None:
    config, room = config_of(), DeviceMemory(needed(), "of a test")
    found = choose(config, "cuda", room)
    assert found is not None and not found.words
    assert found.plan == plan_with("memory.logits=keep")
    assert with_choices(config, "cuda", room) == config


@pytest.mark.parametrize("zero", [0, 3])
def test_logits_are_made_again_where_that_fits(zero: int) -> None:
    dp = 1 + (zero > 0)
    given = [f"mesh.dp={dp}", f"batch.global_batch_size={8 * dp}", f"zero.stage={zero}", "memory.unit_layers=1"]
    room = room_between(*given)
    config = config_of(*given)
    found = choose(config, "cuda", room)
    assert found is not None and found.words == (RECOMPUTE,)
    assert fit_of(found.plan, room).ok
    resolved = with_choices(config, "cuda", room)
    assert resolved.memory.logits == "recompute"
    assert load(yaml.safe_load(dump(resolved))) == resolved
    assert make_plan(resolved, "cuda").program.hash == found.plan.program.hash


@pytest.mark.parametrize(("share", "logits"), [(0.05, "recompute"), (0.9, "keep")])
def test_layers_or_logits_are_made_again_whichever_takes_less_time(share: float, logits: str) -> None:
    given = ["memory.unit_layers=1"]
    room = room_between(*given, share=share)
    found = choose(config_of(*given, "memory.recompute=auto"), "cuda", room)
    assert found is not None and fit_of(found.plan, room).ok
    assert f"memory.logits={logits}" in found.words
    others = [
        choose(config_of(*given, "memory.recompute=auto", f"memory.logits={each}"), "cuda", room)
        for each in ("keep", "recompute")
    ]
    plans = [each.plan for each in others if each is not None and fit_of(each.plan, room).ok]
    assert simulated_seconds(found.plan) == min(map(simulated_seconds, plans))


def test_logits_are_kept_where_the_sake_of_others_leaves_room_for_them() -> None:
    """The microbatches in flight on the first rank take more memory than the logits on the last."""
    given = ["mesh.pp=4", "model.layers=8", "schedule.microbatches=8", "batch.global_batch_size=32"]
    given += ["batch.sequence_length=2048", "model.vocab=32768"]
    config = config_of(*given, "memory.recompute=auto")
    room = DeviceMemory(int(0.8 * needed(*given)), "of a test")
    found = choose(config, "cuda", room)
    assert found is not None and RECOMPUTE not in found.words
    assert found.plan.logit_rows == 0
    assert fit_of(found.plan, room).ok


def test_kept_logits_are_advised_away() -> None:
    long = ["batch.global_batch_size=2", "batch.sequence_length=8192"]  # so that microbatches cannot be smaller
    config, room = config_of("memory.logits=keep", *long), room_between(*long, share=0.05)
    plan = make_plan(config, "cuda")
    advice = memory_advice(config, plan, fit_of(plan, room))
    assert RECOMPUTE in advice and "it fits with" in advice
    assert simulated_seconds(plan) < simulated_seconds(plan_with(RECOMPUTE, *long))


def test_a_plan_says_what_was_chosen(pentad: Pentad) -> None:
    room = room_between()
    given = [*SIZES, *BATCH, "model.vocab=131072", "cluster.cuda_graphs=false", "--device", "cuda"]
    memory = ["--memory", f"{room.bytes / 2**30}"]
    assert json.loads(pentad("plan", *given, *memory, "--json")[1])["chosen"] == [RECOMPUTE]
    assert RECOMPUTE in pentad("plan", *given, *memory)[1]


REFUSED: list[Any] = [
    (["precision.matmul=fp8-tensor", "precision.fp8_head=true"], "memory.logits is recompute with precision.fp8_head"),
    (["memory.logits=all"], "memory.logits is 'all': expected one of keep, recompute or auto"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_bad_input_is_refused_in_one_sentence(pentad: Pentad, words: list[str], sentence: str) -> None:
    given = [RECOMPUTE, *SIZES, *BATCH, "model.vocab=131072", "--device", "cuda"]
    status, _, error = pentad("plan", *given, *words)
    assert status != 0 and sentence in error and len(error.strip().splitlines()) == 1


def test_the_loss_of_a_custom_model_is_its_own(pentad: Pentad, tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text(GPT)
    given = ["model.custom=gpt.py:gpt", "model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab=300"]
    given += ["mesh.pp=1", "schedule.name=1f1b", "batch.sequence_length=16", "--device", "cpu"]
    assert pentad("plan", *given)[0] == 0
    status, _, error = pentad("plan", *given, RECOMPUTE)
    sentence = "memory.logits is recompute with model.custom, whose loss is its own: expected keep or auto"
    assert status != 0 and error == f"pentad: {sentence}\n"


def test_auto_keeps_the_logits_of_a_head_in_8_bits() -> None:
    words = ["precision.matmul=fp8-tensor", "precision.fp8_head=true"]
    assert choose(config_of(*words), "cuda", DeviceMemory(2**30, "of a test")) is None
    with pytest.raises(PentadError, match=r"expected keep or auto$"):
        plan_with(*words, RECOMPUTE)
