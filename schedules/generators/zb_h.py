"""ZB-H1 and ZB-H2: 1F1B with the backward split into B and W, each in its own slot (see one_f_one_b)."""

from __future__ import annotations

import numpy as np

from pentad.schedules.generators.one_f_one_b import lagging, warm_up
from pentad.schedules.ir.columns import Columns
from pentad.schedules.ir.instruction import Op
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def zb_h1(spec: ScheduleSpec) -> Columns:
    """1F1B with W `rank` slots after B, so every rank saves at most `ranks` microbatches: the memory of 1F1B (Qi et
    al. 2023, arXiv 2401.10241, section 2). With several chunks: interleaved, with half the slope of its warm-up."""
    return _split_backward(spec, 1)


def zb_h2(spec: ScheduleSpec) -> Columns:
    """Twice the warm-up of ZB-H1, and W twice as long after B: from `2 * ranks - 1` microbatches on there is no bubble
    if the optimizer step needs no barrier (Qi et al. 2023, arXiv 2401.10241, section 2 and table 2)."""
    return _split_backward(spec, 2)


def _split_backward(spec: ScheduleSpec, slope: int) -> Columns:
    lag = warm_up(spec, slope)
    return lagging(spec, {Op.B: lag, Op.W: lag + slope * np.arange(spec.ranks)})
