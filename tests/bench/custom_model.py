"""What the adapter for torch modules costs: a Llama as a list of them against the one that pentad has, on a CPU.

One stage runs F, B and W of a microbatch with either, and torch alone runs the same modules, in turns. Seconds are of
the thread alone; ratios are medians over the turns, for others may use the machine:

    PYTHONPATH=.typings:tests/support python tests/bench/custom_model.py --out FILE
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from record import record

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.custom.loader import build_layers
from pentad.workers.custom.stage import CustomStage
from pentad.workers.model.stage import Stage
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

LLAMA = """
import torch
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
SIZES = "layers=4 hidden=256 heads=8 kv_heads=4 ffn=768 vocab=4096"
BATCH = [
    "batch.global_batch_size=2",
    "batch.sequence_length=128",
    "mesh.pp=1",
    "schedule.microbatches=1",
    "schedule.name=zb-h1",
]
TURNS = 100

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    record(parser.parse_args().out, "adapter, cpu", measured)


def measured() -> dict[str, Any]:
    """Milliseconds of a microbatch's F, B and W, and their ratios turn by turn: medians."""
    torch.set_num_threads(1)
    words = [*BATCH, *(f"model.{word}" for word in SIZES.split())]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "llama.py")
        file.write_text(LLAMA)
        plans = [make_plan(load(None, more), "cpu") for more in (words, [*words, f"model.custom={file}:llama"])]
        runs = {"builtin": staged(plans[0]), "modules": staged(plans[1]), "torch alone": plain(plans[1])}
        seconds: dict[str, Times] = {name: defaultdict(list) for name in runs}
        for _ in range(TURNS):
            for name, run in runs.items():
                run(seconds[name])
    found = {name: {op: round(1e3 * median(times), 2) for op, times in each.items()} for name, each in seconds.items()}
    ratios = {
        f"modules over {name}": {op: over(seconds["modules"][op], times) for op, times in seconds[name].items()}
        for name in ("builtin", "torch alone")
    }
    return {"model": SIZES, "batch": "2 x 128, float32", "turns": TURNS, "milliseconds": found, **ratios}


def over(some: list[float], others: list[float]) -> float:
    return round(median(a / b for a, b in zip(some, others, strict=True)), 2)


def staged(plan: Plan) -> Callable[[Times], None]:
    """F, B and W of the plan's only stage."""
    banks = make_param_buffers(plan, 0, 0, {ParamShard(0): create_parameters(plan, ParamShard(0), torch.device("cpu"))})
    stage: StageProtocol = Stage(plan, 0, banks) if plan.model.custom is None else CustomStage(plan, 0, banks)
    tokens = torch.randint(plan.model.vocab, (plan.slice_tokens,))

    def run(seconds: Times) -> None:
        stage.begin(0)
        times = [time.thread_time()]
        run_to_completion(stage.forward(0, None, tokens, tokens))
        times.append(time.thread_time())
        run_to_completion(stage.backward_input(0, None))
        times.append(time.thread_time())
        stage.backward_weight(0)
        times.append(time.thread_time())
        for op, (first, end) in zip("FBW", pairwise(times), strict=True):
            seconds[op].append(end - first)
        seconds["B and W"].append(times[3] - times[1])

    return run


def plain(plan: Plan) -> Callable[[Times], None]:
    """Forward and backward of the same modules without pentad."""
    assert plan.model.custom is not None
    layers, _ = build_layers(plan.model.custom, 0, 0, plan.model.layers)
    tokens = torch.randint(plan.model.vocab, (plan.batch.micro_batch_size, plan.batch.sequence_length))

    def run(seconds: Times) -> None:
        started, x = time.thread_time(), tokens
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(x.flatten(0, 1), tokens.flatten())
        between = time.thread_time()
        loss.backward()
        seconds["F"].append(between - started)
        seconds["B and W"].append(time.thread_time() - between)

    return run


if __name__ == "__main__":
    main()
