"""Measures the rates of a rank's device and of its links, together with the other ranks, for `pentad calibrate`.

`python -m pentad.workers.health.calibration DEVICE GPU ADDRESS RANK HOST,HOST,... CALLS` takes the number of each
rank's host and, as JSON, the op and sizes of the calls whose implementations are measured. All hosts have equally many
ranks. Rank 0 prints a line of JSON for each measurement, and finally one with the rates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pentad.kernels import backend
from pentad.workers.health.device_rates import SIZES, Clock, Tensors, measure_device, num_device_timings
from pentad.workers.health.host_rates import measure_layer, measure_pairs
from pentad.workers.health.kernel_times import Shape, measure_kernels
from pentad.workers.health.link_rates import KINDS, PEER_KINDS, measure_group, measure_peers
from pentad.workers.parallel.process_groups import join_store
from pentad.workers.runtime.rank_setup import prepare_device

TIMEOUT = 100.0  # seconds to meet, and for an operation


def calibrate(
    kind: str, gpu: int, address: str, rank: int, hosts: list[int], kernels: Sequence[Shape] = ()
) -> dict[str, object]:
    """The fields of Rates, without a source. Links are seconds by bytes, None for those that do not exist. `layer` has
    the host's seconds for F, B and W of a layer; `pair_layer` and `peer_layer` have those on two ranks of a host.
    `kernels` are KernelTimes."""
    device, sizes, size = prepare_device(kind, gpu), SIZES[kind], len(hosts)
    backend.use_kernels(backend.usual_kernels(device))
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    alike = [other for other, host in enumerate(hosts) if hosts[:other].count(host) == hosts[:rank].count(hosts[rank])]
    done, links = 0, (len(local) > 1) + (len(alike) > 1)
    peers = len(local) > 1 and kind == "cuda"
    total = num_device_timings(sizes, device) + len(sizes.sent_bytes) * (links * len(KINDS) + peers * len(PEER_KINDS))
    total += 1 + (len(local) > 1) + peers + len(kernels)  # layers, and calls

    def report() -> None:
        nonlocal done
        done += 1
        if rank == 0:
            print(json.dumps({"done": done, "total": total}), flush=True)

    store: dist.Store | None = None
    if size > 1:
        store = join_store(address, size, TIMEOUT)
        links_by, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
        timeout = timedelta(seconds=TIMEOUT)
        dist.init_process_group(links_by, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    clock = Clock(device, sizes.seconds, report)
    found = measure_device(sizes, device, clock)
    found["kernels"] = measure_kernels(kernels, Tensors.of(device), Clock(device, sizes.seconds, lambda: None), report)
    if kind == "cuda":
        torch.cuda.empty_cache()
    found["gpu"] = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"
    found |= dict.fromkeys(("intra_host", "inter_host", "peer"))
    for name, ranks in (("intra_host", local), ("inter_host", alike)):
        if len(ranks) > 1:
            group, _ = dist.new_subgroups_by_enumeration(_all_like(hosts, name))
            found[name] = measure_group(group, sizes.sent_bytes, device, clock)
    if peers:
        assert store is not None
        own = dist.PrefixStore(f"host-{hosts[rank]}", store)
        found["peer"] = measure_peers(own, local.index(rank), len(local), sizes.sent_bytes, device, clock)
    found |= {"layer": measure_layer(device, clock), "pair_layer": None, "peer_layer": None}
    if store is not None and len(local) > 1:
        found["pair_layer"] = measure_pairs(hosts, rank, store, device, clock)
        if found["peer"] is not None:
            found["peer_layer"] = measure_pairs(hosts, rank, store, device, clock, peer=True)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def _all_like(hosts: list[int], name: str) -> list[list[int]]:
    """The ranks of each host, or for 'inter_host' the first ranks of all hosts, the second ones and so on."""
    numbers = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    keys = hosts if name == "intra_host" else numbers
    return [[rank for rank, key in enumerate(keys) if key == each] for each in sorted(set(keys))]


if __name__ == "__main__":
    device_kind, number, meeting, own_rank, all_hosts, calls = sys.argv[1:]
    its_hosts = list(map(int, all_hosts.split(",")))
    result = calibrate(device_kind, int(number), meeting, int(own_rank), its_hosts, json.loads(calls))
    if int(own_rank) == 0:
        print(json.dumps({"rates": result}), flush=True)
