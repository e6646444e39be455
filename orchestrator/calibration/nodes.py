"""Calibration on a Ray cluster: the ranks of two nodes measure together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from pentad.orchestrator.activations.kernel_choice import Shape
from pentad.orchestrator.calibration.ranks import LIMIT, Report, run_ranks
from pentad.orchestrator.cluster.cluster import join
from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.cluster.placement import Placement, bundle_places, release, reserve, strategy_of
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.hardware import NODE_GPUS
from pentad.orchestrator.planning.layout import shapes_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh

NODES = 2
START_SECONDS = 120.0  # for an actor, which imports torch


class Examiner:
    """An actor in one bundle of a placement group; the first one on a node starts the processes of all its ranks."""

    def gpu(self) -> int:
        """The GPU of the bundle, -1 if it has none."""
        return next((int(each) for each in ray.get_gpu_ids()), -1)

    def serve(self, size: int) -> str:
        """The address of a store through which the ranks meet."""
        from pentad.workers.parallel.process_groups import start_store  # imports torch

        self.store = start_store(ray.util.get_node_ip_address(), size, START_SECONDS)
        return f"{self.store.host}:{self.store.port}"

    def measure(
        self, device: str, gpus: Mapping[int, int], address: str, hosts: Sequence[int], kernels: Sequence[Shape]
    ) -> dict[str, Any] | None:
        return run_ranks(device, gpus, address, hosts, kernels)


def measured_on_cluster(config: RunConfig, report: Report) -> tuple[dict[str, Any], list[int]]:
    """What rank 0 found, and the host of each rank. Raises PentadError."""
    ranks = min(config.mesh.size, NODES * NODE_GPUS)
    with launch(config.cluster, ranks) as head, join(config.cluster, ranks, head) as cluster:
        timeout = config.cluster.start_timeout_seconds
        placement = reserve(Mesh(dp=ranks), cluster.device, timeout, fixed=cluster.local)
        try:
            return _measured(placement, cluster.device, shapes_of(config, cluster.device), report)
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise PentadError(f"calibration failed on a node: {lines[-1].strip()}") from None
        finally:
            release(placement)  # ends the actors


def _measured(
    placement: Placement, device: str, kernels: Sequence[Shape], report: Report
) -> tuple[dict[str, Any], list[int]]:
    kind = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(Examiner)
    nodes: dict[str, list[Any]] = defaultdict(list)  # an actor a rank, as only that one knows the rank's GPU
    for place in bundle_places(placement):
        nodes[place.node].append(kind.options(scheduling_strategy=strategy_of(placement, place.bundle)).remote())
    fullest = sorted(nodes.values(), key=len, reverse=True)[:NODES]
    each = len(fullest[-1])  # ranks a host, equal on both
    hosts = [host for host in range(len(fullest)) for _ in range(each)]
    gpus = [ray.get([actor.gpu.remote() for actor in its[:each]], timeout=START_SECONDS) for its in fullest]
    address = ray.get(fullest[0][0].serve.remote(len(hosts)), timeout=START_SECONDS)
    calls = []
    for host, its in enumerate(fullest):
        own = {host * each + number: gpu for number, gpu in enumerate(gpus[host])}
        calls.append(its[0].measure.remote(device, own, address, hosts, kernels))
    report(0, 1)
    found = ray.get(calls, timeout=LIMIT + START_SECONDS)[0]
    assert found is not None
    return found, hosts
