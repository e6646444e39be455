"""`pentad calibrate`: from measurements of ranks to a table of rates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.calibration.ranks import Report, run_ranks
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.gpus.rate_table import CPU, RateTable, read_table
from pentad.orchestrator.planning.comm_volume import layer_volume
from pentad.orchestrator.planning.hardware import ISSUE, PEER_ISSUE, TP_HIDDEN, local_device, local_gpus, rates_of
from pentad.orchestrator.planning.layout import shapes_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import KernelTimes, Rates, fit_link
from pentad.workers.health.host_plan import host_plan

GROUPS = ("intra_host", "inter_host", "peer")
_rates: TypeAdapter[Rates] = TypeAdapter(Rates)
_kernel_times: TypeAdapter[KernelTimes] = TypeAdapter(KernelTimes)
Progress = Callable[[], AbstractContextManager[Report]]


def calibrate(config: RunConfig, progress: Progress) -> RateTable:
    """Measures the rates of this machine's GPUs or cores; or on two nodes of the cluster that the run would join, with
    as many ranks on each. Raises PentadError."""
    if config.cluster.address != "local":
        from pentad.orchestrator.calibration.nodes import measured_on_cluster  # imports ray

        with progress() as report:
            found, hosts = measured_on_cluster(config, report)
    else:
        device, _ = local_device(config.cluster, 1)
        ranks = local_gpus() if device == "cuda" else min(config.mesh.size, os.cpu_count() or 1)
        if not ranks:
            raise PentadError("cluster.device is cuda: expected a GPU on this machine")
        hosts, kernels = [0] * ranks, shapes_of(config, device)
        from pentad.workers.parallel.process_groups import start_store  # imports torch

        store = start_store("127.0.0.1", ranks, 60.0)
        with progress() as report:
            address = f"{store.host}:{store.port}"
            measured = run_ranks(device, {rank: rank for rank in range(ranks)}, address, hosts, kernels, report)
            assert measured is not None
            found = measured
    return table_of(found, hosts)


def table_of(found: dict[str, Any], hosts: list[int]) -> RateTable:
    """The table from what rank 0 of ranks on these hosts found. Links that there were none of get the rates that plans
    assume."""
    gpu, kernels = found.pop("gpu"), tuple(map(_kernel_times.validate_python, found.pop("kernels")))
    assumed = [name for name in GROUPS if found[name] is None and (name != "peer" or found["intra_host"] is None)]
    usual = asdict(rates_of("cpu" if gpu == CPU else "cuda", gpu)) if assumed else {}
    links = {name: usual[name] if name in assumed else _fitted(found[name] or {}) for name in GROUPS}
    links["peer"] = links["intra_host"] | links["peer"]  # peer copies do not support every operation
    layer, pair, peer = (found.pop(name) for name in ("layer", "pair_layer", "peer_layer"))
    assumed += ["issue"] * (pair is None)
    usual_issue = (0.0, 0.0) if gpu == CPU else (ISSUE, PEER_ISSUE)
    issue = usual_issue if pair is None else tuple(_exchange_seconds(gpu, layer, each) for each in (pair, peer or pair))
    figures = {
        **found,
        **links,
        "host_memory": asdict(fit_link(*zip(*found["host_memory"], strict=True))),
        "issue": issue[0],
        "peer_issue": issue[1],
        "layer_issue": tuple(layer),
        "tp_hidden": 0.0 if gpu == CPU else TP_HIDDEN,
    }
    measured, ranks = datetime.now(UTC).strftime("%Y-%m-%d"), (len(hosts), len(set(hosts)))
    rates = _rates.validate_python(figures)
    given: dict[str, Any] = {"ranks": ranks, "assumed": tuple(assumed), "rates": rates, "kernels": kernels}
    return RateTable(version=4, gpu=gpu, measured=measured, **given)


def with_earlier(table: RateTable, path: Path) -> RateTable:
    """The table, with the timings of other kernel calls from the one that it replaces, if there is one for this GPU."""
    try:
        earlier = read_table(path, table.gpu).kernels
    except PentadError:
        return table
    measured = {(each.op, each.sizes) for each in table.kernels}
    others = (each for each in earlier if (each.op, each.sizes) not in measured)
    return table.model_copy(update={"kernels": (*table.kernels, *others)})


def _exchange_seconds(gpu: str, layer: Sequence[float], pair: Sequence[float]) -> float:
    """Seconds that the host takes to issue an exchange: the extra time of F and B of a layer, divided by the exchanges
    that the planner counts."""
    plan = host_plan("cpu" if gpu == CPU else "cuda", 1, 2)
    volumes = (layer_volume(plan.model, False, piece_of(plan), phase) for phase in "FB")
    exchanges = sum(volume.operations for its in volumes for volume in its.values())
    return max(0.0, sum(pair[:2]) - sum(layer[:2])) / exchanges


def _fitted(timings: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    return {kind: asdict(fit_link(*zip(*points, strict=True))) for kind, points in timings.items()}
