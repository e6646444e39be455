"""The planner against published measurements: what fits, and which of two configurations is faster."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from published import MODELS, ROWS, Published

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import costs_of, flops_per_token, memories, step_seconds
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.search import search
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters

ROOM = device_memory("cuda", 79).bytes


SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tie_word_embeddings")
COMMON = (
    *("batch.global_batch_size=256", "batch.sequence_length=4096", "schedule.name=1f1b", "mesh.tp_across_nodes=true"),
    *("precision.deterministic=false", "cluster.transport=nccl"),
)


def config(model: str, *overrides: str) -> RunConfig:
    sizes = [f"model.{key}={json.dumps(getattr(MODELS[model], key))}" for key in SIZES]
    return load(None, [*sizes, *COMMON, *overrides])


@cache
def planned(row: Published) -> Plan:
    mesh = [f"mesh.{axis}={getattr(row, axis)}" for axis in ("dp", "tp", "pp")]
    more = f"schedule.microbatches={row.microbatches}", f"zero.stage={row.zero}"
    return make_plan(config(row.model, *mesh, *more), "cuda")


def mfu_percent(plan: Plan) -> float:
    """MFU in percent by the source's definition."""
    seconds = step_seconds(simulate(plan.program, costs_of(plan)))
    work = plan.batch.tokens * flops_per_token(plan.model, plan.batch.sequence_length, causal=False)
    return 100 * work / seconds / plan.mesh.size / 989e12


def test_models_have_the_parameters_of_their_names() -> None:
    sizes = {name: f"{num_parameters(model) / 1e9:.3g}B" for name, model in MODELS.items()}
    assert sizes == {"1.34B": "1.34B", "3.57B": "3.57B", "8.86B": "8.86B", "80B": "80B"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.nodes}-{row.model}")
def test_configurations_that_fitted_in_80_gb_fit(row: Published) -> None:
    plan = planned(row)
    assert plan.batch.micro_batch_size == row.micro_batch_size
    assert max(each["total"] for each in memories(plan)) <= ROOM


@pytest.mark.parametrize("nodes", [1, 2])
def test_eighty_billion_parameters_fit_on_no_mesh_of_two_nodes(nodes: int) -> None:
    """Without offloading and recomputation, which the authors did not use."""
    held = {"memory.offload_fraction": "0", "memory.recompute": "none"}
    given = config("80B", *map("=".join, held.items()))
    assert not search(given, 8 * nodes, device_memory("cuda", 79), list(held)).choices


def test_predictions_rank_configurations_as_the_measurements_do() -> None:
    found = [mfu_percent(planned(row)) for row in ROWS]
    one, other = (np.argsort(np.argsort(values)) for values in (found, [row.mfu for row in ROWS]))
    assert np.corrcoef(one, other)[0, 1] >= 0.8  # Spearman's correlation
