"""Bytes that a rank needs at least with a setting, without compiling it: state, and what its compute order holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pentad.orchestrator.activations.activation_peaks import stage_activations
from pentad.orchestrator.activations.allocations import BYTES, wide_bytes
from pentad.orchestrator.planning.estimate import CUBLAS
from pentad.orchestrator.search.layout import Layout, UnitBytes
from pentad.orchestrator.search.space import Setting
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.lora import shard_size, shard_tensors
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.tensors import LayerRange

_F, _B, _BW, _W = (op_mask({op}) for op in (Op.F, Op.B, Op.BW, Op.W))


def least_state_bytes(layout: Layout, zero: int) -> int:
    """`state_bytes` of the fuller end of the pipeline, if ZeRO needed no buffers."""
    if (key := ("state", zero)) not in layout.known:
        ends = {0, len(layout.placement) - 1}
        layout.known[key] = max(state_bytes(layout, rank, zero, None, buffers=False) for rank in ends)
    return int(layout.known[key])


def state_bytes(layout: Layout, rank: int, zero: int, max_gathered: int | None, *, buffers: bool = True) -> int:
    """Weights, gradients, master weights and moments of a pipeline rank, and the smallest buffers that ZeRO needs."""
    work, mesh, units = layout.work, layout.mesh, layout.units_of_ranks[rank]
    compute, wide, zero = BYTES[work.dtype], wide_bytes(work.dtype), zero if layout.is_shared else 0
    by_unit = [layout.parameters[unit] for unit in units]
    full, largest = sum(map(sum, by_unit)), buffers * max(map(sum, by_unit))
    holders = mesh.dp * mesh.cp * layout.holders
    shard = sum(dense / (holders * mesh.ep) + experts / holders for dense, experts in by_unit) if zero else full
    frozen = sum(_frozen(layout, layout.layers[unit]) for unit in units) if work.lora is not None else 0
    weights: float = full + frozen
    if zero == 3:
        room = layout.gathered(max_gathered) or len(units)
        shards = shard + frozen / (holders * mesh.ep)
        weights = shards + (full + frozen if buffers and room >= len(units) else largest)
    # the stages that mirrors share have a buffer each
    gradients = full if zero < 2 else shard + (largest if layout.holders == 1 else buffers * full)
    on_host = work.config.memory.optimizer == "host"
    state = 2 if work.config.precision.optimizer_state == "bfloat16" else wide
    moments = (1 if work.config.optimizer.name == "muon" else 2) * state
    updated = 0.0 if on_host else shard * (moments + (wide if wide != compute else 0))
    return int(weights * compute + gradients * wide + updated) + CUBLAS


def _frozen(layout: Layout, held: LayerRange) -> int:
    mesh = Mesh(tp=layout.mesh.tp, ep=layout.mesh.ep)
    model, lora = layout.model, layout.work.lora
    return sum(shard_size(shard_tensors(model, lora, held, experts=each, frozen=True), mesh) for each in (False, True))


@lru_cache(maxsize=256)
def _held(program: Program, rank: int) -> dict[tuple[str, int], Array]:
    """By op and stage of an action: what the rank holds before it, in different rows [saved pieces of each stage,
    deferred ones of each]."""
    columns, (first, end) = program.columns, program.columns.rank_offsets[rank : rank + 2]
    op, stage = columns.op[first:end], columns.stage[first:end]
    changes = np.zeros((end - first, 2 * len(program.placement[rank])), int)
    for number, each in enumerate(program.placement[rank]):
        own = stage == each
        changes[:, number] = own * (_F[op].astype(int) - _B[op] - _BW[op])
        changes[:, number + len(program.placement[rank])] = own * (_B[op].astype(int) - _W[op])
    before = np.cumsum(changes, axis=0) - changes
    return {
        (name, each): np.unique(before[(stage == each) & mask[op]], axis=0)
        for name, mask in (("F", _F), ("B", _B), ("BW", _BW))
        for each in program.placement[rank]
    }


class MemoryBounds:
    """Lower bounds on the memory of the settings with one layout and one compute order: those of the ranks at both ends
    of the pipeline."""

    def __init__(self, layout: Layout, program: Program) -> None:
        self.layout, self.program = layout, program
        last = len(layout.placement) - 1
        self.ranks = sorted({0, min(1, last), last})

    def least(self, setting: Setting) -> int:
        """Bytes of the fullest of these ranks with a setting; those of a custom model's activations, which take long to
        count, are left out."""
        found = 0
        for rank in self.ranks:
            state = state_bytes(self.layout, rank, setting.zero, setting.max_gathered)
            found = max(found, state + (self._activations(rank, setting) if self.layout.model.custom is None else 0))
        return found

    def _activations(self, rank: int, setting: Setting) -> int:
        stages = self.program.placement[rank]
        units = {stage: self._of_stage(stage, setting) for stage in stages}
        bytes_of = np.array([sum(each[k] for each in units[stage]) for k in (0, 1) for stage in stages])
        peak = 0
        for (name, stage), rows in _held(self.program, rank).items():
            if len(rows):
                peak = max(peak, int((rows @ bytes_of).max()) + _during(name, units[stage]))
        return peak

    def _of_stage(self, stage: int, setting: Setting) -> list[UnitBytes]:
        """Its units, of which the first ones recompute."""
        before, found = 0, list[UnitBytes]()
        for unit in self.layout.units_of_stages[stage]:
            layers = len(self.layout.layers[unit].numbers)
            is_early = setting.recompute_layers is None or before < setting.recompute_layers
            saving = setting.recompute if is_early and layers else "none", setting.offload if layers else 0.0
            key = self.layout.kinds[unit], *saving
            if key not in self.layout.held:
                self.layout.held[key] = self._unit(unit, *saving)
            found.append(self.layout.held[key])
            before += layers
        return found

    def _unit(self, unit: int, mode: str, offload: float) -> UnitBytes:
        """The bytes of a unit. What is offloaded does not count until it is back for its backward."""
        found = stage_activations(self.layout.model, self.layout.layers, unit, self.layout.piece)
        kept, least = found.kept(mode), min(found.kept(mode), found.not_offloadable)
        saved = least + int((1 - offload) * (kept - least)) if offload else kept
        restored = kept - saved
        again = 0 if mode == "none" else found.saved - kept
        workspace = 0 if mode == "none" else found.recompute
        backward, both = (
            restored + again + max(workspace, effect.peak) for effect in (found.backward, found.backward_and_weight)
        )
        return UnitBytes(saved, found.deferred, found.forward(mode).peak, backward, both)


def _during(name: str, units: Sequence[UnitBytes]) -> int:
    """The most bytes beyond those before it that an action of a stage takes, unit by unit."""
    most = passed = 0
    for unit in units if name == "F" else reversed(units):
        most = max(most, passed + (unit.forward if name == "F" else unit.backward if name == "B" else unit.both))
        passed += unit.saved if name == "F" else unit.deferred * (name == "B") - unit.saved
    return most
