"""Compiles the FP8 casts for an H100 or H200, which needs no GPU, and prints how they read matrices, by case, as JSON.

Runs in a process of its own, where Triton does not interpret kernels.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from pentad.kernels.fp8 import fp8_blockwise_gluon as blockwise
from pentad.kernels.fp8 import fp8_cast_triton as cast
from pentad.kernels.fp8 import fp8_glu_triton as glu
from pentad.kernels.fp8 import fp8_norm_triton as norm
from pentad.kernels.fp8.fp8_scaling_triton import Scaling
from pentad.kernels.rms_norm_triton import PER_THREAD, shape_of

HIDDEN = 4096
BF16, F32, I32 = "*bf16", "*fp32", "i32"
HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]


class Case(NamedTuple):
    """A kernel, its constants and the `types` of its other arguments, some of which are tuples of tensors or None."""

    name: str
    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    warps: int


def reads(case: Case) -> Counter[str]:
    """The kinds of loads from device memory of a compiled kernel."""
    _, kernel, types, constants, warps = case
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in constants.items()}
    attributes = dict[tuple[int, ...], Any]()
    for name, kind in types.items():
        if kind == "fp32":
            continue
        if isinstance(kind, str):
            attributes[names.index(name),] = ALIGNED
            continue
        signature[name] = tuple(each or "constexpr" for each in kind)
        for part, each in enumerate(kind):
            place = names.index(name), part
            values |= {place: None} if each is None else {}
            attributes |= {} if each is None else {place: ALIGNED}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, attributes)
    found = compiled(source, target=HOPPER, options={"num_warps": warps})
    return Counter(re.findall(r"ld\.global[.\w:]*?\.((?:v\d\.)?b\d+)\b", found.asm["ptx"]))


def cases(given: bool) -> Iterator[Case]:
    """All casts with scales from `given` maxima, or else from those of tiles."""
    types: dict[str, Any]
    constants: dict[str, Any]
    scaling, recipe = Scaling(given, 0, 448.0, power_of_two=False), "given" if given else "tiles"
    form, none = ("*fp8e4nv", "*fp32", "*fp32" if given else None), (None, None, None)
    parts_of = {
        (True, False): cast.GIVEN_PARTS._replace(columns=False) if given else cast.ROW_PARTS,
        (False, True): cast.GIVEN_PARTS._replace(rows=False) if given else cast.COLUMN_PARTS,
    }
    if given:
        parts_of[True, True] = cast.GIVEN_PARTS
    for (rows, columns), parts in parts_of.items():
        types = {"x": BF16, "rows": form if rows else none, "columns": form if columns else none, "T": I32, "K": I32}
        constants = {"PARTS": parts, "SCALING": scaling}
        if given and rows:  # as with delayed scaling
            types["maxima"] = F32
        else:
            constants["maxima"] = None
        yield Case(f"cast {recipe} {rows:d}{columns:d}", cast._cast, types, constants, parts.warps)
    by_rows, by_columns = parts_of[True, False], parts_of[False, True]
    types = {"summed": BF16, "weight": BF16, "rstd": F32, "rows": none, "columns": form, "T": I32, "H": I32}
    constants = {"OFFSET": 0.0, "PARTS": by_columns, "SCALING": scaling}
    yield Case(f"normed again {recipe}", norm._again, types, constants, by_columns.warps)
    types = {"gate_up": BF16, "out": form, "maxima": F32, "T": I32, "I": I32}
    constants = {"ACT": "silu", "PARTS": by_rows, "SCALING": scaling}
    yield Case(f"glu {recipe}", glu._forward, types, constants, by_rows.warps)
    types = {"dy": BF16, "gate_up": BF16, "rows": form, "columns": form, "y": form, "T": I32, "I": I32}
    constants = {"ACT": "silu", "GRADIENTS": scaling, "OF_Y": scaling}
    for parts in [glu.GIVEN_PARTS] if given else [glu.ROWS_BACK, glu.COLUMNS_BACK]:
        name = f"glu backward {recipe} {parts.rows:d}{parts.columns:d}"
        yield Case(name, glu._backward, types, constants | {"maxima": None, "PARTS": parts}, parts.warps)
    if not given:
        count, warps = blockwise.GLU
        yield Case("glu backward tiles", blockwise._glu_backward, types, constants | {"COUNT": count}, warps)
        count, warps = blockwise.CAST
        types = {"x": BF16, "rows": form, "columns": form, "T": I32, "K": I32}
        yield Case("cast tiles", blockwise._cast, types, {"COUNT": count, "SCALING": scaling}, warps)
    at_once, block, warps = shape_of(HIDDEN, PER_THREAD)
    types = {"out": form, "maxima": F32, "rstd": F32, "T": I32, "eps": "fp32"}
    types |= {"x": BF16, "residual": BF16, "weight": BF16, "summed": BF16}
    constants = {"H": HIDDEN, "ROWS": at_once, "BLOCK": block, "ADD": True, "OFFSET": 0.0, "CAST": True}
    yield Case(f"norm {recipe}", norm._forward, types, constants | {"SCALING": scaling}, warps)


if __name__ == "__main__":
    both = [*cases(given=False), *cases(given=True)]
    print(json.dumps({each.name: reads(each) for each in both}))
