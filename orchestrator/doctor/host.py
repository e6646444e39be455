"""Limits and memory of this machine or container."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from pentad.orchestrator.doctor.finding import Finding, Subject, Verdict
from pentad.orchestrator.planning.fit import container_bytes, memory_facts
from pentad.orchestrator.planning.formatting import format_bytes

MIB, GIB = 2**20, 2**30
FEW_FILES, MANY_FILES = 1024, 8192
SHM = Path("/dev/shm")
SHM_OBJECTS, SHM_GPU = 256 * MIB, 64 * MIB  # for Ray's objects, and for NCCL's buffers per GPU
INFINIBAND = Path("/sys/class/infiniband")


def examine_files(_: Subject) -> Finding:
    return judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def examine_shm(subject: Subject) -> Finding:
    if not SHM.exists():
        return Finding("not applicable", "no /dev/shm on this system")
    usage = shutil.disk_usage(SHM)
    return judge_shm(usage.total, usage.free, len(subject.gpus))


def examine_memory(_: Subject) -> Finding:
    sizes = memory_facts()
    if not sizes:
        return Finding("not applicable", "no /proc/meminfo on this system")
    limit, used = container_bytes() or (None, 0)
    return judge_memory(sizes["MemTotal"], sizes["MemAvailable"], limit, used)


def examine_pinned(_: Subject) -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    return judge_pinned(None if soft == resource.RLIM_INFINITY else soft, has_rdma=has_rdma)


def judge_files(soft: int, hard: int) -> Finding:
    """Judges the limits on open files (-1: none). Ray raises a low soft limit of its processes as far as allowed."""
    allowed = min((each for each in (soft, hard) if each >= 0), default=-1)
    text = "no limit" if allowed < 0 else f"at most {allowed:,}"
    if allowed < 0 or allowed >= MANY_FILES:
        return Finding("ok", text)
    how = f"`ulimit -n {hard}`" if hard < 0 or hard >= MANY_FILES else "LimitNOFILE= or /etc/security/limits.conf"
    remedy = f"raise it to {MANY_FILES:,} or more: {how.replace('-n -1', '-n 65536')}"
    return Finding("failure" if allowed < FEW_FILES else "warning", text, remedy)


def judge_shm(total: int, free: int, gpus: int) -> Finding:
    needed = SHM_OBJECTS + SHM_GPU * gpus
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free >= needed:
        return Finding("ok", text)
    remedy = "start the container with `--shm-size=8g`; on Kubernetes mount an emptyDir of medium Memory there"
    verdict: Verdict = "failure" if gpus > 1 and free < SHM_GPU * gpus else "warning"
    return Finding(verdict, f"{text}: Ray and NCCL need {format_bytes(needed)}", remedy)


def judge_memory(total: int, available: int, limit: int | None, used: int) -> Finding:
    """Judges free memory, in bytes. `limit` is a container's, if any, of which it uses `used`."""
    is_limited = limit is not None and limit < total
    size = limit if limit is not None and is_limited else total
    free = min(available, size - used) if is_limited else available
    text = f"{format_bytes(free)} free of {format_bytes(size)}" + (", the container's limit" if is_limited else "")
    figures = {"free": free, "total": size}
    if free >= max(GIB, 0.1 * size):
        return Finding("ok", text, figures=figures)
    remedy = "end other processes, or raise the container's limit"
    return Finding("failure" if free < GIB else "warning", text, remedy, figures)


def judge_pinned(limit: int | None, *, has_rdma: bool) -> Finding:
    """Judges the limit on pinned memory. CUDA ignores it; InfiniBand's driver does not."""
    if limit is None:
        return Finding("ok", "no limit")
    text = f"at most {format_bytes(limit)}"
    if has_rdma and limit < GIB:
        remedy = "`ulimit -l unlimited`, LimitMEMLOCK=infinity or `docker run --ulimit memlock=-1`"
        return Finding("failure", f"{text}, too little for NCCL over InfiniBand", remedy)
    return Finding("ok", text if has_rdma else f"{text}, for InfiniBand only, which is not here")
