"""When copies of the state are made in the memory of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.run.replication import Replication


class StubCopies:
    """Of ranks that have memory for a copy once `is_ready`."""

    def __init__(self) -> None:
        self.is_ready, self.asked = False, list[int]()
        self.group = SimpleNamespace(is_ready=lambda refs: True, gather=lambda refs, seconds: ({}, {}))

    def submit(self, step: int) -> dict[int, Any]:
        self.asked.append(step)
        return {}


@pytest.fixture
def copies() -> StubCopies:
    return StubCopies()


def test_the_first_copy_waits_for_memory_and_training_does_not(copies: StubCopies) -> None:
    replication = Replication(10, copies, None)  # type: ignore[arg-type]
    for step in range(4):
        replication.submit(step)
    assert copies.asked == [] and replication.attempted == -1
    copies.is_ready = True
    replication.submit(4)
    assert copies.asked == [4]


def test_a_copy_that_hands_the_state_over_waits_for_memory(copies: StubCopies) -> None:
    replication = Replication(10, copies, None)  # type: ignore[arg-type]
    replication.submit(3, required=True)
    assert copies.asked == [3]
