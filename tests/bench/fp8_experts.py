"""Times the experts' products in 8 bits beside those in bfloat16, on one GPU.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/fp8_experts.py [--json FILE]

TFLOP/s of the grouped products of F (gate_up), B (gate_up's input) and W (gate_up, added to float32; in 8 bits with the
casts of its operands back to bfloat16), and milliseconds of all that a layer's experts do with their rows in F, B and W
of one microbatch, casts of tokens, gathers and gated linear units included; then those of a cast of the weights, once a
step. Routing is even.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernel_times import Calls, random, seconds
from record import stamp, write
from torch import Tensor

from pentad.kernels.fp8.fp8_cast import fp8_cast
from pentad.kernels.fp8.fp8_expert_glu import fp8_weighted_glu, fp8_weighted_glu_backward
from pentad.kernels.fp8.fp8_grouped import ExpertMatrices, dequantize_rows, fp8_grouped_gemm
from pentad.kernels.fp8.fp8_tensor import Recipe
from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.moe.moe_permute import (
    ExpertRows,
    gather_rows,
    sort_by_expert,
    sum_rows,
    weighted_glu,
    weighted_glu_backward,
)

BLOCK, COMPUTE = Recipe("block"), torch.bfloat16


class Shape(NamedTuple):
    """A layer's experts on one rank: tokens of a microbatch, hidden and intermediate size, number of experts, and
    experts a token."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = {
    "Mixtral 8x7B": Shape(8192, 4096, 14336, 8, 2),
    "DeepSeek-V3, 16 experts": Shape(16384, 7168, 2048, 16, 2),
    "DeepSeek-V2-Lite": Shape(16384, 2048, 1408, 64, 6),
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
    "small": Shape(4096, 1024, 512, 64, 4),
}


class Layer:
    """Weights, tokens and gradients of a layer's experts, and both ways to compute with them."""

    def __init__(self, shape: Shape) -> None:
        tokens, hidden, width, experts, top_k = shape
        self.shape, self.x, self.dout = shape, random(tokens, hidden), random(tokens, hidden)
        # As large as in training: with larger ones FP8 errors grow in the gated linear unit.
        self.up, self.down = random(experts, 2 * width, hidden), random(experts, hidden, width)
        self.up.mul_(hidden**-0.5)
        self.down.mul_(width**-0.5)
        self.main_up = torch.zeros(self.up.shape, device="cuda")
        self.main_down = torch.zeros(self.down.shape, device="cuda")
        chosen = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices
        weights = torch.rand(tokens, top_k, device="cuda")
        self.rows: ExpertRows = sort_by_expert(chosen, weights, 0, experts)
        self.up8, self.down8 = self.cast_weights()

    def cast_weights(self) -> tuple[ExpertMatrices, ExpertMatrices]:
        experts = self.shape.experts
        up, down = (fp8_cast(each.flatten(0, 1), BLOCK, "weight") for each in (self.up, self.down))
        return ExpertMatrices.of(up, experts), ExpertMatrices.of(down, experts)

    def bf16(self) -> Tensor:
        rows, offsets = self.rows, self.rows.offsets
        gathered = gather_rows(self.x, rows.tokens, offsets)
        gate_up = grouped_gemm(gathered, self.up, offsets)
        gated = weighted_glu(gate_up, rows.weights, offsets)
        sum_rows(grouped_gemm(gated, self.down, offsets), rows.positions)
        dout = gather_rows(self.dout, rows.tokens, offsets)
        dgated = grouped_gemm(dout, self.down.transpose(1, 2), offsets)
        dgate_up, gated, _ = weighted_glu_backward(dgated, gate_up, rows.weights, offsets)
        dx = sum_rows(grouped_gemm(dgate_up, self.up.transpose(1, 2), offsets), rows.positions)
        dout = gather_rows(self.dout, rows.tokens, offsets)
        accumulate_grouped_gradient_(self.main_down, dout, gated, offsets)
        gathered = gather_rows(self.x, rows.tokens, offsets)
        accumulate_grouped_gradient_(self.main_up, dgate_up, gathered, offsets)
        return dx

    def fp8(self) -> Tensor:
        rows, offsets, index = self.rows, self.rows.offsets, self.rows.tokens
        x = fp8_cast(self.x, BLOCK, "activation", columns=False).rows
        dout = fp8_cast(self.dout, BLOCK, "gradient", columns=False).rows
        assert x is not None and dout is not None
        gate_up = fp8_grouped_gemm(x, self.up8.rows, offsets, COMPUTE, index)
        gated = fp8_weighted_glu(gate_up, rows.weights, offsets, BLOCK)
        sum_rows(fp8_grouped_gemm(gated, self.down8.rows, offsets, COMPUTE), rows.positions)
        dgated = fp8_grouped_gemm(dout, self.down8.columns, offsets, COMPUTE, index)
        dgate_up, gated, _ = fp8_weighted_glu_backward(dgated, gate_up, rows.weights, offsets, BLOCK)
        dx = sum_rows(fp8_grouped_gemm(dgate_up, self.up8.columns, offsets, COMPUTE), rows.positions)
        for main, left, of_left, right, of_right in (
            (self.main_down, dout, index, gated, None),
            (self.main_up, dgate_up, None, x, index),
        ):
            dy, y = dequantize_rows(left, offsets, COMPUTE, of_left), dequantize_rows(right, offsets, COMPUTE, of_right)
            accumulate_grouped_gradient_(main, dy, y, offsets)
        return dx

    def products(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """(in bfloat16, in FP8), for gate_up."""
        offsets, index = self.rows.offsets, self.rows.tokens
        gathered = gather_rows(self.x, index, offsets)
        wide = random(gathered.shape[0], 2 * self.shape.width)
        x, dy = fp8_cast(self.x, BLOCK, "activation").rows, fp8_cast(wide, BLOCK, "gradient").rows
        assert x is not None and dy is not None
        return {
            "F": (
                lambda: grouped_gemm(gathered, self.up, offsets),
                lambda: fp8_grouped_gemm(x, self.up8.rows, offsets, COMPUTE, index),
            ),
            "B": (
                lambda: grouped_gemm(wide, self.up.transpose(1, 2), offsets),
                lambda: fp8_grouped_gemm(dy, self.up8.columns, offsets, COMPUTE),
            ),
            "W": (
                lambda: accumulate_grouped_gradient_(self.main_up, wide, gathered, offsets),
                lambda: accumulate_grouped_gradient_(
                    self.main_up,
                    dequantize_rows(dy, offsets, COMPUTE),
                    dequantize_rows(x, offsets, COMPUTE, index),
                    offsets,
                ),
            ),
        }


def took(call: Callable[[], object]) -> float:
    calls: Calls = [call] * 3
    return seconds(calls)[0]


def measured(shape: Shape) -> dict[str, float]:
    layer, found = Layer(shape), dict[str, float]()
    flops = 4.0 * shape.tokens * shape.top_k * shape.hidden * shape.width
    for name, (bf16, fp8) in layer.products().items():
        found[f"{name} bf16"], found[f"{name} fp8"] = (flops / took(each) / 1e12 for each in (bf16, fp8))
    found["ms bf16"], found["ms fp8"] = (1e3 * took(each) for each in (layer.bf16, layer.fp8))
    found["ratio"] = found["ms bf16"] / found["ms fp8"]
    found["ms weights"] = 1e3 * took(layer.cast_weights)
    apart, want = layer.fp8().float(), layer.bf16().float()
    found["error of dx"] = float((apart - want).norm() / want.norm())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        rows.append({"shape": name, **shape._asdict(), **measured(shape)})
        if len(rows) == 1:
            print(f"{'':<24}" + "".join(f"{column:>12}" for column in list(rows[0])[6:]))
        print(f"{name:<24}" + "".join(f"{value:>12.4g}" for value in list(rows[-1].values())[6:]), flush=True)
        torch.cuda.empty_cache()
    write(args.json, {**stamp(f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}"), "experts": rows})
    return int(any(row["error of dx"] > 0.1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
