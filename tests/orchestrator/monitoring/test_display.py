"""The display prints one line per step in logs and a live table in terminals, never wider than the screen."""

import errno
import io
import math
import re
import time
from functools import cache
from types import SimpleNamespace

import pytest
from rich.console import Console

from pentad.orchestrator.api.plans import planned as planned_run
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring import display as display_module
from pentad.orchestrator.monitoring.display import Display, RunStream, print_summary, sparkline
from pentad.orchestrator.monitoring.plan_view import layers_text, print_plan
from pentad.orchestrator.monitoring.run_state import RankView
from pentad.orchestrator.monitoring.terminal_timeline import bars, coloured_grid
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.formatting import format_bytes, format_count, format_duration
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.grid import time_cells, time_grid
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import Plan

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def _capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capable terminal, regardless of the environment that the tests run in."""
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


def planned(*overrides: str) -> tuple[Plan, Costs, list[RankView]]:
    plan = make_plan(load(None, list(overrides)), "cpu")
    return plan, costs_of(plan), ranks(plan, 0)


def ranks(plan: Plan, step: int) -> list[RankView]:
    at = plan.mesh.coordinates
    return [
        RankView(rank, at(rank), "node-1", 4000 + rank, -1, "running", step, f"{rank}F3", 0.0)
        for rank in range(plan.mesh.size)
    ]


def test_outside_a_terminal_every_step_is_one_line() -> None:
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


def test_missing_figures_are_shown_as_dashes() -> None:
    screen = console(terminal=False)
    Display(screen, "trial", 5).step(row(0, loss=math.nan, grad_norm=None, bubble_measured=None))
    assert "loss nan  grad norm -" in shown(screen)
    assert "bubble - (planned" in shown(screen)


def test_in_a_terminal_a_table_shows_the_last_steps_and_every_rank() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        for step in range(12):
            display.set_ranks(ranks(plan, step))
            display.step(row(step))
        frame = CODES.sub("", shown(screen)).rpartition("trial")[2]
    assert "12/60 steps" in frame
    assert re.findall(r"^ +(\d+) +\d\.\d{4}", frame, re.M) == [str(step) for step in range(4, 12)]
    for rank in range(4):
        assert re.search(rf"^ +{rank} +dp0 pp{rank} +running +11 +{rank}F3", frame, re.M)


def test_reports_from_before_the_last_step_are_not_shown() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.set_ranks(ranks(plan, 3))
        display.step(row(3))
        current = CODES.sub("", shown(screen)).rpartition("trial")[2]
        display.step(row(4))
        stale = CODES.sub("", shown(screen)).rpartition("trial")[2]
    assert re.search(r"^ +2 +dp0 pp2 +running +3 +2F3", current, re.M)
    assert re.search(r"^ +2 +dp0 pp2 +- +- *$", stale, re.M)


def test_a_recovery_shows_the_state_of_the_run_and_the_lost_rank() -> None:
    plan, _, _ = planned()
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.step(row(4))
        display.set_ranks(ranks(plan, 4))
        display.set_state("recovering")
        display.set_ranks([seen._replace(state="lost") if seen.rank == 2 else seen for seen in ranks(plan, 3)])
        recovering = shown(screen).rpartition("trial")[2]
        display.set_state("running")
        again = shown(screen).rpartition("trial")[2]
        display.set_state("stopped")
        over = shown(screen).rpartition("trial")[2]
    assert "recovering" in recovering and "left" not in recovering
    assert re.search(r"^ +2 +dp0 pp2 +lost +3 +2F3", CODES.sub("", recovering), re.M)
    assert "left" in again and "recovering" not in again
    assert "stopped" in over and "dp0 pp2" not in over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The display's clock, which begins at 100 s and moves only when told to."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_a_log_has_a_line_with_the_elapsed_time_of_each_phase(clock: SimpleNamespace) -> None:
    screen = console(terminal=False)
    with Display(screen, "trial", 5, began=97.5) as display:
        display.phase("starting Ray")
        clock.now += 10
        display.phase("placing 4 ranks")
    assert shown(screen) == "   2.5 s  starting Ray\n  12.5 s  placing 4 ranks\n"


def test_a_terminal_shows_all_phases_until_the_first_step(clock: SimpleNamespace) -> None:
    screen = console(terminal=True)
    with Display(screen, "trial", 60, began=97.5) as display:
        display.phase("starting Ray")
        display.note("Ray dashboard: http://127.0.0.1:8265")
        clock.now += 1
        display.phase("first step")
        starting = CODES.sub("", shown(screen)).rpartition("8265")[2]
        clock.now += 1
        while "4.5 s  starting" not in CODES.sub("", shown(screen)):
            time.sleep(0.01)  # a thread updates the clock
        display.step(row(0))
        frame = shown(screen).rpartition("1/60 steps")[2]
        screen.file.truncate(0)
        time.sleep(0.3)
        assert shown(screen) == ""  # steps are drawn at once
    assert re.search(r" 2\.5 s  starting Ray\n +3\.5 s  first step", starting)
    assert "first step" not in frame


def test_a_run_that_ends_without_a_step_erases_its_phases() -> None:
    screen = console(terminal=True)
    with Display(screen, "trial", 60) as display:
        display.phase("starting Ray")
    assert shown(screen).endswith("\x1b[2K")


def test_the_cursor_is_restored_however_the_run_ends() -> None:
    screen = console(terminal=True)

    def run() -> None:
        with Display(screen, "trial", 60) as display:
            display.step(row(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert shown(screen).count("\x1b[?25l") == shown(screen).count("\x1b[?25h") == 1


def test_a_note_is_printed_above_the_table() -> None:
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


@cache
def words_at(width: int, steps: int = 12) -> list[list[str]]:
    """The words of each line of a live table, without bars, after `steps` steps with long figures."""
    plan, _, _ = planned("mesh.dp=2", "mesh.cp=2", "mesh.tp=2", "batch.global_batch_size=32")
    screen = console(terminal=True, width=width)
    with Display(screen, "a-run-with-a-long-name-of-its-own", 100_000) as display:
        for step in range(steps):
            figures = {"tokens_per_second": 1_234_567.8, "step_seconds": 61.7, "grad_norm": 1234.567}
            display.set_ranks(ranks(plan, 90_000 + step))
            display.step(row(90_000 + step, loss=12.3456 - step / 7, **figures))
        page = console(terminal=False, width=width)
        page.print(display._view())
    assert all(len(line) <= width for line in shown(page).splitlines())
    return [re.sub("[━╸╺▁▂▃▄▅▆▇█]+", " ", line).split() for line in shown(page).splitlines()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [36, 48, 60, 72, 100])
def test_a_narrow_terminal_drops_columns_but_never_digits(width: int) -> None:
    known = {word for line in words_at(200) for word in line}
    found = words_at(width)
    assert {word for line in found for word in line if not word.startswith("a-run")} <= known
    for step in range(90_004, 90_012):
        assert any(line[:2] == [str(step), f"{12.3456 - (step - 90_000) / 7:.4f}"] for line in found)
    assert any("running" in line for line in found)


def test_the_bubble_and_the_pace_are_shown_at_60_columns() -> None:
    assert next(line for line in words_at(60) if "loss" in line and "step" in line)[-1] == "bubble"
    assert any("1,234,568" in line and "13.2" in line for line in words_at(60))


@pytest.mark.parametrize("width", [44, 60])
def test_a_plan_in_a_narrow_terminal_drops_columns_but_no_memory(width: int) -> None:
    plan, costs, placements = planned("mesh.dp=2")
    screen = console(terminal=False, width=width)
    print_plan(screen, plan, costs, placements)
    text = shown(screen)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for rank in range(8):
        assert re.search(rf"^ +{rank} .*\d+\.\d MiB", text, re.M)


def test_the_tables_of_pentad_plan_drop_columns_but_no_digits() -> None:
    config, texts = load(None, ["mesh.dp=2"]), []
    for width in (200, 44):
        screen = console(terminal=False, width=width)
        screen.print(planned_run(config, "cuda", 80.0), crop=False)
        texts.append(shown(screen))
    wide, narrow = (set(re.findall(r"(?<=\s)\d[\d.,]*(?=\s)", text)) for text in texts)
    assert "…" not in texts[1] and narrow <= wide
    assert all(head in texts[1] for head in ("optimizer", "a step"))


CHUNKS = ("mesh.pp=2", "schedule.name=interleaved", "schedule.chunks=16", "model.layers=32", "model.hidden=64")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "overrides", [(), ("mesh.dp=2",), ("schedule.name=dualpipe",), ("mesh.pp=8", "schedule.name=gpipe"), CHUNKS]
)
def test_a_plan_fits_in_80_columns(overrides: tuple[str, ...], terminal: bool) -> None:
    plan, costs, placements = planned(*overrides)
    screen = console(terminal=terminal, width=80)
    print_plan(screen, plan, costs, placements)
    lines = CODES.sub("", shown(screen)).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert plan.program.hash[:12] in text
    assert "longest" in text
    assert "makespan" in text
    for at in placements:
        assert re.search(rf"^ +{at.rank} +{at.coordinates} .*node-1 +CPU +{at.pid} +[\d.]+ MiB", text, re.M)


@pytest.mark.parametrize(
    ("stages", "text"),
    [((0,), "embed 0-1"), ((0, 1), "embed 0-3"), ((0, 3), "embed 0-1, 7 head"), ((1, 2, 3), "2-7 head")],
)
def test_layers_of_consecutive_stages_are_shown_as_one_range(stages: tuple[int, ...], text: str) -> None:
    plan, _, _ = planned()
    assert layers_text(plan, *stages) == text


def test_a_large_mesh_shows_some_ranks_and_the_number_of_others() -> None:
    plan, costs, placements = planned("mesh.dp=16", "batch.global_batch_size=128")
    screen = console(terminal=False)
    print_plan(screen, plan, costs, placements)
    assert "and 32 more" in shown(screen)


def test_a_large_mesh_shows_the_memory_and_the_step_of_each_pipeline_rank() -> None:
    plan, costs, _ = planned("mesh.dp=16", "batch.global_batch_size=128")
    print_plan(screen := console(terminal=False), plan, costs)
    rows = [(f"{16 * pp}-{16 * pp + 15}", f"pp{pp}") for pp in range(plan.mesh.pp)]
    assert re.findall(r"^ +(\d+-\d+) +(pp\d) .*MiB", shown(screen), re.M) == rows
    assert re.findall(r"^ (pp\d) [\[FBW.]", shown(screen), re.M) == [name for _, name in rows]


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    plan, costs, placements = planned()
    screen = console(terminal=True)
    print_plan(screen, plan, costs, placements)
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
            words = [f"{part.op}{part.microbatch}".lower() for action in stream for part in action.parts]
            assert re.findall(r"[a-z]+\d+", line.lower()) == words


def test_a_coloured_grid_has_the_text_of_the_plain_grid() -> None:
    program, costs = compile_program("zb-h2", 4, 8), Costs.uniform(4, 1, 2, 1)
    drawn = program, simulate(program, costs), costs
    assert "\n".join(line.plain for line in coloured_grid(time_cells(*drawn))) == time_grid(*drawn)


def test_a_sparkline_follows_its_values() -> None:
    line = sparkline([float(-k) for k in range(100)], 20)
    assert len(line) == 20
    assert list(line) == sorted(line, reverse=True)
    assert (line[0], line[-1]) == ("█", "▁")
    assert sparkline([1.0], 20) == "▁"
    assert sparkline([], 20) == ""


def test_numbers_are_readable() -> None:
    assert [format_duration(s) for s in (None, 5e-5, 9.996e-4, 0.0594, 0.9996, 2.345, 500, 90000)] == [
        "-",
        "50 us",
        "1 ms",
        "59.4 ms",
        "1 s",
        "2.35 s",
        "8 min",
        "25 h 0 min",
    ]
    assert [format_bytes(b) for b in (12, 2048, 3.5 * 2**20, 139 * 2**30)] == [
        "12 B",
        "2.0 KiB",
        "3.5 MiB",
        "139.0 GiB",
    ]
    assert [format_count(n) for n in (12, 2.62e6, 8.03e9)] == ["12", "2.62 M", "8.03 B"]


def test_the_summary_names_the_files() -> None:
    screen = console(terminal=False, width=20)
    facts = {"run": "trial", "folder": "runs/trial", "steps": 60, "loss": 5.1, "first_loss": 8.3, "state": "finished"}
    rates = {"tokens_per_second": 34120.0, "bubble_planned": 0.1, "bubble_measured": None}
    evaluated = {"evaluations": [{"step": 60, "data": "holdout", "loss": 5.25}], "best": None}
    print_summary(screen, {**facts, **rates, **evaluated, "files": {"page": "runs/trial/timeline.html"}})
    assert " finished   60 steps\n" in shown(screen)
    assert " evaluation holdout 5.2500 after 60 steps\n" in shown(screen)
    assert " timeline   runs/trial/timeline.html\n" in shown(screen)
    assert "best" not in shown(screen)
    assert "trace" not in shown(screen)


def test_output_that_is_lost_ends_no_run_unless_nobody_wants_it() -> None:
    class Failing(io.StringIO):
        error: OSError = BrokenPipeError()

        def write(self, text: str) -> int:
            raise self.error

        def flush(self) -> None:
            raise self.error

    with pytest.raises(BrokenPipeError):
        RunStream(Failing(), is_terminal=False).flush()
    for is_terminal in (True, False):
        Failing.error = BrokenPipeError() if is_terminal else OSError(errno.ENOSPC, "No space left on device")
        with Display(Console(file=Failing(), force_terminal=is_terminal), "trial", 3) as shown:
            shown.note("a note")
