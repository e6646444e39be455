"""The hash chain of audit.jsonl: any line that is changed, left out, moved or added is found and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.orchestrator.records.hash_chain import linked, read_chain
from pentad.schedules.ir.errors import PentadError

ENTRIES = [{"event": "step", "step": step, "loss": 1 / (1 + step), "samples": 2**39 + step} for step in range(5)]


def chain(entries: list[dict[str, Any]]) -> list[bytes]:
    lines, last = list[bytes](), ""
    for entry in entries:
        row = linked(entry, last)
        last = row["hash"]
        lines.append(json.dumps(row).encode())
    return lines


def test_a_chain_reads_back() -> None:
    assert list(read_chain(chain(ENTRIES), "audit.jsonl")) == ENTRIES
    assert list(read_chain([], "audit.jsonl")) == []


@given(st.integers(0, 4), st.data())
def test_any_changed_byte_is_found_at_its_line(number: int, data: st.DataObject) -> None:
    lines = chain(ENTRIES)
    at = data.draw(st.integers(0, len(lines[number]) - 1))
    byte = data.draw(st.integers(1, 255))
    changed = bytearray(lines[number])
    changed[at] ^= byte
    lines[number] = bytes(changed)
    if is_same(bytes(changed), chain(ENTRIES)[number]):  # the same values spelled differently
        return
    with pytest.raises(PentadError, match=rf"^audit.jsonl line {number + 1} (is|has) "):
        list(read_chain(lines, "audit.jsonl"))


def is_same(changed: bytes, original: bytes) -> bool:
    try:
        return bool(json.loads(changed) == json.loads(original))
    except ValueError:
        return False


@pytest.mark.parametrize("number", range(4))
def test_lines_left_out_or_exchanged_are_found(number: int) -> None:
    lines = chain(ENTRIES)
    exchanged = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
    for wrong in (lines[:number] + lines[number + 1 :], exchanged, [*lines[: number + 1], *lines[number:]]):
        with pytest.raises(PentadError, match=rf"^audit.jsonl line ({number + 1}|{number + 2}) has the hash "):
            list(read_chain(wrong, "audit.jsonl"))
