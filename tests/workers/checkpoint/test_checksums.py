"""Reading any part of a checkpoint returns what was written or raises an error: every block has its checksum."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import flip, save
from hypothesis import given
from hypothesis import strategies as st

from pentad.workers.checkpoint.checkpoint import MANIFEST, Unreadable, open_checked, open_checkpoint
from pentad.workers.checkpoint.checksums import BLOCK_BYTES, CheckedFile, Checksums, Damaged
from pentad.workers.checkpoint.local_storage import Local
from pentad.workers.checkpoint.shards import read

SIZES = st.sampled_from([0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 5])


def checked(content: bytes, crc32: str) -> CheckedFile:
    return CheckedFile(io.BytesIO(content), "file", len(content), crc32)


def crc32_of(content: bytes) -> str:
    checksums = Checksums()
    checksums.update(memoryview(content))
    return checksums.result().crc32


@given(size=SIZES, start=st.integers(0, 4 * BLOCK_BYTES), count=st.integers(0, 4 * BLOCK_BYTES), flipped=st.integers(0))
def test_a_read_returns_the_bytes_unless_one_of_its_blocks_is_damaged(
    size: int, start: int, count: int, flipped: int
) -> None:
    content = os.urandom(size)
    crc32, damaged, start = crc32_of(content), bytearray(content), start % (size + 1)
    file = checked(content, crc32)
    file.seek(start)
    assert file.read(count) == content[start : start + count]
    if not size:
        return
    damaged[flipped % size] ^= 1 << flipped % 8
    file = checked(bytes(damaged), crc32)
    file.seek(start)
    end = min(start + count, size)
    meets = start < end and start // BLOCK_BYTES <= flipped % size // BLOCK_BYTES <= (end - 1) // BLOCK_BYTES
    if meets:
        with pytest.raises(Damaged, match=r"^file, bytes \d+ to \d+: CRC-32 is [0-9a-f]{8}, expected [0-9a-f]{8}$"):
            file.read(count)
    else:
        assert file.read(count) == content[start:end]


def test_a_file_that_was_cut_off_is_damaged() -> None:
    content = os.urandom(2 * BLOCK_BYTES)
    file = CheckedFile(io.BytesIO(content[:-1]), "file", len(content), crc32_of(content))
    with pytest.raises(Damaged, match=r"^file ends at byte 2097151: expected 2097152 bytes$"):
        file.read(len(content))


def test_reading_tensors_finds_a_flipped_bit_that_opening_does_not(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    path = folder / "stage-1.safetensors"
    names = list(open_checked(folder).tensors)
    flip(path, path.stat().st_size - 1)
    opened = open_checked(folder)
    with pytest.raises(Damaged):
        read(opened, names)


def test_files_of_an_earlier_version_are_verified_as_a_whole(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    body = json.loads((folder / MANIFEST).read_bytes()) | {"version": 3}
    del body["checksum"]
    for shard in body["shards"]:
        del shard["crc32"]
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    text = json.dumps(body | {"checksum": checksum}, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST).write_text(text)
    opened = open_checked(folder)
    names = sorted(opened.tensors)
    expected = read(open_checkpoint(folder), names)
    assert all(torch.equal(found, expected[name]) for name, found in read(opened, names).items())
    path = folder / "stage-1.safetensors"
    flip(path, path.stat().st_size - 1)
    opened = open_checked(folder)
    read(opened, ["model.layers.0.attention.qkv"])
    with pytest.raises(Damaged, match=r"stage-1\.safetensors has sha256"):
        read(opened, ["model.layers.1.attention.qkv"])


def test_storage_that_does_not_answer_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checked(save(tmp_path, 20))

    def away(storage: Local, file: Path) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(Local, "opened", away)
    with pytest.raises(Unreadable):
        read(opened, opened.tensors)


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    ours, theirs = open_checked(folder), open_checkpoint(folder)
    found, expected = read(ours, ours.tensors), read(theirs, theirs.tensors)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
