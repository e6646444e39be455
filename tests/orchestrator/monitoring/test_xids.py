"""Errors reported by GPU drivers (Xids) appear once each: in the journal, on the terminal and as evidence."""

from __future__ import annotations

from pathlib import Path

from page_run import page_run

from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.diagnosis.slow_ranks import _clock
from pentad.orchestrator.monitoring.runfolder import JOURNAL
from pentad.orchestrator.records.json_lines import read_lines
from pentad.workers.runtime.telemetry import GpuState


def test_an_xid_is_recorded_when_it_is_new(tmp_path: Path) -> None:
    notes = list[str]()
    with page_run(tmp_path) as run:
        run.bus.display.note = notes.append  # type: ignore[assignment, method-assign]
        for xids in ((), (79,), (79,), (79, 79, 31), (13,)):  # the last one is of another process
            states = {rank: Status(1, 0, "", 0.0, gpu=GpuState(xids=xids if rank == 2 else ())) for rank in range(4)}
            run.bus.update_ranks(states, {})
        run.bus.folder.files.settle()
        found = [row for row in read_lines(run.bus.folder.path / JOURNAL) if row["event"] == "xid"]
    assert [(row["rank"], row["xid"]) for row in found] == [(2, 79), (2, 79), (2, 31), (2, 13)]
    assert len(notes) == 4 and notes[0].endswith("rank 2, reported XID 79: the GPU has fallen off the bus")


def test_an_xid_is_evidence_against_a_slow_rank() -> None:
    gpus = {0: GpuState(xids=(94, 94)), 1: GpuState(xids=())}
    assert (_clock(0, gpus), _clock(1, gpus)) == (["XID 94"], [])
