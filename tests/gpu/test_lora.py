"""Adapters on GPUs: those of one process in float64, with the model whole or sharded, and the same bits twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import assert_same_runs
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import STEPS, plan_on_mesh
from small_models import HEADS, LATENT_MOE

from pentad.schedules.spec.lora import SEPARATE, LoraSpec, targets_of
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
LORA = LoraSpec(rank=3, alpha=6.0, targets=SEPARATE)
DENSE = replace(HEADS, layers=4)
CASES = [
    ("zb-h2", {"pp": 2}, MemoryOptions(), DENSE),
    ("gpipe", {"dp": 2}, MemoryOptions(zero=3), DENSE),
    ("gpipe", {"tp": 2}, MemoryOptions(), LATENT_MOE),
    ("gpipe", {"ep": 2}, MemoryOptions(zero=3), LATENT_MOE),
]


def adapted(
    corpus: str, name: str, sizes: dict[str, int], options: MemoryOptions, model: ModelSpec, dtype: str
) -> Plan:
    lora = LORA if model.mla is None else replace(LORA, targets=targets_of(model))
    plan = plan_on_mesh(corpus, name, sizes, model=model, memory_options=options, lora=lora)
    return on_gpu(plan, "peer", dtype, options)


@pytest.mark.parametrize(("name", "sizes", "options", "model"), CASES)
def test_adapters_equal_those_of_one_process(gpus, corpus, name, sizes, options, model) -> None:
    assert_equals_one_process(gpus, adapted(corpus, name, sizes, options, model, "float64"))


@pytest.mark.parametrize(("name", "sizes", "options", "model"), CASES)
def test_adapters_repeat_their_bits(gpus, corpus, name, sizes, options, model) -> None:
    plan = adapted(corpus, name, sizes, options, model, "bfloat16")
    assert_same_runs(*(gpus.run(plan, [(0, STEPS)]) for _ in range(2)))
