"""The interface of a logger, and what it receives from a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Note = Callable[[str], None]  # shows a sentence on the run's terminal


class LoggedRun(NamedTuple):
    """What loggers know of a run from the start. `folder` is an absolute path, `first` the first step to log, `done`
    the number of steps recorded in the folder, and `settings` the logger's own section of `config`."""

    name: str
    folder: str
    first: int
    done: int
    config: dict[str, Any]
    settings: dict[str, Any]


class Logger:
    """One destination of metrics; override the methods for the events of interest. An exception ends the logger, never
    the run."""

    def log(self, step: int, time: float, values: dict[str, float]) -> None:
        """Logs the values of step `step`, or of the evaluation after `step` steps, which ended at the Unix time
        `time`."""

    def rewind(self, step: int) -> None:
        """This step and later ones will be logged again."""

    def checkpoint(self, step: int, folder: str) -> None:
        """A checkpoint after `step` steps has been committed."""

    def close(self, state: str) -> None:
        """The run is over, in the state 'finished', 'stopped' or 'failed'. Its pages and pictures are in its folder."""


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl under names such as 'train/loss', and 'train/sources/web' in mappings."""
    return dict(_numbers({key: value for key, value in row.items() if key not in ("step", "time")}, "train"))


def evaluation_scalars(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The losses and perplexities in the rows of an evaluation, as 'eval/NAME/loss' and 'eval/NAME/perplexity'."""
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
