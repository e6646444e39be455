"""Memory, power, clock, temperature and errors of a GPU, as reported by NVML."""

from __future__ import annotations

import functools
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


class GpuState(NamedTuple):
    """The state of one GPU; None for what it does not report.

    Memory is in bytes over all processes, `power` in watts, `clock` (of the SMs) in hertz, `temperature` in degrees
    Celsius. `ecc_errors` counts uncorrectable memory errors since the driver was loaded. `throttles` are keys of
    THROTTLES.
    """

    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    clock: float | None = None
    temperature: float | None = None
    ecc_errors: int | None = None
    throttles: tuple[str, ...] | None = None


def read_gpu(index: int) -> GpuState | None:
    """The state of this host's GPU number `index` in NVML's order; None without NVML, that GPU, or any answer.

    Takes less than a millisecond, except for the first call of a process.
    """
    try:
        handle = _handle(index)
    except nvml.NVMLError:
        return None
    memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle)
    power = _query(nvml.nvmlDeviceGetPowerUsage, handle)
    clock = _query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    reasons = _query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    state = GpuState(
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power=None if power is None else power / 1e3,
        clock=None if clock is None else clock * 1e6,
        temperature=_query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        ecc_errors=_query(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        throttles=None if reasons is None else tuple(name for name, bits in THROTTLES.items() if reasons & bits),
    )
    return None if state == GpuState() else state


@functools.cache
def _handle(index: int) -> Any:
    """Failures are not cached: a driver that is still loading answers later."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByIndex(index)


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, None if this GPU or driver does not support it."""
    with suppress(nvml.NVMLError):
        return function(*arguments)
    return None
