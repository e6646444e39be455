"""The part of the proof that only forward-only programs need: they end with LOSS and leave the training state alone."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.verify.check_data import waits_for_compute
from pentad.schedules.verify.check_order import refuse

_ALLOWED = op_mask({Op.F, Op.SEND_F, Op.RECV_F, Op.ALL_GATHER, Op.FREE, Op.LOSS})


def prove_evaluation_end(program: Program) -> None:
    """Only forwards, their transfers and gathers run, and LOSS on every rank waits for the last forward. Raises
    ScheduleError."""
    columns, ranks = program.columns, np.arange(program.ranks)
    rows = columns.rows_of(~_ALLOWED)
    refuse(program, rows, rows >= 0, lambda k: f"{columns.key(rows[k])} cannot run in a forward-only program")
    loss = program.lookup.rows(ranks, CODE[Op.LOSS], -1, np.full(len(ranks), -1))
    last = program.lookup.last_compute
    waited = waits_for_compute(program, loss, last) | (last < columns.rank_offsets[:-1])
    for rank in np.flatnonzero(loss < 0).tolist():
        raise ScheduleError(f"rank {rank} has no LOSS", rank, len(program.streams[rank]) - 1)
    refuse(program, loss, ~waited, lambda rank: f"LOSS does not wait for {columns.key(last[rank])}")
