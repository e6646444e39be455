"""Times the adapter for torch modules on a CPU: a Llama of modules against the built-in Llama, and against plain torch.

PYTHONPATH=.typings:tests/support python tests/bench/custom_model.py --out FILE

The three run F, B and W of a microbatch alternately. Times are CPU seconds of the thread; the ratios are medians over
the rounds, because the load of the machine may change.
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
from pentad.workers.model.base_stage import BaseStage, StageInputs
from pentad.workers.model.stage import Stage
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
        angles = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def forward(self, x):
        sizes = [part * self.size for part in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.attention_norm(x)).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def llama(vocab, hidden, layers, heads, kv_heads, ffn, length):
    blocks = [lambda: Block(hidden, heads, kv_heads, ffn, length) for _ in range(layers)]
    head = lambda: nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, vocab, bias=False))
    return [lambda: nn.Embedding(vocab, hidden), *blocks, head]
"""
SIZES = "layers=4 hidden=256 heads=8 kv_heads=4 ffn=768 vocab=4096"
BATCH = [
    "batch.global_batch_size=2",
    "batch.sequence_length=128",
    "mesh.pp=1",
    "schedule.microbatches=1",
    "schedule.name=zb-h1",
]
ROUNDS = 100

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results; other sections in it are left as they are")
    record(parser.parse_args().out, "adapter, cpu", measure)


def measure() -> dict[str, Any]:
    """Median milliseconds of a microbatch's F, B and W, and the medians of their ratios."""
    torch.set_num_threads(1)
    overrides = [*BATCH, *(f"model.{size}" for size in SIZES.split())]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "llama.py")
        file.write_text(LLAMA)
        builtin = make_plan(load(None, overrides), "cpu")
        modules = make_plan(load(None, [*overrides, f"model.custom={file}:llama"]), "cpu")
        runs = {"builtin": stage_run(builtin), "modules": stage_run(modules), "torch alone": torch_run(modules)}
        seconds: dict[str, Times] = {name: defaultdict(list) for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                run(seconds[name])
    milliseconds = {
        name: {op: round(1e3 * median(times), 2) for op, times in by_op.items()} for name, by_op in seconds.items()
    }
    ratios = {
        f"modules over {name}": {op: median_ratio(seconds["modules"][op], times) for op, times in seconds[name].items()}
        for name in ("builtin", "torch alone")
    }
    return {"model": SIZES, "batch": "2 x 128, float32", "turns": ROUNDS, "milliseconds": milliseconds, **ratios}


def median_ratio(values: list[float], others: list[float]) -> float:
    return round(median(a / b for a, b in zip(values, others, strict=True)), 2)


def stage_run(plan: Plan) -> Callable[[Times], None]:
    """Runs F, B and W of the plan's only stage."""
    parameters = create_parameters(plan, ParamShard(0), torch.device("cpu"))
    buffers = make_param_buffers(plan, 0, 0, {ParamShard(0): parameters})
    stage: BaseStage = Stage(plan, 0, buffers) if plan.model.custom is None else CustomStage(plan, 0, buffers)
    tokens = torch.randint(plan.model.vocab, (plan.slice_tokens,))

    def run(seconds: Times) -> None:
        stage.begin(0, plan.batch.microbatches, plan.batch.tokens)
        times = [time.thread_time()]
        run_to_completion(stage.forward(0, StageInputs(tokens=tokens, targets=tokens)))
        times.append(time.thread_time())
        run_to_completion(stage.backward_input(0, None))
        times.append(time.thread_time())
        stage.backward_weight(0)
        times.append(time.thread_time())
        for op, (start, end) in zip("FBW", pairwise(times), strict=True):
            seconds[op].append(end - start)
        seconds["B and W"].append(times[3] - times[1])

    return run


def torch_run(plan: Plan) -> Callable[[Times], None]:
    """Runs forward and backward of the same modules with torch autograd."""
    assert plan.model.custom is not None
    layers, _ = build_layers(plan.model.custom, 0, 0, plan.model.layers)
    tokens = torch.randint(plan.model.vocab, (plan.batch.micro_batch_size, plan.batch.sequence_length))

    def run(seconds: Times) -> None:
        started, x = time.thread_time(), tokens
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(x.flatten(0, 1), tokens.flatten())
        forward_end = time.thread_time()
        loss.backward()
        seconds["F"].append(forward_end - started)
        seconds["B and W"].append(time.thread_time() - forward_end)

    return run


if __name__ == "__main__":
    main()
