"""The timeline of a run in a browser: clicks and keys on measured instructions, the critical path, a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROME, Browser, browser
from layered_run import SLOWDOWN, layered_run
from measured_steps import NAMES, measured_run
from page_run import page_run

from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.simulation.layer_spans import planned_messages
from pentad.schedules.draw.html import timeline_page

pytestmark = [pytest.mark.skipif(not CHROME, reason="wants: chromium"), pytest.mark.slow]
SELECTED = "document.querySelector('#selection b')?.textContent ?? ''"
SELECTION = "document.getElementById('selection').innerText"
HEADER = "panels[0].header.innerText"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def opened(tab: Browser, text: str, folder: Path, width: int = 1280, *, dark: bool = False) -> None:
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    tab.look(width, dark=dark, mobile=width < 500)
    tab.errors.clear()
    tab.open(page.as_uri())
    tab.until("document.readyState === 'complete' && typeof panels === 'object' && panels.length === 2")


def click(tab: Browser, name: str, rank: int, panel: int = 0) -> None:
    """Clicks the bar of an instruction in the measured panel (0) or in the one below it (1)."""
    script = """
    (() => {
      const panel = panels[PANEL];
      const n = [...panel.kind.keys()].find((n) => nameOf(panel, n) === NAME && rankOf(panel, n) === RANK);
      panel.canvas.scrollIntoView({ block: 'start' });
      const box = panel.canvas.getBoundingClientRect();
      const [left, top, wide, tall] = barOf(panel, n);
      return [box.left + left + wide / 2, box.top + top + tall / 2];
    })()
    """
    script = script.replace("NAME", repr(name)).replace("RANK", str(rank)).replace("PANEL", str(panel))
    tab.click(*tab.value(script))


def lines(tab: Browser, title: str) -> list[str]:
    """The lines of the list with this title below the panels."""
    script = f"""[...document.querySelectorAll('#selection h3')].filter((h) => h.textContent === '{title}')
        .flatMap((h) => [...h.parentElement.querySelectorAll('li')].map((li) => li.innerText))"""
    return [" ".join(line.split()) for line in tab.value(script)]


def test_a_click_shows_what_a_measured_instruction_waited_for_and_what_waits_for_it(
    tab: Browser, tmp_path: Path
) -> None:
    opened(tab, measured_run("zb-h2").page(), tmp_path)
    assert "Click an instruction" in tab.value(SELECTION)
    click(tab, "1F3", 2)  # rank 2 is pp1 of the first replica
    assert tab.value(SELECTED) == "1F3"
    before, after = lines(tab, "Waits for"), lines(tab, "Needed by")
    assert any(line.startswith("1RECV_F3 rank 2") for line in before) and any("0F3 rank 0" in line for line in before)
    assert sum("last, then" in line and line.endswith("host") for line in before) == 1
    assert sum("last, then" in line and line.endswith("transfer") for line in before) >= 1
    assert any(line.startswith("1SEND_F3 rank 2") for line in after) and any("2F3 rank 4" in line for line in after)
    tab.value("document.querySelector('#selection li button').click()")  # what it waited for longest
    assert before[0].startswith(tab.value(SELECTED))
    tab.press("Escape")
    assert "Click an instruction" in tab.value(SELECTION) and tab.value(SELECTED) == ""
    assert tab.errors == []


def test_arrow_keys_walk_through_measured_instructions(tab: Browser, tmp_path: Path) -> None:
    run = measured_run("zb-h2")
    opened(tab, run.page(), tmp_path)
    stream = [str(part.key) for part in run.program.compute().streams[0]]
    tab.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert tab.value(SELECTED) == stream[2]
    tab.press("ArrowDown", "ArrowDown")
    assert "\nrank\n2\n" in tab.value(SELECTION) and tab.value(SELECTED).startswith("1")
    tab.press("ArrowUp", "ArrowLeft")
    assert "\nrank\n1\n" in tab.value(SELECTION)


def test_the_critical_path_of_each_measured_step_is_shown_with_what_it_is_made_of(tab: Browser, tmp_path: Path) -> None:
    opened(tab, measured_run("zb-h2").page(), tmp_path)
    assert "critical path" not in tab.value(HEADER)
    tab.value("document.getElementById('critical').click()")
    seen = set()
    for _ in range(3):
        text = tab.value(HEADER)
        seen.add(text)
        assert "critical path" in text and "compute" in text and "host" in text
        length = tab.value("panels[0].critical.at(-1).end - panels[0].critical[0].start")
        assert length == pytest.approx(tab.value("panels[0].last - panels[0].first"), abs=2)
        tab.value("document.getElementById('earlier').click()")
    assert len(seen) == 3
    names = "panels[0].critical.filter((p) => p.part !== 'host' && p.end > p.start).map((p) => nameOf(panels[0], p.n))"
    assert tab.value("panels[0].highlighted.reduce((a, b) => a + b, 0)") >= len(set(tab.value(names)))
    tab.value("document.getElementById('critical').click()")
    assert "critical path" not in tab.value(HEADER)


@pytest.mark.parametrize("name", NAMES)
def test_each_piece_of_the_path_begins_when_the_last_that_its_instruction_waited_for_ends(
    tab: Browser, tmp_path: Path, name: str
) -> None:
    """The path leads back to what a click names as the last dependency."""
    opened(tab, measured_run(name).page(), tmp_path)
    wrong = tab.value(
        """
        (() => {
          const found = [];
          for (const panel of panels.slice(0, 1)) {
            const ran = panel.critical.filter((piece) => piece.part !== 'host');
            ran.forEach((piece, i) => {
              if (!i) return;
              const { ready } = lastNeeded(panel, piece.n);
              if (Math.abs(ready - ran[i - 1].end) > 2) found.push([nameOf(panel, piece.n), ready, ran[i - 1].end]);
            });
          }
          return found;
        })()
        """
    )
    assert wrong == []
    tab.value("binding = (n) => dependencyTree(panels[0], n, true).filter((node) => node.binding).length, 0")
    assert tab.value("[...panels[0].kind.keys()].filter((n) => binding(n) > 1)") == []


def test_a_step_of_another_program_says_so(tab: Browser, tmp_path: Path) -> None:
    opened(tab, measured_run("zb-h2").page(other_step="1f1b"), tmp_path)
    tab.value("[1, 2].forEach(() => document.getElementById('earlier').click())")
    assert tab.value("panels[0].step.step") == 3
    unknown = "is not known: the measured step 3 ran a program that this page does not have."
    assert unknown in tab.value(SELECTION)
    click(tab, "1F3", 2)
    text = tab.value(SELECTION)
    assert tab.value(SELECTED) == "1F3" and unknown in text and "Waits for" not in text
    tab.value("document.getElementById('critical').click()")
    assert "critical path" not in tab.value(HEADER)
    tab.value("document.getElementById('later').click()")
    assert "critical path" in tab.value(HEADER)
    assert tab.errors == []


def test_the_memory_of_a_run_is_that_of_its_plan(tab: Browser, tmp_path: Path) -> None:
    """The peaks agree, whatever the times."""
    with page_run(tmp_path) as run:
        run.run(0, 1)
        opened(tab, run.data.timeline_html(), tmp_path)
        peaks = tab.value("panels.map(({ memory }) => memory.curves.map((curve) => curve.peak))")
        assert peaks == [[need["total"] for need in memories(run.plan)]] * 2
        assert "planned bytes" in tab.value(HEADER)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it(tab: Browser, tmp_path: Path, dark: bool) -> None:
    opened(tab, measured_run("zb-v").page(), tmp_path, 390, dark=dark)
    tab.value("document.getElementById('critical').click()")
    click(tab, "1F3", 2)
    assert tab.value(SELECTED) == "1F3" and "last, then" in tab.value(SELECTION)
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    tab.press("ArrowDown", "ArrowDown", "ArrowDown")  # the panel is taller than the window's free part
    assert "\nrank\n5\n" in tab.value(SELECTION)
    assert tab.value(
        """
        (() => {
          const [left, top, wide, tall] = barOf(panels[0], panels[0].selected.n);
          const box = panels[0].canvas.getBoundingClientRect();
          return document.elementFromPoint(box.left + left + wide / 2, box.top + top + tall / 2) === panels[0].canvas;
        })()
        """
    )
    rights = "[...document.querySelectorAll('header *, #selection *')].map((e) => e.getBoundingClientRect().right)"
    assert max(tab.value(rights)) <= 390.5
    assert tab.errors == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_click_or_a_key_shows_the_messages_inside_an_instruction(
    tab: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    """For a measured one as planned, for a simulated one at the costs of the step."""
    run = layered_run()
    opened(tab, run.page(), tmp_path, width, dark=dark)
    assert "exposed messages inside layers" in tab.value("byId('legend').innerText")
    planned = next(each for each in planned_messages(run.plan) if (each.op, each.stage) == ("F", 1))
    compute = planned.takes - planned.exposed
    for panel, factor, title in ((0, 1.0, "Inside layers, as planned"), (1, SLOWDOWN, "Inside layers")):
        click(tab, "1F3", 2, panel)
        assert tab.value(SELECTED) == "1F3"
        text = tab.value("document.querySelector('#selection .messages').innerText").split("\n")
        times = [tab.value(f"duration({factor * each})") for each in (compute, planned.exposed, planned.hidden)]
        facts = ["compute", times[0], "exposed messages", f"tp {times[1]}", "hidden messages", f"tp {times[2]}"]
        assert [line for line in text if line] == [title, *facts]
        tip = [line for line in tab.value("byId('tip').innerText").split("\n") if line]
        if width > 600:  # else only the section below has them
            assert tip[tip.index(("planned " if panel == 0 else "") + "exposed messages") + 1] == f"tp {times[1]}"
    tab.press("ArrowRight")
    assert tab.value(SELECTED) == "1BW3" and "exposed messages" in tab.value(SELECTION)
    tab.value("select(panels[1], [...panels[1].kind.keys()].find((n) => nameOf(panels[1], n) === 'STEP'))")
    assert tab.value(SELECTED) == "STEP" and "exposed messages" not in tab.value(SELECTION)
    assert tab.value("document.documentElement.scrollWidth <= innerWidth") and tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_simulated_bars_end_with_a_mark_as_long_as_they_wait_for_messages(
    tab: Browser, tmp_path: Path, dark: bool
) -> None:
    opened(tab, layered_run().page(), tmp_path, dark=dark)
    marked = """
    panels.map((panel) => {
      byId("height").value = 1;
      arrange();
      paintBase(panel);
      const n = [...panel.kind.keys()].find((n) => nameOf(panel, n) === "0BW3" && rankOf(panel, n) === 0);
      const [left, top, wide, tall] = barOf(panel, n);
      const [first, last] = [Math.floor(left), Math.ceil(left + wide)];
      const row = panel.base.getImageData(first, Math.round(top + tall - 3), last - first, 1).data;
      const mark = channels(theme.fill[FIRST_FILL.LAYERS]);
      const at = [...Array(last - first).keys()].filter((i) => mark.every((value, c) => row[4 * i + c] === value));
      const expected = x(panel, panel.end[n]) - x(panel, panel.end[n] - messagesOf(panel, n).exposed);
      return [at.length, at.length ? last - first - at.at(-1) : 0, expected];
    })
    """
    (measured, _, _), (simulated, to_end, expected) = tab.value(marked)
    assert measured == 0 and simulated == pytest.approx(expected, abs=2) and expected > 3 and to_end <= 3
    assert tab.errors == []


def test_an_evaluation_has_a_critical_path_and_no_memory(tab: Browser, tmp_path: Path) -> None:
    opened(tab, measured_run("1f1b evaluation").page(), tmp_path)
    tab.value("document.getElementById('critical').click()")
    click(tab, "1F3", 2)
    assert "last, then" in tab.value(SELECTION) and "critical path" in tab.value(HEADER)
    assert "peak" not in tab.value(HEADER)
    assert tab.value("panels.every((panel) => panel.memory === null && panel.curve.canvas.hidden)")
    assert tab.errors == []


def test_a_page_without_a_program_says_so_and_still_shows_what_ran(tab: Browser, tmp_path: Path) -> None:
    run = measured_run("zb-h2")
    opened(tab, timeline_page([run.measured, run.simulated], title="t", facts={}), tmp_path)
    assert "the measured step 5 ran a program that this page does not have" in tab.value(SELECTION)
    click(tab, "1F3", 2)
    assert tab.value(SELECTED) == "1F3" and "duration" in tab.value(SELECTION)
    assert tab.value("document.getElementById('paths').hidden") and tab.errors == []
