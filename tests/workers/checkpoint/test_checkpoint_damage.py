"""Damaged, forged and foreign checkpoints are refused, and errors name the file."""

import copy
import hashlib
import inspect
import json
import random
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import flip, save

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import atomic_io, checkpoint, manifest, safetensors_io
from pentad.workers.checkpoint.checkpoint import MANIFEST, folder_of, newest, open_checkpoint
from pentad.workers.checkpoint.manifest import VERSION, UnknownVersion, decode
from pentad.workers.checkpoint.retention import delete_older
from pentad.workers.checkpoint.shards import write_shard

SLOW = pytest.mark.slow


def forge(folder: Path, **changes: Any) -> None:
    """Forges the first shard's entry with a correct checksum, as an attacker would: the other checks must catch it."""
    body = json.loads((folder / MANIFEST).read_bytes())
    del body["checksum"]
    body["shards"][0] |= changes
    body["bytes"] = sum(shard["bytes"] for shard in body["shards"])
    body["checksum"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / MANIFEST).write_bytes(canonical(body))


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def refusal(root: Path) -> str:
    """Why step 20 is refused; step 10 must be the newest valid one."""
    found, refused = newest(root)
    assert found is not None
    assert found.step == 10
    ((folder, why),) = refused
    assert folder == folder_of(root, 20)
    with pytest.raises(PentadError) as raised:
        open_checkpoint(folder)
    assert str(raised.value) == why
    assert str(folder) in why
    return why


@pytest.mark.parametrize("file", ["stage-1.safetensors", MANIFEST])
@pytest.mark.parametrize(("bit", "stride"), [(1, 7), pytest.param(1, 1, marks=SLOW), pytest.param(128, 1, marks=SLOW)])
def test_one_flipped_bit_in_any_byte_is_refused(tmp_path: Path, file: str, bit: int, stride: int) -> None:
    folder = save(tmp_path, 20)
    path = folder / file
    original = path.read_bytes()
    for at in range(0, len(original), stride):
        flip(path, at, bit)
        with pytest.raises(PentadError, match=file):
            open_checkpoint(folder)
        path.write_bytes(original)
    open_checkpoint(folder)


@pytest.mark.parametrize("file", ["stage-0.safetensors", MANIFEST])
def test_newest_skips_a_damaged_checkpoint_and_reports_it(tmp_path: Path, file: str) -> None:
    save(tmp_path, 10)
    flip(save(tmp_path, 20) / file, 40)
    assert file in refusal(tmp_path)


def test_every_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (10, 20)]
    for folder in folders:
        flip(folder / MANIFEST, 9)
    found, refused = newest(tmp_path)
    assert found is None
    assert [folder for folder, _ in refused] == folders[::-1]


def test_a_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, ())
    assert delete_older(tmp_path / "none", keep=1) == ()


def test_a_missing_a_truncated_an_extended_and_a_linked_shard_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20) / "stage-1.safetensors"
    original = path.read_bytes()
    path.unlink()
    assert "stage-1.safetensors cannot be read (No such file" in refusal(tmp_path)
    path.write_bytes(original[:-1])
    assert f"stage-1.safetensors has {len(original) - 1} bytes: expected {len(original)}" in refusal(tmp_path)
    path.write_bytes(original + b"x")
    assert "bytes: expected" in refusal(tmp_path)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(original)
    path.symlink_to(tmp_path / "elsewhere")
    assert "stage-1.safetensors is a link or device" in refusal(tmp_path)


FOREIGN = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"weight_map":{"a":"b"}}',
    b'{"checksum":"0"}',
    b'{"checksum":NaN}',
    b"[" * 100_000,
    b'{"checksum":' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: data[:16])
def test_foreign_json_is_refused(tmp_path: Path, data: bytes) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / MANIFEST).write_bytes(data)
    assert "manifest.json is" in refusal(tmp_path)


def test_a_manifest_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with open(save(tmp_path, 20) / MANIFEST, "r+b") as file:
        file.truncate(1 << 40)
    assert "bytes: expected at most" in refusal(tmp_path)


def test_blanks_that_json_ignores_count_as_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 20) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b",", b", ", 1))
    with pytest.raises(PentadError, match="checksum"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a.pt", ".a", "", 3]
)
def test_a_file_that_escapes_the_folder_is_refused_by_writer_and_reader(tmp_path: Path, file: Any) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(PentadError, match="expected a plain name"):
        write_shard(folder_of(tmp_path, 1), file, {"x": torch.zeros(2)})
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    forge(folder, file=file)
    assert "a shard's file: a plain name" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"bytes": -1}, "bytes"),
        ({"bytes": True}, "bytes"),
        ({"sha256": "00"}, "sha256"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [-1]}}}, "tensor 'x'"),
        ({"tensors": {"x": {"dtype": "F32"}}}, "tensor 'x'"),
    ],
)
def test_a_forged_field_is_named(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    forge(folder, **changed)
    assert word in refusal(tmp_path)


def test_forged_content_is_accepted_or_refused_but_never_breaks_the_reader(tmp_path: Path) -> None:
    body = json.loads((save(tmp_path, 20) / MANIFEST).read_bytes())
    del body["checksum"]
    dice = random.Random(0)
    strange: list[Any] = [None, True, -1, 1.5, "", "..", [], {}, [[]], {"": []}, 1 << 70, "\ud800"]
    for _ in range(2000):
        forged = copy.deepcopy(body)
        node: Any = forged
        while True:
            key = dice.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or dice.random() < 0.2:
                break
            node = node[key]
        if isinstance(node, dict) and dice.random() < 0.2:
            node[str(dice.choice(strange))] = node.pop(key)
        else:
            node[key] = dice.choice(strange)
        forged["checksum"] = hashlib.sha256(canonical(forged)).hexdigest()
        with suppress(PentadError):
            decode(canonical(forged))


def test_a_header_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    tensors = decode((folder / MANIFEST).read_bytes()).shards[0].tensors
    forge(folder, tensors=tensors | {"model.layers.0.attention.qkv": {"dtype": "F32", "shape": [4, 3]}})
    assert "stage-0.safetensors has tensors that differ" in refusal(tmp_path)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 1 << 33])
def test_a_header_that_claims_to_be_huge_is_refused_without_allocating(tmp_path: Path, length: int) -> None:
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    file = folder / "stage-0.safetensors"
    data = length.to_bytes(8, "little") + file.read_bytes()[8:]
    file.write_bytes(data)
    forge(folder, sha256=hashlib.sha256(data).hexdigest())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "stage-0.safetensors cannot be read" in refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_folder_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 15).rename(folder_of(tmp_path, 20))
    assert "step is 15: expected 20" in refusal(tmp_path)


def test_a_checkpoint_of_another_version_stops_the_search(tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    body = json.loads((folder / MANIFEST).read_bytes())
    del body["checksum"]
    body["version"] = VERSION + 1
    body["checksum"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / MANIFEST).write_bytes(canonical(body))
    for search in (newest, lambda root: delete_older(root, keep=1)):
        with pytest.raises(UnknownVersion) as raised:
            search(tmp_path)
        assert str(raised.value) == (
            f"checkpoint {folder}: manifest.json has format 5: expected 4 "
            "(it was written by another version of pentad: start a new run, or go back to that version)"
        )


def test_a_copy_under_another_name_opens(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 20), tmp_path / "best")
    assert open_checkpoint(tmp_path / "best").step == 20


def test_nothing_here_can_unpickle() -> None:
    for module in (checkpoint, atomic_io, manifest, safetensors_io):
        source = inspect.getsource(module)
        assert not any(word in source for word in ("import pickle", "torch.load", "eval(", "yaml"))
