"""Law 4 with every feature on at once: a run that stops and resumes has the bits of one that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bits import same_bits
from evaluations import with_eval
from fleet import Outcome
from mixtures import mixed
from plans import plan_on_mesh
from resume import commit, save_and_resume
from small_models import FAMILIES, HEADS, MOE

from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.lora import SEPARATE, LoraSpec
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup, SpikeSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint, shards

STEPS, STOP = 8, 5
RATES = LearningRate(2e-2, 1e-3, 2, STEPS, "wsd", stable_steps=3, decay_shape="1-sqrt")
MUON = OptimizerSpec(
    RATES,
    *(0.9, 0.95, 1e-8, 0.1),
    name="muon",
    clip_norm=0.5,
    z_loss=1e-3,
    groups=(ParamGroup("embedding", learning_rate_scale=0.5), ParamGroup("*norm", weight_decay=0.3)),
)
ADAMW = replace(MUON, name="adamw", bf16_state=True)
LORA = LoraSpec(3, 6.0, SEPARATE)
ATTENTION = LoraSpec(2, 4.0, ("q_proj", "v_proj", "o_proj"))
DENSE, ROUTED = replace(HEADS, layers=4), replace(FAMILIES["qwen3-moe"], layers=4)
slow = pytest.mark.slow
CASES: list[Any] = [
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, 1, {}, marks=slow),
    pytest.param("zb-h2", {"pp": 4}, 0, {"post_validation": True, "optimizer": ADAMW}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "tp": 2}, 0, {}, marks=slow),
    pytest.param("1f1b", {"tp": 4}, 0, {}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, 2, {"optimizer": ADAMW}, marks=slow),
    pytest.param("1f1b", {"ep": 2, "tp": 2}, 0, {"model": replace(MOE, layers=4)}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "ep": 2}, 3, {"model": replace(MOE, layers=4)}, marks=slow),
    pytest.param("interleaved", {"pp": 2, "dp": 2}, 3, {"recompute": "selective"}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "tp": 2}, 0, {"lora": LORA}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "dp": 2}, 2, {"lora": LORA, "optimizer": ADAMW}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "ep": 2}, 3, {"lora": ATTENTION, "model": ROUTED}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "zero", "more"), CASES)
def test_a_resumed_run_has_the_same_bits(fleet, folder, tmp_path, name, sizes, zero, more):
    plan = everything_on(folder, name, sizes, zero, **more)
    once = fleet.run(plan, [(0,), (0, 3), (3,), (3, 3), (6,), (6, 2)], save=str(tmp_path / "once"))
    stopped = checkpoint.folder_of(tmp_path, STOP)
    resumed = save_and_resume(fleet, plan, stopped, STOP, [(STOP, 1), (6,), (6, 2)])
    again = fleet.run(plan, [(STOP, STEPS - STOP)], restore=str(stopped), save=str(tmp_path / "again"))
    assert 0 < sum(result.skipped for result in once[0].results) < STEPS - 1
    for a, b, c in zip(once, resumed, again, strict=True):
        assert facts(a)[STOP:] == facts(b) == facts(c)
        assert [each.data_sets for each in a.evaluations[2:]] == [each.data_sets for each in b.evaluations]
        assert same_bits(a.state, b.state) and same_bits(a.state, c.state)
    assert same_bits(*(saved(tmp_path / each, outcomes) for each, outcomes in (("once", once), ("again", again))))


def everything_on(
    folder: Path,
    name: str,
    sizes: dict[str, int],
    zero: int,
    optimizer: OptimizerSpec = MUON,
    lora: LoraSpec | None = None,
    **more: Any,
) -> Plan:
    """Sources whose weights change, one of which is used up, packed documents, loss masks, evaluations, and a policy
    that skips about half of the steps."""
    given = {"model": DENSE, "memory_options": MemoryOptions(zero=zero), "dtype": "float32", **more}
    plan = plan_on_mesh(mixed(folder, "documents"), name, sizes, lora=lora, **given)
    spikes = SpikeSpec(threshold=0.3, window=4, min_steps=2)
    return with_eval(replace(plan, optimizer=optimizer, spikes=spikes), 21)


def facts(outcome: Outcome) -> list[tuple[Any, ...]]:
    """The parts of each step's result that depend on training alone."""
    rows = outcome.results
    return [(r.step, r.losses, r.sources, r.squared_lse, r.grad_norm, r.learning_rate, r.skipped) for r in rows]


def saved(folder: Path, outcomes: list[Outcome]) -> dict[str, Any]:
    """All tensors of a checkpoint: weights, optimizer state, router biases, and the window of spikes."""
    commit(folder, STEPS, [entry for outcome in outcomes for entry in outcome.shards])
    found = checkpoint.open_checkpoint(folder)
    return shards.read(found, found.tensors)
