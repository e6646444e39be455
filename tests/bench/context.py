"""Times attention over the GPUs of one host by each variant, beside one GPU with the whole sequence.

PYTHONPATH=.typings python -P tests/bench/context.py --gpus 4 --length 65536 --json OUT

Device time between events, of the slowest rank; TFLOP/s a GPU count what a causal mask leaves, 2.5 times as much for
the backward pass as for the forward one. With --documents N every row is N equal ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
from itertools import product
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.spec.cp_layout import PLACEMENTS, CpMethod, attention_pairs
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup

WARM, TIMED = 3, 10
BACKWARD = 2.5  # products of a backward pass over those of a forward one


def serve(args: argparse.Namespace, rank: int, store: str, results: SimpleQueue) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, args.gpus), rank=rank, world_size=args.gpus, device_id=device
    )
    for cp, deterministic in product(sorted({1, args.gpus}), (False, True)):
        variants: tuple[CpMethod, ...] = tuple(PLACEMENTS) if cp > 1 else ("ring",)
        for variant in variants:
            context = ContextParallelGroup(dist.group.WORLD if cp > 1 else None, cp, rank % cp, variant)
            seconds = torch.tensor(measure(args, context, device, deterministic), device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if rank == 0:
                results.put({"cp": cp, "variant": variant, "deterministic": deterministic} | rates(args, cp, seconds))
    dist.destroy_process_group()


def measure(
    args: argparse.Namespace, context: ContextParallelGroup, device: torch.device, deterministic: bool
) -> list[float]:
    """Median milliseconds of a forward and of a backward pass."""
    length = args.length // context.size
    heads = args.heads, args.kv_heads, args.kv_heads
    sizes = [(args.rows, length, n, args.width) for n in heads]
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    starts = range(0, args.length, args.length // args.documents)
    documents = context.document_mask([starts] * args.rows, args.length, device)
    times: list[list[float]] = [[], []]
    for _ in range(WARM + TIMED):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out, kept = run_to_completion(context.attend(q, k, v, documents, deterministic))
        marks[1].record()
        run_to_completion(context.attend_backward(out, kept))
        marks[2].record()
        torch.cuda.synchronize()
        for found, begin, end in zip(times, marks, marks[1:], strict=False):
            found.append(begin.elapsed_time(end))
    return [sorted(each[WARM:])[TIMED // 2] for each in times]


def rates(args: argparse.Namespace, cp: int, milliseconds: torch.Tensor) -> dict[str, float]:
    forward, backward = milliseconds.tolist()
    starts = range(0, args.length, args.length // args.documents)
    pairs = attention_pairs(args.length, 1, 0, "contiguous", starts) * args.rows
    work = 4 * pairs * args.heads * args.width / cp / 1e9  # of a rank's forward pass, in GFLOP
    return {
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "forward_tflops": round(work / forward, 1),
        "backward_tflops": round(BACKWARD * work / backward, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"gpus": 4, "length": 65536, "rows": 1, "heads": 32, "kv_heads": 8, "width": 128, "documents": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawned = [
            context.Process(target=serve, args=(args, rank, str(Path(folder, "store")), results))
            for rank in range(args.gpus)
        ]
        for each in spawned:
            each.start()
        for each in spawned:
            each.join()
    found = []
    while not results.empty():
        found.append(results.get())
        print(json.dumps(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(any(each.exitcode for each in spawned))


if __name__ == "__main__":
    main()
