"""From a configuration to the plan that workers run. Pure: no Ray; torch and files only for a model of one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from pydantic import ValidationError

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.activation_memory import BYTES
from pentad.orchestrator.planning.cost_model import guess_costs, parameters_held
from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import AUTO, choose
from pentad.schedules.search.search_problem import By
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.cut import cut_layers
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import BatchShape, OptimizerShape, Plan, split_layers
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import head_in_layers


def make_plan(
    config: RunConfig, device: str, *, hosts: int = 1, fingerprint: str = "", model: ModelShape | None = None
) -> Plan:
    """The plan of a run whose ranks are on 'cpu' or 'cuda' devices of so many hosts, its program proven.

    `model` is the one that an earlier plan of the run has: a user's file may have changed since. Raises
    PentadError when cluster.transport cannot serve them.
    """
    assert device in ("cpu", "cuda"), device
    transport = _transport(config, device, hosts)
    mesh, dtype = config.mesh.mesh, _dtype(config, device)
    model = config.shape(dtype) if model is None else model
    replicas = mesh.dp * mesh.ep
    batch = BatchShape(
        config.batch.global_batch_size, config.batch.sequence_length, config.schedule.microbatches, replicas
    )
    options = config.options
    chosen = _chosen(config, model, batch, device, dtype)
    order = chosen or generate(config.schedule.name, mesh.pp, batch.microbatches, options)
    layers = _cut(model, order, batch.length)
    savings = _savings(config, order, model, layers, dtype)
    costs = guess_costs(
        model,
        layers,
        batch,
        device,
        dtype,
        order.slices,
        config.memory.modes(order.stages),
        mesh,
        config.mesh.cp_method,
        savings.zero,
    )
    program = compile_program(
        order.name,
        order.ranks,
        order.microbatches,
        costs=costs,
        gated=transport == "nccl",
        replicas=replicas * mesh.cp,
        validated=config.schedule.post_validation,
        options=options,
        savings=savings,
        order=chosen,
    )
    drafted = draft(config, device, program, layers, transport=transport, zero=savings.zero, fingerprint=fingerprint)
    return replace(drafted, model=model)


def draft(
    config: RunConfig,
    device: str,
    program: Program,
    layers: tuple[tuple[int, int], ...],
    *,
    transport: str,
    zero: int = 0,
    fingerprint: str = "",
) -> Plan:
    """The plan of a run with a program that is there already."""
    mesh = config.mesh.mesh
    replicas = mesh.dp * mesh.ep
    return Plan(
        name=config.run.name,
        mesh=mesh,
        program=program,
        layers=layers,
        model=config.model.shape,
        batch=BatchShape(
            config.batch.global_batch_size, config.batch.sequence_length, config.schedule.microbatches, replicas
        ),
        optimizer=_optimizer(config),
        data=_data(config.data.path),
        cache=os.path.abspath(os.path.expanduser(config.data.cache)),
        seed=config.run.seed,
        dtype=_dtype(config, device),
        device=device,
        transport=transport,
        deterministic=config.precision.deterministic,
        fingerprint=fingerprint,
        zero=zero,
        cp_method=config.mesh.cp_method,
        document_mask=config.data.document_mask,
        tp_across_nodes=config.mesh.tp_across_nodes,
        recompute=config.memory.modes(program.stages),
    )


def _savings(
    config: RunConfig, order: Program, model: ModelShape, layers: tuple[tuple[int, int], ...], dtype: str
) -> MemoryOptions:
    """As configured; no ZeRO where no stage has a second holder. Raises PentadError for too many buckets."""
    alone = config.mesh.copies == 1 and all(len(order.holders(stage)) == 1 for stage in range(order.stages))
    section, found = config.zero, config.memory.savings(order.stages)
    if alone:
        return found
    return found._replace(
        zero=section.stage,
        prefetch=section.prefetch,
        max_gathered=section.max_gathered,
        buckets=buckets_of(config, model, layers, config.mesh.mesh, dtype),
    )


def buckets_of(
    config: RunConfig, model: ModelShape, layers: Sequence[tuple[int, int]], mesh: Mesh, dtype: str
) -> tuple[int, ...]:
    """In how many parts the gradients of each stage are reduced (see `MemoryOptions`)."""
    size = max(BYTES[dtype], BYTES["float32"])
    return config.zero.buckets([size * parameters_held(model, first, end, mesh) for first, end in layers])


def _chosen(config: RunConfig, model: ModelShape, batch: BatchShape, device: str, dtype: str) -> Program | None:
    """The compute order that 'auto' stands for: the quickest by guessed costs; without a barrier at the end of a step
    the one whose busiest rank is done first."""
    section = config.schedule
    if section.name != AUTO:
        return None

    def costs_of(placed: Program) -> Costs | None:
        try:
            layers = _cut(model, placed, batch.length)
        except PentadError:  # more stages than layers
            return None
        return guess_costs(model, layers, batch, device, dtype, placed.slices, mesh=config.mesh.mesh)

    by: By = "longest" if section.post_validation else "makespan"
    return choose(config.mesh.pp, batch.microbatches, costs_of, section.options, by).best.program


def _cut(model: ModelShape, order: Program, length: int) -> tuple[tuple[int, int], ...]:
    """The layers of each stage. Raises PentadError for fewer layers than stages."""
    if model.custom is not None:
        return cut_layers([layer.flops for layer in model.custom.layers], order.placement)
    return split_layers(model.layers, order.placement, head_in_layers(model, length))


def smaller(config: RunConfig, ranks: int) -> RunConfig | None:
    """The same run on the largest mesh of at most `ranks` ranks, or None when elastic.min_ranks allows none.

    The batch, its samples and its microbatches stay the same: fewer replicas take more microbatches each, and a
    shorter pipeline cuts the layers anew. Of meshes of one size, the one whose pipeline is longest: its stages move
    least.
    """
    inner = config.mesh.cp * config.mesh.tp * config.mesh.ep  # what these cut stays cut as it is
    least = config.elastic.min_ranks or config.mesh.dp * config.mesh.pp * inner
    sizes = product(range(1, config.mesh.dp + 1), range(1, config.mesh.pp + 1))
    fitting = [(dp, pp) for dp, pp in sizes if least <= dp * pp * inner <= ranks]
    for dp, pp in sorted(fitting, key=lambda size: (-size[0] * size[1], -size[1])):
        count, rest = divmod(config.mesh.dp * config.schedule.microbatches, dp)
        changed = config.model_dump()
        changed["mesh"] |= {"dp": dp, "pp": pp}
        changed["schedule"]["microbatches"] = count
        if pp != config.mesh.pp:  # other stages, with more layers each
            changed["memory"]["recompute_stages"] = None
        with suppress(ValidationError):  # too few layers or microbatches, or a schedule that wants an even pipeline
            if not rest:
                return RunConfig.model_validate(changed)
    return None


def spread(timeline: Timeline, mesh: Mesh) -> Timeline:
    """A timeline over pipeline ranks as one over the ranks of the mesh: every replica does the same."""
    spans = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank).pp
        for span in timeline.spans:
            if span.rank == here:
                peer = span.peer if span.peer < 0 else mesh.move(rank, pp=span.peer)
                spans.append(span._replace(rank=rank, peer=peer))
    return Timeline(timeline.source, tuple(spans))


def _data(path: str) -> str:
    """Workers may stand in other folders than the user."""
    return path if path.startswith("builtin:") else os.path.abspath(os.path.expanduser(path))


def _dtype(config: RunConfig, device: str) -> str:
    chosen = config.precision.compute
    return {"cuda": "bfloat16", "cpu": "float32"}[device] if chosen == "auto" else chosen


def _transport(config: RunConfig, device: str, hosts: int) -> str:
    chosen = config.cluster.transport
    if device == "cpu":
        return "gloo"
    if chosen == "peer" and hosts > 1:
        raise PentadError(f"cluster.transport is peer, but the ranks are on {hosts} hosts: expected auto or nccl")
    if config.mesh.pp == 1:  # nothing moves
        return "nccl"
    return {"auto": "peer" if hosts == 1 else "nccl"}.get(chosen, chosen)


def _optimizer(config: RunConfig) -> OptimizerShape:
    given = config.optimizer.model_dump()
    if given["min_learning_rate"] is None:
        given["min_learning_rate"] = config.optimizer.learning_rate / 10
    if given["warmup_steps"] is None:
        given["warmup_steps"] = min(100, config.run.steps // 10)
    return OptimizerShape(steps=config.run.steps, **given)
