"""Compiles the 8-bit casts for an H100 or H200, which needs no GPU: prints how they read matrices, by case, as JSON.

In a process of its own, where Triton does not interpret kernels.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pentad.kernels.fp8 import fp8_cast_triton as cast
from pentad.kernels.fp8 import fp8_glu_triton as glu
from pentad.kernels.fp8 import fp8_norm_triton as norm
from pentad.kernels.fp8.fp8_cast_triton import Parts, Scaling

HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]


def reads(kernel: Any, types: dict[str, Any], constants: dict[str, Any], warps: int) -> Counter[str]:
    """The kinds of loads from device memory of a compiled kernel. `types` are those of its arguments, tuples of tensors
    among them, where None is passed as None."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in constants.items()}
    attributes = dict[tuple[int, ...], Any]()
    for name, kind in types.items():
        if isinstance(kind, str):
            attributes[names.index(name),] = ALIGNED
            continue
        signature[name] = tuple(each or "constexpr" for each in kind)
        for part, each in enumerate(kind):
            place = names.index(name), part
            values |= {place: None} if each is None else {}
            attributes |= {} if each is None else {place: ALIGNED}
    source = ASTSource(kernel, signature, values, attributes)
    found = compiled(source, target=HOPPER, options={"num_warps": warps})
    return Counter(re.findall(r"ld\.global[.\w:]*?\.((?:v\d\.)?b\d+)\b", found.asm["ptx"]))


def cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], Parts]]:
    """(case, kernel, types, constants, parts) of each cast."""
    for given in (False, True):
        scaling = Scaling(given, 0, 448.0, power_of_two=False)
        form, none = ("*fp8e4nv", "*fp32", "*fp32" if given else None), (None, None, None)
        recipe = "given" if given else "tiles"
        for rows, columns in ((True, True), (True, False), (False, True)):
            parts = cast.GIVEN_PARTS._replace(rows=rows, columns=columns)
            if not given:
                parts = cast.SPLIT_PARTS if rows and columns else cast.ROW_PARTS if rows else cast.COLUMN_PARTS
            forms = {"rows": form if rows else none, "columns": form if columns else none}
            types = {"x": "*bf16", **forms, "T": "i32", "K": "i32"}
            constants: dict[str, Any] = {"maxima": None, "PARTS": parts, "SCALING": scaling}
            yield f"cast {recipe} {rows:d}{columns:d}", cast._cast, types, constants, parts
        parts = cast.GIVEN_PARTS._replace(rows=False) if given else cast.COLUMN_PARTS
        types = {"summed": "*bf16", "weight": "*bf16", "rstd": "*fp32", "rows": none, "columns": form}
        constants = {"OFFSET": 0.0, "PARTS": parts, "SCALING": scaling}
        yield f"norm {recipe}", norm._again, types | {"T": "i32", "H": "i32"}, constants, parts
        parts = glu.GIVEN_PARTS if given else glu.SPLIT_PARTS
        types = {"dy": "*bf16", "gate_up": "*bf16", "rows": form, "columns": form, "y": form, "T": "i32", "I": "i32"}
        settings = glu.Backward("silu", scaling, scaling)
        yield f"glu {recipe}", glu._backward, types, {"maxima": None, "PARTS": parts, "SETTINGS": settings}, parts


if __name__ == "__main__":
    print(json.dumps({name: reads(kernel, types, given, parts.warps) for name, kernel, types, given, parts in cases()}))
