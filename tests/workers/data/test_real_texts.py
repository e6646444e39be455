"""The mixture of docs/data.md: its commands for a few steps, on texts of this machine in the form of the packages."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from html import escape
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import real_texts
from pages import commands
from paths import ROOT

from pentad.orchestrator.cli.cli import main

NAMES = ("essays", "code", "dictionary")


def write_packages(debian: Path) -> None:
    """Writes pages and entries where anarchism and dict-gcide have theirs."""
    pages, dictionary = debian / "usr/share/doc/anarchism/html", debian / "usr/share/dictd"
    pages.mkdir(parents=True)
    dictionary.mkdir(parents=True)
    for name, text in topics.items():
        page = f"<title>{name}</title></head><body><h1>{name}</h1><p>{escape(text)}</p></body>"
        (pages / f"{name}.html").write_text(page)
    entries = "".join(f"{name} n.\n   {' '.join(text.split())}\n\n" for name, text in topics.items())
    (dictionary / "gcide.dict.dz").write_bytes(gzip.compress(f"00-database-info\n\n{entries}".encode()))


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_packages(Path("debian"))
    monkeypatch.setattr(sys, "argv", ["real_texts.py", "debian", "texts", "--megabytes", "0.4"])
    real_texts.main()
    return tmp_path / "texts"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_train_and_draw_three_real_texts(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        found = documents(texts / f"{name}.jsonl")
        assert len(found) == len(set(found)) > 10 and 200_000 < len("".join(found).encode()) <= 400_000
        assert not any("<p>" in text or "database" in text[:20] for text in found if name != "code")
    shutil.copytree(ROOT / "deploy", "deploy")
    overrides = ["run.steps=8", "eval.every=4", "cluster.dashboard=false",
                 "data.curriculum=[{step: 4, weights: {essays: 0.2, code: 0.2, dictionary: 0.6}}]"]  # fmt: skip
    for arguments in commands(ROOT / "docs" / "data.md"):
        assert main([*arguments, *(overrides if arguments[0] == "train" else ())]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["curves", "mixture", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["changes"]) == (8, [4]) and Path("losses.svg").stat().st_size > 5000
    curves = {curve["name"]: curve for curve in facts["curves"]}
    assert set(curves) == set(NAMES)
    for curve in curves.values():
        assert [each["step"] for each in curve["held_out"]] == [0, 4, 8]
        losses = [each["loss"] for each in curve["held_out"]]
        assert losses[0] > losses[1] > losses[2]
    counts = [
        sum(window["tokens"] for window in curves["dictionary"]["training"][part]) for part in (slice(4), slice(4, 8))
    ]
    assert [count / (4 * 16 * 128) for count in counts] == pytest.approx([0.1, 0.6], abs=1 / 64)
