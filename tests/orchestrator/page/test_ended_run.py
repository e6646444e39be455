"""The page of a run that has ended shows from its files what it showed while the run was live."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
import yaml
from page_run import ended_run

from pentad.orchestrator.cli import show_status
from pentad.orchestrator.page.ended_run import EndedRun
from pentad.schedules.ir.errors import PentadError

SAME = ("run", "step", "steps", "mesh", "axes", "schedule", "program", "flow", "curves", "evaluations", "kept", "loss")


def test_it_shows_what_the_live_page_showed(tmp_path: Path) -> None:
    folder, before, experts = ended_run(tmp_path)
    page = EndedRun(folder)
    state = page.state()
    assert state["state"] == "finished" and {key: state[key] for key in SAME} == {key: before[key] for key in SAME}
    assert [(rank["rank"], rank["node"], rank["dp"], rank["pp"]) for rank in state["ranks"]] == [
        (0, "10.0.0.1", 0, 0),
        (1, "10.0.0.1", 1, 0),
        (2, "10.0.0.1", 0, 1),
        (3, "10.0.0.1", 1, 1),
    ]
    assert [entry["event"] for entry in state["events"]] == ["start", "place", "lost", "end"]
    assert state["has_times"] and state["has_experts"] and page.experts() == experts
    assert page.timeline_html() == (folder / "timeline.html").read_text()
    assert "at the costs of step 6" in page.memory_html() and "rank 3 (dp1 pp1)" in page.rank_times_svg()


@pytest.mark.slow
def test_what_is_not_there_costs_a_sentence_or_nothing(tmp_path: Path) -> None:
    folder, *_ = ended_run(tmp_path)
    for name in ("timeline.html", "timeline.arrow", "rank-times.arrow", "expert-load.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = EndedRun(folder)
    state = page.state()
    assert not (state["kept"] or state["has_times"] or state["has_experts"]) and state["curves"]["step"] == []
    with pytest.raises(PentadError, match="no step has been measured"):
        page.timeline_html()
    (folder / "expert-load.json").write_text("[]")
    with pytest.raises(PentadError, match=r"expert-load\.json is damaged: expected step and layers"):
        EndedRun(folder)


@pytest.mark.slow
def test_a_mesh_that_shrank_is_the_one_that_is_shown(tmp_path: Path) -> None:
    folder, *_ = ended_run(tmp_path)
    line = json.dumps({"time": 1.0, "event": "recovered", "how": "shrink", "mesh": "pp2"})
    with (folder / "journal.jsonl").open("a") as file:
        file.write(f"{line}\n")
    state = EndedRun(folder).state()
    assert state["mesh"] == "pp2" and [rank["node"] for rank in state["ranks"]] == ["", ""]


def test_a_custom_model_is_not_executed(tmp_path: Path) -> None:
    folder, *_ = ended_run(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"] = {"custom": f"{tmp_path}/own.py:model", "vocab": 300, "hidden": 32}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page = EndedRun(folder)
    state = page.state()
    assert len(state["ranks"]) == 4 and state["flow"]["sends"] == [] and len(state["kept"]) == 5
    with pytest.raises(PentadError, match="what a custom model holds is known while its run is live"):
        page.memory_html()


@pytest.mark.slow
def test_the_command_serves_it_until_it_is_interrupted(tmp_path: Path) -> None:
    folder, *_ = ended_run(tmp_path)
    command = [sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "page", str(folder), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        address = json.loads(process.stdout.readline())["page"]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert b"<title>pentad</title>" in opener.open(address).read()
        state = json.loads(opener.open(f"{address.partition('?')[0]}state.json").read())
        assert (state["run"], state["state"], state["step"]) == ("trial", "finished", 7)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert "run trial is finished: this command serves its page until Ctrl-C" in process.stderr.read()


def test_an_interrupt_counts_from_before_the_address_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where KeyboardInterrupt would be lost, as in __del__."""
    folder, *_ = ended_run(tmp_path)
    handler = signal.getsignal(signal.SIGINT)

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def printed(*_: object) -> None:
        Finalized()

    monkeypatch.setattr(show_status, "_print_page", printed)
    show_status.show_page(folder, as_json=True, timeout_seconds=5)
    assert "this command serves its page until Ctrl-C" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
