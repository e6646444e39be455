"""Memory, power, clock, temperature and errors of a GPU, as reported by NVML."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pynvml as nvml

# NVML's bits by cause; idle GPUs and user-defined clocks are not throttled.
THROTTLES = {
    "power": nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hardware": nvml.nvmlClocksEventReasonHwSlowdown,
}
# Errors that the driver reports, described as in NVIDIA's list of XIDs.
XIDS = {
    13: "an error in a kernel",
    31: "a kernel read or wrote a wrong address",
    48: "an uncorrectable memory error",
    63: "a row of memory was replaced",
    64: "a row of memory could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
}
MOST_XIDS = 100  # that a process remembers for each GPU
_seen: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MOST_XIDS))


class GpuState(NamedTuple):
    """The state of one GPU; None for what it does not report.

    Memory is in bytes over all processes, `power` in watts, `clock` (of the SMs) and its maximum in hertz,
    `temperature` in degrees Celsius. `ecc_errors` counts uncorrectable memory errors since the driver was loaded.
    `throttles` are keys of THROTTLES. `xids` are the errors that the driver has reported since this process first
    asked, in order.
    """

    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    clock: float | None = None
    temperature: float | None = None
    ecc_errors: int | None = None
    throttles: tuple[str, ...] | None = None
    xids: tuple[int, ...] | None = None
    clock_most: float | None = None


def read_gpu(index: int) -> GpuState | None:
    """The state of this host's GPU `index` in NVML's order; None without NVML, without that GPU, or if it reports
    nothing.

    Takes less than a millisecond, except for the first call in a process.
    """
    try:
        handle = _handle(index)
    except nvml.NVMLError:
        return None
    memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
    power = query(nvml.nvmlDeviceGetPowerUsage, handle)
    clock = query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    most = query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    state = GpuState(
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power=None if power is None else power / 1e3,
        clock=None if clock is None else clock * 1e6,
        temperature=query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        ecc_errors=query(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        throttles=None if reasons is None else tuple(name for name, bits in THROTTLES.items() if reasons & bits),
        xids=_xids(index),
        clock_most=None if most is None else most * 1e6,
    )
    return None if state == GpuState() else state


@functools.cache
def _handle(index: int) -> Any:
    """Failures are not cached: a driver that is still loading answers later."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByIndex(index)


def _xids(index: int) -> tuple[int, ...] | None:
    try:
        events = _events(index)
    except nvml.NVMLError:
        return None
    with suppress(nvml.NVMLError):  # raised when no event is left
        while True:
            _seen[index].append(int(nvml.nvmlEventSetWait_v2(events, 0).eventData))
    return tuple(_seen[index])


@functools.cache
def _events(index: int) -> Any:
    """The event set in which NVML keeps the XIDs of a GPU until they are read."""
    handle, events = _handle(index), nvml.nvmlEventSetCreate()
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:  # this GPU reports none; it is asked again at every reading
        nvml.nvmlEventSetFree(events)
        raise
    return events


def query(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or None if this GPU or driver does not support it."""
    with suppress(nvml.NVMLError):
        return function(*arguments)
    return None
