"""A user error gives one sentence on stderr and exit status 1, and leaves no traceback, process or file."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import build
from footprint import Footprint

from pentad.orchestrator.cli.cli import main
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.workers.data.sources import described, open_sources

SMALL = ["cluster.device=cpu", "cluster.dashboard=false", "run.steps=2", "model.vocab=300"]
CASES = {
    "unknown key": (["modle.layers=3"], ["modle.layers", "model.layers"]),
    "odd microbatches": (
        ["schedule.name=dualpipe", "schedule.microbatches=9", "batch.global_batch_size=9"],
        ["9", "even"],
    ),
    "missing corpus": (["data.path=nowhere"], ["data.path", "nowhere"]),
    "unknown builtin": (["data.path=builtin:everything"], ["builtin:everything", "builtin:pydoc"]),
    "corpus of too many tokens": (
        ["data.path=corpus", "model.vocab=256"],
        ["model.vocab is 256", "expected at least 2"],
    ),
    "corpus shorter than a sequence": (["data.path=corpus", "batch.sequence_length=100000"], ["data.path", "100001"]),
    "too few GPUs": (["cluster.device=cuda"], ["GPU", "4"]),
    "no such cluster": (["cluster.address=127.0.0.1:1"], ["cluster.address", "127.0.0.1:1"]),
}
STARTS_RAY = ("too few GPUs",)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("Every rank knows what it does, and when, and with whom. " * 200)
    build(folder / "text.txt", out=folder / "corpus")
    return folder / "corpus"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command that must fail; returns its sentence."""
    footprint = Footprint()
    monkeypatch.setenv("FOOTPRINT", footprint.mark)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, files: int) -> str:
        status = main(list(arguments))
        printed = capsys.readouterr()
        assert status == 1, printed
        assert printed.err.startswith("pentad: ")
        assert printed.err.count("\n") == 1, printed.err
        assert "Traceback" not in printed.err
        assert not footprint.processes()
        assert len(list(tmp_path.rglob("*"))) == files
        return printed.err

    return run


def copied(corpus: Path, folder: Path) -> int:
    """Copies the corpus into a test's folder; returns the number of files and folders there."""
    shutil.copytree(corpus, folder / "corpus")
    return len(list(folder.rglob("*")))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in STARTS_RAY else []) for case in CASES]
)
def test_a_bad_configuration_is_reported_in_one_sentence(case, refused, corpus, tmp_path):
    words, named = CASES[case]
    files = copied(corpus, tmp_path)
    sentence = refused("train", *SMALL, *words, files=files)
    assert all(word in sentence for word in named), sentence


def test_each_configuration_error_has_its_own_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "optimizer.lr=1", "run.seed=x", "cluster.device=gpu"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "pentad: optimizer.lr is unknown; did you mean optimizer.learning_rate?",
        "pentad: run.seed is 'x': expected a whole number",
        "pentad: cluster.device is 'gpu': expected one of auto, cpu or cuda (did you mean cuda?)",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["data"], ["checkpoint"]])
def test_a_command_without_a_verb_prints_its_help_alone(words, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "Usage: pentad" in printed.out + printed.err
    assert "(see" not in printed.err


@pytest.mark.parametrize("words", [["--optimizer.learning_rate=1"], ["--optimizer.learning_rate", "1"]])
def test_a_key_with_dashes_is_shown_without(words, capsys):
    assert main(["train", *words]) == 2
    hint = "keys are set without dashes: optimizer.learning_rate=VALUE (see `pentad train --help`)"
    assert capsys.readouterr().err == f"pentad: No such option: --optimizer.learning_rate; {hint}\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "--learning-rate=3e-4"], "optimizer.learning_rate"),
        (["train", "--batch-size", "4"], "batch.global_batch_size"),
        (["plan", "--dp", "4"], "mesh.dp"),
        (["doctor", "--cluster.device=cpu"], "cluster.device"),
    ],
)
def test_a_key_that_is_given_as_an_option_is_named(words, key, capsys):
    assert main(words) == 2
    hint = f"keys are set without dashes: {key}=VALUE (see `pentad {words[0]} --help`)"
    option = words[-2 + ("=" in words[-1])].partition("=")[0]
    assert capsys.readouterr().err == f"pentad: No such option: {option}; {hint}\n"


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        ("plan", "--gpu 8", "No such option: --gpu (Possible options: --gpus)"),
        ("timeline", "first --html", "Option '--html' requires an argument: --html <path>"),
        ("data build", "a b --vocab", "Option '--vocab' requires an argument: --vocab <int>"),
        ("train", "--json=1", "Option '--json' does not take a value"),
        ("train", "--wholly-unknown", "No such option: --wholly-unknown"),
        ("runs", "--batch-size", "No such option: --batch-size"),
        ("train", "--lr 1", "No such option: --lr; keys have no dashes: did you mean optimizer.learning_rate=VALUE?"),
        ("plan", "--mesh.tpp 1", "No such option: --mesh.tpp; keys have no dashes: did you mean mesh.tp=VALUE?"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(command, words, sentence, capsys):
    assert main([*command.split(), *words.split()]) == 2
    assert capsys.readouterr().err == f"pentad: {sentence} (see `pentad {command} --help`)\n"


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("file", ", where {0}/file is no folder: expected a folder of your own"),
        ("file/runs", ", where {0}/file is no folder: expected a folder of your own"),
        ("loop", ", where {0}/loop is no folder: expected a folder of your own"),
        ("s3://bucket/runs", ": expected a folder of a file system (checkpoint.path may be in a store)"),
    ],
)
def test_a_run_folder_that_can_be_none_is_named(folder, said, refused, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    sentence = f"run.folder is '{folder}'{said.format(tmp_path)}"
    assert refused("train", f"run.folder={folder}", files=2) == f"pentad: {sentence}\n"


@pytest.mark.parametrize("words", [[], ["train"], ["data", "build"]])
def test_help_has_a_short_option(words, capsys):
    assert main([*words, "-h"]) == 0
    assert f"Usage: {' '.join(['pentad', *words])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        (["plan"], "~/.cache/pentad", "a path without ~, or HOME to be set"),
        (["train", "data.path=~nobody-here/corpus"], "~nobody-here/corpus", "a path without ~"),
        (["train", "run.folder=~nobody-here"], "~nobody-here", "a path without ~"),
        (["data", "build", "~nobody-here/text", "out"], "~nobody-here/text", "a path without ~"),
        (["checkpoint", "list", "~nobody-here/run"], "~nobody-here/run", "a path without ~"),
    ],
)
def test_a_home_folder_that_is_not_known_is_named(words, path, expected, refused, monkeypatch):
    """For example, of a user without an entry in the container's passwd file."""
    if path.startswith("~/"):
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    home = path.partition("/")[0]
    sentence = f"'{path}' is in {home}, a home folder that is not known: expected {expected}"
    assert refused(*words, files=0) == f"pentad: {sentence}\n"


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "empty"])
def test_a_damaged_corpus_is_reported(damage, refused, corpus, tmp_path):
    copied(corpus, tmp_path)
    shard = tmp_path / "corpus" / "tokens-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    match damage:
        case "flipped":
            shard.write_bytes(data)
        case "cut":
            shard.write_bytes(data[:-8])
        case "missing":
            shard.unlink()
        case "empty":
            shutil.rmtree(tmp_path / "corpus")
            (tmp_path / "corpus").mkdir()
    files = len(list(tmp_path.rglob("*")))
    sentence = refused("train", *SMALL, "data.path=corpus", files=files)
    assert ("corpus" if damage == "empty" else "tokens-00000.arrow") in sentence


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["cluster.dashboard_port", "metrics.port", "metrics.control_port", "metrics.page_port"])
def test_a_taken_port_is_reported_with_its_owner(key, refused, corpus, tmp_path):
    files = copied(corpus, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["data.path=corpus", "cluster.dashboard=true", f"{key}={port}"]
        sentence = refused("train", *SMALL, *words, files=files)
    assert f"{key} is {port}, but " in sentence
    assert f"(pid {os.getpid()}) has that port" in sentence


def test_the_name_of_a_live_run_is_refused(refused, corpus, tmp_path):
    copied(corpus, tmp_path)
    words = [*SMALL, "data.path=corpus", "run.name=alive"]
    (tmp_path / "runs" / "alive").mkdir(parents=True)
    with (tmp_path / "runs" / "alive" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4321")
        held.flush()
        sentence = refused("train", *words, "cluster.address=127.0.0.1:1", files=len(list(tmp_path.rglob("*"))))
    assert sentence == "pentad: run.name is alive, which is running already (process 4321): expected another\n"


def test_a_corpus_that_differs_from_the_drivers_is_refused(corpus):
    data = DataSpec((SourceSpec("data", str(corpus)),))
    found = described(data, open_sources(data, 300, 8))
    assert open_sources(found, 300, 8)[0].corpus.fingerprint == found.sources[0].fingerprint
    changed = replace(data, sources=(replace(data.sources[0], fingerprint="0" * 64),))
    with pytest.raises(PentadError, match=r"data\.path is .*, which has fingerprint .*: expected 000000000000"):
        open_sources(changed, 300, 8)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--costs", "1,1,1e16"], ["--costs", "1e+16", "1e+06"]),
        (["--costs", "1e-9,1,1e9"], ["--costs", "1e+18"]),
        (["--ranks", "100000000"], ["ranks x microbatches", "100000000 x 8", "1000000"]),
    ],
)
def test_excessive_sizes_and_costs_are_refused(words, named, refused):
    sentence = refused("schedule", "1f1b", "--ranks", "4", "--microbatches", "8", *words, files=0)
    assert all(word in sentence for word in named), sentence
