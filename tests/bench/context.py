"""Times context-parallel attention on the GPUs of one host with each method, and one GPU with the full sequence.

PYTHONPATH=.typings:tests/support python tests/bench/context.py --gpus 4 --length 65536 --json OUT

Times are device times of the slowest rank. TFLOP/s are per GPU and count the pairs that the causal mask keeps; a
backward pass counts 2.5 times its forward pass. With --documents N every row consists of N documents whose lengths
differ by one token at most; with several numbers, such as 1 4 16 64 256 1024 10000, each is measured, and `pairs` says
how many pairs of a query and a key a row has: the sum of squares, about half of it. With --longest L the first document
has L tokens, and the others share the rest.
"""

from __future__ import annotations

import argparse
from itertools import product
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import spawn
from record import stamp, write

from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, CpMethod, attention_pairs
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup

WARMUP, TIMED = 3, 10
BACKWARD = 2.5  # FLOPs of a backward pass over those of a forward pass


def benchmark(args: argparse.Namespace, rank: int, store: str, results: SimpleQueue) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, args.gpus), rank=rank, world_size=args.gpus, device_id=device
    )
    for cp, deterministic, documents in product(sorted({1, args.gpus}), (False, True), args.documents):
        methods: tuple[CpMethod, ...] = tuple(CP_LAYOUTS) if cp > 1 else ("ring",)
        for method in methods:
            context = ContextParallelGroup(dist.group.WORLD if cp > 1 else None, cp, rank % cp, method=method)
            milliseconds = torch.tensor(measure(args, context, device, deterministic, documents), device=device)
            dist.all_reduce(milliseconds, dist.ReduceOp.MAX)
            if rank == 0:
                row = {"cp": cp, "variant": method, "deterministic": deterministic, "documents": documents}
                results.put(row | rates(args, cp, milliseconds, documents))
    dist.destroy_process_group()


def measure(
    args: argparse.Namespace,
    context: ContextParallelGroup,
    device: torch.device,
    deterministic: bool,
    num_documents: int,
) -> list[float]:
    """Median milliseconds of a forward pass and of a backward pass."""
    length = args.length // context.size
    heads = args.heads, args.kv_heads, args.kv_heads
    shapes = [(args.rows, length, n, args.width) for n in heads]
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    starts = starts_of(args.length, num_documents, args.longest)
    documents = context.document_mask([starts] * args.rows, args.length, device)
    options = AttentionOptions(True, args.width**-0.5, deterministic)
    times: list[list[float]] = [[], []]
    for _ in range(WARMUP + TIMED):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        out, saved = run_to_completion(context.attend(q, k, v, options, documents))
        events[1].record()
        run_to_completion(context.attend_backward(out, saved))
        events[2].record()
        torch.cuda.synchronize()
        for values, begin, end in zip(times, events, events[1:], strict=False):
            values.append(begin.elapsed_time(end))
    return [sorted(each[WARMUP:])[TIMED // 2] for each in times]


def starts_of(length: int, documents: int, longest: int) -> list[int]:
    if longest and documents > 1:
        rest = starts_of(length - longest, documents - 1, 0)
        return [0, *(longest + start for start in rest)]
    return [number * length // documents for number in range(documents)]


def rates(args: argparse.Namespace, cp: int, milliseconds: torch.Tensor, documents: int) -> dict[str, float]:
    forward, backward = milliseconds.tolist()
    pairs = (
        attention_pairs(args.length, 1, 0, "contiguous", starts_of(args.length, documents, args.longest)) * args.rows
    )
    work = 4 * pairs * args.heads * args.width / cp / 1e9  # GFLOP of a rank's forward pass
    return {
        "pairs": pairs,
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "forward_tflops": round(work / forward, 1),
        "backward_tflops": round(BACKWARD * work / backward, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"gpus": 4, "length": 65536, "rows": 1, "heads": 32, "kv_heads": 8, "width": 128}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--documents", type=int, nargs="+", default=[1])
    parser.add_argument("--longest", type=int, default=0, help="tokens of the first document; 0: as many as others")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    write(args.json, {**stamp(torch.cuda.get_device_name()), "rows": spawn(benchmark, args, args.gpus)})


if __name__ == "__main__":
    main()
