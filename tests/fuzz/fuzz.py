"""Damaged input by the hundred thousand: each case costs one sentence or succeeds, in time and memory, and leaves
nothing. A failure names its reader and seed.

PYTHONPATH=.typings:tests/support:tests/fuzz python -P tests/fuzz/fuzz.py --cases 100000

Each reader runs in a process of its own; one that dies or hangs is followed by another one, from the next case.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fuzz_counts
import fuzz_models
import fuzz_readers
import fuzz_servers
import fuzz_special
from fuzz_guard import Guard
from fuzz_readers import Reader

Make = Callable[[Path], AbstractContextManager[Reader]]
# How many of 100 cases each reader gets.
READERS: dict[str, tuple[Make, float]] = {
    "configurations": (fuzz_readers.configurations, 9),
    "yaml texts": (fuzz_readers.yaml_texts, 5),
    "planned configurations": (fuzz_readers.planned_configurations, 2),
    "manifests": (fuzz_readers.manifests, 8),
    "shard headers": (fuzz_readers.shard_headers, 4),
    "audits": (fuzz_readers.audits, 5),
    "corpus indices": (fuzz_readers.corpus_indices, 4),
    "corpus shards": (fuzz_readers.corpus_shards, 4),
    "run folders": (fuzz_readers.run_folders, 2),
    "run statuses": (fuzz_readers.run_statuses, 1),
    "timelines": (fuzz_readers.timelines, 8),
    "row files": (fuzz_readers.row_files, 8),
    "program files": (fuzz_readers.program_files, 6),
    "programs": (fuzz_readers.programs, 6),
    "orders": (fuzz_readers.orders, 3),
    "control calls": (fuzz_servers.control_calls, 4),
    "copy requests": (fuzz_servers.copy_requests, 3),
    "scrapes": (fuzz_servers.scrapes, 2),
    "tokenizers": (fuzz_readers.tokenizers, 1),
    "model configs": (fuzz_models.model_configs, 6),
    "imports": (fuzz_models.imports, 2),
    "imported weights": (fuzz_models.imported_weights, 2),
    "weight maps": (fuzz_models.weight_maps, 1),
    "adapters": (fuzz_models.adapters, 1),
    "torch checkpoints": (fuzz_models.torch_checkpoints, 1),
    "chat templates": (fuzz_models.chat_templates, 1),
    "large keys": (fuzz_counts.large_keys, 4),
    "large options": (fuzz_counts.large_options, 0.1),
    "places of runs": (fuzz_special.run_places, 2),
    "places of users": (fuzz_special.user_places, 0.3),
    "places of models": (fuzz_special.model_places, 0.3),
}
HANG_SECONDS, HANG_CPU_SECONDS = 900.0, 60.0  # since the last case ended; on a busy machine CPU time is short
MOST_FAILURES = 20  # of a reader, after which it is given up


def play(name: str, seeds: range, folder: Path, on_case: Callable[[int], object] = lambda seed: None) -> Guard:
    """Raises what a case broke, with its seed."""
    guard = Guard(folder)
    with READERS[name][0](folder) as reader:
        for seed in seeds:
            on_case(seed)
            content = reader.case(seed)
            try:
                guard.check(reader.read, content)
            except Exception as error:
                error.add_note(f"again: python -P tests/fuzz/fuzz.py --reader '{name}' --seed {seed}")
                error.add_note(f"content: {content[:1000]!r}")
                raise
    return guard


def _child(name: str, seeds: range, progress: Path, said: Path) -> None:
    """Plays seeds until one fails; the last line it prints is JSON."""
    with said.open("wb") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    faulthandler.enable()
    status = 1
    try:
        with progress.open("r+b") as file, tempfile.TemporaryDirectory() as folder:
            at = mmap.mmap(file.fileno(), 8)
            os.chdir(folder)
            guard = play(name, seeds, Path(folder), lambda seed: at.__setitem__(slice(0, 8), _packed(seed)))
        print(json.dumps({key: getattr(guard, key) for key in ("accepted", "refused", "seconds", "bytes")}))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _packed(seed: int) -> bytes:
    return struct.pack("<q", seed)


def fuzz(name: str, cases: int) -> dict[str, Any]:
    """Plays this many cases in a forked process, and continues in another one after each failure."""
    began, first = time.monotonic(), 0
    failures, parts = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        progress, said = Path(folder, "progress"), Path(folder, "said")
        while first < cases and len(failures) < MOST_FAILURES:
            progress.write_bytes(_packed(first))
            child = get_context("fork").Process(target=_child, args=(name, range(first, cases), progress, said))
            child.start()
            hung = _wait(child, progress)
            lines = said.read_text(errors="replace").splitlines()
            if child.exitcode == 0:
                parts.append(json.loads(lines.pop()))
                if lines:
                    failures.append({"seed": None, "error": "\n".join(lines)[:2000]})
                break
            (at,) = struct.unpack("<q", progress.read_bytes())
            error = "\n".join(lines)[-2500:]
            failures.append({"seed": at, "status": child.exitcode, "hung": hung, "error": error})
            print(f"{name}, seed {at}:\n{error}", file=sys.stderr, flush=True)
            first = at + 1
    return {
        "cases": cases if len(failures) < MOST_FAILURES else first,
        **{key: sum(part[key] for part in parts) for key in ("accepted", "refused")},
        **{f"most_{key}": max((part[key] for part in parts), default=0) for key in ("seconds", "bytes")},
        "wall_seconds": round(time.monotonic() - began, 1),
        "failures": failures,
    }


def _wait(child: BaseProcess, progress: Path) -> bool:
    """Waits for a child; returns whether it had to be killed because no case had ended for too long."""
    last, since, used = b"", time.monotonic(), 0.0
    while child.is_alive():
        child.join(0.2)
        if (now := progress.read_bytes()) != last:
            last, since, used = now, time.monotonic(), _cpu_seconds(child)
        if time.monotonic() - since > HANG_SECONDS or _cpu_seconds(child) - used > HANG_CPU_SECONDS:
            child.kill()
            child.join()
            return True
    return False


def _cpu_seconds(child: BaseProcess) -> float:
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--reader", choices=READERS, action="append", help="only these, which get all cases")
    parser.add_argument("--seed", type=int, help="play this case of the reader in this process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.seed is not None:
        if args.reader is None:
            parser.error("--seed plays a case of --reader")
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            return print(play(args.reader[0], range(args.seed, args.seed + 1), Path(folder)))
    shares = {name: READERS[name][1] for name in args.reader or READERS}
    found = {}
    for name, share in shares.items():
        found[name] = fuzz(name, round(args.cases * share / sum(shares.values())))
        print(f"{name}: {json.dumps({**found[name], 'failures': len(found[name]['failures'])})}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if failed := [name for name, each in found.items() if each["failures"]]:
        sys.exit(f"failures of {', '.join(failed)}")


if __name__ == "__main__":
    main()
