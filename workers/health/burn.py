"""Multiplies fixed matrices on every GPU, or every CPU core, at the same time and compares the products bit by bit.

`python -m pentad.workers.health.burn DEVICE SECONDS` prints a JSON list of what `burn` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from typing import NamedTuple

import torch

from pentad.workers.health.gpu_facts import facts_of, index_of
from pentad.workers.health.results import Burned

SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of the factors
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
SEED = 1
ROWS = 16  # rows of the first product that are compared with float64
ROUND = 10  # products between two checks of the time, on a GPU
WARM_UP = 0.25  # share of the time that does not count for the rate


class Task(NamedTuple):
    """Two factors, some rows of their product in float64, and the errors there that float32 sums and one rounding of
    the result may cause."""

    a: torch.Tensor
    b: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor


def burn(device: str, seconds: float) -> list[Burned]:
    """Burns in all visible GPUs ('cuda') or the cores that this process may use ('cpu') for `seconds`.

    The factors are the same everywhere, drawn on the host. Raises what torch raises if a unit fails.
    """
    task = _task(device)
    found: dict[int, Burned] = {}
    failed: list[BaseException] = []
    units = range(torch.cuda.device_count()) if device == "cuda" else sorted(os.sched_getaffinity(0))

    def work(unit: int) -> None:
        try:
            found[unit] = _burn_gpu(unit, task, seconds) if device == "cuda" else _burn_core(unit, task, seconds)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(unit,)) for unit in units]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [found[unit] for unit in units]


def _task(device: str) -> Task:
    generator, size, dtype = torch.Generator().manual_seed(SEED), SIZE[device], DTYPE[device]
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    rows = a[:: size // ROWS].double()
    exact, sums = rows @ b.double(), rows.abs() @ b.double().abs()
    return Task(a, b, exact, torch.finfo(dtype).eps * exact.abs() + size * torch.finfo(torch.float32).eps * sums)


def _burn_gpu(index: int, task: Task, seconds: float) -> Burned:
    device, properties = torch.device("cuda", index), torch.cuda.get_device_properties(index)
    number = index_of(properties.uuid)
    with torch.cuda.device(device):
        a, b = task.a.to(device), task.b.to(device)
        first = torch.mm(a, b)
        product = torch.empty_like(first)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        began = time.monotonic()
        count, timed, since = 0, 0, began
        while (now := time.monotonic()) < began + seconds:
            if not timed and now >= began + WARM_UP * seconds:
                timed, since = count, now
            for _ in range(ROUND):
                torch.mm(a, b, out=product)
                differing += (product.view(torch.int16) != first.view(torch.int16)).any()
            count += ROUND
            torch.cuda.current_stream().synchronize()
        took = time.monotonic() - since
        for _ in range(4 * ROUND):  # keeps the GPU busy while its clock is read
            torch.mm(a, b, out=product)
        facts = facts_of(number)
        host = first.cpu()
    return Burned(
        unit=f"GPU {number}",
        model=properties.name,
        digest=_digest(host),
        products=count,
        differing=int(differing),
        error=_error(host, task),
        rate=2 * SIZE["cuda"] ** 3 * (count - timed) / took,
        clock=facts.clock,
        clock_most=facts.clock_most,
        throttles=facts.throttles,
    )


def _burn_core(core: int, task: Task, seconds: float) -> Burned:
    """Burns in a core; runs in a thread of its own, which it pins to the core."""
    os.sched_setaffinity(0, {core})
    first = torch.mm(task.a, task.b)
    product = torch.empty_like(first)
    count, differing, began = 0, 0, time.thread_time()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(task.a, task.b, out=product)
        differing += not torch.equal(product.view(torch.int32), first.view(torch.int32))
        count += 1
    took = time.thread_time() - began  # CPU time, as others may use the core
    rate = 2 * SIZE["cpu"] ** 3 * count / max(took, 1e-9)
    return Burned(f"CPU {core}", "", _digest(first), count, differing, _error(first, task), rate)


def _digest(product: torch.Tensor) -> str:
    return hashlib.sha256(product.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _error(product: torch.Tensor, task: Task) -> float:
    """The largest error of a product, in units of the allowed one."""
    rows = product[:: product.shape[0] // ROWS].double()
    return float(((rows - task.exact).abs() / task.allowed).nan_to_num(nan=torch.inf).max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([each._asdict() for each in burn(sys.argv[1], float(sys.argv[2]))]))
