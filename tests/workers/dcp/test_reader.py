"""Tensors that torch.distributed.checkpoint wrote are read bit for bit, and damaged files are named."""

from __future__ import annotations

import io
import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from dcp_files import Parts, save, save_sharded
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension

from pentad.schedules.ir.errors import PentadError
from pentad.workers.dcp.reader import is_dcp, open_dcp
from pentad.workers.dcp.source import DcpSource

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FULL = {"matrix": torch.randn(5, 6), "wide": torch.randn(7, dtype=torch.float64), "half": torch.randn(4, 2).bfloat16()}


def source(folder: Path) -> DcpSource:
    return DcpSource(folder, open_dcp(folder))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_layout_are_read_as_torch_wrote_them(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.randn(3, 4, 5).to(dtype)
    state: dict[str, Any] = {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "part": base[1:, ::2],
        "expanded": base[:1].expand(3, 4, 5),
        "number": base[0, 0, 0],
        "empty": base[:0],
        "nested": {"inner": [base[0], {"deep": base[1]}]},
        "no tensor": {"step": 7, "text": "x", "bytes": io.BytesIO(b"abc")},
        "counts": torch.arange(3),
    }
    found = source(save(state, tmp_path))
    expected = {name: state[name] for name in ("plain", "transposed", "part", "expanded", "number", "empty", "counts")}
    expected |= {"nested.inner.0": base[0], "nested.inner.1.deep": base[1]}
    assert found.names == expected.keys()
    for name, tensor in expected.items():
        wide = torch.float64 if dtype == torch.float64 and name != "counts" else torch.float32
        if name != "counts":
            found.check(name, tuple(tensor.shape))
            assert found.read(name).dtype == wide and torch.equal(found.read(name), tensor.to(wide))
    with pytest.raises(PentadError, match=r"tensor counts .* has dtype torch.int64: expected float64 or"):
        found.check("counts", (3,))
    assert torch.equal(found.tensors["counts"].chunks[0].read(), torch.arange(3))


def ranks() -> list[Parts]:
    """The tensors cut over three ranks: by rows and columns, by uneven parts, and on one of them only."""
    matrix, wide, half = FULL.values()
    return [
        {"matrix": ((0, 0), matrix[:2]), "wide": ((0,), wide[:3])},
        {"matrix": ((2, 0), matrix[2:, :4]), "wide": ((3,), wide[3:4]), "half": ((0, 0), half)},
        {"matrix": ((2, 4), matrix[2:, 4:]), "wide": ((4,), wide[4:])},
    ]


@pytest.mark.parametrize("form", ["distcp", "safetensors"])
def test_the_parts_of_several_ranks_are_joined(form: str, tmp_path: Path) -> None:
    sharded = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    save_sharded(ranks(), FULL, FileSystemWriter(tmp_path) if form == "distcp" else sharded)
    assert len([*tmp_path.glob(f"*.{form}")]) == 3 and is_dcp(tmp_path)
    found = source(tmp_path)
    assert found.names == FULL.keys()
    for name, tensor in FULL.items():
        found.check(name, tuple(tensor.shape))
        assert torch.equal(found.read(name), tensor.to(found.dtype(name)))
    assert found.dtype("wide") == torch.float64 and found.dtype("half") == torch.float32


def test_a_folder_of_ordinary_safetensors_is_no_checkpoint_of_dcp(tmp_path: Path) -> None:
    assert not is_dcp(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not is_dcp(tmp_path)


def test_the_missing_file_of_a_rank_is_noticed(tmp_path: Path) -> None:
    save_sharded(ranks(), FULL, HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(PentadError, match=r"lacks parts .*matrix have 18 elements instead of 30"):
        open_dcp(tmp_path)


def test_a_file_without_sharding_among_others_is_named(tmp_path: Path) -> None:
    save_sharded(ranks(), FULL, HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))
    save_file(load_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors"), tmp_path / "z.safetensors")
    with pytest.raises(PentadError, match=r"z\.safetensors cannot be read"):
        open_dcp(tmp_path)


def rewrite(path: Path, changes: dict[str, bytes | None], compress: int = zipfile.ZIP_STORED) -> bytes:
    """The archive in a one-tensor file, with members replaced, added or (None) removed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members |= {f"archive/{name}": content for name, content in changes.items() if content is not None}
    for name in (name for name, content in changes.items() if content is None):
        del members[f"archive/{name}"]
    with zipfile.ZipFile(made := io.BytesIO(), "w", compress) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def data_pickle(sizes: bytes, strides: bytes, count: int = 6) -> bytes:
    """What torch.save writes for a float32 tensor, with these pickled sizes and strides."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK%ctQ"
    start = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage.replace(b"%c", bytes([count]))
    return start + b"K\x00" + sizes + strides + b"\x89ccollections\nOrderedDict\n)RtR."


TWO_THREE, THREE_ONE = b"K\x02K\x03\x86", b"K\x03K\x01\x86"


@pytest.mark.parametrize(
    ("changes", "compress", "words"),
    [
        ({"data.pkl": data_pickle(TWO_THREE, THREE_ONE)}, 0, None),
        ({"data.pkl": b"cos\nsystem\n(X\x02\x00\x00\x00lstR."}, 0, "os.system"),
        ({"data.pkl": data_pickle(TWO_THREE, b"K\x09K\x01\x86")}, 0, "ends outside"),
        ({"data.pkl": data_pickle(TWO_THREE, b"K\x03J\xff\xff\xff\xff\x86")}, 0, "not numbers"),
        ({"data.pkl": data_pickle(b"K\xffK\xff\x86", b"K\x00K\x00\x86")}, 0, "instead of"),
        ({"data.pkl": data_pickle(TWO_THREE, THREE_ONE, 5)}, 0, "too large"),
        ({"data.pkl": b"]."}, 0, "no tensor"),
        ({"data.pkl": None}, 0, "damaged"),
        ({"data/0": None}, 0, "damaged"),
        ({"byteorder": b"big"}, 0, "big-endian"),
        ({}, zipfile.ZIP_DEFLATED, "compressed"),
    ],
)
def test_a_changed_archive_is_refused(
    changes: dict[str, bytes | None], compress: int, words: str | None, tmp_path: Path
) -> None:
    values = torch.arange(6.0).view(2, 3)
    save({"a": values}, tmp_path)
    path = tmp_path / "__0_0.distcp"
    made = rewrite(path, changes, compress)
    metadata = (tmp_path / ".metadata").read_bytes()
    length = path.stat().st_size.to_bytes(2, "little")
    assert metadata.count(b"M" + length) == 1
    (tmp_path / ".metadata").write_bytes(metadata.replace(b"M" + length, b"M" + len(made).to_bytes(2, "little")))
    path.write_bytes(made)
    found = source(tmp_path)
    if words is None:
        assert torch.equal(found.read("a"), values)
        return
    with pytest.raises(PentadError, match=words) as caught:
        found.read("a")
    assert "tensor a in " in str(caught.value) and ": expected " in str(caught.value)


def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """The archive has checksums of its data and its pickle."""
    values = torch.arange(5.0)
    found, path = source(save({"a": values}, tmp_path)), tmp_path / "__0_0.distcp"
    good = path.read_bytes()
    for at in range(0, len(good), 23):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        with suppress(PentadError):
            assert torch.equal(found.read("a"), values)


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    found = source(save({"a": torch.ones(100)}, tmp_path))
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(PentadError, match=r"tensor a in .*__0_0\.distcp: it is damaged"):
        found.read("a")
    path.unlink()
    with pytest.raises(PentadError, match=r"__0_0\.distcp: it cannot be read \(No such file or directory\)"):
        found.read("a")


@pytest.mark.parametrize("file", ["../up.distcp", "/a.distcp"])
def test_a_file_outside_the_folder_is_never_read(file: str, tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    old = b"\x8c\x0c__0_0.distcp"
    assert old in data
    (tmp_path / ".metadata").write_bytes(data.replace(old, b"\x8c" + bytes([len(file)]) + file.encode()))
    with pytest.raises(PentadError, match="which is no plain file name"):
        open_dcp(tmp_path)


class Named(StreamTransformExtension):
    """An extension that claims to have changed the bytes."""

    @staticmethod
    def registry_name() -> str:
        return "stream.named"

    @staticmethod
    def from_descriptor(version: str) -> Named:
        return Named()

    def get_descriptor(self) -> str:
        return "stream.named/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input


def test_a_tensor_that_was_compressed_is_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path, storage_writer=FileSystemWriter(tmp_path, _extensions=[Named()]))
    with pytest.raises(PentadError, match="tensor a is compressed"):
        open_dcp(tmp_path)


def test_headers_of_the_safetensors_form_are_checked(tmp_path: Path) -> None:
    sharding = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [-1]}})}
    save_file({"a": torch.ones(3)}, tmp_path / "shard.safetensors", metadata=sharding)
    with pytest.raises(PentadError, match=r"shard\.safetensors cannot be read"):
        open_dcp(tmp_path)
