"""What NVML reports of all GPUs: base units, and nothing where there is no driver."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pentad.workers.health.gpu_facts import Driver, GpuFacts, read_driver, read_gpus

ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlSystemGetCudaDriverVersion_v2": 13010,
    "nvmlSystemGetDriverVersion": "580.82.07",
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10 << 30, total=80 << 30),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x1,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetUUID": b"GPU-1",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
}
FACTS = GpuFacts(
    *(0, "GPU-1", "NVIDIA H200", 80 << 30, 10 << 30, ((7, 0),), 2, "pending", ("thermal",), 345e6, 1980e6, False)
)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fakes NVML; functions whose names are added to the result fail."""
    names: set[str] = set()

    def fake(name: str) -> Callable[..., Any]:
        def answer(*_: Any) -> Any:
            if name in names:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return ANSWERS[name]

        return answer

    for name in ANSWERS:
        monkeypatch.setattr(pynvml, name, fake(name))
    return names


def test_every_gpu_is_reported_in_base_units(refused: set[str]) -> None:
    assert read_gpus(None) == (FACTS, FACTS._replace(number=1))
    assert read_driver() == Driver("580.82.07", (13, 1))


@pytest.mark.parametrize(
    ("visible", "numbers"), [(None, [0, 1]), ("", []), ("1", [1]), ("1, 0", [0, 1]), ("7", []), ("GPU-1", [0, 1])]
)
def test_only_visible_gpus_are_reported(refused: set[str], visible: str | None, numbers: list[int]) -> None:
    assert [gpu.number for gpu in read_gpus(visible)] == numbers


def test_what_a_gpu_does_not_report_is_left_open(refused: set[str]) -> None:
    refused.update(set(ANSWERS) - {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"})
    assert read_gpus(None) == (GpuFacts(0, "", "unnamed"), GpuFacts(1, "", "unnamed"))


def test_without_a_driver_there_are_no_gpus(refused: set[str]) -> None:
    refused.add("nvmlInit")
    assert read_gpus(None) == ()
    assert read_driver() is None


@pytest.mark.gpu
def test_a_real_gpu_has_a_name_and_a_highest_clock() -> None:
    facts = read_gpus(None)[0]
    assert facts.name.startswith("NVIDIA") and facts.clock_most is not None and 5e8 < facts.clock_most < 5e9
    assert read_driver() is not None
