"""Shell completions are right, and Tab imports no heavy libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentad.orchestrator.cli.completion import SCHEDULE_NAMES, config_words, run_names, schedule_names
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.config.errors import is_key
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "fast", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "mesh-8.yaml").touch()
    (tmp_path / "other.txt").touch()


def test_runs_and_schedules_are_those_there_are() -> None:
    assert (run_names(""), run_names("f")) == (["fast", "first", "second"], ["fast", "first"])
    assert list(CATALOGUE) == list(SCHEDULE_NAMES)
    assert schedule_names("zb-h") == ["zb-h1", "zb-h2"] and schedule_names("au") == ["auto"]


def test_files_and_keys_come_together() -> None:
    assert config_words("mesh")[:4] == ["mesh-8.yaml", "mesh.dp=", "mesh.pp=", "mesh.cp="]
    assert config_words("mesh.p") == ["mesh.pp=1", "mesh.pp="]
    assert config_words("runs/f") == ["runs/fast/", "runs/first/"]
    assert config_words("precision.compute=b") == ["precision.compute=bfloat16"]
    assert config_words("schedule.name=dual") == ["schedule.name=dualpipe", "schedule.name=dualpipev"]
    assert config_words("run.steps") == ["run.steps="] and config_words("no/thing") == config_words("nothing=") == []


def test_every_offered_key_exists_and_every_value_of_few_is_allowed() -> None:
    keys = [word.removesuffix("=") for word in config_words("") if word.endswith("=")]
    assert len(keys) > 80 and all(is_key(key, RunConfig) for key in keys)
    for key in keys:
        for word in config_words(f"{key}=")[:-1]:
            assert "expected one of" not in refusal(word)


def refusal(override: str) -> str:
    """Why an override alone is refused, as other keys may have to change, too; empty if it is not."""
    try:
        load(None, [override])
    except PentadError as error:
        return str(error)
    return ""


TAB = """
import sys
from pentad.orchestrator.cli.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "ray", "numpy", "pyarrow", "yaml") if name in sys.modules])
"""


def test_a_tab_imports_no_library_that_takes_long() -> None:
    words = {"_PENTAD_COMPLETE": "complete_bash", "COMP_WORDS": "pentad train mesh.p", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TAB], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert done.stdout == "mesh.pp=1\nmesh.pp=\n[]\n", done
