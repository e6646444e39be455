"""The planner against published measurements: what fits, and which of two configurations is faster."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from published import MODELS, ROWS, Published

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import costs_of, flops_per_token, memory
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.planning.mesh_search import search_meshes
from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import BatchSpec, OptimizerSpec, Plan, split_layers
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import head_in_layers, num_parameters

ROOM = device_memory("cuda", 79).bytes


@cache
def planned(row: Published) -> Plan:
    model, mesh = MODELS[row.model], Mesh(dp=row.dp, tp=row.tp, pp=row.pp)
    program = compile_program(
        "1f1b", row.pp, row.microbatches, replicas=row.dp, gated=True, memory_options=MemoryOptions(zero=row.zero)
    )
    return Plan(
        name="published",
        mesh=mesh,
        program=program,
        layers=split_layers(model.layers, program.placement, head_in_layers(model, 4096)),
        model=model,
        batch=BatchSpec(256, 4096, row.microbatches, row.dp),
        optimizer=OptimizerSpec(1e-3, 1e-4, 0, 1, 0.9, 0.95, 1e-8, 0.1, clip_norm=1.0),
        data="",
        cache="",
        seed=0,
        dtype="bfloat16",
        device="cuda",
        transport="nccl",
        deterministic=False,
        zero=row.zero,
        tp_across_nodes=True,
    )


def peak_bytes(plan: Plan) -> int:
    return max(memory(plan, plan.mesh.move(0, pp=pp))["total"] for pp in range(plan.mesh.pp))


def mfu_percent(plan: Plan) -> float:
    """MFU in percent by the source's definition."""
    spans = simulate(plan.program, costs_of(plan)).spans
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    work = plan.batch.tokens * flops_per_token(plan.model, plan.batch.sequence_length, causal=False)
    return 100 * work / seconds / plan.mesh.size / 989e12


def test_models_have_the_parameters_of_their_names() -> None:
    sizes = {name: f"{num_parameters(model) / 1e9:.3g}B" for name, model in MODELS.items()}
    assert sizes == {"1.34B": "1.34B", "3.57B": "3.57B", "8.86B": "8.86B", "80B": "80B"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.nodes}-{row.model}")
def test_configurations_that_fitted_in_80_gb_fit(row: Published) -> None:
    plan = planned(row)
    assert plan.batch.micro_batch_size == row.micro_batch_size
    assert peak_bytes(plan) <= ROOM


@pytest.mark.parametrize("nodes", [1, 2])
def test_eighty_billion_parameters_fit_on_no_mesh_of_two_nodes(nodes: int) -> None:
    sizes = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 28672, "vocab": 131072}
    batch = ["batch.global_batch_size=256", "batch.sequence_length=4096", "schedule.name=1f1b"]
    found = search_meshes(
        load(None, [*(f"model.{key}={value}" for key, value in sizes.items()), *batch]),
        8 * nodes,
        device_memory("cuda", 79),
    )
    assert found.num_fitting == 0


def test_predictions_rank_configurations_as_the_measurements_do() -> None:
    found = [mfu_percent(planned(row)) for row in ROWS]
    one, other = (np.argsort(np.argsort(values)) for values in (found, [row.mfu for row in ROWS]))
    assert np.corrcoef(one, other)[0, 1] >= 0.8  # Spearman's
