"""Laws of the display: a line a step in logs, a table that moves in terminals, nothing wider than the screen."""

import io
import math
import re

import pytest
from rich.console import Console

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display, RankPlacement, RankState, ending, layers_text
from pentad.orchestrator.monitoring.progress_bars import bars, coloured_grid, sparkline
from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.planning.quantities import count, duration, size
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.grid import time_grid
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import Plan

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def _in_a_good_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def console(*, terminal: bool, width: int = 100, **more: object) -> Console:
    kind = {"color_system": "truecolor"} if terminal else {}
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, **kind, **more)  # type: ignore[arg-type]


def shown(screen: Console) -> str:
    return screen.file.getvalue()  # type: ignore[attr-defined]


def row(step: int, **more: object) -> dict:
    facts = {"step": step, "loss": 8.0 - step / 10, "grad_norm": 1.25, "lr": 3e-3, "tokens": 2048, "step_seconds": 0.06}
    rates = {
        "tokens_per_second": 34120.0,
        "mfu": None,
        "bubble_planned": 0.111,
        "bubble_measured": 0.132,
        "generation": 1,
    }
    return {**facts, **rates, **more}


def planned(*overrides: str) -> tuple[Plan, Costs, list[RankPlacement]]:
    plan = make_plan(load(None, list(overrides)), "cpu")
    costs = guess_costs(plan.model, plan.layers, plan.batch, plan.device, plan.dtype)
    at = plan.mesh.coordinates
    return plan, costs, [RankPlacement(rank, at(rank), "node-1", "CPU", 4000 + rank) for rank in range(plan.mesh.size)]


def states(plan: Plan, step: int) -> list[RankState]:
    at = plan.mesh.coordinates
    return [RankState(rank, at(rank), "running", f"{rank}F3", step) for rank in range(plan.mesh.size)]


def test_outside_a_terminal_every_step_is_one_line_with_its_figures() -> None:
    screen = console(terminal=False, width=20)
    with Display(screen, "trial", 5) as display:
        for step in range(5):
            display.step(row(step))
    lines = shown(screen).splitlines()
    assert len(lines) == 5
    for step, line in enumerate(lines):
        assert f"loss {8.0 - step / 10:.4f}" in line
        assert "34,120 tokens/s" in line
        assert "bubble 13.2 % (planned 11.1 %)" in line
    assert "\x1b" not in shown(screen)


def test_what_was_not_measured_is_a_dash() -> None:
    screen = console(terminal=False)
    Display(screen, "trial", 5).step(row(0, loss=math.nan, grad_norm=None, bubble_measured=None))
    assert "loss nan  grad norm -" in shown(screen)
    assert "bubble - (planned" in shown(screen)


def test_in_a_terminal_a_table_shows_the_last_steps_and_every_rank() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        for step in range(12):
            display.step(row(step), states(plan, step))
        frame = CODES.sub("", shown(screen)).rpartition("trial")[2]
    assert "12/60 steps" in frame
    assert re.findall(r"^ +(\d+) +\d\.\d{4}", frame, re.M) == [str(step) for step in range(4, 12)]
    for rank in range(4):
        assert re.search(rf"^ +{rank} +dp0 pp{rank} +running +11 +{rank}F3", frame, re.M)


def test_what_was_heard_of_a_rank_before_the_last_step_is_not_shown() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.refresh(states(plan, 3))
        display.step(row(3))
        current = CODES.sub("", shown(screen)).rpartition("trial")[2]
        display.step(row(4))
        stale = CODES.sub("", shown(screen)).rpartition("trial")[2]
    assert re.search(r"^ +2 +dp0 pp2 +running +3 +2F3", current, re.M)
    assert re.search(r"^ +2 +dp0 pp2 +- +- *$", stale, re.M)


def test_in_a_recovery_the_state_of_the_run_and_the_lost_rank_are_shown() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.step(row(4), states(plan, 4))
        display.turn("recovering")
        display.refresh([seen._replace(state="lost") if seen.rank == 2 else seen for seen in states(plan, 3)])
        recovering = shown(screen).rpartition("trial")[2]
        display.turn("running")
        again = shown(screen).rpartition("trial")[2]
        display.turn("stopped")
        over = shown(screen).rpartition("trial")[2]
    assert "recovering" in recovering and "left" not in recovering
    assert re.search(r"^ +2 +dp0 pp2 +lost +3 +2F3", CODES.sub("", recovering), re.M)
    assert "left" in again and "recovering" not in again
    assert "stopped" in over and "dp0 pp2" not in over


def test_the_terminal_gets_its_cursor_back_however_the_run_ends() -> None:
    screen = console(terminal=True)

    def run() -> None:
        with Display(screen, "trial", 60) as display:
            display.step(row(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert shown(screen).count("\x1b[?25l") == shown(screen).count("\x1b[?25h") == 1


def test_a_note_stands_above_the_table() -> None:
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.step(row(0))
        display.note("checkpoint of [step] 1")
    text = CODES.sub("", shown(screen))
    assert text.rindex("checkpoint of [step] 1") < text.rindex("trial")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = console(terminal=True)
    Display(screen, "trial", 5).step(row(0))
    assert CODES.sub("", shown(screen)).count("\n") == 1


CHUNKS = ("mesh.pp=2", "schedule.name=interleaved", "schedule.chunks=16", "model.layers=32", "model.hidden=64")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "overrides", [(), ("mesh.dp=2",), ("schedule.name=dualpipe",), ("mesh.pp=8", "schedule.name=gpipe"), CHUNKS]
)
def test_a_plan_fits_in_80_columns(overrides: tuple[str, ...], terminal: bool) -> None:
    plan, costs, seats = planned(*overrides)
    screen = console(terminal=terminal, width=80)
    Display(screen, "trial", 5).plan(plan, costs, seats)
    lines = CODES.sub("", shown(screen)).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert plan.program.hash[:12] in text
    assert "longest" in text
    assert "makespan" in text
    for seat in seats:
        assert re.search(rf"^ +{seat.rank} +{seat.coordinates} .*node-1 +CPU +{seat.pid} +[\d.]+ MiB", text, re.M)


@pytest.mark.parametrize(
    ("stages", "text"),
    [((0,), "embed 0-1"), ((0, 1), "embed 0-3"), ((0, 3), "embed 0-1, 7 head"), ((1, 2, 3), "2-7 head")],
)
def test_stages_that_follow_each_other_are_one_span_of_layers(stages: tuple[int, ...], text: str) -> None:
    plan, _, _ = planned()
    assert layers_text(plan, *stages) == text


def test_a_large_mesh_is_cut_and_says_so() -> None:
    plan, costs, seats = planned("mesh.dp=16", "batch.global_batch_size=128")
    screen = console(terminal=False)
    Display(screen, "trial", 5).plan(plan, costs, seats)
    assert "and 32 more" in shown(screen)


def test_without_colours_nothing_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    plan, costs, seats = planned()
    screen = console(terminal=True)
    Display(screen, "trial", 5).plan(plan, costs, seats)
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]", shown(screen))
    assert "F0" in shown(screen)


@pytest.mark.parametrize("width", [1, 7, 79, 300])
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe", "1f1b"])
def test_bars_fill_their_width_and_keep_the_order_of_instructions(width: int, name: str) -> None:
    program = compile_program(name, 4, 8)
    timeline = simulate(program, Costs.uniform(4))
    for coloured in (True, False):
        rows = [line.plain for line in bars(timeline, width, coloured=coloured)]
        assert [len(line) for line in rows] == [width] * 4
    if width == 300:
        for stream, line in zip(program.compute().streams, rows, strict=True):
            words = [f"{part.op}{part.microbatch}".lower() for unit in stream for part in unit.parts]
            assert re.findall(r"[a-z]+\d+", line.lower()) == words


def test_a_coloured_grid_is_the_grid() -> None:
    program, costs = compile_program("zb-h2", 4, 8), Costs.uniform(4, 1, 2, 1)
    grid = time_grid(program, simulate(program, costs), costs)
    assert "\n".join(line.plain for line in coloured_grid(grid)) == grid


def test_a_sparkline_falls_with_its_values() -> None:
    line = sparkline([float(-k) for k in range(100)], 20)
    assert len(line) == 20
    assert list(line) == sorted(line, reverse=True)
    assert (line[0], line[-1]) == ("█", "▁")
    assert sparkline([1.0], 20) == "▁"
    assert sparkline([], 20) == ""


def test_numbers_are_readable() -> None:
    assert [duration(s) for s in (None, 5e-5, 0.0594, 2.345, 500, 90000)] == [
        "-",
        "50 us",
        "59.4 ms",
        "2.35 s",
        "8 min",
        "25 h 0 min",
    ]
    assert [size(b) for b in (12, 2048, 3.5 * 2**20, 139 * 2**30)] == ["12 B", "2.0 KiB", "3.5 MiB", "139.0 GiB"]
    assert [count(n) for n in (12, 2.62e6, 8.03e9)] == ["12", "2.62 M", "8.03 B"]


def test_the_ending_says_where_the_files_are() -> None:
    screen = console(terminal=False, width=20)
    facts = {"run": "trial", "folder": "runs/trial", "steps": 60, "loss": 5.1, "first_loss": 8.3, "state": "finished"}
    rates = {"tokens_per_second": 34120.0, "bubble_planned": 0.1, "bubble_measured": None}
    ending(screen, {**facts, **rates, "files": {"page": "runs/trial/timeline.html"}})
    assert " finished  60 steps\n" in shown(screen)
    assert " timeline  runs/trial/timeline.html\n" in shown(screen)
    assert "trace" not in shown(screen)
