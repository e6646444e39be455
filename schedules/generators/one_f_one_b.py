"""1F1B and its relatives, from GPipe to ZB-H2 (zb_h): every op runs through the same slots, some later than others.

The slots are (chunk, microbatch) in order: a group of microbatches goes through one chunk of a rank's layers, then the
next (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; groups of any size: Llama Team 2024, arXiv 2407.21783,
section 3.3). A group of `ranks` microbatches is depth-first, one group of all microbatches breadth-first.

An order is given by how many slots each op lags behind the forwards of its rank. The lag of the backwards is the
warm-up; when the forwards end, whatever lags behind them is the cool-down.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.generators.arrays import streams_from_arrays
from pentad.schedules.ir.columns import CODE, Array, Columns
from pentad.schedules.ir.instruction import Op
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def gpipe(spec: ScheduleSpec) -> Columns:
    """All microbatches forward, then all backward (Huang et al. 2019, arXiv 1811.06965). With several chunks: through
    chunk after chunk, so each chunk's weights are needed twice a step (Lamy-Poirier 2022, arXiv 2211.05953)."""
    return lagging(spec, {Op.BW: np.full(spec.ranks, spec.chunks * spec.microbatches)})


def one_f_one_b(spec: ScheduleSpec) -> Columns:
    """PipeDream-flush (Narayanan et al. 2021, arXiv 2006.09503): at most `ranks - rank` microbatches in flight.

    On slices of sequences (Seq1F1B, Sun et al. 2024, arXiv 2406.03488): 1 / slices of the bubble, with at most
    `ranks - rank - 1 + slices` slices in flight.
    """
    return lagging(spec, {Op.BW: warm_up(spec, 1)})


def interleaved(spec: ScheduleSpec) -> Columns:
    """1F1B over chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): 1 / chunks of the bubble of 1F1B, for
    (chunks - 1) x group more activations of a chunk.

    With one chunk this is eager 1F1B (Zhuang et al. 2023, arXiv 2211.05322, section 4): twice the warm-up of 1F1B and
    the same bubble, but in the steady state transfers overlap with compute, for up to `2 * (ranks - rank) - 1`
    microbatches in flight.
    """
    return lagging(spec, {Op.BW: warm_up(spec, 2)})


def warm_up(spec: ScheduleSpec, slope: int) -> Array:
    """[ranks] slots before the first backward: until the last rank can turn around, after all but one of the slices of
    a microbatch and after the other chunks of the first group, and `slope` more for each rank that follows."""
    turn = spec.slices - 1 + (spec.chunks - 1) * _group_sizes(spec)[0]
    return slope * np.arange(spec.ranks)[::-1] + turn


def _group_sizes(spec: ScheduleSpec) -> list[int]:
    """Microbatches of each group: `group` or, if that does not divide them, a few more, because a group smaller than
    the pipeline would not fill it."""
    groups = spec.microbatches // (spec.group or spec.microbatches)
    size, rest = divmod(spec.microbatches, groups)
    return [size + (number < rest) for number in range(groups)]


def lagging(spec: ScheduleSpec, lags: dict[Op, Array]) -> Columns:
    """F and the ops of `lags` in slot order, `lags[op][rank]` slots late; in one slot, ops run in this order."""
    lags = {Op.F: np.zeros(spec.ranks, int)} | lags
    chunk, mb = np.concatenate([_slots(spec, backward=op is not Op.F) for op in lags], axis=1)
    slots = np.arange(len(mb) // len(lags))
    order = np.argsort(np.concatenate([slots + lag[:, None] for lag in lags.values()], axis=1), kind="stable")
    op = np.repeat([CODE[op] for op in lags], len(slots))
    return streams_from_arrays(op[order], chunk[order] * spec.ranks + np.arange(spec.ranks)[:, None], mb[order])


def _slots(spec: ScheduleSpec, *, backward: bool) -> Array:
    """[2, slots] chunk and microbatch of each slot. Backwards take the chunks of a group in reverse, and so the slices
    of a microbatch, because the keys and values of a slice get gradients from all later slices."""
    step = -1 if backward else 1
    chunks, slices = range(spec.chunks)[::step], range(spec.slices)[::step]
    slots, start = [], 0
    for size in _group_sizes(spec):
        group = range(start, start + size)
        slots += [(chunk, mb * spec.slices + part) for chunk in chunks for mb in group for part in slices]
        start += size
    return np.array(slots).T
