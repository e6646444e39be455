"""Measures what each part of memory.recompute frees and costs on one GPU, beside what the plan says.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/recompute.py --budget 70 --json FILE

Layers of Llama 3 8B, and of DeepSeek-V3 with 16 experts, recompute nothing, each part by itself, most of them, some
rows of them, and all. Runs follow one another in one process; those that are planned to need more than `--budget` GiB,
or would begin after `--seconds`, are left out. At the end a table has planned and measured figures of all.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from offload import GIB, LLAMA, step, table
from record import stamp, write

EXPERTS = "num_experts=16 top_k=8 intermediate_size=2048 shared_intermediate_size=2048 first_k_dense=0"
LATENTS = "kv_lora_rank=512 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128"
SIZES = "family=deepseek-v3 layers=3 hidden=7168 heads=128 kv_heads=128 ffn=18432 vocab=16384"
DEEPSEEK = [
    *(f"model.{word}" for word in SIZES.split()),
    *(f"model.experts.{word}" for word in EXPERTS.split()),
    *(f"model.mla.{word}" for word in LATENTS.split()),
]
MODELS = {
    "8B": ([*LLAMA, "model.layers=8"], ("mlp", "core_attn", "qkv_linear", "attn_proj")),
    "DeepSeek-V3": (DEEPSEEK, ("moe", "core_attn", "mla_up_proj", "attn_proj")),
}

SHARES = 0.75, 0.5, 0.25  # of the rows


def rows(length: int, steps: int, budget: float) -> Iterator[dict[str, Any]]:
    """A row for each model and mode, with differences from the first one, which recomputes nothing."""
    for name, (model, parts) in MODELS.items():
        plain: dict[str, Any] = {}
        every = ("none", *(f"[{part}]" for part in parts), "attention", f"[{','.join(parts)}]", "full")
        for mode, share in [*((mode, 1.0) for mode in every), *(("attention", share) for share in SHARES)]:
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            sizes = [f"batch.sequence_length={length}", "memory.unit_layers=1", f"memory.recompute={mode}"]
            found = step([*model, *sizes, f"memory.recompute_fraction={share}"], steps, budget)
            row = {"model": name, "recompute": mode, "rows": share, "left_by_rows_before_gib": before / GIB}
            keys = "seconds", "planned_seconds", "peak_gib", "planned_gib", "planned_host_gib", "left_out"
            row |= {key: found[key] for key in keys if key in found}
            if "left_out" in found:
                yield row
                continue
            plain = plain or found
            yield {
                **row,
                "slower_by": found["seconds"] / plain["seconds"] - 1,
                "planned_slower_by": found["planned_seconds"] / plain["planned_seconds"] - 1,
                "freed_gib": plain["peak_gib"] - found["peak_gib"],
                "planned_freed_gib": plain["planned_gib"] - found["planned_gib"],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=math.inf, help="GiB of the GPU")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, found = time.monotonic(), list[dict[str, Any]]([stamp(torch.cuda.get_device_name())])
    for row in rows(args.length, args.steps, args.budget):
        found.append(row)
        print(json.dumps(row), flush=True)
        write(args.json, found)
        if time.monotonic() - began > args.seconds:
            print(json.dumps({"left_out": "the rows that follow"}))
            break
    print(table(found, ("model", "recompute", "rows")))


if __name__ == "__main__":
    main()
