"""Configuration files that include others: `include: base.yaml`, or a list of files, relative to the including file.

A file's own keys override those of included files, and later files override earlier ones; mappings are merged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.config.errors import has_control_characters, shown
from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded

INCLUDE = "include"
MOST_BYTES = 2**20


class Layers(NamedTuple):
    """Merged files: the `values`, and, if others are included, the file of each value by dotted key."""

    values: dict[str, Any]
    origins: dict[str, str]


def read_file(path: Path, option: str = "CONFIG", chain: tuple[Path, ...] = ()) -> Layers:
    """A YAML file with everything that it includes. Raises PentadError if one of the files cannot be read, is not a
    mapping of sections, or includes itself. `option` names the file in errors, `chain` are the files that include it.
    """
    raw = load_yaml(read_text(path, option), str(path))
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else shown(raw)
        raise PentadError(f"{path} holds {found}: expected a mapping of sections such as run, model and mesh")
    return with_includes(raw, path, chain)


def with_includes(raw: Mapping[str, Any], path: Path, chain: tuple[Path, ...] = ()) -> Layers:
    """The content `raw` of a file, or any mapping, with its includes, which are relative to the folder of `path`."""
    names = raw.get(INCLUDE, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name and not has_control_characters(name) for name in names
    ):
        raise PentadError(f"{INCLUDE} of {path} is {shown(names)}: expected a YAML file's path or a list of them")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in names:
        included = path.parent / expanded(name)
        circle = [*chain, path, included]
        if os.path.realpath(included) in map(os.path.realpath, circle[:-1]):
            text = " -> ".join(map(str, circle))
            raise PentadError(f"{INCLUDE} of {path} is {name!r}, which leads back to it ({text}): expected no circle")
        layers = read_file(included, f"{INCLUDE} of {path}", (*chain, path))
        values, origins = merged(values, layers.values), {**origins, **layers.origins}
    own = {key: value for key, value in raw.items() if key != INCLUDE}
    return Layers(merged(values, own), {**origins, **{key: str(path) for key in leaves(own)}} if names or chain else {})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`; where both have a mapping, the two are merged."""
    found = dict(base)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        found[key] = value
    return found


def read_text(path: Path, option: str) -> str:
    """Raises PentadError if the file cannot be read, is too large or is not UTF-8. Refuses pipes and devices, which may
    never end."""
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise PentadError(f"{option} is '{path}', which is a pipe or device: expected a YAML file")
        if stat.S_ISREG(status.st_mode) and status.st_size > MOST_BYTES:
            raise PentadError(f"{option} is '{path}', which has {status.st_size} bytes: expected at most {MOST_BYTES}")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PentadError(f"{path} is not UTF-8 text (byte {error.start}): expected a YAML file") from None
    except OSError as error:
        reason = f"which cannot be read ({error.strerror})"
        raise PentadError(f"{option} is '{path}', {reason}: expected a YAML file") from None


def leaves(values: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted keys of all values and mappings."""
    found = []
    for key, value in values.items():
        found.append(f"{path}{key}")
        if isinstance(value, Mapping):
            found += leaves(value, f"{path}{key}.")
    return found
