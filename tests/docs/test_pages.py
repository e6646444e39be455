"""On every page, links resolve, commands run, and code blocks print the output shown below them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from os import environ, pathsep
from pathlib import Path

import pytest
from pages import PAGES, Block, blocks, commands, shows
from paths import ROOT, TESTS

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.cluster.local_head import LocalHead, launch
from pentad.orchestrator.config.sections import ClusterSection

OUTPUTS = ("--html", "--svg", "--arrow", "--csv", "--trace")
MARK = "-- end of block --"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader with a clone."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub derives them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in index for page in PAGES if page.parent.name == "docs" and page.name != "README.md")


def _runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0, f"pentad {shlex.join(arguments)}: {capsys.readouterr().err}"
    for option, value in pairwise(arguments):
        if option in OUTPUTS:
            assert Path(value).stat().st_size > 100, value


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHead]:
    """The head of a Ray cluster for two ranks that the runs of a test share; otherwise each would start its own."""
    with launch(ClusterSection(), 2) as head:
        assert head is not None
        monkeypatch.setattr(head, "wait_for_address", cache(head.wait_for_address))
        monkeypatch.setattr("pentad.orchestrator.run.train.launch", lambda section, ranks: nullcontext(head))
        yield head


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("head")
def test_every_command_of_the_first_pages_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README and the first-hour page are read in sequence: commands on both run once."""
    done: list[list[str]] = []
    for page in (ROOT / "README.md", ROOT / "docs" / "first-hour.md"):
        for arguments in commands(page):
            if arguments not in done:
                _runs(arguments, capsys)
                done.append(arguments)
    assert sum(arguments[0] == "train" for arguments in done) >= 2
    names = {"config.yaml", "program.arrow", "metrics.jsonl", "timeline.arrow", "trace.json.gz", "timeline.html"}
    assert names <= {path.name for path in (folder / "runs" / "first").iterdir()}
    rows = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(6)), "the second run resumes after the first one's 4"


ELSEWHERE = ("README.md", "first-hour.md", "hugging-face.md", "fine-tuning.md", "data.md")  # have tests of their own
LONG = ("train", "sweep", "doctor")  # verbs that take long
OTHERS = [
    pytest.param(page, marks=[pytest.mark.slow] if any(verb in LONG for verb, *_ in commands(page)) else [])
    for page in PAGES
    if commands(page) and page.name not in ELSEWHERE
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", OTHERS, ids=page_id)
def test_every_command_of_a_page_runs(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands(page):
        _runs(arguments, capsys)


def _cluster_commands() -> Iterator[tuple[Path, list[str]]]:
    for page in PAGES:
        for arguments in commands(page, "bash"):
            yield page, arguments


def test_every_cluster_command_is_one_that_controls_a_submitted_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Only options are checked here: jobs/test_submitted.py runs these commands on a cluster."""
    driven = (TESTS / "orchestrator" / "jobs" / "test_submitted.py").read_text()
    for page, (verb, *arguments) in _cluster_commands():
        assert f'"{verb}"' in driven, f"{page_id(page)}: pentad {verb}"
        capsys.readouterr()
        assert main([verb, *arguments[: verb == "checkpoint"], "--help"]) == 0
        known = capsys.readouterr().out
        assert all(argument in known for argument in arguments if argument.startswith("--")), verb


SEARCHES, TRAINS = "choose(", "pentad.train("
PYTHON = [
    pytest.param(
        page, marks=[pytest.mark.slow] if any(each in page.read_text("utf-8") for each in (SEARCHES, TRAINS)) else []
    )
    for page in PAGES
    if blocks(page, "text")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PYTHON, ids=page_id)
def test_every_python_block_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    found = blocks(page, "python", "text")
    code = [block.text for block in found if block.kind == "python"]
    shown = [after for block, after in pairwise([*found, Block("", "")]) if block.kind == "python"]
    (tmp_path / "page.py").write_text(f"\nprint({MARK!r})\n".join(code))
    path = pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env={**environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")
    assert len(printed) == len(shown) > 3
    for (kind, expected), found_text in zip(shown, printed, strict=True):
        assert kind != "text" or shows(expected.splitlines(), found_text), found_text


CONSOLE = [
    pytest.param(page, number, marks=[pytest.mark.slow] if block.text.startswith("$ pentad train") else [])
    for page in PAGES
    for number, block in enumerate(blocks(page, "console"))
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "number"), CONSOLE, ids=lambda each: each.stem if isinstance(each, Path) else str(each)
)
def test_every_command_prints_what_the_page_shows(
    page: Path, number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader has appended the Python blocks above the command to my.py."""
    code: list[str] = []
    for kind, text in blocks(page, "python", "console"):
        if kind == "python":
            code.append(text)
        elif number:
            number -= 1
        else:
            break
    Path("my.py").write_text("\n\n".join(code))
    command, *expected = text.splitlines()
    _, program, *arguments = shlex.split(command)
    assert (command[:2], program) == ("$ ", "pentad")
    status = main(arguments)
    printed = capsys.readouterr()
    assert (status == 0) == (not printed.err)
    assert shows(expected, printed.out + printed.err), printed.out + printed.err


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    folders = "|".join(("schedules", "workers", "orchestrator", "kernels", "tests", "deploy", "docs"))
    named = re.findall(rf"`((?:{folders})/[\w/.-]*)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]
