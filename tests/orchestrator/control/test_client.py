"""`pentad status` and its siblings: a live run answers; any other is described in one sentence."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from controls import Served, once_printed, once_requested, plain_view, rank, seen, serving
from rich.console import Console

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.cli.show_status import status_view
from pentad.orchestrator.config.config import load
from pentad.orchestrator.control.control_client import NotLive, connect, ended
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS
from pentad.orchestrator.monitoring.run_state import ControlRequests, EvalView
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.run_lock import locked
from pentad.schedules.ir.errors import PentadError

STATUS_KEYS = {"run", "step", "generation", "state", "ranks", "endpoints"}
RANK_KEYS = {"rank", "pid", "node", "coordinates", "state", "step", "instruction", "heartbeat_age_seconds"}
Pentad = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/trial, the folder of a run that has done three steps in its second generation and has not ended."""
    monkeypatch.chdir(tmp_path)
    config = load(None, ["run.name=trial"])
    with RunFolder(config, make_plan(config, "cpu")) as run:
        for step in range(3):
            run.metrics({**dict.fromkeys(METRIC_KEYS, 0.5), "step": step, "generation": 2})
        run.event("start", generation=2, step=0)
        return run.path


@pytest.fixture
def pentad(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Pentad:
    """Runs a command line in the folder above runs/: (status, stdout, stderr)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(list(arguments)), *capsys.readouterr()

    return run


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(folder) as made:
        yield made


def journal(folder: Path, event: str, **facts: Any) -> None:
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"time": 0.0, "event": event, **facts}) + "\n")


def test_a_live_run_s_status_has_the_agreed_keys(pentad: Pentad, served: Served) -> None:
    status, out, err = pentad("status", "trial", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    facts = json.loads(out)
    assert facts.keys() >= STATUS_KEYS
    assert facts.keys() == ended(served.folder).keys()
    assert (facts["state"], facts["step"], facts["generation"], len(facts["ranks"])) == ("running", 5, 2, 2)
    assert facts["ranks"][1].keys() >= RANK_KEYS
    assert facts["ranks"][1]["coordinates"] == {"dp": 0, "pp": 1, "cp": 0, "tp": 0, "ep": 0}


def test_status_shows_every_rank_and_the_verdict(pentad: Pentad, served: Served) -> None:
    served.control.on_view(
        seen("recovering", rank(0), rank(1, "hung", age=9.0), verdict="rank 1 has not moved for 9 s")
    )
    status, out, _ = pentad("status", "runs/trial")
    assert status == 0
    for text in ("recovering", "step 5/60", "generation 2", "dp0 pp1", "hung", "rank 1 has not moved for 9 s"):
        assert text in out
    assert "\x1b" not in out


def test_an_ended_run_is_shown_without_ranks_or_endpoints(pentad: Pentad, served: Served) -> None:
    served.control.on_view(seen("finished", step=60))
    out = pentad("status", "trial")[1]
    assert "finished" in out
    assert "dp0" not in out and "127.0.0.1" not in out


def test_the_address_of_the_page_is_printed_with_the_token(pentad: Pentad, served: Served) -> None:
    early = (1, "", "pentad: run trial has no page yet: expected one that has started\n")
    assert pentad("page", "trial") == early
    served.control.on_view(seen(endpoints={"page": "http://127.0.0.1:3/"}))
    address = f"http://127.0.0.1:3/?token={served.endpoint['token']}"
    assert pentad("page", "trial") == (0, f"{address}\n", "")
    assert json.loads(pentad("page", "trial", "--json")[1]) == {"run": "trial", "page": address}
    assert served.endpoint["token"] not in pentad("status", "trial")[1]


def test_status_shows_spares_that_wait(pentad: Pentad, served: Served) -> None:
    assert "spares" not in pentad("status", "trial")[1]
    served.control.on_view(seen(spares=2))
    assert "generation 2  spares 2\n" in pentad("status", "trial")[1]


@pytest.mark.parametrize(("state", "shown"), [("running", "5/60  2 h 3 min left  gen"), ("paused", "5/60  gen")])
def test_status_shows_the_time_left_of_a_run_that_continues(
    pentad: Pentad, served: Served, state: str, shown: str
) -> None:
    served.control.on_view(seen(state, seconds_left=7380.0))
    assert shown in pentad("status", "trial")[1]


def test_status_shows_the_last_evaluation_and_when_the_next_is_due(pentad: Pentad, served: Served) -> None:
    served.control.on_view(seen(evaluations=(EvalView("wiki", 4, 2.5), EvalView("code", 4, None)), next_evaluation=8))
    assert " evaluation after 4 steps: wiki 2.5000  code -  next after 8 steps\n" in pentad("status", "trial")[1]
    served.control.on_view(seen(next_evaluation=0))
    assert " evaluation: next after 0 steps\n" in pentad("status", "trial")[1]
    served.control.on_view(seen())
    assert "evaluation" not in pentad("status", "trial")[1]


def test_an_ended_run_shows_the_evaluations_in_its_folder(folder: Path) -> None:
    row = dict.fromkeys(EVAL_KEYS, 1.5) | {"generation": 1}
    lines = ({**row, "step": step, "data": data} for step in (0, 2) for data in ("a", "b"))
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ended(folder)
    assert found["evaluations"] == [{"data": data, "step": 2, "loss": 1.5} for data in ("a", "b")]
    assert found["next_evaluation"] == load(folder / "config.yaml").eval.every


def test_ranks_with_problems_are_shown_first_if_not_all_fit() -> None:
    view = seen("running", *(rank(number, "lost" if number == 70 else "running") for number in range(100)))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(status_view(plain_view(view), 5))
    assert "lost" in captured.get()
    assert "and 95 more" in captured.get()


def test_watch_shows_each_change_until_the_run_ends(pentad: Pentad, served: Served) -> None:
    once_printed(served.control.on_view, seen("finished", step=60))
    status, out, _ = pentad("status", "trial", "--watch", "--json")
    assert status == 0
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["running", "finished"]


def test_a_run_that_ends_while_watched_is_shown_from_its_folder(pentad: Pentad, served: Served) -> None:
    journal(served.folder, "stop")
    timer = once_printed(served.control.close)
    status, out, _ = pentad("status", "trial", "--watch", "--json")
    timer.join()
    assert status == 0
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["running", "stopped"]


@pytest.mark.parametrize(
    ("verb", "news", "message"),
    [
        ("pause", seen("paused", step=7), "trial paused after step 7"),
        ("resume", seen(step=7), "trial continues from step 7"),
        ("stop", seen("stopped", step=7), "trial stopped after step 7, with a checkpoint"),
        ("abort", seen("stopped", step=7), "trial aborted at step 7, without a checkpoint"),
    ],
)
def test_a_request_is_answered_when_it_is_done(
    pentad: Pentad, served: Served, verb: str, news: Any, message: str
) -> None:
    served.control.on_view(seen("paused" if verb == "resume" else "running"))
    once_requested(served, served.control.on_view, news)
    status, out, err = pentad(verb, "trial")
    assert (status, out, err) == (0, f" {message}\n", "")


def test_a_checkpoint_request_is_answered_with_its_step(pentad: Pentad, served: Served) -> None:
    once_requested(served, served.requests.checkpoint_saved, 6)
    status, out, _ = pentad("checkpoint", "save", "trial", "--json")
    assert (status, json.loads(out)) == (0, {"run": "trial", "state": "running", "step": 6, "generation": 2})


def test_a_request_that_takes_too_long_is_reported_in_one_sentence(pentad: Pentad, served: Served) -> None:
    status, out, err = pentad("pause", "trial", "--timeout", "0.2")
    assert (status, out) == (1, "")
    message = "in which run trial got the request, but Pause is not done yet: expected a longer one"
    assert err == f"pentad: --timeout is 0.2 s, {message}\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("events", "state", "verdict"),
    [
        ([("end", {})], "finished", ""),
        ([("stop", {})], "stopped", ""),
        ([("failure", {"error": "rank 1 died"})], "failed", "rank 1 died"),
        (
            [("end", {}), ("start", {"generation": 3})],
            "failed",
            "it ended without an error message: it was killed, or its machine is gone",
        ),
    ],
)
def test_an_ended_run_is_shown_from_its_folder(
    pentad: Pentad, folder: Path, events: list[tuple[str, dict[str, Any]]], state: str, verdict: str
) -> None:
    for event, facts in events:
        journal(folder, event, **facts)
    status, out, err = pentad("status", "trial", "--json")
    assert (status, err) == (0, "")
    reported = json.loads(out)
    assert reported.keys() >= STATUS_KEYS
    assert (reported["state"], reported["step"], reported["steps"], reported["verdict"]) == (state, 3, 60, verdict)
    assert (reported["ranks"], reported["endpoints"], reported["loss"]) == ([], {}, 0.5)
    assert state in pentad("status", "trial")[1]
    status, _, err = pentad("pause", "trial")
    assert (status, err) == (1, f"pentad: run trial is {state} at step 3: expected a live one\n")


def test_a_stale_endpoint_of_a_killed_run_is_recognized(pentad: Pentad, folder: Path) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    (folder / "control.json").write_text(json.dumps({"address": address, "token": "t", "pid": 1}))
    status, _, err = pentad("resume", "trial")
    message = f"run trial is not running any more (nothing answers at {address}), its last known step is 3"
    assert (status, err) == (1, f"pentad: {message}: expected a live one\n")
    status, out, _ = pentad("status", "trial", "--json")
    assert (status, json.loads(out)["state"]) == (0, "failed")


def test_a_live_run_that_answers_nothing_is_not_taken_for_one_that_has_ended(pentad: Pentad, folder: Path) -> None:
    """It may be stopped (SIGSTOP): after 20 s, gRPC reports the same error as for a run that has ended."""
    (folder / "control.json").write_text(json.dumps({"address": "127.0.0.1:1", "token": "t", "pid": 1}))
    with locked(folder, ""):
        status, _, err = pentad("resume", "trial")
    said = f"run trial does not answer at 127.0.0.1:1, but process {os.getpid()} has it: expected one that runs"
    assert (status, err) == (1, f"pentad: {said} and is not stopped\n")


def test_a_folder_before_its_first_step_has_a_status(tmp_path: Path) -> None:
    config = load(None, [f"run.folder={tmp_path}", "run.name=new"])
    with RunFolder(config, make_plan(config, "cpu")) as run:
        assert (ended(run.path)["state"], ended(run.path)["step"]) == ("stopped", 0)


def test_a_port_now_used_by_another_run_is_reported(folder: Path, tmp_path: Path) -> None:
    with closing(ControlServer(tmp_path, "127.0.0.1", 0, ControlRequests())) as other:
        endpoint = {"address": other.address, "token": "of a run that was killed", "pid": 1}
        (folder / "control.json").write_text(json.dumps(endpoint))
        with (
            connect("trial") as client,
            pytest.raises(PentadError, match=r"has a token that .* refuses: expected the file that run trial wrote"),
        ):
            client.status()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "5", "{}", '{"address": 1}', '{"address": "a", "token": null}', '"x"', "[" * 100_000),
        *('{"address": NaN, "token": "x"}', '{"address": ":1", "token": "x"}', '{"address": "a", "token": "x"}'),
        *('{"address": "a:1 ", "token": "x"}', '{"address": "a:1", "token": "x\\n"}'),
        *('{"address": "a:1", "token": "\\u00e9"}', '{"address": "\\u00e9:1", "token": "x"}'),
    ],
    ids=range(15),
)
def test_a_damaged_endpoint_is_reported_in_one_sentence(folder: Path, text: str) -> None:
    (folder / "control.json").write_text(text)
    with pytest.raises(PentadError, match=r"control.json is damaged: expected address and token; remove it"):
        connect("trial")


def test_a_loopback_address_of_another_machine_is_not_called(folder: Path) -> None:
    endpoint = {"address": "127.0.0.1:1", "token": "t", "pid": 1, "host": "elsewhere"}
    (folder / "control.json").write_text(json.dumps(endpoint))
    with pytest.raises(PentadError, match=r"run trial listens at 127.0.0.1:1 of elsewhere only: expected that machine"):
        connect("trial")


def test_a_folder_that_cannot_be_read_is_reported_in_one_sentence(folder: Path) -> None:
    (folder / "control.json").mkdir()
    with pytest.raises(PentadError, match=r"RUN is 'trial', which cannot be read \(Is a directory\)"):
        connect("trial")


def test_a_run_that_does_not_exist_is_reported_in_one_sentence(pentad: Pentad) -> None:
    status, out, err = pentad("status", "trail")
    assert (status, out) == (1, "")
    assert err.startswith("pentad: RUN is 'trail' (did you mean trial?): expected a run's folder or a name under runs/")


def test_a_run_that_is_not_live_is_reported_with_its_last_state(folder: Path) -> None:
    journal(folder, "end")
    with pytest.raises(NotLive) as over:
        connect(folder)
    assert over.value.last["state"] == "finished"
