"""Lower bounds on the bytes of a rank with a setting, without compiling it: state, and what its compute order holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, product
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pentad.orchestrator.activations.activation_peaks import run_order, stage_activations
from pentad.orchestrator.activations.allocations import BYTES, wide_bytes
from pentad.orchestrator.planning.estimate import CUBLAS, bytes_of_reductions
from pentad.orchestrator.planning.hardware import NODE_GPUS
from pentad.orchestrator.search.layout import Layout
from pentad.orchestrator.search.space import Setting, Sharding
from pentad.orchestrator.search.time_bounds import Timed
from pentad.orchestrator.search.units import UnitBytes
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import Lookup
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.lora import shard_size, shard_tensors
from pentad.schedules.spec.mesh import Axis, Mesh, are_copied, hosts_of_size
from pentad.schedules.spec.plan import aligned_part
from pentad.schedules.spec.row_slots import ROW_SLOTS, largest_message
from pentad.schedules.spec.tensors import LayerRange
from pentad.schedules.spec.zero_layout import Reduced

IMPOSSIBLE = 2**62  # stands for the bytes of a setting that no plan has
Runs = list[tuple[UnitBytes, int]]  # the units of a stage, as runs of equal ones with their length
_F, _B, _BW, _W = (op_mask({op}) for op in (Op.F, Op.B, Op.BW, Op.W))


class Held(NamedTuple):
    """What a rank holds before each of its actions. Each of the `rows` has the number of saved pieces of each stage,
    then of deferred ones; it precedes an action (op, stage), `actions[of[row]]`."""

    rows: Array
    of: Array
    actions: list[tuple[str, int]]

    @staticmethod
    def by_action(found: dict[tuple[str, int], Array]) -> Held:
        of = np.repeat(np.arange(len(found)), [*map(len, found.values())])
        return Held(np.concatenate([*found.values()]), of, [*found])


# By the lookup of a program; then by rank and `is_local`.
_held_by_rank = WeakKeyDictionary[Lookup, dict[tuple[int, bool], Held]]()


def least_state_bytes(layout: Layout, zero: int, *, of_ends: bool) -> int:
    """`state_bytes` of the fullest pipeline rank, or of the fuller end of the pipeline, without buffers for ZeRO. It
    does not depend on units, so that all layouts of a placement share it."""
    known, last = layout.work.state, len(layout.placement) - 1
    if (key := (layout.mesh, layout.piece.zero_shards, layout.placement, zero, of_ends)) not in known:
        ranks = {0, last} if of_ends else range(last + 1)
        known[key] = max(state_bytes(layout, rank, zero, None, buffers=False) for rank in ranks)
    return known[key]


def least_in_any_order(layout: Layout, saved: Sequence[Setting], shardings: Sequence[Sharding], limit: int) -> int:
    """Bytes that each of these settings needs at least, with any of these shardings and in any order; stops at the
    first result within the limit."""
    if (key := ("any order", tuple(each.saving for each in saved))) not in layout.known:
        layout.known[key] = _least_in_any_order(layout, saved, shardings, limit)
    return int(layout.known[key])


def _least_in_any_order(layout: Layout, saved: Sequence[Setting], shardings: Sequence[Sharding], limit: int) -> int:
    least = IMPOSSIBLE
    for setting, sharding in product(reversed(saved), reversed(shardings)):
        fullest = 0
        for rank in layout.units.different:
            fullest = max(fullest, state_bytes(layout, rank, *sharding) + _in_any_order(layout, rank, setting))
            if fullest > limit:
                break
        least = min(least, fullest)
        if least <= limit:
            break
    return least


def state_bytes(layout: Layout, rank: int, zero: int, max_gathered: int | None, *, buffers: bool = True) -> int:
    """Weights, gradients, master weights and moments of a pipeline rank, its tables, and the smallest buffers that ZeRO
    and peer copies need."""
    key = layout.units.alike[rank], zero, max_gathered, buffers
    if key not in layout.state:
        layout.state[key] = _state_bytes(layout, layout.units.of_ranks[rank], zero, max_gathered, buffers=buffers)
    return layout.state[key] + (copy_bytes(layout, rank, zero) if buffers else 0)


def _state_bytes(layout: Layout, units: Sequence[int], zero: int, max_gathered: int | None, *, buffers: bool) -> int:
    work, mesh = layout.work, layout.mesh
    compute, wide, zero = BYTES[work.dtype], wide_bytes(work.dtype), zero if layout.is_shared else 0
    by_unit = [layout.parameters[unit] for unit in units]
    full, beside = sum(map(sum, by_unit)), _beside(layout, units, layout.parameters) if buffers and zero > 1 else 0
    of_experts = layout.piece.zero_shards or mesh.dp * mesh.cp * layout.holders
    of_rest = layout.piece.zero_shards or of_experts * mesh.ep
    shard = sum(dense / of_rest + experts / of_experts for dense, experts in by_unit) if zero else full
    frozen = sum(_frozen(layout, layout.units.layers[unit]) for unit in units) if work.lora is not None else 0
    weights: float = (full + frozen) * compute
    if zero == 3:
        room, of_units = layout.gathered(max_gathered) or len(units), [layout.gathered_bytes[unit] for unit in units]
        shards = sum(dense / of_rest + experts / of_experts for dense, experts in of_units)
        shards += compute * frozen / of_rest
        is_ahead = room > 1 and work.config.zero.prefetch > 0
        ahead = _beside(layout, units, layout.gathered_bytes) if buffers and is_ahead else 0
        gathered = ahead if is_ahead else buffers * max(map(sum, of_units))
        all_of_them = sum(map(sum, of_units)) + compute * frozen
        weights = shards + (all_of_them if buffers and room >= len(units) else gathered)
    gradients = full if zero < 2 else shard + beside
    on_host = work.config.memory.optimizer == "host"
    state = 2 if work.config.precision.optimizer_state == "bfloat16" else wide
    moments = (1 if work.config.optimizer.name == "muon" else 2) * state
    updated = 0.0 if on_host else shard * (moments + wide - compute)
    return int(weights + gradients * wide + updated) + _table_bytes(layout, units)


def most_copy_bytes(layout: Layout) -> int:
    """The maximum of `copy_bytes`."""
    return max(copy_bytes(layout, rank, zero) for rank in layout.units.different for zero in (0, 3))


def copy_bytes(layout: Layout, rank: int, zero: int) -> int:
    """Bytes of the slots in which a pipeline rank exchanges rows and gradients by peer copies."""
    key = "copies", layout.units.alike[rank], zero > 0
    if key not in layout.state:
        layout.state[key] = _reduction_bytes(layout, layout.units.of_ranks[rank], zero)
    if "rows" not in layout.known:
        layout.known["rows"] = _row_slot_bytes(layout)
    return layout.state[key] + int(layout.known["rows"])


def _row_slot_bytes(layout: Layout) -> int:
    piece, rows = layout.piece, 0
    given = layout.model, layout.mesh, piece.tokens, piece.slices, piece.dtype, piece.cp_method
    for axis, count in ROW_SLOTS.items():
        rows += count * largest_message(axis, *given) if _are_copied(layout, axis) else 0
    return rows * piece.itemsize


def _are_copied(layout: Layout, axis: Axis, zero: int = 0) -> bool:
    """`are_copied` for a plan with this ZeRO stage."""
    config, mesh = layout.work.config, layout.mesh
    return config.cluster.transport != "nccl" and are_copied(
        *(mesh, axis, () if config.cluster.transport == "peer" else hosts_of_size(mesh, NODE_GPUS)),
        zero=zero,
        zero_shards=layout.piece.zero_shards,
        has_mirrors=layout.holders > 1,
        is_dynamic=config.data.balance == "dynamic",
    )


def _reduction_bytes(layout: Layout, units: Sequence[int], zero: int) -> int:
    work, mesh, shards = layout.work, layout.mesh, list[Reduced]()
    of_experts = mesh.dp * mesh.cp * layout.holders
    for kind, holders in enumerate((of_experts * mesh.ep, of_experts)):
        count = (layout.piece.zero_shards or holders) if zero else 1
        sizes = {layout.parameters[unit][kind] for unit in units}
        shards += [Reduced(aligned_part(size, count), count, holders // count) for size in sizes if size]
    given = {"is_copied": _are_copied(layout, "dp", zero), "bf16": work.config.precision.bf16_reduce}
    return bytes_of_reductions(shards, work.dtype, "cuda", **given)


def _table_bytes(layout: Layout, units: Sequence[int]) -> int:
    """Bytes of rotary tables and of cuBLAS's workspace."""
    length, width = layout.piece.length * layout.piece.slices, layout.model.rotary_width
    tables = sum(layout.rotary_tables[unit] for unit in units)
    return tables * length * width * wide_bytes(layout.work.dtype) + CUBLAS


def _beside(layout: Layout, units: Sequence[int], sizes: Sequence[tuple[int, int]]) -> int:
    """The most that two consecutive units of a stage have together, by kind: while one computes, the next one is
    gathered, and while the gradients of one are reduced, those of the next accumulate. `sizes` covers all units."""
    stage_of = layout.units.stage_of
    pairs = {(sizes[a], sizes[b]) for a, b in pairwise(units) if stage_of[a] == stage_of[b]}
    groups = [*pairs, *((size,) for size in {sizes[unit] for unit in units})]
    return sum(max(sum(size[kind] for size in group) for group in groups) for kind in (0, 1))


def _frozen(layout: Layout, held: LayerRange) -> int:
    mesh = Mesh(tp=layout.mesh.tp, ep=layout.mesh.ep)
    model, lora = layout.model, layout.work.lora
    return sum(shard_size(shard_tensors(model, lora, held, experts=each, frozen=True), mesh) for each in (False, True))


def _held(program: Program, rank: int, *, is_local: bool) -> Held:
    """`is_local` as in `run_order`."""
    known = _held_by_rank.setdefault(program.lookup, {})
    if (key := (rank, is_local)) not in known:
        order = run_order(program, rank, is_local=is_local)
        before = _held_before(program, rank, order).items()
        known[key] = Held.by_action({action: _different(rows) for action, rows in before if len(rows)})
    return known[key]


def _different(rows: Array) -> Array:
    """The distinct rows; in the steady state they repeat."""
    return np.array([*dict.fromkeys(map(tuple, rows.tolist()))], int)


def _held_before(program: Program, rank: int, order: Array) -> dict[tuple[str, int], Array]:
    columns, (first, end) = program.columns, program.columns.rank_offsets[rank : rank + 2]
    op, stage = columns.op[first:end][order], columns.stage[first:end][order]
    changes = np.zeros((end - first, 2 * len(program.placement[rank])), int)
    for number, each in enumerate(program.placement[rank]):
        own = stage == each
        changes[:, number] = own * (_F[op].astype(int) - _B[op] - _BW[op])
        changes[:, number + len(program.placement[rank])] = own * (_B[op].astype(int) - _W[op])
    before = np.cumsum(changes, axis=0) - changes
    return {
        (name, each): before[(stage == each) & mask[op]]
        for name, mask in (("F", _F), ("B", _B), ("BW", _BW))
        for each in program.placement[rank]
    }


class MemoryBounds:
    """Lower bounds on the memory of the settings with one layout and one compute order."""

    def __init__(self, layout: Layout, timed: Timed) -> None:
        self.layout, self.timed = layout, timed
        last = len(layout.placement) - 1
        self.ranks = dict.fromkeys((0, last, *range(last)))
        self._held = cache(lambda rank: _held(timed.program, rank, is_local=layout.mesh.is_local))
        self._known = dict[object, int]()

    def least(self, setting: Setting, limit: float = inf) -> int:
        """Bytes of the fullest rank with a setting, or of the first one found to exceed the limit, be it in any order
        or in this one. Without the activations of a custom model, which take long to count."""
        layout = self.layout
        key = "least", setting.zero, setting.max_gathered, setting.saving, limit
        if key not in layout.known:
            in_any_order = partial(_in_any_order, layout)
            layout.known[key] = self._most(setting, limit, in_any_order, layout.units.different)
        found = int(layout.known[key])
        for own_order in (self._by_stage, self._by_unit):
            if found <= limit:
                found = self._most(setting, limit, partial(self._in_own_order, own_order), self.ranks, found)
        return found

    def least_of(self, saved: Iterable[Setting], shardings: Sequence[Sharding], limit: int) -> int:
        """What each of these settings needs at least, with any of these shardings; stops at one within the limit."""
        found = IMPOSSIBLE
        for each, (zero, gathered) in product(saved, shardings):
            found = min(found, self.least(each._replace(zero=zero, max_gathered=gathered), limit))
            if found <= limit:
                break
        return found

    def _most(
        self,
        setting: Setting,
        limit: float,
        activations: Callable[[int, Setting], int],
        ranks: Iterable[int],
        found: int = 0,
    ) -> int:
        """The most bytes among these ranks, stopping at the first that exceeds the limit."""
        for rank in ranks:
            state = state_bytes(self.layout, rank, setting.zero, setting.max_gathered)
            found = max(found, state + activations(rank, setting))
            if found > limit:
                break
        return found

    @property
    def _alternates(self) -> bool:
        """Whether units of a forward run between those of a backward."""
        return self.timed.has_pairs and not self.layout.mesh.is_local

    def _in_own_order(self, activations: Callable[[int, Setting], int], rank: int, setting: Setting) -> int:
        if (key := (activations, rank, setting.saving)) not in self._known:
            self._known[key] = 0 if self.layout.model.custom is not None else activations(rank, setting)
        return self._known[key]

    def _by_stage(self, rank: int, setting: Setting) -> int:
        """Bytes of a rank that runs one action at a time, without what is being copied."""
        if self._alternates:
            return 0
        stages = self.layout.placement[rank]
        runs = {stage: _of_stage(self.layout, stage, setting) for stage in stages}
        bytes_of = np.array([sum(unit[k] * count for unit, count in runs[stage]) for k in (0, 1) for stage in stages])
        held = self._held(rank)
        during = np.array([_during(name, runs[stage]) for name, stage in held.actions])
        return max(0, int((held.rows @ bytes_of + during[held.of]).max()))

    def _by_unit(self, rank: int, setting: Setting) -> int:
        """Bytes of a rank that offloads, with what is not copied or still in flight; or of one that interleaves units
        of a forward with those of a backward, which free memory."""
        if not setting.offload and not self._alternates:
            return 0
        copies = self.timed.copies
        sizes = np.zeros((copies.program.stages, len(UnitBytes._fields) + 1), int)
        for stage in self.layout.placement[rank]:
            for units, mode, share in _equal_units(self.layout, stage, setting):
                plain = _of_unit(self.layout, units.start, mode, 0.0)
                copied = plain.saved - _of_unit(self.layout, units.start, mode, share).saved
                sizes[units.start : units.stop] = *plain, copied
        saved, deferred, *during, moved = sizes.T
        rows = copies.rows_of_rank(rank, is_local=self.layout.mesh.is_local)
        changes = np.concatenate((saved, deferred - saved, -saved, -deferred))[rows.kind]
        most = np.concatenate((*during, np.zeros_like(saved)))[rows.kind]
        weights, count = moved[rows.copied], len(rows.kind)
        away = np.bincount(rows.reload, weights, count) - np.bincount(rows.release, weights, count)
        return int((np.cumsum(changes) - changes + np.cumsum(away) + most).max(initial=0))


def _during(name: str, runs: Runs) -> int:
    """The most bytes that an action of a stage takes beyond those held before it, unit by unit."""
    most = passed = 0
    for unit, count in runs if name == "F" else reversed(runs):
        own = unit.forward if name == "F" else unit.backward if name == "B" else unit.both
        each = unit.saved if name == "F" else unit.deferred * (name == "B") - unit.saved
        most = max(most, passed + own + max(0, each * (count - 1)))
        passed += each * count
    return most


def _in_any_order(layout: Layout, rank: int, setting: Setting) -> int:
    """Bytes of activations; 0 for a custom model, as counting them takes long."""
    if layout.model.custom is not None:
        return 0
    if (key := (layout.units.alike[rank], setting.saving)) not in layout.known:
        layout.known[key] = _at_first_backward(layout, rank, setting)
    return int(layout.known[key])


def _at_first_backward(layout: Layout, rank: int, setting: Setting) -> int:
    """Bytes at the first backward of each stage. That of the last stage comes first, when a piece of every stage is
    saved; with mirrored stages, only a piece of its own."""
    held = layout.placement[rank]
    stages = {stage: _of_stage(layout, stage, setting) for stage in held}
    saved = {stage: sum(unit.saved * count for unit, count in runs) for stage, runs in stages.items()}
    taken = {stage: saved[stage] + min(_during("B", runs), _during("BW", runs)) for stage, runs in stages.items()}
    if layout.holders == 1:
        taken[max(held)] += sum(saved.values()) - saved[max(held)]
    return max(taken.values())


def _equal_units(layout: Layout, stage: int, setting: Setting) -> Iterator[tuple[range, str, float]]:
    """Consecutive units of one kind that save memory in the same way: (units, recomputation mode, offloaded share)."""
    for run in layout.units.runs[stage]:
        saves, late = bool(layout.units.layers[run.start].numbers), run.stop  # the first unit that does not recompute
        if setting.recompute_layers is not None:
            late = bisect_left(layout.units.layers_before, setting.recompute_layers, run.start, run.stop)
        mode, share = (setting.recompute, setting.offload) if saves else ("none", 0.0)
        parts = (range(run.start, late), mode), (range(late, run.stop), "none")
        yield from ((units, how, share) for units, how in parts if units)


def _of_stage(layout: Layout, stage: int, setting: Setting) -> Runs:
    equal = _equal_units(layout, stage, setting)
    return [(_of_unit(layout, units.start, mode, share), len(units)) for units, mode, share in equal]


def _of_unit(layout: Layout, unit: int, mode: str, offload: float) -> UnitBytes:
    known, key = layout.unit_bytes, (layout.units.kinds[unit], mode, offload)
    if key not in known:
        known[key] = _unit(layout, unit, mode, offload)
    return known[key]


def _unit(layout: Layout, unit: int, mode: str, offload: float) -> UnitBytes:
    """Offloaded tensors count only once they are back for their backward."""
    found = stage_activations(layout.model, layout.units.layers, unit, layout.piece)
    kept, least = found.kept(mode), min(found.kept(mode), found.not_offloadable)
    saved = least + int((1 - offload) * (kept - least)) if offload else kept
    restored = kept - saved
    again = 0 if mode == "none" else found.saved - kept
    workspace = 0 if mode == "none" else found.recompute
    backward, both = (
        restored + again + max(workspace, effect.peak) for effect in (found.backward, found.backward_and_weight)
    )
    return UnitBytes(saved, found.deferred, found.forward(mode).peak, backward, both)
