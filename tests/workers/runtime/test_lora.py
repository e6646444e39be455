"""LoRA under every schedule and mesh: the losses and adapters of one process, which uses W + alpha / rank B A."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from exactness import assert_equals_one_process
from plans import plan_on_mesh
from resume import assert_repeatable
from small_models import FAMILIES, HEADS
from worker_processes import check_recovery

from pentad.schedules.spec.lora import TARGETS, LoraSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

slow = pytest.mark.slow
ALL = LoraSpec(rank=3, alpha=6.0, targets=tuple(TARGETS))
ATTENTION = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "o_proj"))
DENSE = replace(HEADS, layers=4)


def plan_with(corpus: str, lora: LoraSpec, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    return replace(plan_on_mesh(corpus, name, sizes, **more), lora=lora)


MESHES: list[Any] = [
    ("zb-h2", {"pp": 2, "tp": 2}, {}),
    ("zb-v", {"pp": 2, "dp": 2}, {"zero": 3, "max_gathered": 1}),
    pytest.param("gpipe", {}, {}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "dp": 2}, {"zero": 2}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "dp": 2}, {"zero": 1}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "tp": 2}, {}, marks=slow),
    pytest.param("1f1b", {"tp": 4}, {}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, {"zero": 2}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "cp": 2}, {}, marks=slow),
    pytest.param("gpipe", {"dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("1f1b", {"tp": 2, "dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "cp": 2}, {"zero": 3}, marks=slow),
    pytest.param("dualpipe", {"pp": 4}, {"zero": 3}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "options"), MESHES)
def test_adapters_equal_those_of_one_process(fleet, corpus, name, sizes, options):
    plan = plan_with(corpus, ALL, name, sizes, model=DENSE, memory_options=MemoryOptions(**options))
    assert_equals_one_process(fleet, plan, check_bytes=True)


FAMILY_CASES: list[Any] = [
    pytest.param("qwen3-moe", "1f1b", {"ep": 2, "tp": 2}, 0, marks=slow),
    pytest.param("gpt-oss", "zb-h2", {"ep": 2, "pp": 2}, 0, marks=slow),
    pytest.param("mixtral", "1f1b", {"ep": 4}, 0, marks=slow),
    pytest.param("mixtral", "zb-v", {"ep": 2, "pp": 2}, 3, marks=slow),
    pytest.param("qwen3-moe", "1f1b", {"ep": 2, "dp": 2}, 3, marks=slow),
    pytest.param("qwen3", "zb-h2", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("gemma2", "1f1b", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("olmo2", "1f1b", {"tp": 4}, 0, marks=slow),
    pytest.param("qwen2", "1f1b", {"tp": 4}, 0, marks=slow),
]


@pytest.mark.parametrize(("family", "name", "sizes", "zero"), FAMILY_CASES)
def test_attention_has_adapters_in_every_family(fleet, corpus, family, name, sizes, zero):
    model, options = replace(FAMILIES[family], layers=4), MemoryOptions(zero=zero)
    plan = plan_with(corpus, ATTENTION, name, sizes, model=model, memory_options=options)
    assert_equals_one_process(fleet, plan, check_bytes=True)


@slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_layers_have_adapters(fleet, corpus, mode):
    plan = plan_with(corpus, ALL, "1f1b", {"pp": 2, "tp": 2}, model=DENSE, recompute=mode)
    assert_equals_one_process(fleet, plan)
    options = MemoryOptions(zero=3, max_gathered=1)
    plan = plan_with(corpus, ALL, "zb-v", {"pp": 2, "dp": 2}, model=DENSE, recompute=mode, memory_options=options)
    assert_equals_one_process(fleet, plan)


@slow
def test_post_validation_steps_adapters(fleet, corpus):
    assert_equals_one_process(fleet, plan_with(corpus, ALL, "zb-h2", {"pp": 4}, model=DENSE, post_validation=True))
    sizes, options = {"pp": 2, "dp": 2}, MemoryOptions(zero=3)
    plan = plan_with(corpus, ALL, "zb-h2", sizes, model=DENSE, post_validation=True, memory_options=options)
    assert_equals_one_process(fleet, plan)


@slow
@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [("zb-h2", {"pp": 2, "tp": 2}, 0), ("zb-v", {"pp": 2, "dp": 2}, 2), ("zb-v", {"pp": 2, "dp": 2}, 3)],
)
def test_runs_with_adapters_repeat_and_resume_bit_identically(fleet, corpus, tmp_path, name, sizes, zero):
    options = MemoryOptions(zero=zero)
    plan = plan_with(corpus, ALL, name, sizes, model=DENSE, memory_options=options, dtype="float32")
    assert_repeatable(fleet, plan, tmp_path)


RECOVERIES: list[Any] = [
    ("dualpipe", {"pp": 4}, signal.SIGKILL),
    pytest.param("zb-h2", {"dp": 2, "pp": 2}, signal.SIGSTOP, marks=slow),
    pytest.param("1f1b", {"dp": 2, "tp": 2}, signal.SIGKILL, marks=slow),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "sizes", "fault"), RECOVERIES)
def test_a_run_with_adapters_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, sizes, fault):
    check_recovery(workers, plan_with(corpus, ALL, name, sizes, model=DENSE, dtype="float32"), 16, fault)
