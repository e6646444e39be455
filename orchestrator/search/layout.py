"""How a setting lays out a model: the layers of stages and units, and what each costs and holds.

Settings with the same mesh, microbatch size and placement of stages share a layout, and thus these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from pentad.orchestrator.activations.allocations import BYTES, Piece
from pentad.orchestrator.activations.offloaded_tensors import cuts
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.cost_model import (
    Kind,
    end_seconds,
    guess_costs,
    kind_of,
    stage_seconds,
    transfer_seconds,
)
from pentad.orchestrator.planning.estimate import num_rotary_tables
from pentad.orchestrator.planning.hardware import gpu_of, is_on_host, launched, rates_for
from pentad.orchestrator.planning.layout import logit_rows, slots_for, split, units_of
from pentad.orchestrator.planning.numerics import fp8_spec, named_kernels
from pentad.orchestrator.planning.parameter_collectives import (
    gather_seconds,
    local_parameters,
    num_mirrors,
    parameters_in_8_bits,
    reduction_seconds,
    replica_seconds,
)
from pentad.orchestrator.planning.planning import default_gathered
from pentad.orchestrator.search.offload_bounds import Copies
from pentad.orchestrator.search.space import Order, Placement, Setting, placement_of
from pentad.orchestrator.search.units import UnitBytes, Units
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.units import split_into_units
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.mesh import LAYER_AXES, Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import LayerRange
from pentad.schedules.spec.validate import check_divisibility

T = TypeVar("T")


class Compute(NamedTuple):
    """Seconds of one piece in consecutive layers."""

    forward: float
    backward: float
    weight: float


def _in_layers(piece: Piece) -> Piece:
    """The piece with only the parts of its mesh that layers depend on."""
    return piece._replace(mesh=replace(piece.mesh, dp=1, pp=1), zero_shards=0)


class Work:
    """What is to be planned: a configuration on GPUs, and what all its layouts share. In every setting, all layers
    recompute in one of `modes`."""

    def __init__(self, config: RunConfig, modes: Sequence[str] = ("none",)) -> None:
        self.config, self.model, self.modes = config, config.model_spec("bfloat16"), modes
        self.dtype = "bfloat16" if config.precision.compute == "auto" else config.precision.compute
        self.lora, self.gpu, self.rates = config.lora_spec, gpu_of(config.cluster), rates_for(config.cluster, "cuda")
        self.launched = launched(self.rates)
        self.fp8, self.kernels = fp8_spec(config, self.model, self.rates), named_kernels(config.precision, self.gpu)
        self.with_units, self.piece = cache(self._with_units), cache(self._piece)
        self.stages, self.end_seconds, self.order = cache(self._stages), cache(self._end_seconds), cache(self._order)
        self.copies_of, self.slices = cache(self._copies_of), cache(self._slices)
        self.state: dict[tuple[Mesh, int, Placement, int, bool], int] = {}  # lower bounds on its bytes, by ZeRO stage
        self.state_of: dict[tuple[Mesh, int, Units], dict[object, int]] = {}  # without slots of peer copies
        self.counts: dict[tuple[Order, int, int, int], Any] = {}  # placement_bounds.py
        self._counts: dict[tuple[Placement, int, int, int | None, bool], tuple[int, ...]] = {}
        self._units = cache(lambda placement, counts: Units(placement, self.stages(placement), counts, self.kind))
        self.laid_out = cache(partial(Layout, self))
        self._kinds: dict[LayerRange, int] = {}
        self._numbers: dict[Kind, int] = {}
        self.unit_bytes: dict[Piece, dict[tuple[int, str, float], UnitBytes]] = {}  # by piece
        self._compute: dict[tuple[Piece, bool], dict[int, Compute]] = {}  # by piece, and whether without graphs
        self._reduce: dict[tuple[Mesh, int, int, int, int], tuple[float, float]] = {}
        self._gather: dict[tuple[Mesh, int, int, int], float] = {}
        self._parameters: dict[tuple[int, int, int], tuple[int, int]] = {}

    def _with_units(self, layers: int | None) -> RunConfig:
        """The configuration with this many layers in a unit, whatever recomputes."""
        changed = {"unit_layers": layers, "recompute": "none", "offload_fraction": 0.0}
        return self.config.model_copy(update={"memory": self.config.memory.model_copy(update=changed)})

    @property
    def length(self) -> int:
        return self.config.batch.sequence_length

    def _order(self, order: Order, ranks: int, microbatches: int, slices: int) -> Program:
        """The compute order of a schedule that does not plan with costs."""
        options = order.options._replace(slices=slices if slices > 1 else None)
        return generate(order.name, ranks, microbatches, options)

    def _copies_of(self, order: Order, ranks: int, microbatches: int, slices: int, units: Units) -> Copies:
        """The copies of the compute order of a schedule that does not plan with costs."""
        return self.copies(self.order(order, ranks, microbatches, slices), units)

    def copies(self, order: Program, units: Units) -> Copies:
        copied = [unit for unit, held in enumerate(units.layers) if held.numbers]
        cut = split_into_units(order, units.counts)
        return Copies(cut, copied, self.config.memory.offload_prefetch or 1, order)

    def _slices(self, order: Order) -> int:
        if CATALOGUE[order.name].slices == 1 or order.options.slices:
            return order.options.slices or 1
        return next(k for k in range(CATALOGUE[order.name].slices, 0, -1) if self.length % k == 0)

    def _piece(self, mesh: Mesh, microbatches: int, slices: int, shards: int = 0) -> Piece:
        """Raises PentadError for sizes that do not divide."""
        rows = self.config.batch.global_batch_size // (mesh.dp * mesh.ep * microbatches)
        if self.model.custom is not None and mesh.tp * mesh.cp * mesh.ep > 1:
            raise PentadError(f"mesh is {mesh}: expected dp and pp only for model.custom")
        if shards and (holders := mesh.dp * mesh.cp * (1 if self.model.experts else mesh.ep)) % shards:
            raise PentadError(f"zero.shards is {shards}: expected a divisor of {holders}, on {mesh}")
        method, length = self.config.mesh.cp_method, self.config.batch.sequence_length
        check_divisibility(self.model, mesh, length, rows, slices, method)
        sizes = rows, length // slices // mesh.cp
        found = Piece(*sizes, self.dtype, "cuda", slices, mesh, method, fp8=self.fp8, gpu=self.gpu)
        slots = slots_for(self.config, mesh, "cuda", found.tokens)
        return found._replace(
            logit_rows=logit_rows(self.config, mesh, self.dtype),
            expert_slots=slots,
            zero_shards=shards,
            kernels=self.kernels,
        )

    def layout(
        self, mesh: Mesh, microbatches: int, order: Order, unit_layers: int | None, *, by_layer: bool, shards: int = 0
    ) -> Layout:
        """Raises PentadError for sizes that do not divide."""
        slices = self.slices(order)
        placement = placement_of(order, mesh.pp, microbatches, slices)
        piece = self.piece(mesh, microbatches, slices, shards)
        return self.laid_out(placement, piece, unit_layers, by_layer and unit_layers is None)

    def layout_of(self, setting: Setting) -> Layout:
        by_layer = setting.recompute != "none" or setting.offload > 0
        given = setting.mesh, setting.microbatches, setting.order, setting.unit_layers
        return self.layout(*given, by_layer=by_layer, shards=setting.shards or 0)

    def rates_of(self, mesh: Mesh) -> Rates:
        """Rates at which no plan on this mesh takes longer than at its own: those with CUDA graphs, if it may have
        them."""
        section, in_layers = self.config.cluster, mesh.tp * mesh.cp * mesh.ep
        is_peer = section.transport == "peer" or (section.transport == "auto" and is_on_host(mesh, LAYER_AXES))
        return self.launched if section.cuda_graphs is not False and (is_peer or in_layers == 1) else self.rates

    def compute(self, piece: Piece, span: LayerRange, rates: Rates | None = None) -> Compute:
        """Seconds of F, B and W of one piece in a span of layers, at `rates_of` the mesh or at the given rates."""
        rates = rates or self.rates_of(piece.mesh)
        known = self._compute.setdefault((_in_layers(piece), rates is self.rates), {})
        if (kind := self.kind(span)) not in known:
            stage = stage_seconds(self.model, span, piece, rates, self.lora)
            known[kind] = Compute(stage.forward, stage.backward, stage.weight)
        return known[kind]

    def reduce_seconds(self, piece: Piece, span: LayerRange, zero: int, mirrors: int) -> tuple[float, float]:
        """Seconds to all-reduce a span's gradients, or to reduce-scatter them twice (ZeRO); and to sum replicas."""
        mesh, shards = piece.mesh, piece.zero_shards
        key = mesh, shards, self.kind(span), zero, mirrors
        if key not in self._reduce:
            given = self.model, self.lora, span, mesh, self.rates
            among: dict[str, Any] = {"bf16": self.config.precision.bf16_reduce, "mirrors": mirrors, "shards": shards}
            replicas = replica_seconds(*given, **among) if zero and shards else 0.0
            self._reduce[key] = reduction_seconds(*given, zero, **among), replicas
        return self._reduce[key]

    def gather_seconds(self, piece: Piece, span: LayerRange, mirrors: int) -> float:
        """A lower bound, for any stage of ZeRO, on the seconds of an all-gather of a span's weights; frozen ones do not
        count."""
        key = piece.mesh, piece.zero_shards, self.kind(span), mirrors
        if key not in self._gather:
            given = self.model, self.lora, span, piece, self.rates
            self._gather[key] = min(gather_seconds(*given, zero, mirrors) for zero in (1, 3))
        return self._gather[key]

    def _end_seconds(self, mesh: Mesh, shards: int, placement: Placement, zero: int) -> tuple[float, float]:
        """Seconds of NORM and STEP on the fullest rank."""
        on_host = self.config.memory.optimizer == "host"
        given = self.model, self.stages(placement), placement, mesh, self.rates, zero, self.lora
        return end_seconds(*given, host_optimizer=on_host, shards=shards)

    def units(self, placement: Placement, mesh: Mesh, layers: int | None, *, shared: bool) -> Units:
        """Units of this many layers each; the default depends on whether ranks have `shared` parameters."""
        key = placement, mesh.tp, mesh.ep, layers, shared
        if key not in self._counts:
            given = self.with_units(layers), self.model, self.stages(placement), mesh, self.dtype
            self._counts[key] = units_of(*given, shared=shared)
        return self._units(placement, self._counts[key])

    def _stages(self, placement: Placement) -> tuple[LayerRange, ...]:
        """The layers of each stage."""
        return split(self.model, placement, self.length, self.config.schedule.layers_per_stage)

    def parameters(self, span: LayerRange, mesh: Mesh) -> tuple[int, int]:
        """Trained elements of layers on a rank: without experts, and of experts."""
        key = mesh.tp, mesh.ep, self.kind(span)
        if key not in self._parameters:
            self._parameters[key] = local_parameters(self.model, self.lora, span, mesh)
        return self._parameters[key]

    def kind(self, span: LayerRange) -> int:
        """A number for the kind of a span, on which its costs and sizes depend."""
        if span not in self._kinds:
            kind = kind_of(self.model, self.fp8, span)
            self._kinds[span] = self._numbers.setdefault(kind, len(self._numbers))
        return self._kinds[span]


@dataclass(frozen=True, eq=False)
class Layout:
    """Stages and units under one placement. `by_layer`: units have one layer by default."""

    work: Work
    placement: Placement
    piece: Piece
    unit_layers: int | None
    by_layer: bool
    known: dict[object, float] = field(default_factory=dict)  # bounds of all settings with this layout
    orders: dict[object, Order] = field(default_factory=dict)  # the first schedule with each compute order

    @property
    def model(self) -> ModelSpec:
        return self.work.model

    @property
    def mesh(self) -> Mesh:
        return self.piece.mesh

    @cached_property
    def holders(self) -> int:
        """Pipeline ranks that hold a stage: two for DualPipe."""
        return max(sum(0 in held for held in self.placement), 1)

    def gathered(self, given: int | None) -> int | None:
        """Units that a rank with ZeRO-3 keeps gathered at once, the default if none are given; None: all of them."""
        return given or default_gathered(self.units.counts)

    @cached_property
    def gains_by_graphs(self) -> bool:
        """Whether a plan may use CUDA graphs if they fit, and compute is slower without them."""
        work = self.work
        if work.config.cluster.cuda_graphs is not None or work.rates_of(self.mesh) is not work.launched:
            return False
        kinds = self.units.examples.values()
        return any(work.compute(self.piece, unit, work.rates) != work.compute(self.piece, unit) for unit in kinds)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same parameters."""
        return self.mesh.dp * self.mesh.ep * self.mesh.cp * self.holders > 1

    @cached_property
    def units(self) -> Units:
        """Units as `make_plan` cuts stages."""
        size = self.unit_layers or (1 if self.by_layer and self.model.custom is None else None)
        return self.work.units(self.placement, self.mesh, size, shared=self.is_shared)

    def _of_kinds(self, value: Callable[[LayerRange], T]) -> tuple[T, ...]:
        """A value of each unit."""
        found = {kind: value(unit) for kind, unit in self.units.examples.items()}
        return tuple(map(found.__getitem__, self.units.kinds))

    @cached_property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """Trained elements of each unit on a rank: without experts, and of experts."""
        return self._of_kinds(lambda unit: self.work.parameters(unit, self.mesh))

    @cached_property
    def unit_bytes(self) -> dict[tuple[int, str, float], UnitBytes]:
        """What is known so far, by a unit's kind, recomputation mode and offloaded share."""
        return self.work.unit_bytes.setdefault(_in_layers(self.piece), {})

    @cached_property
    def state(self) -> dict[object, int]:
        """What is known so far, for any number of microbatches."""
        return self.work.state_of.setdefault((self.mesh, self.piece.zero_shards, self.units), {})

    @cached_property
    def gathered_bytes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of each unit's full weights with ZeRO-3: without experts, and of experts."""

        def of_unit(unit: LayerRange) -> tuple[int, int]:
            narrow, size = parameters_in_8_bits(self.model, self.work.fp8, unit, self.mesh), BYTES[self.work.dtype]
            dense, experts = self.work.parameters(unit, self.mesh)
            return dense * size - narrow[0] * (size - 1), experts * size - narrow[1] * (size - 1)

        return self._of_kinds(of_unit)

    @cached_property
    def rotary_tables(self) -> tuple[int, ...]:
        """The number of rotary tables of each unit."""
        return self._of_kinds(lambda unit: num_rotary_tables(self.model, unit))

    @cached_property
    def plain(self) -> Costs:
        """The costs of units, without ZeRO."""
        compute = self._of_kinds(lambda unit: self.work.compute(self.piece, unit))
        forward, backward, weight = zip(*compute, strict=True)
        transfer = transfer_seconds(self.model, self.piece, self.work.rates)
        costs = Costs(forward, backward, weight, transfer, launch=self.work.rates.launch)
        return replace(costs, **self._of_parameters(0))

    @cached_property
    def sharded(self) -> Costs:
        """The costs of units, with ZeRO."""
        mirrors = num_mirrors(self.placement)
        gather = self._of_kinds(lambda unit: self.work.gather_seconds(self.piece, unit, mirrors))
        return replace(self.plain, gather=gather, **self._of_parameters(1))

    def _of_parameters(self, zero: int) -> dict[str, Any]:
        """The costs of reductions and of the update, as fields of Costs."""
        work, mirrors = self.work, num_mirrors(self.placement)
        reductions = self._of_kinds(lambda unit: work.reduce_seconds(self.piece, unit, zero, mirrors))
        reduce, replicas = zip(*reductions, strict=True)
        norm, step = work.end_seconds(self.mesh, self.piece.zero_shards, self.placement, zero)
        return {"reduce": reduce, "reduce_replicas": replicas, "norm": norm, "step": step}

    @cached_property
    def last_scatters(self) -> tuple[float, ...]:
        """Seconds of the last REDUCE_SCATTER of each unit in a step."""
        return tuple(
            each / 2 + own for each, own in zip(self.sharded.reduce, self.sharded.reduce_replicas, strict=True)
        )

    @cached_property
    def of_stages(self) -> Costs:
        """`plain`, of stages."""
        return self.plain.of_stages(self.units.counts)

    @cached_property
    def first_wait(self) -> float:
        """Every forward waits for a forward of stage 0, and that one for the weights of its units, gathered one after
        another; frozen weights do not count."""
        gathered = computed = most = 0.0
        for unit in self.units.of_stages[0] if self.work.lora is None else ():
            gathered += self.sharded.gather[unit]
            most = max(most, gathered - computed)
            computed += self.sharded.forward[unit] + self.sharded.launch
        return most

    @cached_property
    def of_order(self) -> Costs:
        """The costs of stages that a schedule plans with: without graphs, as it is not yet known if there are any."""
        by_unit = self._of_kinds(lambda unit: self.work.compute(self.piece, unit, self.work.rates))
        forward, backward, weight = zip(*by_unit, strict=True)
        return replace(self.plain, forward=forward, backward=backward, weight=weight).of_stages(self.units.counts)

    @cached_property
    def recompute(self) -> Callable[[str], Sequence[float]]:
        return cache(self._recompute)

    @cached_property
    def offload(self) -> Callable[[str, float], Sequence[float]]:
        return cache(self._offload)

    @cached_property
    def least_recompute(self) -> list[float]:
        """Seconds for each stage that every setting spends on recomputation, with the units of such settings."""
        if "none" in self.work.modes:
            return [0.0] * len(self.units.of_stages)
        layout = self.work.laid_out(self.placement, self.piece, self.unit_layers, self.unit_layers is None)
        least = [*map(min, zip(*map(layout.recompute, self.work.modes), strict=True))]
        return [sum(least[of.start : of.stop]) for of in layout.units.of_stages]

    def _recompute(self, mode: str) -> Sequence[float]:
        """Seconds to recompute each unit, including launches."""
        work, units = self.work, self.units
        modes = [mode if unit.numbers else "none" for unit in units.layers]
        given = self.model, units.layers, units.of_ranks, self.piece, work.rates_of(self.mesh), modes, 0, work.lora
        found = guess_costs(*given)
        return [each + found.launch * (each > 0) for each in found.recompute]

    def _offload(self, mode: str, share: float) -> Sequence[float]:
        """Seconds to copy this share of what each unit saves to the host, and the same again to bring it back, with
        recomputation in all layers of `mode`."""
        units, host = self.units, self.work.rates_of(self.mesh).host_memory
        fractions = [share if unit.numbers else 0.0 for unit in units.layers]
        modes = [mode if unit.numbers else "none" for unit in units.layers]
        is_sent = [False, *(before != after for before, after in pairwise(units.stage_of))]
        alike = [*zip(units.kinds, is_sent, strict=True)]
        examples = {each: unit for unit, each in enumerate(alike)}
        of = cuts(self.model, units.layers, units.stage_of, self.piece, modes, fractions, [*examples.values()])
        seconds = {each: host.seconds(cut.bytes) for each, cut in zip(examples, of, strict=True)}
        return [*map(seconds.__getitem__, alike)]
