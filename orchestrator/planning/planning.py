"""From a configuration to the plan that workers run. Needs no Ray, and torch only for a custom model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from pentad.orchestrator.activations.allocations import BYTES, Piece
from pentad.orchestrator.activations.offloaded_tensors import cuts, offloadable, with_slots
from pentad.orchestrator.config.config import Layout, RunConfig
from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.fit import DeviceMemory, device_memory, fit_of, host_memory, require_host
from pentad.orchestrator.planning.hardware import NODE_GPUS, gpu_name, gpu_of, launched, local_device, rates_for
from pentad.orchestrator.planning.layout import (
    batch_spec,
    compute_dtype,
    compute_order,
    default_units,
    divided,
    first_piece,
    layout_of,
    logit_rows,
    require_groups,
    row_fraction,
    slots_for,
    split,
)
from pentad.orchestrator.planning.memory_tiers import choose_tiers
from pentad.orchestrator.planning.numerics import fp8_spec, optimizer_spec, require_fp8, with_kernels
from pentad.schedules.compiler import compile_forward_only, compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.regular_files import expanded
from pentad.schedules.passes.units import place_units
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.data import DataSpec
from pentad.schedules.spec.eval_spec import EvalData, EvalSpec
from pentad.schedules.spec.mesh import LAYER_AXES, ORDER, are_on_one_host, hosts_of_size
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan, split_layers_into_units
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import LayerRange, num_parameters
from pentad.schedules.spec.zero_layout import pool_sizes

GATHERED_UNITS = 2  # one in use, one being gathered
GRAPHS_GAIN = 1.05  # graphs are used if compute takes this many times longer without them (docs/performance.md)
MOST_NUMBERS = 2**53  # parameters of a model, and bytes that its layers save of a microbatch


def make_plan(
    config: RunConfig,
    device: str,
    *,
    hosts: tuple[int, ...] | None = None,
    model: ModelSpec | None = None,
    units: tuple[int, ...] | None = None,
    fractions: tuple[float, ...] | None = None,
    memory: DeviceMemory | None = None,
    proved: bool = True,
) -> Plan:
    """Compiles and proves the program of a run on 'cpu' or 'cuda' devices; `hosts` is the host of each rank (empty: all
    on one; None: hosts of NODE_GPUS each).

    `model` is that of the run's first plan, as a custom model's file may have changed since. So are the `units` of each
    stage, if ranks keep their state. `fractions` of units are offloaded instead of the configured ones; with
    offload_fraction auto, those with which ranks fit into `memory` (None: of the devices here). With
    data.capacity_factor auto, ranks have room for their even share of tokens. A plan that is not `proved` is for
    comparison only. Raises PentadError for a schedule, model or transport that loading could not refuse.
    """
    assert device in ("cpu", "cuda"), device
    assert "auto" not in (config.memory.recompute, config.zero.max_gathered), "the planner has not chosen yet"
    if config.memory.offload_fraction == "auto":
        make = partial(make_plan, device=device, hosts=hosts, model=model, units=units, proved=False)
        room = memory or device_memory(device, gpu=gpu_of(config.cluster))
        return choose_tiers(config, room, host_memory(config, device), make, proved=proved)
    hosts, dtype = assumed_hosts(config) if hosts is None else hosts, compute_dtype(config, device)
    model = config.model_spec(dtype) if model is None else model
    order, layout = layout_of(config, model, device)
    stages = split(model, layout.placement, config.batch.sequence_length, config.schedule.layers_per_stage)
    units = units or default_units(config, model, layout, dtype)
    layers = split_layers_into_units(stages, units)
    fractions = config.memory.fractions(layers) if fractions is None else fractions
    options = _memory_options(config, units, layout, model, layers, fractions, device)
    costs = _guessed(config, model, device, layout, units, layers, options.zero, fractions)
    on_one_host = are_on_one_host(config.mesh.mesh, ("pp",), hosts)
    is_gated = {"gloo": False, "peer": not on_one_host, "nccl": True}[transport_of(config, device, hosts)]

    def compiled(microbatches: int, order: Program | None) -> Program:
        return compile_program(
            config.schedule.name if order is None else order.name,
            config.mesh.pp,
            microbatches,
            costs=costs,
            gated=is_gated,
            replicas=config.mesh.replicas,
            post_validation=config.schedule.post_validation,
            options=config.options,
            memory_options=options,
            # a user's function may plan with costs, so it is called again now that they are known
            order=None if order is None or ":" in order.name else order,
            proved=proved,
        )

    program = compiled(config.schedule.microbatches, order)
    others = _other_programs(config, model, device, program, compiled)
    plan = replace(draft(config, model, device, program, layers, hosts=hosts, zero=options.zero), **others)
    _require_peers(config, plan)
    plan = with_slots(replace(plan, eval=_eval(config, program, costs, options, gated=is_gated), offload=fractions))
    return _with_graphs(config.cluster.cuda_graphs, plan, costs, memory or device_memory(device, gpu=plan.gpu))


def _with_graphs(wanted: bool | None, plan: Plan, costs: Costs, room: DeviceMemory) -> Plan:
    """The plan, whose costs are `costs`, with compute launched as CUDA graphs if `wanted`; None: if compute gains from
    it and memory suffices. If `wanted`, raises PentadError for a plan whose steps rarely or never repeat an earlier
    one, or that communicates inside layers other than by peer copies."""
    found = reasons_against_graphs(plan)
    if wanted and found:
        raise PentadError(f"cluster.cuda_graphs is true: expected false with {found[0]}")
    if found or wanted is False:
        return plan
    assert plan.rates is not None
    graphs = replace(plan, cuda_graphs=True, rates=launched(plan.rates))
    if wanted:
        return graphs
    gains = _compute_seconds(costs) > GRAPHS_GAIN * _compute_seconds(costs_of(graphs))
    return graphs if gains and fit_of(graphs, room).ok else plan


def reasons_against_graphs(plan: Plan) -> list[str]:
    """What keeps a plan's compute from being launched as graphs, worded to follow 'with'."""
    by_nccl = [each for each in LAYER_AXES if getattr(plan.mesh, each) > 1 and plan.transport_along(each) == "nccl"]
    reasons = {
        "CPU ranks": plan.device == "cpu",
        "precision.kernels = torch, whose references wait for the GPU": plan.kernels.name == "torch",
        "model.custom, whose backward is that of autograd": plan.model.custom is not None,
        "memory.offload_fraction, since what comes back lies elsewhere": any(plan.offload),
        "data.document_mask, since every step has other documents": plan.data.document_mask,
        "data.balance = dynamic, since every step has other groups": plan.batch.capacity > 0,
        f"mesh.{' and mesh.'.join(by_nccl)} over NCCL": bool(by_nccl),
        "mesh.ep_capacity, since slots may grow": plan.expert_slots > 0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _compute_seconds(costs: Costs) -> float:
    """Seconds of F, B and W of a microbatch, summed over all stages."""
    return sum(map(sum, (costs.forward, costs.backward, costs.weight)))


def _guessed(
    config: RunConfig,
    model: ModelSpec,
    device: str,
    layout: Layout,
    units: tuple[int, ...],
    layers: Sequence[LayerRange],
    zero: int,
    fractions: tuple[float, ...],
) -> Costs:
    """The costs of units before there is a program."""
    rates = rates_for(config.cluster, device)
    piece = first_piece(config, device, layout.slices, fp8_spec(config, model, rates))
    _require_countable(model, layers, piece)
    modes = config.memory.modes(units, layers)
    stage_of = [stage for stage, count in enumerate(units) for _ in range(count)]
    moved = [each.bytes for each in cuts(model, layers, stage_of, piece, modes, fractions)]
    placement = place_units(layout.placement, units)
    given = model, layers, placement, piece, rates, modes, zero, config.lora_spec, moved
    host_optimizer = config.memory.optimizer == "host"
    return guess_costs(*given, host_optimizer=host_optimizer, bf16_reduce=config.precision.bf16_reduce)


def _require_countable(model: ModelSpec, layers: Sequence[LayerRange], piece: Piece) -> None:
    """Raises PentadError for sizes beyond any memory, whose bytes over all ranks may not fit into 64 bits."""
    if (parameters := num_parameters(model)) > MOST_NUMBERS:
        raise PentadError(f"model has {parameters:.1e} parameters: expected at most {MOST_NUMBERS:.1e}")
    saved = (offloadable(model, each, piece, "none", is_sent=False) for each in layers if model.custom is None)
    if (activations := sum(map(sum, saved))) > MOST_NUMBERS:
        found = f"model and batch have {activations:.1e} bytes of activations a microbatch"
        raise PentadError(f"{found}: expected at most {MOST_NUMBERS:.1e}")


def _other_programs(
    config: RunConfig,
    model: ModelSpec,
    device: str,
    program: Program,
    compiled: Callable[[int, Program | None], Program],
) -> dict[str, Any]:
    """The programs for other microbatch counts than that of `program`, as fields of a plan."""
    batch = batch_spec(config)
    counts = {"rampup_programs": batch.rampup_microbatches, "longer_programs": batch.longer}
    orders = {count: compute_order(config, model, device, count) for count in chain(*counts.values())}
    _require_same_stages(config, program, list(orders.values()))
    return {name: tuple(compiled(count, orders[count]) for count in of) for name, of in counts.items()}


def _require_same_stages(config: RunConfig, program: Program, orders: Sequence[Program | None]) -> None:
    """Raises PentadError if one of the `orders` for other microbatch counts places stages differently from the program,
    so that weights would have to move between steps. Orders of the catalogue (None) never do."""
    for order in orders:
        if order is not None and (order.placement, order.slices) != (program.placement, program.slices):
            counts = f"{order.microbatches} and {program.microbatches} microbatches"
            found = f"schedule.name is {config.schedule.name}, which places stages differently for {counts}"
            raise PentadError(f"{found}: expected a schedule with the same placement for both")


def first_plan(config: RunConfig) -> Plan:
    """The plan that a run begins with, made before anything is started or written.

    On a local cluster, ranks must fit on the devices of this machine, if those are known. Raises PentadError.
    """
    assert config.data.capacity_factor != "auto", "the planner has not chosen yet"
    if config.cluster.address != "local":
        return assumed_plan(config)
    device, _ = local_device(config.cluster, config.mesh.size)
    plan = make_plan(config, device)
    require_shards(config, plan)
    require_host(config, plan)
    found = fit_of(plan, device_memory(device, gpu=plan.gpu))
    if not found.ok and (device == "cpu" or plan.gpu == gpu_name()):
        raise PentadError(f"run {config.run.name} {found.sentence}")
    return plan


def assumed_plan(config: RunConfig) -> Plan:
    """The plan for a cluster that has not been joined yet: on GPUs unless the configuration says otherwise, NODE_GPUS a
    host. `plan_on` corrects it."""
    device = "cpu" if config.cluster.device == "cpu" else "cuda"
    plan = make_plan(config, device)
    require_shards(config, plan)
    return plan


def assumed_hosts(config: RunConfig) -> tuple[int, ...]:
    """The host of each rank, with NODE_GPUS ranks a host; all on one host with cluster.transport peer."""
    return () if config.cluster.transport == "peer" else hosts_of_size(config.mesh.mesh, NODE_GPUS)


def draft(
    config: RunConfig,
    model: ModelSpec,
    device: str,
    program: Program,
    layers: tuple[LayerRange, ...],
    *,
    hosts: tuple[int, ...],
    zero: int = 0,
) -> Plan:
    """A plan with a given program."""
    batch, rates = batch_spec(config), rates_for(config.cluster, device)
    slice_tokens = batch.micro_batch_size * batch.sequence_length // program.slices // config.mesh.cp
    plan = Plan(
        name=config.run.name,
        mesh=config.mesh.mesh,
        program=program,
        layers=layers,
        model=model,
        batch=batch,
        optimizer=optimizer_spec(config),
        data=_with_absolute_paths(config.data.spec),
        seed=config.run.seed,
        dtype=compute_dtype(config, device),
        device=device,
        transport=transport_of(config, device, hosts),
        hosts=hosts if device == "cuda" else (),
        deterministic=config.precision.deterministic,
        zero=zero,
        zero_shards=(config.zero.shards or 0) if zero else 0,
        bf16_reduce=config.precision.bf16_reduce,
        cp_method=config.mesh.cp_method,
        expert_slots=slots_for(config, config.mesh.mesh, device, slice_tokens),
        spikes=config.spikes.spec,
        replicate_every=config.elastic.replicate_every,
        notice=config.elastic.notice,
        lora=config.lora_spec,
        tp_across_nodes=config.mesh.tp_across_nodes,
        recompute=config.memory.modes(program.units or (1,) * program.stages, layers),
        recompute_fraction=row_fraction(config),
        logit_rows=logit_rows(config, config.mesh.mesh, compute_dtype(config, device)),
        offload_prefetch=config.memory.offload_prefetch or 1,
        host_optimizer=config.memory.optimizer == "host",
        fp8=fp8_spec(config, model, rates),
        gpu=gpu_of(config.cluster) if device == "cuda" else "",
        rates=rates,
        profile_steps=tuple(config.metrics.profile_steps),
    )
    require_fp8(plan, config.cluster.gpu or gpu_name())
    if config.data.balance == "dynamic":
        require_groups(config, model, program)
    return with_kernels(config, replace(plan, batch=divided(config, plan)))


def _eval(config: RunConfig, program: Program, costs: Costs, options: MemoryOptions, *, gated: bool) -> EvalSpec | None:
    """The evaluation of a run; None if it has no data for one."""
    held_out = [EvalData(name, _place(path), config.data.holdout) for name, path in config.data.held_out.items()]
    data_sets = *held_out, *(EvalData(each.name, _place(each.path)) for each in config.eval.data or ())
    if not data_sets:
        return None
    forward = compile_forward_only(program, costs, gated=gated, memory_options=options)
    return EvalSpec(forward, data_sets, config.eval.sequences)


def require_shards(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError if ZeRO is configured and no stage has a second holder to share with."""
    if config.zero.stage and not plan.zero:
        found = "mesh.dp x mesh.cp x mesh.ep is 1, so there is nothing to shard"
        raise PentadError(f"zero.stage is {config.zero.stage}, but {found}: expected zero.stage 0, or more replicas")


def _memory_options(
    config: RunConfig,
    units: tuple[int, ...],
    layout: Layout,
    model: ModelSpec,
    layers: Sequence[LayerRange],
    fractions: tuple[float, ...],
    device: str,
) -> MemoryOptions:
    """The configured options, without ZeRO if every stage has only one holder."""
    section, found = config.zero, config.memory.options(units, layers, fractions)
    if config.mesh.replicas == 1 and not layout.has_mirrors:
        return found
    gathered = section.max_gathered
    assert gathered != "auto"
    fp8 = fp8_spec(config, model, rates_for(config.cluster, device)) if section.stage == 3 else None
    itemsize = BYTES[compute_dtype(config, device)]
    return found._replace(
        zero=section.stage,
        prefetch=section.prefetch,
        max_gathered=(gathered or default_gathered(units)) if section.stage == 3 else None,
        reduce=section.reduce if section.stage > 1 else "step",  # only for sharded gradients
        sizes=pool_sizes(
            model,
            config.lora_spec,
            layers,
            config.mesh.mesh,
            1 + layout.has_mirrors,
            fp8,
            itemsize,
            section.shards or 0,
        ),
    )


def default_gathered(units: Sequence[int]) -> int | None:
    """GATHERED_UNITS if stages are cut into units, else None."""
    return GATHERED_UNITS if max(units) > 1 else None


def with_inputs_of(plan: Plan, other: Plan) -> Plan:
    """The plan with the opened data, the frozen weights and the age of moments of another plan of the same run."""
    optimizer = replace(plan.optimizer, moment_offset=other.optimizer.moment_offset)
    found = replace(plan, data=other.data, lora=other.lora, optimizer=optimizer)
    if plan.eval is None or other.eval is None:
        return found
    return replace(found, eval=replace(plan.eval, data_sets=other.eval.data_sets))


def _with_absolute_paths(data: DataSpec) -> DataSpec:
    """Workers may have a different working folder than the user."""
    sources = tuple(replace(source, path=_place(source.path)) for source in data.sources)
    return replace(data, sources=sources, cache=_absolute(data.cache))


def _place(path: str) -> str:
    return path if ":" in path else _absolute(path)


def _absolute(path: str) -> str:
    return os.path.abspath(expanded(path))


def transport_of(config: RunConfig, device: str, hosts: tuple[int, ...]) -> str:
    """The transport of a plan with ranks on these hosts: 'nccl' also if no two ranks share a host."""
    if device == "cpu":
        return "gloo"
    if config.mesh.size == 1 or config.cluster.transport == "nccl":
        return "nccl"
    is_shared = not hosts or len(set(hosts)) < len(hosts)
    return "peer" if is_shared or config.cluster.transport == "peer" else "nccl"


def _require_peers(config: RunConfig, plan: Plan) -> None:
    """Raises PentadError if cluster.transport is peer, but ranks that exchange by peer copies are on several hosts."""
    if config.cluster.transport != "peer" or not plan.hosts:
        return
    on_one = replace(plan, hosts=())
    apart = [axis for axis in ORDER if on_one.transport_along(axis) != plan.transport_along(axis)]
    if apart:
        along = " and ".join(f"mesh.{axis}" for axis in apart)
        found = f"cluster.transport is peer, but ranks along {along} are on several of {len(set(plan.hosts))} hosts"
        raise PentadError(f"{found}: expected auto or nccl")
