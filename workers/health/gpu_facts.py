"""What NVML reports about this machine's GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pynvml as nvml

from pentad.workers.runtime.telemetry import THROTTLES, query


class GpuFacts(NamedTuple):
    """One GPU in NVML's order; None for what it does not report.

    Memory is in bytes, (SM) clocks in hertz. `processes` are the PIDs that compute on it and the bytes that each holds,
    0 if unknown. `ecc_errors` counts uncorrectable errors since the driver was loaded. `remapping` is the state of the
    memory's row remapping: '', 'pending' (needs a reset) or 'failed' (needs a replacement). `throttles` are keys of
    THROTTLES.
    """

    number: int
    uuid: str
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    ecc_errors: int | None = None
    remapping: str = ""
    throttles: tuple[str, ...] = ()
    clock: float | None = None
    clock_most: float | None = None
    is_persistent: bool | None = None


class Driver(NamedTuple):
    """The driver's version, such as '580.82.07', and the newest CUDA that it supports, such as (13, 0)."""

    version: str
    cuda: tuple[int, int]


def read_driver() -> Driver | None:
    """The GPU driver; None if there is none."""
    try:
        nvml.nvmlInit()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return Driver(_text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
    except nvml.NVMLError:
        return None


def read_gpus(visible: str | None) -> tuple[GpuFacts, ...]:
    """The GPUs that a process may use with `visible` as its CUDA_VISIBLE_DEVICES, which lists indices, UUIDs or UUID
    prefixes (None: all GPUs). Empty without a driver."""
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    try:
        nvml.nvmlInit()
        found = [facts_of(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    except nvml.NVMLError:
        return ()
    return tuple(gpu for gpu in found if names is None or _is_named(gpu, names))


def _is_named(gpu: GpuFacts, names: list[str]) -> bool:
    return str(gpu.number) in names or any(name.startswith("GPU-") and gpu.uuid.startswith(name) for name in names)


def index_of(uuid: object) -> int:
    """NVML's index of the GPU with this UUID, given as in torch, without 'GPU-'. Raises NVMLError."""
    nvml.nvmlInit()
    return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))


def facts_of(index: int) -> GpuFacts:
    """The facts of the GPU with this index. Raises NVMLError if there is none."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    clock = query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    most = query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    persistence = query(nvml.nvmlDeviceGetPersistenceMode, handle)
    return GpuFacts(
        index,
        uuid=_text(query(nvml.nvmlDeviceGetUUID, handle) or ""),
        name=_text(query(nvml.nvmlDeviceGetName, handle) or "unnamed"),
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        processes=tuple(
            (int(each.pid), int(each.usedGpuMemory or 0))
            for each in query(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        ),
        ecc_errors=query(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remapping=_remapping(query(nvml.nvmlDeviceGetRemappedRows, handle)),
        throttles=tuple(name for name, bits in THROTTLES.items() if reasons & bits),
        clock=None if clock is None else clock * 1e6,
        clock_most=None if most is None else most * 1e6,
        is_persistent=None if persistence is None else bool(persistence),
    )


def _remapping(rows: Any) -> str:
    """The remapping state from NVML's (correctable, uncorrectable, pending, failed)."""
    if rows is None:
        return ""
    _, _, pending, failed = rows
    return "failed" if failed else "pending" if pending else ""


def _text(found: str | bytes) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found
