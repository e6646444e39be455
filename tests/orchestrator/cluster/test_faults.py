"""What kind of fault a rank's error is."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

from pentad.orchestrator.cluster.faults import Failure


def raised(text: str, cause: Exception) -> RayError:
    return RayTaskError("run", text, cause)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (raised("OutOfMemoryError", RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), "memory"),
        (raised("RuntimeError", RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")), "memory"),
        (raised("MemoryError", MemoryError()), "memory"),
        (OutOfMemoryError("Task was killed due to the node running low on memory."), "memory"),
        (WorkerCrashedError(), "killed"),
        (ActorUnavailableError("Socket closed", None), "killed"),
        (raised("RuntimeError: Connection reset by peer", RuntimeError("Connection reset by peer")), "peer"),
        (raised("ValueError: no", ValueError("no")), "error"),
    ],
)
def test_the_kind_of_a_fault_is_that_of_its_error(error: RayError, fault: str) -> None:
    assert Failure(0, error).fault == fault


def test_of_a_rank_whose_node_says_nothing_both_causes_are_named() -> None:
    assert Failure(0, ActorUnavailableError("Socket closed", None)).cause == "its process was killed or its node lost"
