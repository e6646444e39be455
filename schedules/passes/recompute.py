"""Pass: RECOMPUTE before every backward of some stages, whose F saves less (Chen et al., arXiv 1604.06174).

It needs nothing from other ranks, so it goes before the wait for the gradient and fills it. W uses what B saves, so a
schedule that splits the backward still recomputes once.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pentad.schedules.ir.columns import CODE, key_columns
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert_rows


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """RECOMPUTE for every microbatch of these stages. Raises PentadError for a stage that the program does not have."""
    unknown = sorted(stage for stage in stages if not 0 <= stage < program.stages)
    if unknown:
        found = f"memory.recompute_stages has stage {unknown[0]}"
        raise PentadError(f"{found}: expected stages from 0 to {program.stages - 1}")
    columns = program.columns
    rows = columns.rows_of(IS_BACKWARD)
    rows = rows[np.isin(columns.stage[rows], list(stages))]
    op = np.full(len(rows), CODE[Op.RECOMPUTE])
    added = key_columns(np.array([0, len(rows)]), op, columns.stage[rows], columns.microbatch[rows])
    return program.with_streams(insert_rows(columns, added, columns.rank[rows], rows - columns.is_second[rows]))
