"""The table of rates that `pentad calibrate` writes for a GPU, and plans read."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.schedules.simulate.rates import KernelTimes, Rates

CPU = "CPU"  # the name of ranks without a GPU
MAY_BE_ZERO, MAY_BE_EMPTY = (".latency", ".issue", ".peer_issue", ".layer_issue", ".tp_hidden"), ".products_8bit"


class RateTable(BaseModel):
    """`gpu` is CUDA's name for the GPU, or CPU. `measured` is the date, `ranks` the number of ranks and of hosts, and
    `assumed` names the rates that could not be measured with those. `refined` are the runs whose measured costs have
    changed the rates since. `kernels` are timings for all configurations that this GPU was calibrated for."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[4]
    gpu: str
    measured: str
    ranks: tuple[int, int]
    assumed: tuple[str, ...]
    rates: Rates
    refined: tuple[str, ...] = ()
    kernels: tuple[KernelTimes, ...] = ()


def place_of(gpu: str) -> Path:
    """The file of a GPU's table in the user's cache folder."""
    cache = expanded(os.environ.get("PENTAD_CACHE") or "~/.cache/pentad")
    return cache / "rates" / f"{gpu.replace(' ', '-').replace('/', '-')}.json"


def require_place(path: Path) -> None:
    """Raises PentadError if no table can be written there."""
    if path.is_dir():
        raise PentadError(f"{path} is a folder: expected a file")
    _write(path, None)


def write_table(table: RateTable, path: Path) -> None:
    """Raises PentadError where the file cannot be written; a reader never sees half of it."""
    _write(path, table.model_dump_json(indent=1) + "\n")


def _write(path: Path, text: str | None) -> None:
    """Writes `text`; None: only tries whether it could."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text or "", encoding="utf-8")
        part.unlink() if text is None else part.replace(path)
    except OSError as error:
        raise PentadError(f"{path} cannot be written ({error.strerror}): expected a writable path") from None


def read_rates(path: Path, gpu: str, key: str = "cluster.rates") -> Rates:
    """The rates of a table, with their source. Raises PentadError as `read_table` does."""
    table = read_table(path, gpu, key)
    runs = f", refined by {', '.join(table.refined)}" if table.refined else ""
    return replace(table.rates, source=f"measured {table.measured}{runs} ({path})")


def read_table(path: Path, gpu: str, key: str = "cluster.rates") -> RateTable:
    """The table of this GPU. Raises PentadError for a file that `pentad calibrate` did not write, or that is of another
    GPU."""
    try:
        written = path.stat().st_mtime_ns
    except OSError:
        written = 0
    return _read(path, gpu, key, written)


@lru_cache(maxsize=8)
def _read(path: Path, gpu: str, key: str, written: int) -> RateTable:
    """Cached by the time at which the file was `written`, as a search makes hundreds of plans with it."""
    expected = f"{key} is {path}: expected a table that `pentad calibrate` wrote for {gpu}"
    try:
        table = RateTable.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PentadError(f"{expected} ({getattr(error, 'strerror', None) or 'no text'})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PentadError(f"{expected} ({where}: {first['msg']})") from None
    if table.gpu != gpu:
        raise PentadError(f"{expected} (it is of {table.gpu})")
    figures = table.model_dump()["rates"] | {"source": None, "host_order": None}
    figures["kernels"] = [[seconds for _, seconds in each.seconds] for each in table.kernels] or None
    if wrong := _impossible(figures, "rates"):
        raise PentadError(f"{expected} ({wrong})")
    return table


def _impossible(value: Any, name: str) -> str:
    """What is wrong with the first figure that is not finite and above 0; those in MAY_BE_ZERO may be 0. '' if nothing
    is."""
    if isinstance(value, dict):
        return next(filter(None, (_impossible(each, f"{name}.{key}") for key, each in value.items())), "")
    if isinstance(value, (list, tuple)):
        if not value and not name.endswith(MAY_BE_EMPTY):
            return f"{name} is empty"
        return next(filter(None, (_impossible(each, f"{name}.{number}") for number, each in enumerate(value))), "")
    may_be_zero = name.rstrip(".0123456789").endswith(MAY_BE_ZERO)
    if value is None or (math.isfinite(value) and (value > 0 or (value == 0 and may_be_zero))):
        return ""
    return f"{name} is {value}"
