"""Counts that are far too large, in each configuration key and each command option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz_damage import COUNTS
from fuzz_guard import command
from fuzz_readers import GIVEN, MORE, Reader
from paths import ROOT

KEYS = [line.split()[0] for line in (ROOT / "orchestrator" / "config" / "keys.txt").read_text().splitlines()]
_SCHEDULE = ("schedule", "interleaved", "--ranks", "2", "--microbatches", "4")
_INIT = ("init", "--gpus", "2")
COMMANDS = (
    *((*_SCHEDULE, f"--{name}") for name in ("ranks", "microbatches", "chunks", "group", "slices", "comm", "zero")),
    *((*_SCHEDULE, f"--{name}") for name in ("memory-limit", "max-resident", "max-gathered", "prefetch")),
    *((*_INIT, f"--{name}") for name in ("gpus", "sequence-length", "global-batch-size", "memory")),
)


@contextmanager
def large_keys(folder: Path) -> Iterator[Reader]:
    """One or two keys of a configuration to plan: each one in turn, then pairs."""
    files = [folder / "dense.yaml", folder / "experts.yaml"]
    for path, content in zip(files, (GIVEN, GIVEN | MORE), strict=True):
        path.write_text(json.dumps(content))
    single = [(file.name, f"{key}={count}") for key in KEYS for count in COUNTS for file in files]

    def chosen(_: bytes, seed: int) -> bytes:
        again, at = divmod(seed, len(single))
        other = [single[(at * 7 + again * 1009) % len(single)][1]] if again else []
        return json.dumps([*single[at], *other]).encode()

    def read(content: bytes) -> None:
        name, *words = json.loads(content)
        command("plan", str(folder / name), *words, statuses=(0, 1, 2))

    yield Reader(tuple(json.dumps([file.name]).encode() for file in files), (chosen,), read)


@contextmanager
def large_options(folder: Path) -> Iterator[Reader]:
    cases = [(*words, str(count)) for words in COMMANDS for count in COUNTS]

    def chosen(_: bytes, seed: int) -> bytes:
        return json.dumps(cases[seed % len(cases)]).encode()

    def read(content: bytes) -> None:
        command(*json.loads(content), statuses=(0, 1, 2))

    yield Reader((json.dumps(_SCHEDULE).encode(), json.dumps(_INIT).encode()), (chosen,), read)
