"""ZB-V: two chunks per rank, placed as a V, so that the first and the last stage share a rank.

Qi et al. 2023, arXiv 2401.10241, section 6; the order is that of the published implementation.
"""

from __future__ import annotations

import numpy as np

from pentad.schedules.generators.arrays import occurrence_index, streams_from_arrays
from pentad.schedules.ir.columns import CODE, Columns
from pentad.schedules.ir.instruction import Op
from pentad.schedules.spec.schedule_spec import ScheduleSpec

F0, F1, B0, B1, W0, W1 = range(6)  # op and chunk
_OPS = np.array([CODE[op] for op in (Op.F, Op.B, Op.W)])


def zb_v(spec: ScheduleSpec) -> Columns:
    """No bubble without a barrier at equal costs of F, B and W, from `2 * ranks - 1` microbatches on, with the
    activations of 1F1B on every rank. Chunk 0 of a rank is stage `rank`, chunk 1 is stage `2 * ranks - 1 - rank`."""
    ranks, enough = spec.ranks, max(2 * spec.ranks - 1, spec.microbatches)
    kind = np.array([_all_phases(rank, ranks, enough) for rank in range(ranks)])
    mb = occurrence_index(kind, enough)
    rank = np.arange(ranks)[:, None]
    stage = np.where(kind % 2, 2 * ranks - 1 - rank, rank)
    exists = mb < spec.microbatches
    return streams_from_arrays(*(field[exists].reshape(ranks, -1) for field in (_OPS[kind // 2], stage, mb)))


def _all_phases(rank: int, ranks: int, microbatches: int) -> list[int]:
    """The kinds of a step with enough microbatches for all phases."""
    below = ranks - rank
    return [
        *[F0] * (2 * below - 1),  # warm-up 1
        *[F1, F0] * rank,  # warm-up 2
        *[F1, B1, W1] * below,  # warm-up 3
        *[F0, B0, W0, F1, B1, W1] * (microbatches + rank + 1 - 2 * ranks),  # steady state
        *[B0, W0, F1, B1, W1] * (below - 1),  # steady state after the last F0
        *[B0, B1] * rank,  # cool-down 1
        *[B0, W0] * below,  # cool-down 2
        *[W1] * rank,  # cool-down 3: the remaining weight gradients
        *[W0] * rank,
    ]
