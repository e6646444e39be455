"""Environment variables that slow down NCCL, Gloo or CUDA, or keep ranks from connecting."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from pentad.orchestrator.doctor.finding import Finding, Subject

OURS = ("NCCL_", "TORCH_NCCL_", "GLOO_")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Values often left over from debugging ('': any value), and what each of them costs.
COSTLY = {
    ("NCCL_P2P_DISABLE", "1"): "copies between GPUs of a host go through its memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs without peer access talk through sockets",
    ("NCCL_IB_DISABLE", "1"): "hosts talk through TCP instead of InfiniBand or RoCE",
    ("NCCL_NET", "Socket"): "hosts talk through TCP instead of InfiniBand or RoCE",
    ("NCCL_DEBUG", "INFO"): "every communicator logs dozens of lines",
    ("NCCL_DEBUG", "TRACE"): "every call of NCCL is logged",
    ("NCCL_ALGO", ""): "NCCL may not choose the fastest algorithm",
    ("NCCL_PROTO", ""): "NCCL may not choose the fastest protocol",
    ("NCCL_BLOCKING_WAIT", "1"): "the host waits for every collective",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "the host waits for every collective",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel, so nothing overlaps",
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"): "every tensor waits for cudaMalloc",
}


def examine_variables(_: Subject) -> Finding:
    return judge_variables(os.environ, [name for _, name in socket.if_nameindex()])


def judge_variables(environment: Mapping[str, str], interfaces: Sequence[str]) -> Finding:
    """Judges environment variables; `interfaces` are the names of this machine's network interfaces."""
    for name in INTERFACES:
        value = environment.get(name, "")
        if value and not _selected(value, interfaces, exact=name.startswith("GLOO")):
            text = f"{name} is '{value}', which selects none of {', '.join(interfaces)}"
            return Finding("failure", text, f"unset {name}, or name the interface to the other nodes")
    found = {
        name: cost
        for (name, value), cost in COSTLY.items()
        if name in environment and value.upper() in ("", environment[name].upper())
    }
    if found:
        text = "; ".join(f"{name}={environment[name]}: {cost}" for name, cost in found.items())
        return Finding("warning", text, f"unset {' '.join(found)}")
    ours = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(OURS)]
    return Finding("ok", ", ".join(ours) if ours else "no variables set")


def _selected(value: str, interfaces: Sequence[str], *, exact: bool) -> list[str]:
    """The interfaces that a variable selects by NCCL's rules: a list of prefixes, of exact names after '=', or of
    exclusions after '^'. Gloo's names are always exact."""
    exact = exact or "=" in value[:2]
    names = [name for name in value.lstrip("^=").split(",") if name]

    def is_named(interface: str) -> bool:
        return interface in names if exact else interface.startswith(tuple(names))

    return [interface for interface in interfaces if is_named(interface) != value.startswith("^")]
