"""What the adapter for torch modules costs: a Llama as a list of them against the one that pentad has.

One rank runs F, B and W of the same sizes with either, in turns. On a CPU seconds are of the rank's thread alone, for
others may use the machine:

    PYTHONPATH=.typings:tests python -P tests/bench/own_model.py --out FILE
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench.record import record

from pentad.orchestrator.config import load
from pentad.orchestrator.planning import make_plan
from pentad.schedules.plan import Plan
from pentad.workers import lanes
from pentad.workers.own_source import build
from pentad.workers.runner import Runner

LLAMA = """
import torch
from bench.record import record
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn, length):
        super().__init__()
        size = hidden // heads
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        turns = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def turned(self, x):
        one, two = x.chunk(2, -1)
        return torch.cat((one * self.cos - two * self.sin, two * self.cos + one * self.sin), -1)

    def forward(self, x):
        sizes = [part * self.size for part in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.attention_norm(x)).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def llama(vocab, hidden, layers, heads, kv_heads, ffn, length):
    blocks = [lambda: Block(hidden, heads, kv_heads, ffn, length) for _ in range(layers)]
    end = lambda: nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, vocab, bias=False))
    return [lambda: nn.Embedding(vocab, hidden), *blocks, end]
"""
SIZES = {
    "cpu": "layers=4 hidden=256 heads=8 kv_heads=4 ffn=768 vocab=4096",
    "cuda": "layers=8 hidden=2048 heads=16 kv_heads=8 ffn=8192 vocab=32000",
}
BATCH = {"cpu": (8, 128, 4), "cuda": (8, 4096, 4)}  # sequences, their length, microbatches
TURNS, STEPS = 3, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    record(asked.out, f"adapter, {asked.device}", lambda: measured(asked.device))


def measured(device: str) -> dict[str, Any]:
    """Least milliseconds of a microbatch's F, B and W, and of a step, of both, and what torch alone takes."""
    sequences, length, microbatches = BATCH[device]
    words = [f"model.{word}" for word in SIZES[device].split()]
    words += [f"batch.sequences={sequences}", f"batch.sequence_length={length}", "mesh.pp=1", "schedule.name=zb-h1"]
    words += [f"schedule.microbatches={microbatches}"]
    if device == "cpu":
        lanes.time = SimpleNamespace(monotonic=time.thread_time)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "llama.py")
        file.write_text(LLAMA)
        plans = {
            "builtin": plan_of(words, device, folder),
            "modules": plan_of([*words, f"model.own={file}:llama"], device, folder),
        }
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        peaks: dict[str, int] = {}
        for _ in range(TURNS):
            for name, plan in plans.items():
                peaks[name] = ran(plan, seconds[name])
            if device == "cpu":
                plain(plans["modules"], seconds["torch alone"])
    found: dict[str, Any] = {
        name: {op: round(1e3 * min(times), 3) for op, times in sorted(each.items())} for name, each in seconds.items()
    }
    ratios = {op: round(found["modules"][op] / found["builtin"][op], 3) for op in found["builtin"]}
    sizes = {"model": SIZES[device], "batch": f"{sequences} x {length} in {microbatches} microbatches, zb-h1"}
    name = torch.cuda.get_device_name() if device == "cuda" else "one thread"
    dtype = plans["builtin"].dtype
    peak = {"peak_bytes": peaks} if device == "cuda" else {}
    return {"device": f"{name}, {dtype}", **sizes, "milliseconds": found, "modules_over_builtin": ratios, **peak}


def plain(plan: Plan, seconds: dict[str, list[float]]) -> None:
    """The same modules without pentad: forward and backward of a microbatch."""
    assert plan.model.own is not None
    layers, _ = build(plan.model.own, 0, 0, plan.model.layers)
    for _ in range(STEPS * plan.batch.microbatches):
        x = torch.randint(plan.model.vocab, (plan.batch.rows, plan.batch.length))
        targets, started = x.flatten(), time.thread_time()
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(x.flatten(0, 1), targets)
        between = time.thread_time()
        loss.backward()
        seconds["F"].append(between - started)
        seconds["B and W"].append(time.thread_time() - between)


def plan_of(words: list[str], device: str, folder: str) -> Plan:
    config = load(None, [*words, f"data.cache={folder}"])
    return replace(make_plan(config, device), dtype={"cpu": "float32", "cuda": "bfloat16"}[device])


def ran(plan: Plan, seconds: dict[str, list[float]]) -> int:
    """Adds what STEPS steps took, a step of warming up left out; returns the most memory of a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        runner = Runner(plan, 0, Path(folder, "board"))
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        runner.restore(None)
        results = runner.run(0, STEPS + 1)[1:]
        runner.close()
    for result in results:
        for span in result.spans:
            if span.op in ("F", "B", "W", "STEP"):
                seconds[span.op].append(span.end - span.start)
        seconds["step"].append(max(s.end for s in result.spans) - min(s.start for s in result.spans))
    return results[-1].peak_bytes


if __name__ == "__main__":
    main()
