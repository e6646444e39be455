"""Damage that knows a format: it restores what the first checks look at, to get past them."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from pentad.orchestrator.records.hash_chain import linked
from pentad.workers.checkpoint.manifest import _canonical, _checksum
from pentad.workers.data.corpus_index import CHECKED, INDEX_FILE, checksum_file

Damage = Callable[[bytes, int], bytes]
COUNTS = (2**31 - 1, 2**31, 2**63 - 1, 10**20)  # instead of any count
HOSTILE: tuple[Any, ...] = (
    *COUNTS,
    *(None, True, -1, 0, 1, 2, 3, 1 << 62, 1 << 64, -(1 << 63), 1e20, 1e-20, 10**40, 0.5, float("inf"), float("nan")),
    *("", "x", "\x00", "\x1b[31m", "\ud800", "..", "/etc/passwd", "~", "a/b", "x" * 5000, "9" * 5000, "é", "null"),
    *([], [[]], [0], ["x"], {}, {"a": 1}, {"x": {"y": []}}),
)


def damaged_tree(data: bytes, seed: int) -> bytes:
    """JSON with one to three of its values replaced, removed, repeated, renamed, nested or swapped."""
    random, tree = Random(seed), json.loads(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tree = _changed(random, tree)
    return json.dumps(tree).encode()


def large_counts(data: bytes, seed: int) -> bytes:
    """JSON with one or two of its integers far too large."""
    random, tree = Random(seed), json.loads(data)
    places = [(parent, key) for parent, key in _places(tree) if type(parent[key]) is int]
    for parent, key in random.sample(places, min(len(places), random.choice((1, 1, 2)))):
        parent[key] = random.choice(COUNTS)
    return json.dumps(tree).encode()


def damaged_manifest(data: bytes, seed: int) -> bytes:
    """A checkpoint's manifest with other values, and the right checksum for them."""
    body = json.loads(data)
    random, rest = Random(seed), {key: value for key, value in body.items() if key != "checksum"}
    for _ in range(random.choice((1, 1, 2))):
        rest = _changed(random, rest)
    try:
        return _canonical(rest | {"checksum": _checksum(rest)} if isinstance(rest, dict) else rest)
    except (ValueError, TypeError):  # a number that is not finite
        return json.dumps(rest).encode()


def damaged_chain(data: bytes, seed: int) -> bytes:
    """Lines of audit.jsonl changed, moved or left out, with the right hashes for the result."""
    random, lines = Random(seed), [json.loads(line) for line in data.splitlines()]
    at = random.randrange(len(lines))
    match random.choice(("change", "change", "change", "remove", "repeat", "swap")):
        case "change":
            lines[at] = _changed(random, lines[at])
        case "remove":
            del lines[at]
        case "repeat":
            lines.insert(random.randrange(len(lines) + 1), lines[at])
        case "swap":
            to = random.randrange(len(lines))
            lines[at], lines[to] = lines[to], lines[at]
    out, previous = [], ""
    for line in lines:
        if isinstance(line, dict):
            try:
                line = linked({key: value for key, value in line.items() if key != "hash"}, previous)
                previous = line["hash"]
            except (ValueError, TypeError):
                previous = ""
        out.append(json.dumps(line))
    return "".join(f"{line}\n" for line in out).encode()


def with_checksums(folder: Path, shard: str) -> None:
    """Updates checksums and index of the corpus in `folder` for a shard's present bytes."""
    content, index = (folder / shard).read_bytes(), json.loads((folder / INDEX_FILE).read_text())
    blocks = (content[at : at + CHECKED] for at in range(0, len(content), CHECKED))
    checksums = b"".join(struct.pack("<I", zlib.crc32(block)) for block in blocks)
    (folder / checksum_file(shard)).write_bytes(checksums)
    first = index["shards"][0]
    first["bytes"], first["checksums"] = len(content), hashlib.sha256(checksums).hexdigest()
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _changed(random: Random, tree: Any) -> Any:
    places = [*_places(tree)]
    if not places:
        return _hostile(random)
    parent, key = random.choice(places)
    match random.choice(("value", "value", "value", "value", "number", "remove", "copy", "rename", "nest", "repeat")):
        case "number" if isinstance(old := parent[key], int | float) and not isinstance(old, bool):
            parent[key] = random.choice((-old, old + 1, old - 1, old * 2, 0, 1 << 40, *COUNTS))
        case "remove":
            del parent[key]
        case "copy":
            other, name = random.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                parent[key] = copy.deepcopy(other[name])
        case "rename" if isinstance(parent, dict):
            parent[random.choice((key + "x", key[:-1], "", "\x00", "__class__"))] = parent.pop(key)
        case "nest":
            parent[key] = [parent[key]]
        case "repeat" if isinstance(parent, list):
            parent.extend([parent[key]] * random.choice((1, 2, 50)))
        case _:
            parent[key] = _hostile(random)
    return tree


def _hostile(random: Random) -> Any:
    """A hostile value, copied, so that further changes do not leak into other cases."""
    return copy.deepcopy(random.choice(HOSTILE))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])
