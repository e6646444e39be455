"""What the API's functions accept as a configuration, and the quickstart fitted to this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.config.errors import has_control_characters, shown
from pentad.orchestrator.planning import hardware
from pentad.orchestrator.planning.formatting import counted
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError

Config = RunConfig | Mapping[str, Any] | str | os.PathLike[str] | None
NO_SECTIONS: Mapping[str, Any] = MappingProxyType({})


@checks_types
def load_config(config: Config = None, **sections: Any) -> RunConfig:
    """A configuration from a YAML file's path, a mapping of sections, or another configuration (None: the quickstart),
    with `sections` such as `mesh={"pp": 2}` merged into it. Raises PentadError with all mistakes."""
    return load(_source(config), sections=sections)


def config_to_train(
    config: Config = None, overrides: Iterable[str] = (), sections: Mapping[str, Any] = NO_SECTIONS
) -> tuple[RunConfig, str]:
    """`load_config` with `section.key=value` overrides. The quickstart gets a pipeline no longer than the number of
    GPUs here, or, without GPUs, of CPU cores (at least 2); the second result is a note that says so.

    Any other configuration is left as it is, and so is the quickstart with a given mesh or cluster.
    """
    overrides, note = list(overrides), ""
    is_given = not {"mesh", "cluster"}.isdisjoint([*sections, *(each.partition(".")[0] for each in overrides)])
    gpus, cores, ranks = hardware.local_gpus(), hardware.local_cores(), load(None).mesh.pp
    devices = gpus or max(2, cores)
    if config is None and not is_given and devices < ranks:
        number, kind = (gpus, "GPU") if gpus else (cores, "CPU core")
        has = f"this machine has {counted(number, kind)}"
        note = f"{has}: the quickstart runs with mesh.pp = {devices}, not {ranks}"
        overrides.append(f"mesh.pp={devices}")
    return load(_source(config), overrides, sections), note


def _source(config: Config) -> RunConfig | Mapping[str, Any] | Path | None:
    if not isinstance(config, str | os.PathLike):
        return config
    if has_control_characters(path := os.fsdecode(config)):
        raise PentadError(f"config is {shown(path)}: expected a path without control characters")
    return Path(path)
