"""Lower bounds on a plan's time, before there is an order.

The bound of a shape divides the work of a step among the ranks and follows one microbatch. That of a placement adds the
ends of the pipeline, gathers, reductions and the update. That of an order also knows how much of a rank's work precedes
the reduction of each stage's gradients, and how much a schedule that plans with costs saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.planning.cost_model import transfer_seconds
from pentad.orchestrator.search.layout import Compute, Layout, Work
from pentad.orchestrator.search.space import Order, splits_backward
from pentad.orchestrator.search.time_bounds import update_seconds
from pentad.schedules.catalogue import CATALOGUE, spec_of
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.tensors import all_layers

_PARTS = op_mask({Op.F}), op_mask({Op.B, Op.BW}), op_mask({Op.W, Op.BW})


def even_seconds(work: Work, mesh: Mesh, microbatches: int) -> float:
    """Seconds of the work of a step in its layers, divided equally. Raises PentadError for sizes that do not divide."""
    return microbatches * sum(_of_all_layers(work, mesh, microbatches, 1)) / mesh.pp


def shape_bound(work: Work, mesh: Mesh, microbatches: int, slices: int) -> float:
    """For any schedule: no backward starts before the first piece has gone forward through all ranks, and no forward
    starts after the backward of the last piece has. Raises PentadError for sizes that do not divide."""
    forward, backward, weight = _of_all_layers(work, mesh, microbatches, slices)
    hops = (mesh.pp - 1) * transfer_seconds(work.model, work.piece(mesh, microbatches, slices), work.rates)
    share = microbatches * slices / mesh.pp
    begin = max(share * forward, forward + hops)
    return max(begin + share * (backward + weight), begin + backward + hops)


def _of_all_layers(work: Work, mesh: Mesh, microbatches: int, slices: int) -> Compute:
    return work.compute(work.piece(mesh, microbatches, slices), all_layers(work.model))


def placement_bound(layout: Layout, order: Order, microbatches: int) -> float:
    """For any order of the layout's placement: a rank waits for its first input and its first gradient, and does its
    work; after its last forward or backward, those of the earlier stages still have to run."""
    is_split = splits_backward(order)
    if (key := (microbatches, is_split)) not in layout.known:
        path = _Path.of(layout, is_split=is_split)
        layout.known[key] = _placement_bound(layout, path, microbatches * layout.piece.slices)
    return layout.known[key]


def order_bound(layout: Layout, order: Order, microbatches: int) -> float:
    """For the order of a schedule, with any stage of ZeRO. A rank that saves at most k pieces takes at least a k-th of
    the total time for which pieces are saved (Little's law)."""
    path, limit = _Path.of(layout, is_split=splits_backward(order)), CATALOGUE[order.name].most_saved
    counts, held = counts_of(layout, order, microbatches), np.array(layout.placement)
    forward, gradient, whole, arrival, turn, left, again = (np.array(each)[held] for each in path[:7])
    parts, begin = np.stack((forward, gradient, whole - gradient), axis=-1), arrival.min(axis=1)
    if limit is None:
        before = (counts.forwards * forward).sum(axis=1)
    else:
        among = held.shape[1] * limit(spec_of(order.name, len(held), microbatches, order.options))
        before = among * forward.max(axis=1)
        begin = begin + np.maximum(0.0, arrival.max(axis=1) - begin - among * forward[:, 0])
    first = np.take_along_axis(arrival + forward + turn - again, counts.first[:, None], axis=1)[:, 0]  # first backward
    begin = np.maximum(begin, first - before)  # of its work, if the rank did not wait afterwards
    starts = begin[:, None] + (counts.adding * parts[:, None]).sum(axis=(2, 3))
    ends = begin[:, None] + (counts.backward * parts[:, None]).sum(axis=(2, 3)) + gradient + left + path.last
    if limit is not None:
        saved = (forward + turn + gradient).sum(axis=1)
        starts[:, 0] = np.maximum(starts[:, 0], arrival[:, 0] + microbatches * saved / among)
    most = max(float(ends.max()), float((starts + whole - gradient).max()))
    if not layout.is_shared:
        seconds = most + update_seconds(layout.work, layout.plain)
    else:
        reduced, scattered = (
            _last_end(starts, np.array([sum(each[of.start : of.stop]) for of in layout.units.of_stages])[held])
            for each in (layout.plain.reduce, layout.last_scatters)
        )
        with_zero = layout.first_wait + max(most, scattered) + update_seconds(layout.work, layout.sharded)
        without = max(most, reduced) + update_seconds(layout.work, layout.plain)
        seconds = with_zero if layout.piece.zero_shards else min(with_zero, without)
    return max(placement_bound(layout, order, microbatches), seconds)


def _last_end(starts: Array, seconds: Array) -> float:
    """The last end of reductions [ranks, stages] that each rank runs one after another on a lane."""
    order = np.argsort(-starts, axis=1)
    after = np.cumsum(np.take_along_axis(seconds, order, axis=1), axis=1)
    return float((np.take_along_axis(starts, order, axis=1) + after).max())


class Counts(NamedTuple):
    """Numbers of forwards, backwards and weight gradients of each stage that a rank runs at least before the last
    action that adds to the gradients of a stage (`adding`) and before the last backward of a stage (`backward`):
    [ranks, stages, stages, 3], that stage first. `forwards` is how many of each stage run at most before the first
    backward, which is of its stage number `first`."""

    adding: Array
    backward: Array
    forwards: Array
    first: Array


def counts_of(layout: Layout, order: Order, microbatches: int) -> Counts:
    known, entry, slices = layout.work.counts, CATALOGUE[order.name], layout.piece.slices
    if (key := (order, len(layout.placement), microbatches, slices)) not in known:
        if entry.most_saved is None:
            known[key] = counts_in(layout.work.order(*key))
        else:
            saved = int(entry.most_saved(spec_of(order.name, key[1], microbatches, order.options)))
            known[key] = planned_counts(*np.shape(layout.placement), microbatches, saved)
    return known[key]


def counts_in(program: Program) -> Counts:
    """The counts of an order."""
    columns, found = program.columns, list[tuple[Array, Array, Array, int]]()
    for held, span in zip(program.placement, pairwise(columns.rank_offsets.tolist()), strict=True):
        op, stage, action = (each[slice(*span)] for each in (columns.op, columns.stage, columns.action))
        rows = np.array([[(stage == each) & part[op] for part in _PARTS] for each in held])  # [stages, 3, rows]
        before = np.concatenate((np.zeros((len(held), 3, 1), int), rows.cumsum(axis=2)), axis=2)
        begin = np.searchsorted(action, action)  # start of the action of each row
        last = len(op) - 1 - np.argmax(rows[:, :, ::-1], axis=2)
        adding, backward = (np.moveaxis(before[:, :, begin[last[:, part]]], 2, 0) for part in (2, 1))
        first = np.argmax(rows[:, 1].any(axis=0))
        at = int(np.argmax(rows[:, 1, first]))
        found.append((adding, backward, before[:, 0, begin[first]], at))
    return Counts(*map(np.array, zip(*found, strict=True)))


def planned_counts(ranks: int, stages: int, microbatches: int, saved: int) -> Counts:
    """The counts of a schedule that plans with costs, whose ranks save at most `saved` microbatches of their one or two
    stages. Weight gradients follow the order of backwards, so the last one of the first stage comes last of all. Before
    the last one of the second stage, all forwards have run, and all additions to the first stage's gradients except for
    what is still saved. Before the last backward, all weight gradients have run except for at most 2 x `saved` of the
    first stage and `saved` of the second."""
    adding = np.full((stages, stages, len(_PARTS)), microbatches)
    adding[range(stages), range(stages), -1] -= 1
    adding[1:, 0, 1:] = max(0, microbatches - stages * saved + 1)
    backward = np.zeros_like(adding)
    backward[0] = microbatches
    backward[0, 0, 1] -= 1
    backward[0, :, 2] = [max(0, microbatches - count) for count in (2 * saved, saved)[:stages]]
    forwards = np.full((ranks, stages), min(saved * stages, microbatches))
    adding, backward = (np.broadcast_to(each, (ranks, *each.shape)) for each in (adding, backward))
    return Counts(adding, backward, forwards, np.full(ranks, stages - 1))


class _Path(NamedTuple):
    """The path of one piece through all stages. By stage: seconds of `forward`, of backward until the previous stage
    can continue (`gradient`), of the entire backward (`whole`), and of the recomputation in it (`again`), which may
    precede the gradient; `arrival` of its first input, `turn` from the end of its forward to the start of its backward,
    `left` from the end of its backward to that of stage 0, after which `last` follows."""

    forward: list[float]
    gradient: list[float]
    whole: list[float]
    arrival: list[float]
    turn: list[float]
    left: list[float]
    again: list[float]
    last: float

    @staticmethod
    def of(layout: Layout, *, is_split: bool) -> _Path:
        costs = layout.of_stages
        launches = [count * costs.launch for count in layout.units.counts]
        whole = [b + w + each for b, w, each in zip(costs.backward, costs.weight, launches, strict=True)]
        gradient = [b + each for b, each in zip(costs.backward, launches, strict=True)] if is_split else whole
        forward = [f + each for f, each in zip(costs.forward, launches, strict=True)]
        stays = {stage for held in layout.placement for stage in held if stage + 1 in held}
        hops = [0.0 if stage in stays else costs.transfer for stage in range(len(forward) - 1)]
        arrival = list(accumulate(map(add, forward, hops), initial=0.0))
        left = list(accumulate(map(add, gradient, hops), initial=0.0))
        turns = (2 * hop + f + g for hop, f, g in zip(hops, forward[1:], gradient[1:], strict=True))
        turn = list(accumulate([*turns][::-1], initial=0.0))[::-1]
        again, last = layout.least_recompute, costs.weight[0] if is_split else 0.0
        return _Path(forward, gradient, [*map(add, whole, again)], arrival, turn, left, again, last)

    def work(self, stage: int) -> float:
        return self.forward[stage] + self.whole[stage]

    def release(self, stage: int, pieces: int) -> float:
        """The earliest time at which the last of this many pieces adds to a stage's gradients."""
        forward, whole, others = self.forward[stage], self.whole[stage], pieces - 1
        after = max(others * (forward + whole), others * max(forward, whole) + self.turn[stage])
        return self.arrival[stage] + forward + after


def _placement_bound(layout: Layout, path: _Path, pieces: int) -> float:
    most = path.arrival[-1] + path.forward[-1] + path.gradient[-1] + path.left[-1] + path.last
    for held in layout.placement:
        forward, gradient, whole = (
            pieces / layout.holders * sum(each[stage] for stage in held)
            for each in (path.forward, path.gradient, path.whole)
        )
        if layout.holders > 1:
            most = max(most, forward + whole)
            continue
        low, high = min(held), max(held)
        head = path.arrival[low] + forward
        first = path.arrival[high] + path.forward[high] + path.turn[high]
        start = max(head, first - path.again[high])  # start of all backwards
        rear = path.turn[high] + path.gradient[high] + path.left[high] + path.last
        most = max(most, start + whole, start + gradient + path.left[low] + path.last, head + rear)
        if layout.is_shared and layout.work.lora is None:
            most = max(most, _shared_bound(layout, path, pieces, held))
    return most + update_seconds(layout.work, layout.sharded if layout.is_shared else layout.plain)


def _shared_bound(layout: Layout, path: _Path, pieces: int, held: Sequence[int]) -> float:
    """A lane reduces the gradients of a stage after the work of all pieces but one; with ZeRO it scatters them then,
    having gathered the weights before."""
    plain, sharded, after = layout.plain, layout.sharded, inf
    reduced = scattered = reducing = scattering = gathering = 0.0
    for release, stage in sorted(((path.release(stage, pieces), stage) for stage in held), reverse=True):
        units = layout.units.of_stages[stage]
        own = sum(layout.last_scatters[unit] for unit in units)
        reducing, scattering = reducing + sum(plain.reduce[unit] for unit in units), scattering + own
        gathering += sum(sharded.gather[unit] for unit in units)
        reduced, scattered = max(reduced, release + reducing), max(scattered, release + scattering)
        after = min(after, (pieces - 1) * path.work(stage) + own)
    with_zero = max(scattered, gathering + after)
    return with_zero if layout.piece.zero_shards else min(reduced, with_zero)
