"""What GEMMs of Llama 8B cost under the power limit of a GPU: each runs for seconds, until clock and power are steady.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/gemm_energy.py [--json FILE]

Prints TFLOP/s, the share of what tensor cores could do at this clock, clock, watts, and joules per TFLOP. W writes
float32. The rate of a cool GPU, as that of fp8_kernels.py, is higher.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_kernels import LINEARS, RECIPES, TOKENS, forms
from gpu_clocks import clocks, sampled
from kernel_times import random
from record import record

from pentad.kernels import wgrad_gemm
from pentad.kernels.fp8.fp8_gemm import accumulate_fp8_gradient_, fp8_gemm

SECONDS, STEADY = 2.2, 0.8  # of a measurement, and after which clocks are read
CALLS = 20  # between two waits for the GPU
FLOPS_A_CLOCK = {"bf16": 2 * 2048, "fp8": 2 * 4096}  # of an SM of a Hopper GPU

Call = Callable[[], object]


def steady(call: Call, flops: float, width: str) -> dict[str, float]:
    with sampled(torch.cuda.current_device()) as samples:
        begin, count = time.monotonic(), 0
        while time.monotonic() < begin + SECONDS:
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            count += CALLS
        end = time.monotonic()
    found, rate = clocks(samples, begin + STEADY, end), flops * count / (end - begin)
    sms = torch.cuda.get_device_properties().multi_processor_count
    return {
        "TFLOP/s": round(rate / 1e12),
        "of tensor cores at this clock": round(rate / (sms * FLOPS_A_CLOCK[width] * found["sm_mhz"] * 1e6), 2),
        **found,
        "J/TFLOP": round(found["watts"] / rate * 1e12, 3),
    }


def calls(n: int, k: int) -> dict[tuple[str, str], Call]:
    """By recipe and op, the GEMMs of a linear layer [n, k]."""
    x, dy, w, main = random(TOKENS, k), random(TOKENS, n), random(n, k), torch.empty(n, k, device="cuda")
    found: dict[tuple[str, str], Call] = {
        ("bf16", "F"): lambda: x @ w.t(),
        ("bf16", "B"): lambda: dy @ w,
        ("bf16", "W"): partial(wgrad_gemm.accumulate_gradient_, main, dy, x, overwrite=True),
    }
    for name, recipe in RECIPES.items():
        roles = {"activation": x, "gradient": dy, "weight": w}
        operands: list[Any] = [forms(tensor, recipe, role) for role, tensor in roles.items()]
        fx, fdy, fw = operands
        accumulate = partial(accumulate_fp8_gradient_, overwrite=True)
        found |= {
            (name, "F"): partial(fp8_gemm, fx.rows, fw.rows, torch.bfloat16),
            (name, "B"): partial(fp8_gemm, fdy.rows, fw.columns, torch.bfloat16),
            (name, "W"): partial(accumulate, main, fdy.columns, fx.columns),
        }
    return found


def measure() -> dict[str, Any]:
    rows = []
    for layer in ("qkv", "gate_up"):
        n, k = LINEARS[layer]
        for (recipe, op), call in calls(n, k).items():
            found = steady(call, 2.0 * TOKENS * n * k, "bf16" if recipe == "bf16" else "fp8")
            rows.append({"layer": layer, "recipe": recipe, "op": op, **found})
            print(*rows[-1].values(), flush=True)
    return {"device": torch.cuda.get_device_name(), "gemms": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    record(parser.parse_args().json, "energy", measure)


if __name__ == "__main__":
    main()
