"""How long operations between ranks take, by size: collectives of process groups, and peer copies on a host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.ir.errors import PentadError
from pentad.workers.health.device_rates import Clock, Work
from pentad.workers.parallel.async_ops import all_gather, reduce_scatter
from pentad.workers.transport.peer_memory import PeerMemory
from pentad.workers.transport.stream_flags import StreamFlags

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
PEER_KINDS = ("all_gather", "reduce_scatter", "send")
Timings = dict[str, list[tuple[float, float]]]  # (bytes that a rank sends, seconds) by kind of operation


def measure_group(group: dist.ProcessGroup, sizes: tuple[int, ...], device: torch.device, clock: Clock) -> Timings:
    """Timings of a group's operations. All ranks call this, so all groups are measured at once."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: Timings = {kind: [] for kind in KINDS}
    for size in sizes:
        full = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
        parts = full.numel() // group.size()
        full = full[: parts * group.size()]
        works = _works(group, full, full.new_ones(parts), torch.empty_like(full))
        for kind, work in works.items():
            found[kind].append((_sent(kind, full, group.size()), clock.seconds(work)))
    return found


def _works(group: dist.ProcessGroup, full: Tensor, part: Tensor, other: Tensor) -> dict[str, Work]:
    ranks = dist.get_process_group_ranks(group)
    after, before = (ranks[(group.rank() + step) % len(ranks)] for step in (1, -1))

    def send() -> None:
        pair = [dist.P2POp(dist.isend, full, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()

    return {
        "all_gather": partial(all_gather, full, part, group=group),
        "reduce_scatter": partial(reduce_scatter, part, full, group=group),
        "all_reduce": partial(dist.all_reduce, full, dist.ReduceOp.MAX, group),
        "all_to_all": partial(dist.all_to_all_single, other, full, group=group),
        "send": send,
    }


def _sent(kind: str, full: Tensor, ranks: int) -> float:
    """Bytes that a rank sends with a ring algorithm."""
    share = (ranks - 1) / ranks
    return full.nbytes * {"send": 1.0, "all_reduce": 2 * share}.get(kind, share)


def measure_peers(
    store: dist.Store, rank: int, ranks: int, sizes: tuple[int, ...], device: torch.device, clock: Clock
) -> Timings | None:
    """Timings of copies by copy engines between the ranks of a host, as used by transfers and ZeRO; None if any rank
    cannot share its memory. `store` belongs to these ranks alone."""
    shared = torch.zeros(max(sizes) // 4, device=device)
    peers = [other for other in range(ranks) if other != rank]
    names: dict[Hashable, int] = {(event, other): 0 for event in ("ready", "done") for other in range(ranks)}
    memory = flags = None
    try:
        memory = PeerMemory(store, "rates", rank, {"shared": shared}, peers)
        flags = StreamFlags(store, rank, range(ranks), names, 0)
    except (PentadError, RuntimeError, ImportError):
        memory = None
    if clock.slowest(float(memory is None or flags is None)):
        return None
    assert memory is not None and flags is not None
    found: Timings = {kind: [] for kind in PEER_KINDS}
    turns = count(1)
    for size in sizes:
        for kind, work in _peer_works(memory, flags, turns, rank, ranks, shared, size).items():
            found[kind].append((size * (1.0 if kind == "send" else (ranks - 1) / ranks), clock.seconds(work)))
    clock.wait()
    dist.barrier()
    memory.close()
    flags.close()
    return found


def _peer_works(
    memory: PeerMemory, flags: StreamFlags, turns: count[int], rank: int, ranks: int, shared: Tensor, size: int
) -> dict[str, Work]:
    part = max(1, size // 4 // ranks)
    others = [(rank + step) % ranks for step in range(1, ranks)]
    target = shared.new_empty(ranks - 1, part)
    own, total, sent = shared.new_empty(part), shared.new_empty(part), shared.new_empty(size // 4)

    def meet(event: str, turn: int, peers: list[int]) -> None:
        flags.write((event, rank), turn)
        for peer in peers:
            flags.wait((event, peer), turn)

    def read() -> None:
        for peer, row in zip(others, target, strict=True):
            memory.read(peer, "shared", 0, row)

    def scatter() -> None:
        turn = next(turns)
        meet("ready", turn, others)
        read()
        add_shards_(total, own, target, rank, accumulate=False)
        meet("done", turn, others)

    def send() -> None:
        turn = next(turns)
        meet("ready", turn, others[:1])
        memory.write(others[0], "shared", 0, sent)
        meet("done", turn, others[-1:])

    found: dict[str, Callable[[], object]] = {"all_gather": read, "reduce_scatter": scatter, "send": send}
    return found
