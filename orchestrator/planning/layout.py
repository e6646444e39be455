"""How a run lays out its model before anything is compiled: compute order, layers of stages and their units; and its
batches, including those of data-aware groups (data.balance dynamic)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pentad.orchestrator.activations.allocations import BYTES, Piece, piece_of, wide_bytes
from pentad.orchestrator.activations.kernel_choice import Shape, kernel_shapes
from pentad.orchestrator.config.config import Layout, RunConfig
from pentad.orchestrator.planning.cost_model import Kind, compute_seconds, guess_costs, kind_of
from pentad.orchestrator.planning.hardware import gpu_of, links_of, ranks_on_host, rates_for, rates_of
from pentad.orchestrator.planning.numerics import fp8_spec, named_kernels
from pentad.orchestrator.planning.parameter_collectives import local_parameters
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.units import place_units
from pentad.schedules.search.auto import AUTO, choose
from pentad.schedules.search.problem import Objective
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import acyclic_events
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.plan import Plan, num_units, split_layers, split_layers_by_cost, split_layers_into_units
from pentad.schedules.spec.row_slots import expert_slots, routed_share
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import LayerRange, head_in_layers, layers_of_sizes

UNIT_BYTES = 400 * 2**20  # of gradients: large enough for the full speed of a link, small beside a backward
LOGIT_BYTES = 512 * 2**20  # of a chunk
TILE_ROWS = 128
CAPACITY_FACTOR = 1.25  # for ranks of data-aware groups, unless configured
# 'auto' also times the gradient reductions of at most MOST_NEAR orders whose steps are at most NEAR longer than the
# best.
MOST_NEAR, NEAR = 5, 0.05
LONGER = 4  # at most this many programs with more microbatches than schedule.microbatches
Placement = Sequence[Sequence[int]]


def unit_placement(config: RunConfig, device: str) -> tuple[tuple[int, ...], ...]:
    """The units of every pipeline rank in `make_plan`, which are known before anything is compiled."""
    dtype = compute_dtype(config, device)
    model = config.model_spec(dtype)
    _, layout = layout_of(config, model, device)
    return place_units(layout.placement, default_units(config, model, layout, dtype))


def layout_of(config: RunConfig, model: ModelSpec, device: str) -> tuple[Program | None, Layout]:
    """The result of `compute_order`, and the placement of stages by it or else by the catalogue's schedule."""
    order = compute_order(config, model, device, config.schedule.microbatches)
    layout = config.layout() if order is None else Layout.of(order)
    assert layout is not None
    config.check_layout(layout, model)
    return order, layout


def default_units(config: RunConfig, model: ModelSpec, layout: Layout, dtype: str) -> tuple[int, ...]:
    """`units_of` the stages of a layout."""
    stages = split(model, layout.placement, config.batch.sequence_length, config.schedule.layers_per_stage)
    shared = config.mesh.replicas > 1 or layout.has_mirrors
    return units_of(config, model, stages, config.mesh.mesh, dtype, shared=shared)


def units_of(
    config: RunConfig, model: ModelSpec, stages: Sequence[LayerRange], mesh: Mesh, dtype: str, *, shared: bool
) -> tuple[int, ...]:
    """The number of units of each stage, given its layers. A unit has memory.unit_layers layers; by default one where
    layers recompute or are offloaded, and at most UNIT_BYTES of gradients where ranks have `shared` parameters, so that
    some are reduced while backward continues. A custom model recomputes whole stages."""
    found, lora, parameters = [], config.lora_spec, dict[Kind, int]()
    for layers in stages:
        size = config.memory.unit_layers or len(layers.numbers)
        if config.memory.unit_layers is None and config.memory.by_layer and model.custom is None:
            size = 1
        elif config.memory.unit_layers is None and shared:
            inner = LayerRange(layers.first, layers.end)
            if (kind := kind_of(model, None, inner)) not in parameters:
                parameters[kind] = sum(local_parameters(model, lora, inner, mesh))
            size = max(1, int(size * UNIT_BYTES / max(1, wide_bytes(dtype) * parameters[kind])))
        found.append(num_units(layers, size))
    return tuple(found)


def compute_order(config: RunConfig, model: ModelSpec, device: str, microbatches: int) -> Program | None:
    """The compute order with this many microbatches, for a schedule from a file or 'auto', whose layout is known only
    from its program. None for a schedule of the catalogue.

    'auto' takes the order with the shortest step at guessed costs, or, without a barrier at the end of a step, the
    order whose busiest rank ends first; or the order that the run was re-planned to.
    """
    section, ranks = config.schedule, config.mesh.pp
    if section.name in CATALOGUE:
        return None
    if section.name != AUTO:
        return generate(section.name, ranks, microbatches, config.options)
    if section.order is not None and section.order.microbatches == microbatches:
        return section.order

    def costs_of(placed: Program) -> Costs | None:
        given = section.layers_per_stage
        if model.layers < placed.stages or (given is not None and len(given) != placed.stages):
            return None
        layers = split(model, placed.placement, config.batch.sequence_length, given)
        return _order_costs(config, model, device, layers, placed.placement)

    objective = objective_of(config)
    found = choose(ranks, microbatches, costs_of, section.options, objective)
    most = found.best.step(objective) * (1 + NEAR)
    near = {each.program.hash: each.program for each in found.candidates if each.step(objective) <= most}
    orders = list(near.values())[:MOST_NEAR]
    reduces = config.mesh.replicas > 1 or any(Layout.of(each).has_mirrors for each in orders)
    if objective == "longest" or not reduces:
        return found.best.program
    return min(orders, key=lambda order: _seconds_with_reductions(config, model, device, order))


def _order_costs(
    config: RunConfig, model: ModelSpec, device: str, layers: Sequence[LayerRange], placement: Placement
) -> Costs:
    """Costs of stages or units with no sliced sequences, recomputation or offloading."""
    rates = rates_for(config.cluster, device)
    piece = first_piece(config, device, 1, fp8_spec(config, model, rates))._replace(cp_method="ring")
    return guess_costs(model, layers, placement, piece, rates, zero=config.zero.stage, lora=config.lora_spec)


def _seconds_with_reductions(config: RunConfig, model: ModelSpec, device: str, order: Program) -> float:
    """Seconds of a step in this order, including the reductions of gradients between ranks with the same parameters;
    ZeRO-2 and 3 are timed as ZeRO-1."""
    layout = Layout.of(order)
    units = default_units(config, model, layout, compute_dtype(config, device))
    stages = split(model, layout.placement, config.batch.sequence_length, config.schedule.layers_per_stage)
    placement = place_units(layout.placement, units)
    costs = _order_costs(config, model, device, split_layers_into_units(stages, units), placement)
    program = compile_program(
        order.name,
        *(order.ranks, order.microbatches),
        costs=costs,
        replicas=config.mesh.replicas,
        memory_options=MemoryOptions(units=units, zero=min(config.zero.stage, 1)),
        order=order,
        proved=False,
    )
    times = event_times(program, acyclic_events(program), costs)
    return float(times.ends.max() - times.starts.min())


def objective_of(config: RunConfig) -> Objective:
    """What 'auto' minimizes."""
    return "longest" if config.schedule.post_validation else "makespan"


def split(
    model: ModelSpec, placement: Placement, length: int, given: Sequence[int] | None = None
) -> tuple[LayerRange, ...]:
    """The layers of each stage: as `given`, or so that the busiest rank does as little as possible."""
    if given is not None:
        return layers_of_sizes(given, has_ends=model.custom is None)
    if model.custom is not None:
        return split_layers_by_cost([layer.flops for layer in model.custom.layers], placement)
    return split_layers(model.layers, placement, head_in_layers(model, length))


def batch_spec(config: RunConfig) -> BatchSpec:
    """The samples of a step."""
    section, replicas = config.batch, config.mesh.dp * config.mesh.ep
    sizes = section.global_batch_size, section.sequence_length, config.schedule.microbatches
    return BatchSpec(*sizes, replicas, section.sizes.rampup, longer=_longer(config))


def _longer(config: RunConfig) -> tuple[int, ...]:
    """The microbatch counts of longer steps that get a program of their own, up to data.microbatch_factor. A few
    suffice, as microbatches without documents are skipped. Multiples of the group or pipeline size if
    schedule.microbatches is one, for schedules that need that."""
    count, unit = config.schedule.microbatches, config.schedule.group or config.mesh.pp
    if config.data.balance != "dynamic":
        return ()
    unit = 1 if count % unit else unit
    further = int(count * config.data.microbatch_factor + 1e-9) // unit - count // unit
    return tuple(sorted({count + unit * -(-further * part // LONGER) for part in range(1, LONGER + 1)} - {count}))


def first_piece(config: RunConfig, device: str, slices: int, fp8: Fp8Spec | None) -> Piece:
    """What a rank computes at once, in steps with the full batch."""
    batch, mesh = batch_spec(config), config.mesh.mesh
    length = batch.sequence_length // slices // mesh.cp
    sizes = batch.micro_batch_size, length, compute_dtype(config, device), device, slices
    gpu, fraction = gpu_of(config.cluster) if device == "cuda" else "", row_fraction(config)
    found = Piece(*sizes, mesh, config.mesh.cp_method, fp8=fp8, gpu=gpu, recompute_fraction=fraction)
    slots = slots_for(config, mesh, device, found.tokens)
    return found._replace(
        logit_rows=logit_rows(config, mesh, found.dtype),
        expert_slots=slots,
        zero_shards=config.zero.shards or 0,
        kernels=named_kernels(config.precision, gpu),
    )


def shapes_of(config: RunConfig, device: str) -> list[Shape]:
    """The shapes of a run's kernel calls whose implementations `pentad calibrate` measures."""
    layout = config.layout()
    if config.model.custom is not None or layout is None or config.data.balance == "dynamic":
        return []
    mask, deterministic = config.data.document_mask, config.precision.deterministic
    piece = first_piece(config, device, layout.slices, None)._replace(document_mask=mask, deterministic=deterministic)
    return kernel_shapes(config.model.spec, piece)


def slots_for(config: RunConfig, mesh: Mesh, device: str, tokens: int) -> int:
    """The `expert_slots` of a mesh's ranks with so many tokens. By default there are none on CPUs, on GPUs that share a
    host, and in runs whose steps cannot be repeated with more slots. Raises PentadError if such a run asks for slots.
    """
    capacity, experts = config.mesh.ep_capacity, config.model.experts
    reasons = {
        "schedule.post_validation = true, where steps change weights before the norm is known": (
            config.schedule.post_validation
        ),
        "data.balance = dynamic, where ranks have unlike numbers of tokens": config.data.balance == "dynamic",
        "memory.offload_fraction or memory.max_resident_microbatches, as host memory has no room for more": (
            config.memory.offload_fraction != 0 or config.memory.max_resident_microbatches is not None
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if capacity and found:
        raise PentadError(f"mesh.ep_capacity is {capacity:g}: expected 0 or null with {found[0]}")
    along: tuple[Axis, ...] = ("ep",)
    on_host = ranks_on_host(mesh, along)
    by_default = device == "cuda" and mesh.ep > on_host and not found
    if experts is None or mesh.ep == 1 or (capacity is None and not by_default):
        return 0
    return expert_slots(routed_share(experts, mesh.ep), tokens, capacity, on_host)


def logit_rows(config: RunConfig, mesh: Mesh, dtype: str) -> int:
    """The rows of a chunk of logits in this compute dtype: at most LOGIT_BYTES, in full tiles if a tile fits; 0: all
    logits are kept. Raises PentadError for models whose logits cannot be made in chunks."""
    if config.memory.logits != "recompute":
        return 0
    if found := kept_logits(config):
        raise PentadError(f"memory.logits is recompute with {found}: expected keep or auto")
    rows = LOGIT_BYTES * mesh.tp // (config.model.vocab * BYTES[dtype])
    return max(1, rows // TILE_ROWS * TILE_ROWS or rows)


def kept_logits(config: RunConfig) -> str:
    """Why the logits cannot be made in chunks, '' if they can."""
    if config.precision.fp8_head:
        return "precision.fp8_head = true"
    return "model.custom, whose loss is its own" if config.model.custom is not None else ""


def row_fraction(config: RunConfig) -> float:
    """memory.recompute_fraction, once it is known."""
    found = config.memory.recompute_fraction
    assert found != "auto", "the planner has not chosen yet"
    return found


def compute_dtype(config: RunConfig, device: str) -> str:
    """precision.compute, or for 'auto' the default of 'cpu' or 'cuda' devices."""
    chosen = config.precision.compute
    return {"cuda": "bfloat16", "cpu": "float32"}[device] if chosen == "auto" else chosen


def divided(config: RunConfig, plan: Plan) -> BatchSpec:
    """A plan's batch, divided as data.balance says."""
    section = config.data
    if section.balance == "none":
        return plan.batch
    given = section.document_costs
    costs = document_costs(plan) if given == "auto" else DocumentCosts(given[0], 1.0, given[1])
    batch = replace(plan.batch, document_costs=costs)
    factor = 1.0 if section.capacity_factor == "auto" else section.capacity_factor
    return grouped(replace(plan, batch=batch), factor) if section.balance == "dynamic" else batch


def grouped(plan: Plan, factor: float = CAPACITY_FACTOR) -> BatchSpec:
    """A plan's batch with data-aware groups, in which a rank holds at most `factor` times its even share of tokens."""
    batch, mesh = plan.batch, plan.mesh
    even = batch.micro_batch_size * batch.sequence_length / mesh.cp
    unit = math.lcm(2, mesh.tp)  # a shared sequence has two chunks, and tp ranks divide its tokens
    costs = batch.document_costs or document_costs(plan)
    return replace(batch, document_costs=costs, capacity=unit * math.ceil(factor * even / unit))


def document_costs(plan: Plan) -> DocumentCosts:
    """Seconds of F, B and W at the plan's rates, relative to a token without attention. Attention is quadratic in a
    document's tokens, at its rate for a full sequence. Rounded, for config.yaml."""
    model, mesh, length = plan.model, plan.mesh, plan.batch.sequence_length
    rates, whole = plan.rates or rates_of(plan.device, plan.gpu), LayerRange(0, model.layers, True, True)
    tokens, alone = plan.batch.micro_batch_size * length, Mesh(tp=mesh.tp, ep=mesh.ep)

    def seconds(of: int) -> float:
        piece = piece_of(plan)._replace(rows=tokens // of, length=of, slices=1, mesh=alone)
        found = compute_seconds(model, whole, piece, rates)
        return (found.forward + found.backward + found.weight) / tokens

    link = links_of(rates, mesh, ("cp" if mesh.cp > 1 else "dp",), in_layers=True).send
    attention = (seconds(length) - seconds(1)) / max(1, length - 1)
    linear = seconds(1) - attention
    ring = _ring_bytes(model, plan.dtype) / link.bandwidth
    return DocumentCosts(*(float(f"{each / linear:.4g}") for each in (attention, linear, ring)))


def _ring_bytes(model: ModelSpec, dtype: str) -> int:
    """Bytes that a rank receives for each token: keys and values in F and in B, and the sums of their gradients."""
    width = model.kv_heads * 2 * model.qk_head_dim
    if model.mla is not None:
        width = model.heads * (model.qk_head_dim + model.mla.v_head_dim)
    return model.layers * width * (2 * BYTES[dtype] + wide_bytes(dtype))


def require_groups(config: RunConfig, model: ModelSpec, program: Program) -> None:
    """Raises PentadError for what data-aware groups do not support."""
    for error in _group_rules(config, model, program):
        raise PentadError(f"{error} for data.balance dynamic")


def _group_rules(config: RunConfig, model: ModelSpec, program: Program) -> Iterator[str]:
    schedule, memory = config.schedule.name, config.memory
    if model.custom is not None:
        yield "model.custom is set: expected null"
    if model.mtp_layers:
        yield f"model.mtp_layers is {model.mtp_layers}: expected 0"
    if config.mesh.cp_method != "ring":
        yield f"mesh.cp_method is {config.mesh.cp_method}: expected ring"
    if config.precision.matmul != "compute":
        yield f"precision.matmul is {config.precision.matmul}: expected compute"
    if config.elastic.check_every:  # its inputs are sequences
        yield f"elastic.check_every is {config.elastic.check_every}: expected 0"
    if memory.max_resident_microbatches is not None:
        yield f"memory.max_resident_microbatches is {memory.max_resident_microbatches:g}: expected null"
    if program.slices > 1:
        yield f"schedule.name is {schedule}, which cuts sequences into {program.slices} slices: expected another one"
    if any(isinstance(action, Overlap) for stream in program.streams for action in stream):
        yield f"schedule.name is {schedule}, which overlaps microbatches: expected another one"
