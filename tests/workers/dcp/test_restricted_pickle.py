"""Pickles of checkpoints are read, and nothing that any other pickle asks for is executed."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.dcp.reader import open_dcp
from pentad.workers.dcp.restricted_pickle import Record, parse_pickle

KNOWN: dict[str, Any] = {
    "torch Size": lambda sizes: tuple(sizes),
    "torch float32": "float32",
    "a B": lambda: Record("B"),
}
PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner) | st.tuples(inner, inner),
)


class Calls:
    """Is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@settings(max_examples=15)
@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_is_what_pickle_reads(value: Any, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol), {}) == value


def hostile(marker: Path) -> dict[str, bytes]:
    touch = f"touch {marker}"
    return {
        "system": pickle.dumps(Calls(os.system, touch)),
        "eval": pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w')")),
        "open": pickle.dumps(Calls(open, str(marker), "w")),
        "a function": pickle.dumps(getattr),
        "old protocol": b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "newobj_ex": b"\x80\x04cpathlib\nPosixPath\n)}\x92.",
        "call of a result": b"\x80\x04ctorch\nSize\n))R)R.",
        "call of a constant": b"\x80\x04ctorch\nfloat32\n)R.",
        "call of text": b"\x80\x04\x8c\x06system)R.",
        "arguments that are no tuple": b"\x80\x04ctorch\nSize\n]R.",
        "state of a class": b"\x80\x04ca\nB\n}b.",
        "a longer name": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "a name of another type": b"\x80\x04K\x01\x8c\x06system\x93.",
        "a persistent id": b"\x80\x04\x8c\x01x\x51.",
        "an extension": b"\x80\x04\x82\x01.",
        "a buffer": b"\x80\x05\x97.",
        "bytes": pickle.dumps(b"text"),
        "a key of tuples": pickle.dumps({((1, 2), 3): 4}),
        "no end": pickle.dumps([1, 2])[:-1],
        "nothing": b"",
        "an empty stack": b"\x80\x04.",
        "a mark that is not there": b"\x80\x04t.",
        "a memo that is not there": b"\x80\x04h\x07.",
        "two values": b"\x80\x04K\x01K\x01.",
    }


@pytest.mark.parametrize("name", hostile(Path("marker")))
def test_nothing_else_is_done(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    data = hostile(marker)[name]
    with pytest.raises(PentadError, match=": expected ") as caught:
        parse_pickle(data, KNOWN)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(PentadError, match=r"\.metadata"):
        open_dcp(tmp_path)
    assert not marker.exists()


def test_a_value_too_long_to_print_is_refused_at_once() -> None:
    nested = b"\x80\x04)"
    for number in range(60):  # each tuple holds the one before it twice: 2 ** 60 values
        nested += b"\x94" + b"h" + bytes([number]) + b"\x86"
    for end in (b")R.", b"]a.", b"}b.", b"K\x01s."):
        with pytest.raises(PentadError):
            parse_pickle(nested + end, KNOWN)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    for start in (b"", b"\x80\x04"):
        with suppress(PentadError):
            parse_pickle(start + data, KNOWN)


@given(st.lists(st.sampled_from([op.code for op in pickletools.opcodes]), max_size=30), st.binary(max_size=20))
def test_any_instructions_are_a_value_or_an_error(codes: list[str], argument: bytes) -> None:
    data = b"".join(code.encode("latin-1") + argument[: number % 5] for number, code in enumerate(codes))
    with suppress(PentadError):
        parse_pickle(b"\x80\x04ctorch\nSize\n" + data + b".", KNOWN)


def test_a_changed_byte_of_metadata_is_a_value_or_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3, 4), "b": {"c": torch.zeros(2)}}, checkpoint_id=tmp_path, no_dist=True)
    good = (tmp_path / ".metadata").read_bytes()
    for at in range(0, len(good), 9):
        changed = bytes([(0, good[at] ^ 1, 255)[at % 3]])
        (tmp_path / ".metadata").write_bytes(good[:at] + changed + good[at + 1 :])
        with suppress(PentadError):
            open_dcp(tmp_path)
