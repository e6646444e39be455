"""GPU telemetry: base units, and None for what a GPU does not report."""

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pentad.workers.runtime import telemetry
from pentad.workers.runtime.telemetry import THROTTLES, GpuState, read_gpu

ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 512_500,
    "nvmlDeviceGetClockInfo": 1490,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x40 | 0x1,
    "nvmlEventSetCreate": "events",
    "nvmlDeviceRegisterEvents": None,
    "nvmlEventSetFree": None,
}
FIELDS = {
    "nvmlDeviceGetMemoryInfo": ("memory_used", "memory_total"),
    "nvmlDeviceGetPowerUsage": ("power",),
    "nvmlDeviceGetClockInfo": ("clock",),
    "nvmlDeviceGetMaxClockInfo": ("clock_most",),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetTotalEccErrors": ("ecc_errors",),
    "nvmlDeviceGetCurrentClocksEventReasons": ("throttles",),
    "nvmlDeviceRegisterEvents": ("xids",),
}
STATE = GpuState(10 << 30, 80 << 30, 512.5, 1.49e9, 61, 2, ("power", "thermal"), (), 1.98e9)
Refuse = Callable[..., list[str]]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Fakes NVML; the result makes some of its functions fail from then on, and returns the list of calls."""
    calls: list[str] = []
    refused: set[str] = set()

    def fake(name: str) -> Callable[..., Any]:
        def answer(*_: Any) -> Any:
            calls.append(name)
            if name in refused:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return ANSWERS[name]

        return answer

    for name in ANSWERS:
        monkeypatch.setattr(pynvml, name, fake(name))
    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", no_event)
    _forget()

    def refuse(*names: str) -> list[str]:
        refused.clear()
        refused.update(names)
        return calls

    yield refuse
    _forget()


def _forget() -> None:
    telemetry._handle.cache_clear()
    telemetry._events.cache_clear()
    telemetry._seen.clear()


def no_event(events: Any, milliseconds: int) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


def test_a_state_is_in_base_units(nvml: Refuse) -> None:
    assert read_gpu(3) == STATE


@pytest.mark.parametrize("function", FIELDS)
def test_what_a_gpu_does_not_report_is_none(nvml: Refuse, function: str) -> None:
    nvml(function)
    assert read_gpu(0) == STATE._replace(**dict.fromkeys(FIELDS[function]))


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_there_is_no_state_while_nvml_or_the_gpu_is_missing(nvml: Refuse, function: str) -> None:
    nvml(function)
    assert read_gpu(0) is None
    nvml()
    assert read_gpu(0) == STATE


def test_a_gpu_that_never_reports_anything_has_no_state(nvml: Refuse) -> None:
    nvml(*FIELDS)
    assert read_gpu(0) is None


def test_nvml_is_initialized_once(nvml: Refuse) -> None:
    read_gpu(0)
    read_gpu(0)
    calls = nvml()
    assert calls.count("nvmlInit") == 1
    assert calls.count("nvmlDeviceGetTemperature") == 2


def test_an_idle_gpu_is_not_throttled(nvml: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlClocksEventReasonGpuIdle)
    assert read_gpu(0) == STATE._replace(throttles=())
    assert not any(bits & pynvml.nvmlClocksEventReasonGpuIdle for bits in THROTTLES.values())


def test_errors_of_the_driver_are_remembered_in_order(nvml: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [31, 79]

    def event(events: Any, milliseconds: int) -> Any:
        return SimpleNamespace(eventData=waiting.pop(0)) if waiting else no_event(events, milliseconds)

    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", event)
    assert read_gpu(0) == STATE._replace(xids=(31, 79))
    waiting.append(48)
    assert read_gpu(0) == STATE._replace(xids=(31, 79, 48))
    assert read_gpu(1) == STATE


def test_a_gpu_that_reports_no_errors_keeps_no_event_set(nvml: Refuse) -> None:
    calls = nvml("nvmlDeviceRegisterEvents")
    read_gpu(0)
    read_gpu(0)
    assert calls.count("nvmlEventSetCreate") == calls.count("nvmlEventSetFree") == 2


def test_a_state_can_be_pickled(nvml: Refuse) -> None:
    assert pickle.loads(pickle.dumps(read_gpu(0))) == STATE


@pytest.mark.gpu
def test_a_real_gpu_reports_plausible_values() -> None:
    state = read_gpu(0)
    assert state is not None
    assert state.memory_used is not None
    assert state.memory_total is not None
    assert 0 < state.memory_used < state.memory_total
    assert state.power is None or 10 < state.power < 2000
    assert state.clock is None or 1e8 < state.clock < 5e9
    assert state.temperature is None or 10 < state.temperature < 110
    assert state.ecc_errors is None or state.ecc_errors >= 0
    assert read_gpu(999) is None
