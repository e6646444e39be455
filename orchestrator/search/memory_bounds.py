"""Bytes that a rank needs at least with a setting, without compiling it: state, and what its compute order holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from pentad.orchestrator.activations.activation_peaks import StageActivations, stage_activations
from pentad.orchestrator.activations.allocations import BYTES, wide_bytes
from pentad.orchestrator.planning.estimate import CUBLAS
from pentad.orchestrator.search.layout import Layout
from pentad.orchestrator.search.space import Setting
from pentad.orchestrator.search.time_bounds import GATHERED
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.lora import shard_size, shard_tensors
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.tensors import LayerRange

_F, _B, _BW, _W = (op_mask({op}) for op in (Op.F, Op.B, Op.BW, Op.W))


@lru_cache(maxsize=4096)
def least_state_bytes(layout: Layout, zero: int) -> int:
    """`state_bytes` of the fuller end of the pipeline, if ZeRO needed no buffers."""
    return max(state_bytes(layout, rank, zero, None, buffers=False) for rank in {0, len(layout.placement) - 1})


def state_bytes(layout: Layout, rank: int, zero: int, max_gathered: int | None, *, buffers: bool = True) -> int:
    """Weights, gradients, master weights and moments of a pipeline rank, and the smallest buffers that ZeRO needs."""
    work, mesh, units = layout.work, layout.mesh, layout.units_of_ranks[rank]
    compute, wide, zero = BYTES[work.dtype], wide_bytes(work.dtype), zero if layout.is_shared else 0
    by_unit = [layout.parameters(layout.layers[unit]) for unit in units]
    full, largest = sum(map(sum, by_unit)), buffers * max(map(sum, by_unit))
    holders = mesh.dp * mesh.cp * layout.holders
    shard = sum(dense / (holders * mesh.ep) + experts / holders for dense, experts in by_unit) if zero else full
    frozen = sum(_frozen(layout, layout.layers[unit]) for unit in units) if work.lora is not None else 0
    weights: float = full + frozen
    if zero == 3:
        room = max_gathered or (GATHERED if max(layout.units) > 1 and layout.holders == 1 else len(units))
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


@dataclass(frozen=True, eq=False)
class Held:
    """What a pipeline rank holds over its compute order: rows of how many pieces of each of its `stages` are between F
    and B, and between B and W. Rows that hold no more than others are left out."""

    stages: tuple[int, ...]
    saved: Array
    deferred: Array


@lru_cache(maxsize=2048)
def _held(program: Program, rank: int) -> Held:
    columns, (first, end) = program.columns, program.columns.rank_offsets[rank : rank + 2]
    stages, op, stage = program.placement[rank], columns.op[first:end], columns.stage[first:end]
    saved, deferred = (np.zeros((end - first, len(stages)), int) for _ in range(2))
    for number, each in enumerate(stages):
        own = stage == each
        saved[:, number] = np.cumsum(own * (_F[op].astype(int) - _B[op] - _BW[op]))
        deferred[:, number] = np.cumsum(own * (_B[op].astype(int) - _W[op]))
    rows = np.unique(np.concatenate((saved, deferred), axis=1), axis=0)
    return Held(stages, rows[:, : len(stages)], rows[:, len(stages) :])


class MemoryBounds:
    """Of the settings with one layout and one compute order: those of the ranks at both ends of the pipeline."""

    def __init__(self, layout: Layout, program: Program) -> None:
        self.layout, self.program = layout, program
        last = len(layout.placement) - 1
        self.ranks = sorted({0, min(1, last), last})
        self._kept: dict[str, Array] = {}

    @cached_property
    def activations(self) -> list[StageActivations]:
        """Of each unit."""
        layers = self.layout.layers
        return [stage_activations(self.layout.model, layers, unit, self.layout.piece) for unit in range(len(layers))]

    @cached_property
    def is_counted(self) -> bool:
        """Whether activations are: those of a custom model take long to count."""
        return self.layout.model.custom is None

    def least(self, setting: Setting) -> int:
        """Bytes of the fullest of these ranks with a setting."""
        found = 0
        for rank in self.ranks:
            state = state_bytes(self.layout, rank, setting.zero, setting.max_gathered)
            found = max(found, state + (self._activations(rank, setting) if self.is_counted else 0))
        return found

    def _activations(self, rank: int, setting: Setting) -> int:
        held = _held(self.program, rank)
        saved, deferred = ([self._of_stage(stage, setting)[k] for stage in held.stages] for k in (0, 1))
        peak = held.saved @ np.array(saved) + held.deferred @ np.array(deferred)
        return int(peak.max(initial=0))

    def _of_stage(self, stage: int, setting: Setting) -> tuple[int, int]:
        """Bytes between F and B, and between B and W, of one piece; of what is offloaded none count."""
        before, saved, deferred = 0, 0, 0
        for unit in self.layout.units_of_stages[stage]:
            layers, of_unit = self.layout.layers[unit], self.activations[unit]
            is_early = setting.recompute_layers is None or before < setting.recompute_layers
            mode = setting.recompute if is_early and layers.numbers else "none"
            kept = of_unit.kept(mode)
            if setting.offload and layers.numbers:
                kept = of_unit.not_offloadable + int((1 - setting.offload) * (kept - of_unit.not_offloadable))
            saved += max(0, kept)
            deferred += of_unit.deferred
            before += len(layers.numbers)
        return saved, deferred
