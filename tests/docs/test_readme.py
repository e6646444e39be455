"""What the README shows is what happens: its commands run, its grid is printed, its YAML is the quickstart."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from paths import ROOT

README = (ROOT / "README.md").read_text()
COMMAND = [sys.executable, "-P", "-c", "import sys; from pentad.orchestrator.cli.cli import main; sys.exit(main())"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pentad ")]


def pentad(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120"}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


@pytest.mark.timeout(400)
def test_every_command_of_the_readme_does_what_it_says(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    assert len(commands()) >= 9
    for arguments in commands():
        done = pentad(arguments, tmp_path)
        assert done.returncode == 0, f"pentad {shlex.join(arguments)}: {done.stderr}"
        for option, value in pairwise(arguments):
            if option in ("--html", "--svg", "--arrow", "--csv"):
                assert (tmp_path / value).stat().st_size > 100, value
    names = {"config.yaml", "program.arrow", "metrics.jsonl", "timeline.arrow", "trace.json.gz", "timeline.html"}
    assert names <= {path.name for path in (tmp_path / "runs" / "first").iterdir()}


def test_the_first_grid_is_the_one_that_is_printed(tmp_path):
    printed = pentad(["schedule", "zb-h2", "--ranks", "4", "--microbatches", "8", "--grid"], tmp_path).stdout
    assert blocks("")[0].strip() in printed


def test_the_first_yaml_is_the_quickstart():
    assert blocks("yaml")[0] == (ROOT / "orchestrator" / "quickstart.yaml").read_text()


def test_the_cluster_commands_are_those_that_drive_the_submitted_run(tmp_path):
    """They need a cluster: jobs/test_submitted.py runs these verbs on one; here their arguments are looked at."""
    lines = [shlex.split(line, comments=True)[1:] for line in blocks("bash")[0].splitlines()]
    driven = (ROOT / "tests" / "orchestrator" / "jobs" / "test_submitted.py").read_text()
    for verb, *arguments in lines:
        assert f'"{verb}"' in driven, verb
        known = pentad([verb, "--help"], tmp_path).stdout
        assert all(argument in known for argument in arguments if argument.startswith("--")), verb
