"""audit.jsonl: every step, event and rewind of a run, in an append-only hash chain.

The hash of an entry is the SHA-256 of the previous entry's hash and its own content, so no entry can be changed, left
out or moved without breaking the chain there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from pentad.orchestrator.records.json_rows import checked_row
from pentad.schedules.ir.errors import PentadError

AUDIT = "audit.jsonl"
Entry = dict[str, Any]


def linked(entry: Entry, previous: str) -> Entry:
    """The entry, which must hold JSON values, with its `hash`; `previous` is the hash before it ('' for the first)."""
    return {**entry, "hash": _hash(entry, previous)}


def read_chain(lines: Iterable[bytes], where: str) -> Iterator[Entry]:
    """The entries of complete lines, without their hashes. Raises PentadError naming the first line that does not
    follow from the one before it."""
    previous = ""
    for number, line in enumerate(lines, 1):
        entry = _entry(line, f"{where} line {number}")
        found = entry.pop("hash")
        try:
            previous = _hash(entry, previous)
        except (ValueError, RecursionError):  # Infinity and 1e400, which Python's JSON reader accepts
            raise PentadError(f"{where} line {number} has a number that is not finite: expected JSON") from None
        if found != previous:
            text = f"{where} line {number} has the hash {str(found)[:12]}"
            raise PentadError(f"{text}: expected {previous[:12]}, that of its content after the line before it")
        yield checked_row(entry, f"{where} line {number}")


def hash_of(last: bytes, where: str) -> str:
    """The hash in the last line of a chain; '' if `last` is empty. Raises PentadError if the line is not an entry of a
    chain."""
    return str(_entry(last, f"the last line of {where}")["hash"]) if last else ""


def _hash(entry: Entry, previous: str) -> str:
    content = json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()


def _entry(line: bytes, where: str) -> Entry:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not {"event", "hash"} <= entry.keys():
        raise PentadError(f"{where} is {line[:40]!r}: expected an entry with event and hash, as pentad writes them")
    return entry
