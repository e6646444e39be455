"""Interleaved schedules: a rank holds several chunks of layers, and a group of microbatches goes through one, then the
next.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2; groups of any size: Llama Team 2024, arXiv 2407.21783, section
3.3. A group of `ranks` microbatches is depth-first, one group of all microbatches breadth-first (Lamy-Poirier 2022,
arXiv 2211.05953).

Every op goes through the same sequence of slots, (chunk, microbatch) in order, and an order is given by how many slots
each op lags behind the forwards of its rank. The lag of the backwards is the warm-up; when the forwards end, whatever
lags behind them is the cool-down.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.generators.arrays import streams_from_arrays
from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Streams
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def interleaved(spec: ScheduleSpec) -> Streams:
    """1F1B over chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): 1 / chunks of the bubble of 1F1B, for
    (chunks - 1) x group more activations of a chunk."""
    return _lagging(spec, {Op.F: _no_lag(spec), Op.BW: _warm_up(spec, 2, _slots(spec))})


def interleaved_zb(spec: ScheduleSpec) -> Streams:
    """ZB-H1 over chunks (Qi et al. 2023, arXiv 2401.10241, section 2): half the slope of 1F1B's warm-up, and W lags
    `rank` slots behind B."""
    warm_up = _warm_up(spec, 1, _slots(spec) - 1)
    return _lagging(spec, {Op.F: _no_lag(spec), Op.B: warm_up, Op.W: warm_up + np.arange(spec.ranks)})


def looped_bfs(spec: ScheduleSpec) -> Streams:
    """All microbatches forward through chunk after chunk, then all backward, so each chunk's weights are needed twice a
    step (Lamy-Poirier 2022, arXiv 2211.05953)."""
    return _lagging(spec, {Op.F: _no_lag(spec), Op.BW: _no_lag(spec) + _slots(spec)})


def _group_sizes(spec: ScheduleSpec) -> list[int]:
    """Microbatches of each group: `group` or, if that does not divide them, a few more, because a group smaller than
    the pipeline would not fill it."""
    groups = spec.microbatches // spec.group
    size, rest = divmod(spec.microbatches, groups)
    return [size + (number < rest) for number in range(groups)]


def _slots(spec: ScheduleSpec) -> int:
    return spec.chunks * spec.microbatches


def _no_lag(spec: ScheduleSpec) -> Array:
    return np.zeros(spec.ranks, int)


def _warm_up(spec: ScheduleSpec, slope: int, most: int) -> Array:
    """[ranks] forwards before the first backward: until the first group has been through all chunks of the last rank,
    and `slope` more for each rank that follows."""
    following = np.arange(spec.ranks)[::-1]
    return np.minimum(slope * following + (spec.chunks - 1) * _group_sizes(spec)[0], most)


def _lagging(spec: ScheduleSpec, lags: dict[Op, Array]) -> Streams:
    """Every op in slot order, `lags[op][rank]` slots late; at one time, ops run in the order of `lags`."""
    slots = np.arange(_slots(spec))
    times = [(slots + lag[:, None]) * len(lags) + at for at, lag in enumerate(lags.values())]
    order = np.argsort(np.concatenate(times, axis=1), kind="stable")
    op = np.repeat([CODE[op] for op in lags], len(slots))
    chunk, mb = np.concatenate([_slot_sequence(spec, backward=op is not Op.F) for op in lags], axis=1)
    return streams_from_arrays(op[order], chunk[order] * spec.ranks + np.arange(spec.ranks)[:, None], mb[order])


def _slot_sequence(spec: ScheduleSpec, *, backward: bool) -> Array:
    """[2, slots] chunk and microbatch of each slot: a group goes through one chunk, then through the next."""
    chunks = range(spec.chunks - 1, -1, -1) if backward else range(spec.chunks)
    slots, start = [], 0
    for size in _group_sizes(spec):
        slots += [(chunk, mb) for chunk in chunks for mb in range(start, start + size)]
        start += size
    return np.array(slots).T
