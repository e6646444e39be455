"""The Ray cluster at cluster.address, once joined, and how far its nodes' clocks are from this machine's."""

from __future__ import annotations

import time
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.cluster.local_head import LOOPBACK
from pentad.orchestrator.doctor.finding import Finding
from pentad.orchestrator.planning.formatting import format_duration
from pentad.schedules.ir.errors import PentadError

READINGS, SECONDS = 5, 30.0  # readings of a clock, and the time limit of each
CLOSE, FAR = 0.1, 10.0  # acceptable and intolerable seconds between two clocks; a node answers within milliseconds
Dashboard = Literal["open", "protected", "silent", "none"]


def examine_ray(cluster: Cluster) -> Finding:
    from pentad.orchestrator.jobs.client_auth import is_open  # imports aiohttp, which no run needs at its start

    dashboard: Dashboard = "none"
    if cluster.dashboard:
        try:
            dashboard = "open" if is_open(cluster.dashboard) else "protected"
        except PentadError:
            dashboard = "silent"
    return judge_ray(f"Ray {ray.__version__} at {cluster.address}", cluster.dashboard or "", dashboard)


def judge_ray(where: str, url: str, dashboard: Dashboard) -> Finding:
    """Judges a cluster that has accepted our Ray version and token."""
    if dashboard == "silent":
        remedy = "look at dashboard.log in the head's session folder: `pentad submit` needs it"
        return Finding("warning", f"{where}, whose dashboard at {url} does not answer", remedy)
    if dashboard == "none":
        return Finding("warning", f"{where}, without a dashboard", "start it with one: `pentad submit` needs it")
    if dashboard == "open" and LOOPBACK not in url:
        text = f"{where} works without a token: whoever reaches its ports can run code on it"
        return Finding("warning", text, "start it with RAY_AUTH_MODE=token (docs/cluster.md)")
    token = "a token is required" if dashboard == "protected" else "no token, on this machine only"
    return Finding("ok", f"{where}, dashboard at {url}, {token}")


def clock_offset(actor: Any) -> Finding:
    """Judges the clock of an Examiner's node by its fastest answer, assumed to be given halfway through the round
    trip."""
    readings = []
    for _ in range(READINGS):
        began = time.time()
        try:
            there = ray.get(actor.clock.remote(), timeout=SECONDS)
        except RayError:
            return Finding("failure", f"no answer within {SECONDS:.0f} s", "look at the node, and at its load")
        ended = time.time()
        readings.append((ended - began, there - (began + ended) / 2))
    delay, offset = min(readings)
    return judge_clock(offset, delay / 2)


def judge_clock(offset: float, delay: float) -> Finding:
    """Judges a clock that is `offset` seconds ahead of this machine's, known to within `delay` seconds."""
    figures = {"offset": offset, "delay": delay}
    text = f"{format_duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} this machine"
    if abs(offset) <= CLOSE + delay:
        return Finding("ok", f"{text}, known to {format_duration(delay)}", figures=figures)
    verdict: Literal["warning", "failure"] = "failure" if abs(offset) > FAR else "warning"
    return Finding(verdict, text, "run chrony or another NTP client on every node", figures)
