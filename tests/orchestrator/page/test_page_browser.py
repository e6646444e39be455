"""The page in a browser: the token, ranks selected by keys and touch, kept steps, a phone, light and dark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from browser import CHROME, Browser, browser
from page_run import HOSTILE, TOKEN, PageRun, ended_run, page_run

from pentad.orchestrator.page.ended_run import EndedRun
from pentad.orchestrator.page.page_server import PageServer

pytestmark = [pytest.mark.skipif(not CHROME, reason="wants: chromium"), pytest.mark.slow]
CONTRAST = """
(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => channels(text).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (element) => {
    const found = getComputedStyle(element).backgroundColor;
    return channels(found)[3] === 0 && element.parentElement ? ground(element.parentElement) : found;
  };
  const low = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || element.closest("svg")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 3.5) low.push([element.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)]);
  }
  return low;
})()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRun]:
    with page_run(tmp_path_factory.mktemp("runs")) as made:
        made.bus.set_state("running")
        made.run(0, 1, 2)
        made.stall()
        made.bus.record("lost", rank=1, fault="killed", error=HOSTILE)
        yield made


@pytest.fixture(scope="module")
def tab(run: PageRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def opened(tab: Browser, run: PageRun, width: int = 1300, *, dark: bool = False) -> None:
    tab.look(width, dark=dark, mobile=width < 500)
    tab.errors.clear()
    tab.open(f"{run.served.url}?token={TOKEN}")
    tab.until("document.querySelectorAll('.tile').length === 4")
    assert TOKEN not in tab.value("location.href")


def test_the_token_is_typed_into_a_form(tab: Browser, run: PageRun) -> None:
    tab.look(390)
    tab.open(run.served.url)
    tab.until("document.activeElement?.id === 'token'")
    tab.write("wrong")
    tab.press("Enter")
    tab.until("document.activeElement?.id === 'token' && document.activeElement.value === ''")
    tab.write(TOKEN)
    tab.press("Enter")
    tab.until("document.getElementById('run')?.textContent === 'trial'")
    assert TOKEN not in tab.value("location.href + document.documentElement.outerHTML")


def test_keys_choose_a_rank_and_show_its_groups_and_what_flows(tab: Browser, run: PageRun) -> None:
    opened(tab, run)
    tab.until("document.getElementById('panel').textContent.includes('rank 1 waits for 3: 0RECV_B0')")
    while tab.value("document.activeElement.className") != "tile":
        tab.press("Tab")
    tab.press("ArrowDown")
    panel = "document.getElementById('panel').innerText"
    assert "Rank 1, pp0 dp1" in tab.value(panel)
    tab.press("ArrowRight")
    text = " ".join(tab.value(panel).split())
    assert "Rank 3, pp1 dp1" in text and "pp 1 the stages of one replica" in text
    assert "dp 2 replicas with other samples" in text
    count = run.plan.program.microbatches
    assert f"from 1 activations, {count} x " in text and f"to 1 gradients, {count} x " in text
    assert "dp all-reduce" in text
    axes = "Object.fromEntries([...document.querySelectorAll('.tile')].map((t) => [t.dataset.rank, t.dataset.axis]))"
    assert tab.value(axes) == {"0": "", "1": "pp", "2": "dp", "3": ""}
    kinds = "[...document.querySelectorAll('#mesh svg > path')].map((p) => p.getAttribute('class'))"
    assert sorted(tab.value(kinds)) == ["flow backward", "flow forward", "link dp"]
    name = "document.querySelector('.tile[data-rank=\"2\"]').getAttribute('aria-label')"
    assert tab.value(name).startswith("rank 2, pp1 dp0: ") and tab.value(name).endswith(", in the dp group of rank 3")
    tab.press("ArrowLeft")
    assert "waits for 3: 0RECV_B0" in " ".join(tab.value(panel).split())
    tab.value("document.querySelector('#panel button').click()")  # the rank it waits for
    assert "Rank 3" in tab.value(panel) and tab.value("document.activeElement.dataset.rank") == "3"
    tab.press("Escape")
    assert tab.value("document.querySelectorAll('[aria-pressed=true]').length") == 0


def test_the_kept_steps_are_walked_through_and_stay_until_newer_ones_are_asked_for(tab: Browser, run: PageRun) -> None:
    opened(tab, run)
    shown = "document.getElementById('timeline').contentDocument?.querySelector('section h2')?.textContent"
    assert tab.until(shown) == "Measuredstep 2"
    tab.value("document.getElementById('timeline').contentWindow.focus()")
    tab.value("document.getElementById('timeline').contentDocument.getElementById('earlier').click()")
    assert tab.value(shown) == "Measuredstep 1"
    run.run(3)
    tab.until("document.getElementById('newest').textContent === 'Show steps 0 to 3'")
    assert tab.value(shown) == "Measuredstep 1"
    tab.value("document.getElementById('newest').click()")
    tab.until(f"{shown} === 'Measuredstep 3'")
    assert tab.until("document.getElementById('newest').disabled")


def test_curves_are_read_by_keys(tab: Browser, run: PageRun) -> None:
    opened(tab, run)
    tab.until("document.getElementById('chart-loss')")
    tab.value("document.querySelector('#chart-loss svg').focus()")
    tab.press("ArrowLeft", "ArrowLeft")
    steps = run.data.state()["curves"]
    read = tab.value("document.querySelector('#chart-loss output').textContent")
    assert read == f"step {steps['step'][-3]}: {steps['loss'][-3]:.4g}"
    tab.until("!document.getElementById('slow').hidden")
    loads = tab.until("document.getElementById('loads').innerText")
    assert loads.split() == ["layer", "1", "0", "to", "3", "layer", "2", "1", "to", "1"]


def test_a_spike_leaves_the_figure_and_the_other_values_fill_it(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path) as spiked:
        for step in range(60):
            row = {"step": step, "loss": 2.0, "grad_norm": 90.0 if step == 39 else 1 + step % 2 / 2}
            spiked.data.on_steps([row], [])
        opened(tab, spiked)
        about = tab.until("document.querySelector('#chart-grad_norm .soft')?.textContent")
        assert about == "before clipping, up to 90 in step 39"
        labels = "[...document.querySelectorAll('#chart-grad_norm text')].map((text) => Number(text.textContent))"
        assert max(found for found in tab.value(labels) if found) < 3
        inside = "document.querySelector('#chart-grad_norm .line').getBBox().y"
        assert tab.value(inside) >= 10


def test_names_of_the_run_stay_text(tab: Browser, run: PageRun) -> None:
    run.bus.update(verdict=HOSTILE)
    opened(tab, run)
    assert tab.until("document.getElementById('verdict').textContent") == HOSTILE
    assert HOSTILE in tab.value("document.getElementById('events').textContent")
    assert tab.value("document.querySelectorAll('#verdict *, #events img').length") == 0
    assert tab.errors == []


def test_what_is_read_stays_while_nothing_changes(tab: Browser, run: PageRun) -> None:
    """A screen reader in the panel does not lose its place whenever the driver answers."""
    opened(tab, run)
    tab.value("document.querySelector('.tile[data-rank=\"0\"]').click()")
    tab.until("document.querySelector('#panel h3').textContent.startsWith('Rank 0')")
    tab.value("document.querySelector('#panel h3').dataset.read = 'here'")
    run.bus.update(endpoints=run.bus.view.endpoints | {"dashboard": "http://10.0.0.1:8265"})
    tab.until("!!document.querySelector('#facts a')")
    tab.value("document.querySelector('#facts a').focus()")
    tab.value("globalThis.answers = 0; globalThis.ask = fetch; fetch = (...all) => (answers++, ask(...all))")
    tab.until("answers >= 3")
    assert tab.value("document.querySelector('#panel h3').dataset.read") == "here"
    assert tab.value("document.activeElement.textContent") == "dashboard"


def test_groups_of_four_axes_are_chosen_on_a_phone(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path, "mesh.cp=2", "mesh.tp=2") as wide:
        tab.look(390, mobile=True)
        tab.open(f"{wide.served.url}?token={TOKEN}")
        tab.until("document.querySelectorAll('.tile').length === 16")
        tab.value("document.querySelector('.tile[data-rank=\"10\"]').click()")
        groups = "[...document.querySelectorAll('#panel .groups li')].map((line) => line.innerText.split(/\\s+/))"
        assert [found[:2] for found in tab.value(groups)] == [["pp", "2"], ["dp", "14"], ["tp", "11"], ["cp", "8"]]
        small = "[...document.querySelectorAll('.tile, #panel button')].map((b) => b.getBoundingClientRect())"
        assert tab.value(f"{small}.every((box) => box.width >= 24 && box.height >= 24)")
        assert tab.value("document.documentElement.scrollWidth - innerWidth") <= 0
        tab.value("document.querySelector('#panel .groups button[data-rank=\"14\"]').click()")
        assert tab.value("document.activeElement.dataset.rank") == "14"
        assert "Rank 14, pp1 dp1 tp0 cp1" in tab.value("document.getElementById('panel').innerText")


def test_many_replicas_leave_the_curves_in_sight(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path, "mesh.dp=64", "batch.global_batch_size=512") as wide:
        tab.look(1300)
        tab.open(f"{wide.served.url}?token={TOKEN}")
        tab.until("document.querySelectorAll('.tile').length === 128")
        assert tab.value("document.getElementById('ranks').getBoundingClientRect().height / innerHeight") < 0.95
        wide.bus.rank_lost(5)
        tab.until("document.querySelector('.tile[data-rank=\"5\"]').dataset.state === 'lost'")
        assert tab.value("document.getElementById('mesh-name').textContent").endswith(", 128 in all, 1 lost")
        colour = "getComputedStyle(document.querySelector('.tile[data-rank=\"{}\"]')).backgroundColor"
        assert tab.value(colour.format(5)) != tab.value(colour.format(6)) and tab.value(CONTRAST) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_it_fits_and_is_legible(tab: Browser, run: PageRun, width: int, dark: bool) -> None:
    opened(tab, run, width, dark=dark)
    tab.value("document.getElementById('memory-button').click()")
    tab.until("document.getElementById('memory').contentDocument?.querySelectorAll('#ranks section').length")
    empty = "(frame) => frame.clientHeight - frame.contentDocument.body.offsetHeight"
    tab.until(f"({empty})(document.getElementById('memory')) <= 2")
    for chosen in ("null", "3"):
        tab.value(f"document.querySelector('[data-rank=\"{chosen}\"]')?.click()")
        assert tab.value("document.documentElement.scrollWidth - innerWidth") <= 0
        assert tab.value(CONTRAST) == []
    wide = "document.getElementById('timeline').contentDocument.documentElement"
    tab.until("document.getElementById('timeline').contentDocument?.readyState === 'complete'")
    assert tab.value(f"{wide}.scrollWidth - {wide}.clientWidth") <= 0
    assert tab.errors == []


def test_it_says_so_when_the_driver_is_gone(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path) as gone:
        gone.bus.set_state("running")
        gone.run(0)
        opened(tab, gone)
        tab.until("document.getElementById('facts').textContent.includes('time left')")
    tab.until("document.getElementById('state').textContent === 'was running'")
    assert "time left" not in tab.value("document.getElementById('facts').textContent")
    assert "has not answered since" in tab.value("document.getElementById('connection').textContent")


def test_an_open_page_learns_how_the_run_has_ended(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path) as ending:
        opened(tab, ending)
        tab.until("document.getElementById('connection').textContent === 'live'")
        ending.bus.update(verdict="rank 3 is slow")
        tab.until("!document.getElementById('verdict').hidden")
        ending.bus.set_state("finished")
    tab.until("document.getElementById('state').textContent === 'finished'")
    assert tab.value("document.getElementById('verdict').hidden")
    assert tab.value("document.getElementById('connection').textContent") == ""
    tab.value("document.getElementById('memory-button').click()")
    tab.until("document.getElementById('connection').textContent.includes('`pentad page trial` shows the rest')")
    assert tab.value("document.getElementById('memory').hidden")


def test_an_open_page_says_why_the_run_has_failed(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path) as failing:
        opened(tab, failing)
        failing.bus.record("failure", error="rank 1 has no memory left")
        failing.bus.set_state("failed")
        assert tab.until("document.getElementById('verdict').textContent") == "rank 1 has no memory left"


def test_events_are_in_words_below_their_days(tab: Browser, tmp_path: Path) -> None:
    with page_run(tmp_path) as old:
        phases = {"detect": 0.5, "fence": 0.041, "load": 1.8}
        now = time.time()
        old.data.on_event({"time": now - 86_400, "event": "lost", "rank": 1, "fault": "killed", "cause": "it died"})
        old.data.on_event({"time": now, "event": "recovered", "seconds": phases, "mesh": "dp2", "spares": []})
        opened(tab, old)
        events = "[...document.querySelectorAll('#events li')].map((line) => line.lastChild.textContent)"
        recovered, day, lost = tab.until(f"{events}.length === 3 && {events}")
    assert (recovered, lost) == ("took 2.3 s, mesh dp2", "it died") and str(time.localtime(now - 86_400).tm_mday) in day


def test_a_run_that_has_ended_is_shown_from_its_files(tab: Browser, tmp_path: Path) -> None:
    page = EndedRun(ended_run(tmp_path)[0])
    with closing(PageServer(page, "127.0.0.1", 0, TOKEN, None)) as served:
        tab.look(1300)
        tab.open(f"{served.url}?token={TOKEN}")
        tab.errors.clear()  # those of the previous page, whose driver is gone
        tab.until("document.getElementById('state')?.textContent === 'finished'")
        tab.value("document.querySelector('.tile[data-rank=\"3\"]').click()")
        text = " ".join(tab.value("document.getElementById('panel').innerText").split())
        assert "state ended" in text and "CPU of 10.0.0.1" in text and "last answer" not in text
        shown = "document.getElementById('timeline').contentDocument?.querySelector('section h2')?.textContent"
        assert tab.until(shown) == "Measuredstep 6"
        assert tab.until("document.getElementById('loads').innerText").split()[:2] == ["layer", "1"]
        tab.until("!document.getElementById('slow').hidden")
    assert tab.value("document.getElementById('connection').textContent") == "" and tab.errors == []
