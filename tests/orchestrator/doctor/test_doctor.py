"""`pentad doctor` from end to end on this machine, without its GPUs."""

import json
from pathlib import Path

import pytest
from commands import Pentad
from rich.console import Console

from pentad.orchestrator.cli.show_doctor import show_row
from pentad.orchestrator.doctor import checks, disk
from pentad.orchestrator.doctor import probe as probes
from pentad.orchestrator.doctor.examine import NAMES
from pentad.orchestrator.doctor.finding import Finding, FindingRow
from pentad.orchestrator.doctor.probe import ProbeError, probe

NEEDS_GPU = ["driver", "GPUs", "GPU memory", "ECC", "clocks", "links"]


@pytest.fixture(autouse=True)
def a_small_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, on which the disk check writes little."""
    monkeypatch.setattr(disk, "BLOCKS", 1)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(checks, "read_gpus", lambda _: ())


def test_every_check_is_made_and_nothing_stays(pentad: Pentad, tmp_path: Path) -> None:
    status, out, err = pentad("doctor", "--json", "--burn", "0.1", f"run.folder={tmp_path}/new/runs")
    report = json.loads(out)
    found = {each["check"]: each for each in report["checks"]}
    assert sorted(found) == sorted(NAMES) and not err
    assert status == int(report["verdict"] == "failure")
    assert all(found[name]["verdict"] == "not applicable" for name in NEEDS_GPU)
    assert all(found[name]["text"] == "no GPU" for name in NEEDS_GPU)
    assert found["versions"]["verdict"] == "ok"
    assert found["disk"]["figures"]["write"] > 0
    assert found["burn"]["verdict"] == "ok" and found["burn"]["figures"]["units"][0]["products"] > 0
    assert not list(tmp_path.iterdir())


def test_a_line_a_check_with_its_remedy_below(pentad: Pentad, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    status, out, _ = pentad("doctor", f"run.folder={blocked}/runs")
    lines = out.splitlines()
    assert status == 1
    at = next(number for number, line in enumerate(lines) if line.startswith(" disk"))
    assert lines[at].split(maxsplit=2)[1:] == ["failure", lines[at][lines[at].index("run.folder") :]]
    assert f"run.folder is '{blocked}/runs', which cannot be written (Not a directory)" in lines[at]
    assert lines[at + 1].strip().startswith("> choose another run.folder")
    assert any(line.endswith("links, burn: no GPU") for line in lines)
    assert "1 failure" in lines[-1]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    row = FindingRow("pinned memory", Finding("failure", "word " * 40, "remedy " * 30), "10.0.0.1")
    show_row(row, Console(width=width, force_terminal=True, color_system=None))
    out = capsys.readouterr().out
    assert out.startswith(" pinned memory failure 10.0.0.1: word")
    assert out.count("word") == 40 and max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["missing.yaml"], 1, "CONFIG is 'missing.yaml'"),
        (["--burn", "-1"], 2, "--burn"),
        (["a.yaml", "b.yaml"], 2, "CONFIG is given twice"),
    ],
)
def test_bad_input_costs_one_sentence(pentad: Pentad, arguments: list[str], status: int, sentence: str) -> None:
    found, out, err = pentad("doctor", *arguments)
    assert (found, out, err.count("\n")) == (status, "", 1) and sentence in err


def test_a_probe_that_fails_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProbeError, match="No module named"):
        probe("nonsense")
    monkeypatch.setattr(probes, "START_SECONDS", 0.05)
    with pytest.raises(ProbeError, match="no answer within"):
        probe("burn", "cpu", "60")


@pytest.mark.gpu
def test_a_machine_with_gpus_is_examined(pentad: Pentad) -> None:
    _, out, _ = pentad("doctor", "--json", "--burn", "3")
    found = {each["check"]: each for each in json.loads(out)["checks"]}
    assert all(found[name]["text"] != "no GPU" for name in (*NEEDS_GPU, "burn"))
    assert found["burn"]["verdict"] in ("ok", "failure") and found["burn"]["figures"]["units"]
