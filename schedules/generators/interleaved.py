"""Interleaved schedules: a rank holds several chunks of layers, and a group of microbatches takes turns on them.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2; groups of any size: Llama Team 2024, arXiv 2407.21783, section
3.3. A group of `ranks` is depth-first, one of all microbatches breadth-first (Lamy-Poirier 2022, arXiv 2211.05953).

An order is told by how many turns each op lags behind a rank's first forward: of one moment the op told first goes
first. The warm-up is the lag of the backwards; what lags is left for the cool-down.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.generators.orders import streams
from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Streams
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def interleaved(shape: ScheduleSpec) -> Streams:
    """1F1B over turns: a chunk's share of the bubble, for (chunks - 1) x group more activations of a chunk."""
    return _lagging(shape, {Op.F: _ranks(shape) * 0, Op.BW: _warm_up(shape, 2, shape.chunks * shape.microbatches)})


def interleaved_zb(shape: ScheduleSpec) -> Streams:
    """ZB-H1 over turns (Qi et al. 2023, arXiv 2401.10241): half the slope of warm-up, and W lags by `rank` turns."""
    warm_up, ranks = _warm_up(shape, 1, shape.chunks * shape.microbatches - 1), _ranks(shape)
    return _lagging(shape, {Op.F: ranks * 0, Op.B: warm_up, Op.W: warm_up + ranks})


def looped_bfs(shape: ScheduleSpec) -> Streams:
    """All microbatches forward through chunk after chunk, then all backward: each chunk's weights are needed twice a
    step, once each way (Lamy-Poirier 2022, arXiv 2211.05953)."""
    return _lagging(shape, {Op.F: _ranks(shape) * 0, Op.BW: _ranks(shape) * 0 + shape.chunks * shape.microbatches})


def group_sizes(shape: ScheduleSpec) -> list[int]:
    """Microbatches of each group: all of them in groups of `group` or, where that leaves a rest, a few more, because
    a group smaller than the pipeline would not fill it."""
    groups = shape.microbatches // shape.group
    share, rest = divmod(shape.microbatches, groups)
    return [share + (number < rest) for number in range(groups)]


def _ranks(shape: ScheduleSpec) -> Array:
    return np.arange(shape.ranks)


def _warm_up(shape: ScheduleSpec, slope: int, most: int) -> Array:
    """Forwards of every rank until the first group has been through all chunks of the last rank."""
    return np.minimum(slope * _ranks(shape)[::-1] + (shape.chunks - 1) * group_sizes(shape)[0], most)


def _lagging(shape: ScheduleSpec, lags: dict[Op, Array]) -> Streams:
    """Every op takes all turns in order, `lags` turns of its rank late."""
    turns = np.arange(shape.chunks * shape.microbatches)
    moments = [(turns + lag[:, None]) * len(lags) + at for at, lag in enumerate(lags.values())]
    order = np.argsort(np.concatenate(moments, axis=1), kind="stable")
    op = np.repeat([CODE[op] for op in lags], len(turns))
    chunk, mb = np.concatenate([_turns(shape, down=op is not Op.F) for op in lags], axis=1)
    return streams(op[order], chunk[order] * shape.ranks + _ranks(shape)[:, None], mb[order])


def _turns(shape: ScheduleSpec, *, down: bool) -> Array:
    """(chunk, microbatch) in order: a group through one chunk, then through the next."""
    chunks = range(shape.chunks - 1, -1, -1) if down else range(shape.chunks)
    turns, start = [], 0
    for size in group_sizes(shape):
        turns += [(chunk, mb) for chunk in chunks for mb in range(start, start + size)]
        start += size
    return np.array(turns).T
