"""When copies of the state are made in the memory of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.run.replication import Replication
from pentad.workers.replication.replicator import SentPart


class StubCopies:
    """Copies on ranks that have memory for one once `is_ready`."""

    def __init__(self) -> None:
        self.is_ready, self.asked = False, list[int]()
        self.group = SimpleNamespace(
            generation=0,
            is_ready=lambda refs: True,
            gather=lambda refs, seconds: ({}, {}),
            collect=lambda refs, tick: [SentPart(8, 0.5, 1.0), SentPart(9, 0.25, 1.5)],
        )
        self.num_on_the_same_node, self.num_in_the_same_domain, self.holders, self.label = 0, 0, [0], "rack"

    def submit(self, step: int) -> dict[int, Any]:
        self.asked.append(step)
        return {}

    def commit(self, step: int) -> dict[int, Any]:
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


def test_what_copies_take_is_recorded_and_noted_if_it_is_more_steps_than_are_between_them(
    copies: StubCopies,
) -> None:
    notes, events, files = list[str](), list[dict[str, Any]](), SimpleNamespace(waiting=False)
    bus = SimpleNamespace(
        folder=SimpleNamespace(files=files),
        display=SimpleNamespace(note=notes.append),
        record=lambda event, **facts: events.append(facts),
    )
    replication = Replication(4, copies, bus)  # type: ignore[arg-type]
    copies.is_ready = True
    for first, last in ((4, 30), (32, 36), (36, 62), (64, 91)):
        replication.submit(first)
        replication.continue_(last)
    assert [(each["step"], each["steps_meanwhile"]) for each in events] == [(4, 26), (32, 4), (64, 27)]
    found = {(each["bytes"], each["snapshot_seconds"], each["transfer_seconds"]) for each in events}
    assert found == {(17, 0.5, 1.5)}
    assert [note.split(" in memory")[0] for note in notes] == ["the copy of step 4", "the copy of step 64"]
    assert "26 steps ran meanwhile, which a lost rank would cost; elastic.replicate_every is 4" in notes[0]


@pytest.mark.parametrize(
    ("node", "domain", "expected"),
    [
        (0, 0, ""),
        (1, 1, "copied to ranks of the same node: that protects from the loss of ranks, not of the node"),
        (0, 1, "copied to ranks of the same rack (elastic.failure_domain), and would be lost with all its nodes"),
    ],
)
def test_one_note_says_which_loss_the_first_copy_does_not_protect_from(
    copies: StubCopies, node: int, domain: int, expected: str
) -> None:
    notes = list[str]()
    bus = SimpleNamespace(
        folder=SimpleNamespace(files=SimpleNamespace(waiting=False)),
        display=SimpleNamespace(note=notes.append),
        record=lambda *_, **__: None,
    )
    replication, copies.is_ready = Replication(4, copies, bus), True  # type: ignore[arg-type]
    copies.num_on_the_same_node, copies.num_in_the_same_domain = node, domain
    for step in (4, 8):
        replication.submit(step)
        replication.continue_(step)
    assert len(notes) == bool(expected) and expected in "".join(notes)


def test_copies_protect_a_state_unless_one_failed_or_a_part_is_twice_on_one_node(copies: StubCopies) -> None:
    files = SimpleNamespace(waiting=False)
    bus = SimpleNamespace(
        folder=SimpleNamespace(files=files),
        display=SimpleNamespace(note=lambda text: None),
        record=lambda *_, **__: None,
    )
    replication = Replication(4, copies, bus)  # type: ignore[arg-type]
    assert replication.protects, "the first copy is made as soon as there is memory"
    copies.num_on_the_same_node = 1
    assert not replication.protects and not Replication(0, copies, bus).protects
    copies.num_on_the_same_node, copies.is_ready = 0, True
    replication.submit(4)
    assert replication.protects
    copies.group.collect = lambda refs, tick: ["rank 0 has no memory for it"]
    replication.continue_(4)
    assert not replication.protects
