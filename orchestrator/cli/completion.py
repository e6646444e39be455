"""What the shell completes: runs, schedules and configuration keys. Imports nothing heavy: it runs at every Tab."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

SCHEDULE_NAMES = (
    *("gpipe", "1f1b", "1f1b-eager", "seq-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-1p", "zb-2p"),
    *("interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev"),
)


def run_names(incomplete: str) -> list[str]:
    """The runs under runs/."""
    names = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    return [name for name in names if name.startswith(incomplete)]


def schedule_names(incomplete: str) -> list[str]:
    return [name for name in (*SCHEDULE_NAMES, "auto") if name.startswith(incomplete)]


def config_words(incomplete: str) -> list[str]:
    """YAML files and folders, and overrides: `key=`, and once no other key fits, also its values."""
    folder, _, start = incomplete.rpartition("/")
    paths = sorted(Path(folder or ".").glob("*")) if Path(folder or ".").is_dir() else []
    found = [path for path in paths if path.name.startswith(start) and (path.is_dir() or path.suffix == ".yaml")]
    prefix = incomplete[: len(incomplete) - len(start)]
    names = [f"{prefix}{path.name}{'/' * path.is_dir()}" for path in found if not path.name.startswith(".")]
    return [*names, *_overrides(incomplete)]


def _overrides(incomplete: str) -> Iterator[str]:
    key, has_value, _ = incomplete.partition("=")
    known = (line.split() for line in (files("pentad.orchestrator.config") / "keys.txt").read_text().splitlines())
    fitting = [words for words in known if (words[0] == key if has_value else words[0].startswith(key))]
    for name, *values in fitting:
        offered = [f"{name}={value}" for value in values] if len(fitting) == 1 else []
        if len(offered) < 2:  # if both were offered, the shell would stop after `key=`, without a space
            offered.append(f"{name}=")
        yield from (word for word in offered if word.startswith(incomplete))
