"""`on_step` sees every row once; whatever it raises ends the run in good order."""

from __future__ import annotations

from typing import Any

import pytest

from pentad.orchestrator.run.callbacks import StepCallback, StopTraining


class Boom(Exception):
    pass


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step} for step in steps]


def callback(seen: list[int], at: int, error: Exception | None) -> tuple[StepCallback, list[str]]:
    def on_step(row: dict[str, Any]) -> bool:
        seen.append(row.pop("step"))  # its own copy
        if error is not None and seen[-1] == at:
            raise error
        return True  # means nothing

    stops: list[str] = []
    return StepCallback(on_step, lambda: stops.append("stop")), stops


@pytest.mark.parametrize("error", [None, StopTraining(), Boom()])
def test_an_exception_stops_the_run_once_and_is_raised_when_it_is_over(error: Exception | None) -> None:
    seen: list[int] = []
    watcher, stops = callback(seen, 3, error)
    given = rows(0, 1, 2, 3, 4)

    def run() -> None:
        with watcher.raised():
            watcher.on_steps(given[:2], [])
            watcher.on_steps(given[2:], [])

    if isinstance(error, Boom):
        with pytest.raises(Boom):
            run()
    else:
        run()
    assert seen == [0, 1, 2, 3] + [4] * (error is None)
    assert stops == ["stop"] * (error is not None)
    assert given == rows(0, 1, 2, 3, 4)


@pytest.mark.parametrize("error", [None, StopTraining(), Boom()])
def test_an_error_of_the_run_comes_before_the_callbacks(error: Exception | None) -> None:
    watcher, _ = callback([], 0, error)

    def run() -> None:
        with watcher.raised():
            watcher.on_steps(rows(0), [])
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk") as caught:
        run()
    assert caught.value.__cause__ is error
