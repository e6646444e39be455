"""`pentad plan --search`: the fastest meshes that fit, why, and what would change that; `pentad init`: a configuration
with the first of them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.api.starting_config import StartingConfig
from pentad.orchestrator.planning.estimate import mfu
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.formatting import counted, format_bytes, format_duration, format_percent
from pentad.orchestrator.planning.hardware import rates_for
from pentad.orchestrator.search.reasons import Flip, describe, flips, nearest_fits, reason, shares_of
from pentad.orchestrator.search.result import Planned
from pentad.orchestrator.search.search import SearchResult, search
from pentad.orchestrator.search.space import KEYS, given_and_changed, load_for_search
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import write_file


class Command:
    """The command line that trains with a plan, derived from the one that searched."""

    def __init__(self, file: Path | None, given: Sequence[str]) -> None:
        self.file = file
        self.config, self.words = load_for_search(file, given)
        self.held = frozenset(word.partition("=")[0] for word in given)  # keys that the search leaves unchanged

    def of(self, planned: Planned) -> str:
        given, changed = given_and_changed(self.words, self.config, planned.config)
        return shlex.join(["pentad", "train", *([str(self.file)] if self.file else []), *given, *changed])


def show_search(command: Command, gpus: int, device: DeviceMemory, console: Console, *, as_json: bool) -> int:
    """Prints the result. Returns the exit status: 1 if nothing fits."""
    config = command.config
    found = search(config, gpus, device, command.held)
    shares = [shares_of(each) for each in found.choices]
    reasons = [reason(each, shares[0] if number else None) for number, each in enumerate(shares)]
    changes = list(flips(config, found)) if found.choices else []
    nearest = [] if found.choices else list(nearest_fits(config, gpus, found, command.held))
    if as_json:
        choices = [
            {**_facts(each), "command": command.of(each), "reason": why, "shares": own._asdict()}
            for each, why, own in zip(found.choices, reasons, shares, strict=True)
        ]
        sizes = {"gpus": gpus, "available": device.bytes, "meshes": len(found.space.meshes), "planned": found.planned}
        flipping = [{"change": each.sentence, "command": command.of(each.other)} for each in changes]
        fitting = [{"change": change, **_facts(each), "command": command.of(each)} for change, each in nearest]
        found_facts = {"choices": choices, "flips": flipping, "refused": _refused(found), "nearest": fitting}
        print(json.dumps({**sizes, **found_facts}))
        return int(not found.choices)
    for number, (each, why) in enumerate(zip(found.choices, reasons, strict=True), 1):
        _line(console, f" {number}  {_figures(each)}  {describe(each)}: {why}", "bold" if number == 1 else "")
        _line(console, f"    {command.of(each)}", "dim")
    _show_rest(console, command, gpus, found, changes, nearest)
    return int(not found.choices)


def _show_rest(
    console: Console,
    command: Command,
    gpus: int,
    found: SearchResult,
    changes: Sequence[Flip],
    nearest: Sequence[tuple[str, Planned]],
) -> None:
    room = f"{format_bytes(found.device.bytes)} {found.device.where}"
    for flip in changes:
        _line(console, f" would change it: {flip.sentence}")
    if not found.choices:
        _line(console, f" nothing fits on {counted(gpus, 'GPU')} in the {room}", "bold red")
    for change, planned in nearest:
        _line(console, f" it fits {change}: {describe(planned)}, {format_duration(planned.seconds)} a step")
        _line(console, f"    {command.of(planned)}", "dim")
    source = rates_for(command.config.cluster, "cuda").source
    meshes = counted(len(found.space.meshes), "mesh", "meshes")
    possible = f"{found.num_possible} of {meshes} of {counted(gpus, 'GPU')} may fit in the {room}"
    _line(console, f" {possible}; seconds come from rates {source}", "green" if found.choices else "")
    for sentence, number in _refused(found).items():
        more = f", and {number - 1} more for this reason" if number > 1 else ""
        _line(console, f" not possible: {sentence}{more}", "dim")


def _refused(found: SearchResult) -> dict[str, int]:
    """Reasons why meshes have no plan: for each, a sentence about the mesh that comes closest, and the number of
    meshes."""
    sentences, counts = dict[str, str](), Counter[str]()
    for each in sorted(found.refusals.values(), key=lambda each: each.least_bytes):
        key = each.why.partition(" is ")[0]
        sentences.setdefault(key, each.why)
        counts[key] += 1
    return {sentences[key]: number for key, number in counts.items()}


def show_init(found: StartingConfig, out: Path | None, *, as_json: bool) -> None:
    """Writes the configuration to a new file, or prints it. Raises PentadError if the file exists."""
    if out is not None:
        try:
            write_file(out, [memoryview(found.text.encode())], replace=False)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PentadError(f"OUT is '{out}', which cannot be written ({reason}): expected a new file") from None
    if as_json:
        facts = {"file": str(out) if out else None, "config": found.config.model_dump(), **_facts(found.choice)}
        print(json.dumps(facts))
    elif out is None:
        print(found.text, end="")
    else:
        print(f"{out}: see what it would run with `pentad plan {out} --device cuda`")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)


def _figures(planned: Planned) -> str:
    used = _mfu(planned)
    share = "" if used is None else f"{format_percent(used)} MFU  "
    return f"{format_duration(planned.seconds)}  {share}{format_bytes(planned.bytes)}"


def _mfu(planned: Planned) -> float | None:
    return mfu(planned.tokens_per_second, planned.plan, planned.plan.gpu)


def _facts(planned: Planned) -> dict[str, Any]:
    plan, values = planned.plan, planned.setting.values
    return {
        "mesh": asdict(plan.mesh),
        "settings": {key: values[key] for key in KEYS if not key.startswith("mesh.")},
        "sequences": plan.batch.micro_batch_size,
        "step_seconds": planned.seconds,
        "tokens_per_second": planned.tokens_per_second,
        "mfu": _mfu(planned),
        "peak_bytes": planned.bytes,
    }
