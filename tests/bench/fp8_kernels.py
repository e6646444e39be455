"""Times 8-bit products at the shapes of Llama 8B, and the casts, on one GPU.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/fp8_kernels.py [--json FILE]

Products: TFLOP/s of every recipe in F, B and W, beside cuBLAS in bf16. W writes float32. Casts: GB/s of the bytes that
have to move, beside a copy's. Every result is checked against the reference in torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_recipes import amax_for, assert_nearly_equal
from kernel_times import EPS, SETS, Calls, each, error, peak_rate, random, seconds, sets
from record import stamp, write
from torch import Tensor

from pentad.kernels import wgrad_gemm
from pentad.kernels.fp8 import fp8_cast, fp8_glu, fp8_norm
from pentad.kernels.fp8.fp8_gemm import accumulate_fp8_gradient_, fp8_gemm
from pentad.kernels.fp8.fp8_tensor import Fp8Forms, Fp8Tensor, Recipe

TOKENS, HIDDEN, FFN = 16384, 4096, 14336
LINEARS = {"qkv": (6144, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
RECIPES = {"tensor": Recipe("tensor"), "row": Recipe("row"), "block": Recipe("block")}


def forms(x: Tensor, recipe: Recipe, role: Any) -> Fp8Forms:
    return fp8_cast.fp8_cast(x, recipe, role, amax_for(recipe, x))


def rate(flops: float, calls: Calls) -> float:
    return flops / seconds(calls)[0] / 1e12


def measured(measure: Callable[[], float]) -> float | str:
    try:
        return measure()
    except Exception as problem:  # that cuBLAS lacks a layout or dtype here is a result too
        return f"{type(problem).__name__}: {problem}"[:200]


def products(name: str, n: int, k: int) -> list[dict[str, Any]]:
    """Rows of the table of products of one linear layer [n, k]."""
    flops = 2.0 * TOKENS * n * k
    main = torch.empty(n, k, device="cuda")
    data = sets(lambda: (random(TOKENS, k), random(TOKENS, n), random(n, k)))
    calls: dict[str, Callable[[Any, Any, Any], object]] = {
        "F": lambda x, dy, w: x @ w.t(),
        "B": lambda x, dy, w: dy @ w,
        "W": lambda x, dy, w: wgrad_gemm.accumulate_gradient_(main, dy, x, overwrite=True),
        "W+=": lambda x, dy, w: wgrad_gemm.accumulate_gradient_(main, dy, x),
    }
    rows = [{"product": f"{name} {kind}", "bf16": rate(flops, each(call, data))} for kind, call in calls.items()]
    x, dy, w = data[0]
    for recipe_name, recipe in RECIPES.items():
        cast = [
            (forms(x, recipe, "activation"), forms(dy, recipe, "gradient"), forms(w, recipe, "weight"))
            for x, dy, w in data[:2]
        ]
        fp8_calls: dict[str, tuple[Callable[..., Tensor | None], Tensor]] = {
            "F": (lambda x, dy, w: fp8_gemm(x.rows, w.rows, torch.bfloat16), x @ w.t()),
            "B": (lambda x, dy, w: fp8_gemm(dy.rows, w.columns, torch.bfloat16), dy @ w),
            "W": (lambda x, dy, w: accumulate_fp8_gradient_(main, dy.columns, x.columns, overwrite=True), dy.t() @ x),
            "W+=": (lambda x, dy, w: accumulate_fp8_gradient_(main, dy.columns, x.columns), dy.t() @ x),
        }
        for row, (kind, (call, want)) in zip(rows, fp8_calls.items(), strict=True):
            row[recipe_name] = measured(partial(rate, flops, each(call, cast)))
            if kind != "W+=" and not isinstance(row[recipe_name], str):
                found = call(*cast[0])
                row[f"{recipe_name} error"] = error([main if found is None else found], [want])
        del cast
    return rows


def casts(recipe: Recipe) -> dict[str, tuple[float, Calls]]:
    """Casts, each with the bytes that must move: every input read once and every result written once."""
    weight, big = random(HIDDEN), random(2 * FFN, HIDDEN)
    narrow = sets(lambda: (random(TOKENS, HIDDEN), random(TOKENS, HIDDEN)))
    wide = sets(lambda: (random(TOKENS, 2 * FFN), random(TOKENS, FFN)))
    amax, elements = amax_for(recipe, narrow[0][0]), TOKENS * HIDDEN
    rows = amax and amax.rows
    both = None if amax is None else (amax, amax.columns)
    rstd = torch.rsqrt(narrow[0][0].float().square().mean(1) + EPS)

    def cast(x: Tensor, _: Tensor, *, rows: bool = True, columns: bool = True) -> object:
        return fp8_cast.fp8_cast(x, recipe, "gradient", amax, rows=rows, columns=columns)

    def norm(x: Tensor, residual: Tensor) -> object:
        return fp8_norm.fp8_rms_norm(x, weight, EPS, recipe, rows, residual)

    def normed(x: Tensor, _: Tensor) -> object:
        return fp8_norm.fp8_normed(x, weight, rstd, recipe, amax, rows=False)

    return {
        "rows": (3 * elements, each(partial(cast, columns=False), narrow)),
        "columns": (3 * elements, each(partial(cast, rows=False), narrow)),
        "both forms": (4 * elements, each(cast, narrow)),
        "weight, both forms": (4 * big.numel(), [lambda: fp8_cast.fp8_cast(big, recipe, "weight", amax)] * SETS),
        "RMSNorm + residual, rows": (7 * elements, each(norm, narrow)),
        "normed again, columns": (3 * elements, each(normed, narrow)),
        "SwiGLU, rows": (5 * TOKENS * FFN, each(lambda x, _: fp8_glu.fp8_glu(x, recipe, "silu", rows), wide)),
        "dSwiGLU, both forms, y columns": (
            11 * TOKENS * FFN,
            each(lambda x, dy: fp8_glu.fp8_glu_backward(dy, x, recipe, "silu", both), wide),
        ),
    }


def cast_rows() -> Iterator[dict[str, Any]]:
    for scaling in ("block", "tensor"):
        for name, (work, calls) in casts(RECIPES[scaling]).items():
            row = {"cast": f"{scaling}: {name}", "GB/s": work / seconds(calls)[0] / 1e9}
            print(f"{row['cast']:<44}{row['GB/s']:>8.0f}", flush=True)
            yield row


def results(recipe: Recipe, x: Tensor, weight: Tensor, gate_up: Tensor, dy: Tensor) -> list[Fp8Tensor | None]:
    """The results of all casts."""
    amax = amax_for(recipe, x)
    rows = amax and amax.rows
    both = None if amax is None else (amax, amax.columns)
    normed, summed, rstd = fp8_norm.fp8_rms_norm(x, weight, EPS, recipe, rows)
    dgate_up, y = fp8_glu.fp8_glu_backward(dy, gate_up, recipe, "silu", both)
    return [
        *fp8_cast.fp8_cast(x, recipe, "gradient", amax),
        *(normed, *fp8_norm.fp8_normed(summed, weight, rstd, recipe, amax)),
        *(fp8_glu.fp8_glu(gate_up, recipe, "silu", rows), *dgate_up, y),
    ]


def check_casts() -> None:
    """Compares the kernels at full width with the reference, which can round gradients of the gated unit as they do."""
    inputs = random(256, HIDDEN), random(HIDDEN), random(256, 2 * FFN), random(256, FFN)
    x, weight, *of_unit = (each.cpu() for each in inputs)
    for recipe in (RECIPES["block"], RECIPES["tensor"]):
        wanted = results(recipe, x.float(), weight.float(), *of_unit)
        for found, want in zip(results(recipe, *inputs), wanted, strict=True):
            assert found is not None
            assert_nearly_equal(Fp8Tensor(found.values.cpu(), found.scales.cpu()), want, differing=1e-2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    torch.manual_seed(0)
    check_casts()
    copy, gemm = peak_rate(False) / 1e9, peak_rate(True) / 1e12
    print(f"a copy: {copy:.0f} GB/s; a square bf16 product: {gemm:.0f} TFLOP/s")
    cast_results, product_rows = list(cast_rows()), list[dict[str, Any]]()
    print(f"{'TFLOP/s':<14}" + "".join(f"{name:>10}" for name in ("bf16", *RECIPES)))
    for name, shape in LINEARS.items():
        product_rows += products(name, *shape)
        for row in product_rows[-4:]:
            cells = (row[column] for column in ("bf16", *RECIPES))
            print(
                f"{row['product']:<14}"
                + "".join(f"{cell:>10.0f}" if isinstance(cell, float) else f" {cell}" for cell in cells),
                flush=True,
            )
    machine = f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    write(
        args.json,
        {**stamp(machine), "copy GB/s": copy, "bf16 TFLOP/s": gemm, "casts": cast_results, "products": product_rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
