"""Pass: RECOMPUTE before every backward of some stages, whose F saves less (Chen et al., arXiv 1604.06174).

It needs nothing from other ranks, so it goes before the wait for the gradient and fills that time. W uses what B saves,
so a schedule that splits the backward still recomputes once.

What a unit recomputes is a string in a `Plan`: a mode, or names of parts of its layers joined by commas. The names are
Megatron-LM's (those of --recompute-modules, and qkv_linear and attn_proj of --offload-modules).

Row-wise parts can be recomputed for only a share of a sequence's tokens, while the rows of the others are saved (MEMO,
arXiv 2407.12117).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from pentad.schedules.ir.columns import CODE, key_columns
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert_rows
from pentad.schedules.spec.model import ModelSpec

RECOMPUTE_MODES = ("none", "selective", "attention", "full")  # each recomputes more than the one before
LayerPart = Literal[
    "mlp",  # gate and up products of a dense feed-forward network
    "moe",  # the same of experts and shared experts
    "core_attn",  # the result of attention and its log-sum-exps
    "qkv_linear",  # queries, keys and values, and what their norms save
    "mla_up_proj",  # the same of multi-head latent attention, and its latents
    "attn_proj",  # the residual stream after attention, and what the norms beside it save
]
PARTS: tuple[LayerPart, ...] = get_args(LayerPart)
ROW_WISE = frozenset[str]({"mlp", "qkv_linear", "attn_proj"})  # each row depends on one token alone
# The product of some rows is bit-identical to those rows of the full product if both row counts are multiples of what
# kernels take at once: ROWS on CPUs and ROWS_OF_TILE on GPUs.
ROWS, ROWS_OF_TILE, LARGE = 4, 128, 1024
_OF_MODES = {
    "none": frozenset[str](),
    "selective": frozenset({"mlp", "moe"}),
    "attention": frozenset[str](PARTS) - {"core_attn"},
    "full": frozenset[str](PARTS),
}


def parts_of(model: ModelSpec) -> tuple[LayerPart, ...]:
    """The parts that the model's layers have; a custom model's have none."""
    if model.custom is not None:
        return ()
    missing = {"mla_up_proj" if model.mla is None else "qkv_linear"}
    missing |= {"mlp"} if not model.dense_layers else set()
    missing |= {"moe"} if model.experts is None else set()
    return tuple(part for part in PARTS if part not in missing)


def mode_of(names: Collection[str]) -> str:
    """Part names as a plan writes them."""
    return ",".join(name for name in PARTS if name in names)


def config_value(mode: str) -> str | list[str]:
    """A plan's mode as a value of memory.recompute."""
    return mode if mode in RECOMPUTE_MODES else mode.split(",")


def config_text(mode: str) -> str:
    """`config_value` in YAML."""
    return mode if mode in RECOMPUTE_MODES else f"[{mode}]"


@lru_cache
def recomputed_parts(mode: str) -> frozenset[str]:
    """The parts that a mode recomputes; 'full' does so from the input of the unit, from which everything follows."""
    return _OF_MODES[mode] if mode in _OF_MODES else frozenset(mode.split(","))


def is_row_wise(parts: Collection[str]) -> bool:
    """Whether RECOMPUTE can run all of these parts of a layer row by row."""
    return ROW_WISE.issuperset(parts)


def saved_rows(rows: int, fraction: float) -> int:
    """How many rows of a rank's residual stream, from the first on, F saves if row-wise parts are recomputed for this
    `fraction` of them (0 to 1): the other rows, less up to a tile. Fewer `rows` never give more."""
    of_tiles = int((1 - fraction) * max(rows, LARGE)) // ROWS_OF_TILE * ROWS_OF_TILE
    return of_tiles if rows >= LARGE else min(of_tiles, int((1 - fraction) * rows) // ROWS * ROWS)


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """Adds RECOMPUTE for every microbatch of these stages. Raises PentadError for a stage that the program does not
    have."""
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
