"""data.balance dynamic: what a rank of the pool can hold, what documents cost, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pentad.orchestrator.activations.allocations import BYTES, wide_bytes
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import document_costs
from pentad.orchestrator.planning.hardware import link_of, rates_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

CAPACITY_FACTOR = 1.25  # unless the configuration says otherwise


def grouped(plan: Plan, factor: float = CAPACITY_FACTOR) -> BatchSpec:
    """A plan's batch with data-aware groups, in which a rank holds at most `factor` times its even share of tokens."""
    batch, mesh, model = plan.batch, plan.mesh, plan.model
    rates = rates_of(plan.device, plan.gpu)
    _, bandwidth = link_of(rates, mesh, "cp" if mesh.cp > 1 else "dp")
    costs = document_costs(model, batch.sequence_length)
    costs = costs._replace(ring=_ring_bytes(model, plan.dtype) / bandwidth * rates.flops)
    even = batch.micro_batch_size * batch.sequence_length / mesh.cp
    unit = math.lcm(2, mesh.tp)  # of a shared sequence's two chunks, and of tokens that tp ranks divide
    return replace(batch, document_costs=costs, capacity=unit * math.ceil(factor * even / unit))


def require_groups(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError for what data-aware groups do not support."""
    for error in _rules(config, plan.model, plan.program):
        raise PentadError(f"{error} for data.balance dynamic")


def _ring_bytes(model: ModelSpec, dtype: str) -> int:
    """For each token that a rank receives: keys and values in F and in B, and the sums of their gradients."""
    width = model.kv_heads * 2 * model.qk_head_dim
    if model.mla is not None:
        width = model.heads * (model.qk_head_dim + model.mla.v_head_dim)
    return model.layers * width * (2 * BYTES[dtype] + wide_bytes(dtype))


def _rules(config: RunConfig, model: ModelSpec, program: Program) -> Iterator[str]:
    schedule, memory = config.schedule.name, config.memory
    if model.custom is not None:
        yield "model.custom is set: expected null"
    if model.mtp_layers:
        yield f"model.mtp_layers is {model.mtp_layers}: expected 0"
    if model.experts is not None:
        for key in ("aux_loss_coef", "router_z_loss_coef", "bias_update_rate"):  # of the tokens of a microbatch
            if value := getattr(model.experts, key):
                yield f"model.experts.{key} is {value:g}: expected 0"
    if config.mesh.ep > 1:
        yield f"mesh.ep is {config.mesh.ep}: expected 1"
    if config.mesh.cp_method != "ring":
        yield f"mesh.cp_method is {config.mesh.cp_method}: expected ring"
    if config.precision.matmul != "compute":
        yield f"precision.matmul is {config.precision.matmul}: expected compute"
    if memory.offload_fraction:
        yield f"memory.offload_fraction is {memory.offload_fraction}: expected 0"
    if memory.max_resident_microbatches is not None:
        yield f"memory.max_resident_microbatches is {memory.max_resident_microbatches:g}: expected null"
    if program.slices > 1:
        yield f"schedule.name is {schedule}, which cuts sequences into {program.slices} slices: expected another one"
    if any(isinstance(action, Overlap) for stream in program.streams for action in stream):
        yield f"schedule.name is {schedule}, which overlaps microbatches: expected another one"
