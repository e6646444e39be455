"""Times attention of packed documents, with windows and with soft caps on one GPU, beside torch's kernels for them.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/packed_attention.py --json OUT

The peer is torch's flash attention 2, and, for soft caps, which it lacks, products, a softmax in float32 and autograd,
as in transformers' `eager` attention. Times are median device times; TFLOP/s count the pairs that masks keep, and a
backward 2.5 times its forward. The error is the largest of our output, dq, dk and dv beside the peer's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from kernel_times import SAMPLES, error, random
from record import stamp, write
from torch import Tensor

from pentad.kernels.attention import attention_partial as kernels
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.attention.packed_runs import PackedLengths

LARGEST_ERROR = 1e-2
TEXTS = [5000, 3192, 700, 900, 92, 2000, 4300, 200]  # tokens of documents


class Case(NamedTuple):
    lengths: list[int]
    heads: int = 32
    groups: int = 8
    width: int = 128
    value: int = 128
    window: int | None = None
    softcap: float = 0.0

    @property
    def flops(self) -> int:
        """FLOPs of a forward."""
        seen = [(length, min(length, self.window or length)) for length in self.lengths]
        pairs = sum(most * (most + 1) // 2 + (length - most) * most for length, most in seen)
        return 2 * pairs * self.heads * (self.width + self.value)


CASES = {
    "4 documents of 16,384": Case([16384] * 4),
    "2 documents of 8,192": Case([8192] * 2),
    "documents of 92 to 5,000": Case(TEXTS),
    "64 documents of 1,024": Case([1024] * 64),
    "256 documents of 256": Case([256] * 256),
    "1,024 documents of 64": Case([64] * 1024),
    "window of 4,096 of 32,768": Case([32768], window=4096),
    "window of 1,024 of 32,768": Case([32768], window=1024),
    "4 documents of 4,096, heads of 64": Case([4096] * 4, 32, 8, 64, 64),
    "3 documents, MLA": Case([8192, 4096, 4096], 16, 16, 192, 128),
    "4 documents of 4,096, heads of 256": Case([4096] * 4, 16, 8, 256, 256),
    "soft cap, 8,192, heads of 256": Case([8192], 16, 8, 256, 256, softcap=50.0),
    "soft cap, 8,192, heads of 128": Case([8192], 32, 16, softcap=50.0),
}


def eager(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Soft-capped causal attention of a sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * options.scale
    scores = (scores / options.softcap).tanh() * options.softcap
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(mask, -math.inf).softmax(3, dtype=torch.float32).to(q.dtype) @ v


Pair = tuple[Callable[[], Any], Callable[[], Any]]  # forward, and backward


def ours(inputs: list[Tensor], options: AttentionOptions) -> Pair:
    q, k, v, dout = inputs
    out, lse = kernels.partial_attention(q, k, v, options)
    return (
        lambda: kernels.partial_attention(q, k, v, options),
        lambda: kernels.partial_attention_backward(dout, q, k, v, out, lse, options),
    )


def torchs(inputs: list[Tensor], options: AttentionOptions) -> Pair:
    q, k, v, dout = inputs
    if not options.softcap:
        out, lse = kernels._flash(q, k, v, options)
        return (
            lambda: kernels._flash(q, k, v, options),
            lambda: kernels._flash_backward(dout, q, k, v, out, lse, options),
        )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = eager(leaves[0], leaves[1], leaves[2], options)
    return (
        lambda: (eager(q, k, v, options),),
        lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True),
    )


def milliseconds(call: Callable[[], Any]) -> float:
    """Median device time."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3 + SAMPLES)]
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events[2:]))


def measure(case: Case) -> dict[str, Any]:
    tokens = sum(case.lengths)
    sizes = ((case.heads, case.width), (case.groups, case.width), (case.groups, case.value), (case.heads, case.value))
    inputs = [random(1, tokens, *size).transpose(1, 2) for size in sizes]
    ends = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device="cuda")
    lengths = None if case.softcap else PackedLengths(ends, ends, (max(case.lengths),) * 2)
    window = None if case.window is None else case.window - 1
    scale = 1 / math.sqrt(case.width)
    options = AttentionOptions(True, scale, True, lengths, window_left=window, softcap=case.softcap)
    pairs = {"": ours(inputs, options), "torch_": torchs(inputs, options._replace(deterministic=False))}
    of_ours, of_torch = ((forward()[0], *backward()) for forward, backward in pairs.values())
    row: dict[str, Any] = {"error": error(of_ours, of_torch)}
    for who, calls in pairs.items():
        for what, call, share in zip(("forward", "backward"), calls, (1.0, 2.5), strict=True):
            taken = milliseconds(call)
            row |= {f"{who}{what}_ms": taken, f"{who}{what}_tflops": share * case.flops / taken / 1e9}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    rows = []
    print(f"{'TFLOP/s':<38}{'forward':>9}{'torch':>7}{'ratio':>7}{'backward':>10}{'torch':>7}{'ratio':>7}{'error':>9}")
    for name, case in CASES.items():
        torch.manual_seed(0)
        row = measure(case)
        rows.append({"name": name, **row})
        parts = [(row[f"{what}_tflops"], row[f"torch_{what}_tflops"]) for what in ("forward", "backward")]
        (forward, of_forward), (backward, of_backward) = parts
        print(
            f"{name:<38}{forward:>9.0f}{of_forward:>7.0f}{forward / of_forward:>7.2f}"
            f"{backward:>10.0f}{of_backward:>7.0f}{backward / of_backward:>7.2f}{row['error']:>9.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
    write(args.json, {**stamp(f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}"), "cases": rows})
    return 0 if all(row["error"] < LARGEST_ERROR for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
