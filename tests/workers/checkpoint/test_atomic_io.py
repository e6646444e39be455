"""The laws of files that are written past the page cache."""

import binascii
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.workers.checkpoint import atomic_io
from pentad.workers.checkpoint.checksums import BLOCK_BYTES

BLOCK = 8192


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_io, "BLOCK", BLOCK)
        yield


@given(sizes=st.lists(st.integers(0, 3 * BLOCK), max_size=6), seed=st.integers(0, 2**32))
def test_a_file_has_the_bytes_of_its_parts(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    content = hashlib.shake_256(str(seed).encode()).digest(sum(sizes))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [memoryview(content)[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    crc32 = "".join(f"{binascii.crc32(block):08x}" for block in blocks)
    assert atomic_io.write_file(path, parts) == (len(content), hashlib.sha256(content).hexdigest(), crc32)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("refused", ["when it is asked for", "when it is used", "never"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    content, write, asked = os.urandom(5 * BLOCK + 5), os.write, list[bool]()

    def refuse(descriptor: int, data: memoryview) -> int:
        asked.append(bool(atomic_io.fcntl.fcntl(descriptor, atomic_io.fcntl.F_GETFL) & atomic_io.DIRECT))
        if refused == "when it is used" and asked[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data)

    if refused == "when it is asked for":
        monkeypatch.setattr(atomic_io, "DIRECT", 0)
    monkeypatch.setattr(atomic_io.os, "write", refuse)
    atomic_io.write_file(tmp_path / "file", [memoryview(content)])
    assert (tmp_path / "file").read_bytes() == content
    assert asked[-1] is False  # the last bytes are no whole block
    assert sum(asked) <= (0 if refused == "when it is asked for" else 1 if refused == "when it is used" else 5)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_io.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_io.write_file(tmp_path / "file", [memoryview(bytes(3 * BLOCK))])
    assert list(tmp_path.iterdir()) == []
