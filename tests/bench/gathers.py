"""Times a ZeRO-3 gather of one layer of Llama 3 8B on the GPUs of a host, alone and beside products of that layer.

PYTHONPATH=.typings:tests/support:tests/bench python -P tests/bench/gathers.py --json OUT

copies: each rank copies what the others have, as pentad does. nccl: NCCL's all-gather. zero: NCCL's without thread
blocks (its zero-CTA policy), into memory that all ranks have registered as one symmetric window; on another stream than
the default, which NCCL 2.28 does not support for it. `gb_per_s` is what arrives at a rank, `slower` how much longer the
products take beside it than alone; all are of the slowest rank. A way that fails is a row with its error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn
from record import stamp, write

from pentad.workers.transport.peer_memory import PeerMemory

PARAMETERS = 218_112_000  # of a layer
TOKENS, HIDDEN, FFN = 8192, 4096, 28672
GATHERS, PRODUCTS, ROUNDS = 6, 16, 9
Way = Callable[[], object]


def gathers(args: argparse.Namespace, rank: int, store: str, results: SimpleQueue[Any]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    files = dist.FileStore(store, args.ranks)
    dist.init_process_group("nccl", store=files, rank=rank, world_size=args.ranks, device_id=device)
    share = torch.full((PARAMETERS // args.ranks,), float(rank), dtype=torch.bfloat16, device=device)
    products = Products(device)
    for name, make in {"copies": copies, "nccl": nccl, "zero": zero}.items():
        try:
            way, whole = make(share, rank, args.ranks, files)
            row: dict[str, Any] = measure(way, whole, products, share)
        except Exception as error:  # one way failed; the others are still measured
            row = {"error": f"{type(error).__name__}: {error}"[:400]}
        if rank == 0:
            results.put({"way": name, **row})
    dist.barrier()
    torch.cuda.synchronize()


class Products:
    """Products with a layer's two largest matrices."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        self.w = torch.randn(HIDDEN, FFN, device=device).bfloat16()
        self.y = torch.empty(TOKENS, FFN, device=device, dtype=torch.bfloat16)

    def run(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.x, self.w, out=self.y)


def copies(share: torch.Tensor, rank: int, ranks: int, store: dist.Store) -> tuple[Way, torch.Tensor]:
    memory = PeerMemory(store, "gathers", rank, {"share": share}, [each for each in range(ranks) if each != rank])
    whole = torch.empty(ranks, len(share), dtype=share.dtype, device=share.device)

    def gather() -> None:
        whole[rank].copy_(share)
        for step in range(1, ranks):
            peer = (rank + step) % ranks
            memory.read(peer, "share", 0, whole[peer])

    return gather, whole


def nccl(share: torch.Tensor, rank: int, ranks: int, store: dist.Store) -> tuple[Way, torch.Tensor]:
    whole = torch.empty(ranks, len(share), dtype=share.dtype, device=share.device)
    return lambda: dist.all_gather_into_tensor(whole.view(-1), share), whole


def zero(share: torch.Tensor, rank: int, ranks: int, store: dist.Store) -> tuple[Way, torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options.config.cta_policy = backend.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=options)
    symmetric.set_backend("NCCL")
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(share.device)):
        whole = torch.empty(ranks * len(share), dtype=share.dtype, device=share.device)
        registered = torch.empty_like(share)
    registered.copy_(share)
    for tensor in (whole, registered):
        symmetric.rendezvous(tensor, group=group.group_name)
    return lambda: dist.all_gather_into_tensor(whole, registered, group=group), whole.view(ranks, -1)


def measure(way: Way, whole: torch.Tensor, products: Products, share: torch.Tensor) -> dict[str, float]:
    """Raises RuntimeError if not everything arrives."""
    side = torch.cuda.Stream()

    def timed(gather: bool, multiply: bool) -> tuple[float, float]:
        """Median milliseconds of a gather and of the products."""
        found = list[tuple[float, float]]()
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start, gathered, multiplied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(2_000_000)  # so that everything is issued before any of it runs
            start.record()
            side.wait_event(start)
            with torch.cuda.stream(side):
                for _ in range(GATHERS if gather else 0):
                    way()
                gathered.record()
            if multiply:
                products.run()
            multiplied.record()
            torch.cuda.synchronize()
            found.append((start.elapsed_time(gathered) / GATHERS, start.elapsed_time(multiplied)))
        return median(each for each, _ in found), median(each for _, each in found)

    timed(True, True)
    if not bool((whole == torch.arange(len(whole), device=whole.device)[:, None]).all()):
        raise RuntimeError("not all that was gathered has arrived")
    alone, _ = timed(True, False)
    _, products_alone = timed(False, True)
    beside, products_beside = timed(True, True)
    slowest = torch.tensor([alone, beside, products_alone, products_beside], device=share.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    alone, beside, products_alone, products_beside = slowest.tolist()
    received = (len(whole) - 1) * share.nbytes / 1e6
    return {
        **{"gather_ms": round(alone, 3), "gb_per_s": round(received / alone, 1)},
        **{"gather_beside_ms": round(beside, 3), "gb_per_s_beside": round(received / beside, 1)},
        **{"products_ms": round(products_alone, 3), "products_beside_ms": round(products_beside, 3)},
        "slower": round(products_beside / products_alone - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    rows = spawn(gathers, args, args.ranks)
    found = (
        f"{args.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}"
    )
    write(args.json, {**stamp(found), "parameters": PARAMETERS, "rows": rows})


if __name__ == "__main__":
    main()
