"""What NVML says of a GPU: memory, power, clocks, heat and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pynvml as nvml

# Why a GPU may hold its clocks down, as NVML's bits: 'idle' and clocks set by hand are no reason to worry.
THROTTLES = {
    "power": nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hardware": nvml.nvmlClocksEventReasonHwSlowdown,
}


class GpuState(NamedTuple):
    """One GPU now; None where it does not tell.

    Memory is in bytes, over all processes; `power` in watts, `clock` (of the multiprocessors) in hertz, `temperature`
    in degrees Celsius. `ecc_errors` counts memory errors beyond repair since the driver was loaded. `throttles` are
    the keys of THROTTLES that hold.
    """

    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    clock: float | None = None
    temperature: float | None = None
    ecc_errors: int | None = None
    throttles: tuple[str, ...] | None = None


def read_gpu(index: int) -> GpuState | None:
    """The state of this host's GPU number `index`, in NVML's order; None without NVML, such a GPU, or any answer.

    Takes well under a millisecond, but for the first call of a process.
    """
    try:
        handle = _handle(index)
    except nvml.NVMLError:
        return None
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    power = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
    clock = _ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    reasons = _ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    state = GpuState(
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power=None if power is None else power / 1e3,
        clock=None if clock is None else clock * 1e6,
        temperature=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        ecc_errors=_ask(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        throttles=None if reasons is None else tuple(name for name, bits in THROTTLES.items() if reasons & bits),
    )
    return None if state == GpuState() else state


@functools.cache
def _handle(index: int) -> Any:
    """A failure is not remembered: a driver that is being loaded answers later."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByIndex(index)


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, None where this GPU or this driver has none."""
    with suppress(nvml.NVMLError):
        return question(*arguments)
    return None
