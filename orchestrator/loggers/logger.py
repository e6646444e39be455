"""What a logger is, and what it receives from a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Note = Callable[[str], None]  # shows a sentence on the run's terminal


class LoggedRun(NamedTuple):
    """A run as its loggers know it from the start. `folder` is an absolute path, `first` the first step to log, `done`
    the steps that are recorded in the folder, `settings` the logger's own section of `config`."""

    name: str
    folder: str
    first: int
    done: int
    config: dict[str, Any]
    settings: dict[str, Any]


class Logger:
    """One place that metrics go to, which hears of what it has no method for in vain. What it raises ends the logger,
    never the run."""

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        """The values of a step that ended at this Unix time, or of the evaluation after `step` steps."""

    def rewind(self, step: int) -> None:
        """This step and later ones are logged again."""

    def checkpoint(self, step: int, folder: str) -> None:
        """A checkpoint after `step` steps has been committed."""

    def close(self, state: str) -> None:
        """The run is over: 'finished', 'stopped' or 'failed'. Its pages and pictures are in its folder."""


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl as 'train/loss', those of mappings as 'train/sources/web'."""
    return dict(_numbers({key: value for key, value in row.items() if key not in ("step", "time")}, "train"))


def evaluation_scalars(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The losses in the rows of an evaluation as 'eval/NAME/loss', and their perplexities."""
    return dict(
        pair
        for row in rows
        for pair in _numbers({key: row[key] for key in ("loss", "perplexity")}, f"eval/{row['data']}")
    )


def _numbers(row: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}/{key}", int(value) if isinstance(value, bool) else value
