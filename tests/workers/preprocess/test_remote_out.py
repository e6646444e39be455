"""A corpus built for a remote folder is that of a local one, at whatever point the build dies and is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpora import build, content

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.tokenizer import train_tokenizer
from pentad.workers.preprocess.remote_out import RemoteOut


class KilledError(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of a build of several shards."""
    train_tokenizer(["the cat"], 270).save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat"}\n' * 20)
    options = {"source": tmp_path / "a.jsonl", "tokenizer": tmp_path / "t.json", "shard_tokens": 30}
    return options | {"staging": tmp_path / "staging", "out": f"file://{tmp_path}/remote"}


def test_a_build_that_is_ended_at_any_moment_continues_to_the_local_corpus(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(build(**options | {"out": tmp_path / "local"}).path)
    copy, write, left = RemoteOut._copy, RemoteOut._write, 0

    def dying(change: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return change(*arguments)

        return call

    monkeypatch.setattr(RemoteOut, "_copy", dying(copy))
    monkeypatch.setattr(RemoteOut, "_write", dying(write))
    for kills in range(20):
        left = 1 + kills % 3
        try:
            corpus = build(**options)
            break
        except KilledError:
            assert "index.json" not in content(tmp_path / "remote")
    assert kills > 2 and content(tmp_path / "remote") == expected
    assert corpus.fingerprint == open_corpus(tmp_path / "local").fingerprint
    assert not list((tmp_path / "staging").iterdir())


def test_another_build_replaces_an_unfinished_one_and_no_finished_one(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RemoteOut, "_missing", lambda self, sizes: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            build(**options)
    (tmp_path / "remote" / "tokens-00099.arrow").write_text("left")
    build(**options | {"shard_tokens": 50})
    assert content(tmp_path / "remote") == content(build(**options | {"shard_tokens": 50, "out": tmp_path / "a"}).path)
    with pytest.raises(PentadError, match=r"OUT is 'file://.*/remote', which exists and is not empty: expected a new"):
        build(**options)


def test_a_folder_with_other_files_is_not_touched(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "precious").touch()
    with pytest.raises(PentadError, match="which exists and is not empty"):
        build(**options)
    assert list(content(tmp_path / "remote")) == ["precious"] and not (tmp_path / "staging").exists()
