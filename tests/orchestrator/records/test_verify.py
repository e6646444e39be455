"""`pentad verify` proves histories with any faults, and finds every sample that counted twice or never."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Pentad
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoint import save_small

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.hash_chain import linked, read_chain
from pentad.orchestrator.records.verify import replay
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, fingerprint
from pentad.workers.data.samples import Dataset, digest_of
from pentad.workers.data.sources import open_dataset

Entries = list[dict[str, Any]]
SMALL = ("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=300")
BATCH = (
    "batch.global_batch_size=4",
    "batch.sequence_length=16",
    "schedule.name=1f1b",
    "schedule.microbatches=2",
    "mesh.pp=1",
)


def step(number: int, batch: int | None = None, generation: int = 1) -> dict[str, Any]:
    batch = number if batch is None else batch
    return {"event": "step", "step": number, "batch": batch, "samples": 0, "loss": 1.0, "generation": generation}


@given(st.lists(st.integers(0, 12), max_size=8))
def test_any_history_of_rewinds_leaves_every_step_once(rewinds: list[int]) -> None:
    entries: Entries = [{"event": "rewind", "step": 0}]
    following = generation = 0
    for number in (*rewinds, 12):
        while following < number:
            entries.append(step(following, generation=generation))
            following += 1
        following, generation = min(following, number), generation + 1
        entries.append({"event": "rewind", "step": following})
    history = replay(entries, "audit.jsonl")
    assert list(history.steps) == list(range(12))
    assert history.undone == sum(entry["event"] == "step" for entry in entries) - 12


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([step(0), step(0)], "line 2 commits step 0: expected step 1"),
        ([step(0), step(2)], "line 2 commits step 2: expected step 1"),
        ([step(0), step(1, batch=0)], "line 2 trains step 1 on batch 0, after batch 0: expected a later one"),
        (
            [step(0), {"event": "rewind", "step": 2}],
            "line 2 continues from step 2: expected one up to 1, the next step",
        ),
        ([{"event": "step", "step": 0}], "line 1 is a step without batch, samples, loss, generation"),
    ],
)
def test_a_step_that_is_repeated_or_left_out_is_named(entries: Entries, sentence: str) -> None:
    with pytest.raises(PentadError, match=f"^audit.jsonl {sentence}$"):
        replay(entries, "audit.jsonl")


class Run:
    """A run in a folder, whose ranks count the samples that the test says."""

    def __init__(self, folder: RunFolder, dataset: Dataset) -> None:
        self.folder, self.dataset, self.path = folder, dataset, folder.path

    def steps(self, first: int, last: int, digest: Callable[[int], int] | None = None) -> None:
        for number in range(first, last):
            values = dict.fromkeys(METRIC_KEYS, 1.0) | {"step": number, "tokens": 64, "generation": 1}
            samples = (digest or self.dataset.digest)(number)
            self.folder.metrics(values | {"loss": 1 / (1 + number), "batch": number, "samples": samples})
        self.folder.files.settle()

    def save(self, step: int) -> None:
        save_small(self.folder.checkpoint(step), step)
        self.folder.event("checkpoint", step=step, manifest=fingerprint(self.folder.checkpoint(step)))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    config = load(None, [*SMALL, *BATCH, "mesh.pp=1", f"run.folder={tmp_path / 'runs'}", "run.name=trial"])
    plan = make_plan(config, "cpu")
    with RunFolder(config, plan) as folder:
        yield Run(folder, open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed))


def outcome(run: Run, pentad: Pentad, *options: str) -> tuple[int, str]:
    run.folder.close()
    status, out, err = pentad("verify", str(run.path), *options)
    return status, out or err


def test_a_run_that_was_interrupted_is_proven(run: Run, pentad: Pentad) -> None:
    run.folder.rewind(0)
    run.steps(0, 5)
    run.save(4)
    run.folder.rewind(4)
    run.steps(4, 8)
    run.save(8)
    status, out = outcome(run, pentad)
    assert status == 0
    assert "trial: 8 steps in 1 generation, of which 1 step ran again: each of 32 samples once; 2 checkpoints" in out
    status, out = outcome(run, pentad, "--no-data", "--json")
    assert status == 0
    assert json.loads(out) == {
        **{"run": "trial", "steps": 8, "samples": None, "rewinds": 1, "undone": 1, "generations": 1, "checkpoints": 2}
    }


@pytest.mark.parametrize("number", [b"Infinity", b"1e400", b"NaN"])
def test_a_number_that_json_lacks_breaks_the_chain_in_one_sentence(number: bytes) -> None:
    line = b'{"event": "step", "step": 0, "loss": ' + number + b', "hash": ""}'
    with pytest.raises(PentadError, match=r"^audit.jsonl line 1 has a number that is not finite: expected JSON$"):
        list(read_chain([line], "audit.jsonl"))


def twice(dataset: Dataset, number: int) -> int:
    """The digest of a batch in which a rank counted row 0 in place of row 1."""
    sources, indices = dataset.rows(number)
    samples = {row: dataset.sample(int(sources[row]), int(indices[row])) for row in (0, 2, 3)}
    return digest_of(number, {**samples, 1: samples[0]})


def never(dataset: Dataset, number: int) -> int:
    sources, indices = dataset.rows(number)
    return digest_of(number, {row: dataset.sample(int(sources[row]), int(indices[row])) for row in (0, 1, 3)})


def another_batch(dataset: Dataset, number: int) -> int:
    return dataset.digest(number + 1)


@pytest.mark.parametrize("fault", [twice, never, another_batch])
def test_samples_that_count_twice_or_never_are_found(
    run: Run, pentad: Pentad, fault: Callable[[Dataset, int], int]
) -> None:
    run.steps(0, 2)
    run.steps(2, 3, lambda number: fault(run.dataset, number))
    run.steps(3, 4)
    status, text = outcome(run, pentad)
    assert status == 1
    assert "step 2 counted samples with the digest" in text and "each sample of batch 2 once" in text


def test_metrics_and_checkpoints_are_those_that_were_committed(run: Run, pentad: Pentad) -> None:
    run.steps(0, 3)
    run.save(2)
    folder = run.path / "checkpoints" / "step-00000002"
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"1", b"2", 1))
    status, text = outcome(run, pentad, "--no-data")
    assert status == 1 and "MANIFEST" in text.upper() and "with which it was committed" in text
    folder.rename(run.path / "elsewhere")
    assert outcome(run, pentad, "--no-data")[0] == 0
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join([*lines, lines[2]]))
    assert "metrics.jsonl has step 2 twice: expected each step once" in outcome(run, pentad)[1]
    (run.path / "metrics.jsonl").write_text("".join(lines[:-1]))
    status, text = outcome(run, pentad, "--no-data")
    assert status == 1 and "has the loss none of step 2: expected 0.3333333333333333, as audit.jsonl has it" in text


def test_the_journal_has_the_events_that_were_written_in_their_order(run: Run, pentad: Pentad) -> None:
    run.steps(0, 2)
    for step in (1, 2):
        run.save(step)
    run.folder.files.settle()
    path = run.path / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert outcome(run, pentad)[0] == 0
    path.write_text("".join([*lines, '{"event": "lost", "rank": 1}\n']))
    assert outcome(run, pentad)[0] == 0, "a crash came before its line in audit.jsonl"
    for damaged in (lines[:-1], lines[::-1], [*lines[:-1], lines[-1].replace('"step": 2', '"step": 1')]):
        path.write_text("".join(damaged))
        status, text = outcome(run, pentad)
        assert status == 1 and f"{path} lacks the event 'checkpoint' of audit.jsonl line" in text


def test_a_line_changed_later_is_named(run: Run, pentad: Pentad) -> None:
    run.steps(0, 3)
    path = run.path / "audit.jsonl"
    path.write_text(path.read_text().replace('"batch": 1,', '"batch": 0,'))
    status, text = outcome(run, pentad)
    assert status == 1 and f"{path} line 3 has the hash" in text


def test_what_cannot_be_verified_costs_a_sentence(run: Run, pentad: Pentad) -> None:
    run.steps(0, 1)
    status, _, err = pentad("verify", str(run.path))
    assert status == 1 and "is running: expected a run that has ended" in err
    path = run.path / "audit.jsonl"
    for content in (b"", b"{}\n", b"[]\n", b"\xff\n", json.dumps(linked({"event": "step"}, "")).encode() + b"\n"):
        path.write_bytes(content)
        status, text = outcome(run, pentad, "--no-data")
        assert status == 1 and text.count("\n") == 1, text
    path.unlink()
    assert "has no audit.jsonl: expected a run of this version of pentad" in outcome(run, pentad)[1]
