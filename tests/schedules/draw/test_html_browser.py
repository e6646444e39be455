"""The pages as a browser shows them: selection, search, steps, colours and labels on a narrow window."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROME, Browser, browser
from html_pages import NAMES, keys_of, page_of, payload, simulated_program
from sweep_rows import PRUNED, ROWS
from sweep_rows import page_of as sweep_of

from pentad.schedules.draw.html import timeline_page
from pentad.schedules.simulate.timeline import Timeline

pytestmark = pytest.mark.skipif(not CHROME, reason="wants: chromium")
Browse = Callable[..., dict]
PRESS = """
const press = (key, target = document.body, more = {}) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const type = (text) => {
  byId("find").value = text;
  byId("find").dispatchEvent(new Event("input", { bubbles: true }));
};
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The tab in which all pages open in turn: starting a browser takes longer than opening a page."""
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browse(tab: Browser, tmp_path: Path) -> Browse:
    """Opens a page, runs a script in it and returns the script's result."""

    def run(text: str, script: str, *, width: int = 1200, dark: bool = False) -> dict:
        page = tmp_path / "page.html"
        page.write_text(text)
        tab.look(width, 860, dark=dark)
        tab.open(page.as_uri())
        tab.until(f"location.href === {json.dumps(page.as_uri())} && document.readyState === 'complete'")
        return tab.value(f"(() => {{{PRESS}{script}}})()")

    return run


def run_page(steps: tuple[int, ...] = (3, 4)) -> str:
    """A run whose steps get slower, measured and simulated."""
    spans = simulated_program("zb-h1").timeline.spans
    timelines = [
        Timeline(
            source,
            tuple(
                span._replace(step=step, start=slow * step * span.start / 1e3, end=slow * step * span.end / 1e3)
                for step in steps
                for span in spans
            ),
        )
        for source, slow in (("measured", 1.1), ("simulated", 1.0))
    ]
    return timeline_page(timelines, title="t", facts={"program": "p"})


def test_a_selected_instruction_lists_its_dependencies(browse: Browse) -> None:
    schedule = simulated_program("zb-h1")
    data = payload(page_of(schedule))
    number = keys_of(data, data["panels"][0]).index((2, "2F4"))
    found = browse(
        page_of(schedule, simulated_program("zb-h2")),
        f"""
        const shown = () => document.querySelector("#selection b")?.textContent ?? "";
        select(panels[0], {number});
        const names = (nodes) => nodes.map((l) => [nameOf(panels[0], l.n), l.binding, names(l.children)]);
        const dependencies = names(panels[0].selected.dependencies);
        const selected = shown();
        press("ArrowRight");
        const after = shown();
        press("ArrowDown");
        const below = rankOf(panels[0], panels[0].selected.n);
        press("Escape");
        const heads = [...document.querySelectorAll("section > header")].map((h) => h.textContent);
        return {{ dependencies, selected, after, below, none: view.selected, heads }};
        """,
    )
    spans = {(span.rank, span.name): span for span in schedule.timeline.spans}
    names = [name for name, _, _ in found["dependencies"]]
    assert found["selected"] == "2F4" and "2RECV_F4" in names
    for name, binding, _ in found["dependencies"]:
        assert binding == (abs(spans[2, name].end - spans[2, "2F4"].start) < 1e-9)
    assert any(binding for _, binding, _ in found["dependencies"])
    beyond = next(children for name, _, children in found["dependencies"] if name == "2RECV_F4")
    assert "1F4" in [name for name, _, _ in beyond]
    compute = [str(part.key) for action in schedule.program.compute().streams[2] for part in action.parts]
    assert found["after"] == compute[compute.index("2F4") + 1]
    assert found["below"] == 3 and found["none"] is None
    assert all("makespan" in head and "longest" in head and "bubble" in head for head in found["heads"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_start_is_set_by_a_dependency_that_ends_then(browse: Browse, name: str) -> None:
    found = browse(
        page_of(simulated_program(name), limit=6.0),
        """
        const panel = panels[0];
        const wrong = [];
        for (let n = 0; n < panel.count; n++) {
          const nodes = dependencyTree(panel, n, true);
          const isSet = nodes.some((node) => node.binding) || panel.start[n] === panel.first;
          const causal = nodes.every((node) => node.slack >= -1);
          const leadsBack = (node) => dependencyTree(panel, node.n, false).some((d) => eventOf(panel, d.n).includes(n));
          if (!isSet || !causal || !nodes.every(leadsBack)) wrong.push(nameOf(panel, n));
        }
        byId("critical").click();
        for (const row of ROWS) toggleRow(row, true);
        select(panel, panel.critical.at(-2).n);
        for (const factor of [0.3, 0.3, 3]) zoom(factor);
        paint(panel);
        paintMemory(panel);
        return { wrong, edges: selectedEdges(panel).length, count: panel.count };
        """,
    )
    assert found["wrong"] == [] and found["edges"] > 0
    assert found["count"] == len(simulated_program(name).timeline.spans)


STEP_THROUGH = """
const current = () => search.matches[search.index];
const shown = () => [nameOf(current().panel, current().n), current().panel.start[current().n]];
const highlighted = () => panels.map((p) => p.highlighted?.reduce((a, b) => a + b, 0) ?? null);
const found = {};
for (const text of TEXTS) {
  type(text);
  const names = search.matches.map((match) => nameOf(match.panel, match.n));
  found[text] = { count: byId("found").textContent, names, highlighted: highlighted() };
}
press("/");
found.focused = document.activeElement === byId("find");
found.steps = [];
for (const key of ["Enter", "ArrowDown", "Enter", "Shift+Enter", "ArrowUp", "ArrowUp"]) {
  press(key.replace("Shift+", ""), byId("find"), { shiftKey: key.startsWith("Shift") });
  found.steps.push([...shown(), byId("found").textContent, view.from <= shown()[1] && shown()[1] <= view.to]);
}
press("Escape", byId("find"));
const focused = document.activeElement === byId("find");
found.end = [byId("find").value, byId("found").textContent, search.matches.length, focused];
found.hidden = [...hiddenRows];
return found;
"""


@pytest.mark.parametrize("kind", ["schedule", "run"])
def test_search_finds_marks_and_steps_through_instructions(browse: Browse, kind: str) -> None:
    schedule = simulated_program("zb-h1")
    text = page_of(schedule) if kind == "schedule" else run_page((3,))
    found = browse(text, "const TEXTS = ['1f6', 'F6', 'W', '2SEND', 'norm', 'nothing', 'SEND_F'];" + STEP_THROUGH)
    copies = 1 if kind == "schedule" else 2  # panels
    spans = sorted(schedule.timeline.spans, key=lambda span: span.start)
    expected = {
        "1f6": [s.name for s in spans if s.name == "1F6"],
        "F6": [s.name for s in spans if (s.op, s.microbatch) == ("F", 6)],
        "W": [s.name for s in spans if s.op == "W"],
        "2SEND": [s.name for s in spans if s.op in ("SEND_F", "SEND_B") and s.stage == 2],
        "norm": [s.name for s in spans if s.op == "NORM"],
        "nothing": [],
        "SEND_F": [s.name for s in spans if s.op == "SEND_F"],
    }
    for query, names in expected.items():
        assert sorted(found[query]["names"]) == sorted(names * copies), query
        plural = "match" if len(names) * copies == 1 else "matches"
        assert found[query]["count"] == (f"{len(names) * copies} {plural}" if names else "no match")
        assert found[query]["highlighted"] == [len(names)] * copies
    assert found["focused"]
    count = len(expected["SEND_F"]) * copies
    assert [step[2] for step in found["steps"]] == [f"{i} of {count}" for i in (1, 2, 3, 2, 1, count)]
    assert found["steps"][0][1] <= found["steps"][1][1] <= found["steps"][2][1]
    assert all(in_view for *_, in_view in found["steps"])
    assert found["end"] == ["", "", 0, False]
    assert "send" not in found["hidden"]


def test_all_panels_follow_the_step(browse: Browse) -> None:
    found = browse(
        run_page(),
        """
        const heads = () => panels.map((p) => p.header.querySelector("h2").textContent);
        const last = heads();
        type("1F6");
        press("[");
        const lengths = panels.map((p) => Math.round((p.last - p.first) / 1e4));
        return { last, first: heads(), lengths, matches: search.matches.length };
        """,
    )
    assert found["last"] == ["Measuredstep 4", "Simulatedstep 4, at its measured costs"]
    assert found["first"] == ["Measuredstep 3", "Simulatedstep 3, at its measured costs"]
    assert found["lengths"][0] == pytest.approx(1.1 * found["lengths"][1], rel=1e-3)
    assert found["matches"] == 2


COLOURS = """
paintBase(panels[0]);
const panel = panels[0];
const size = 24;
let worst = 0, windows = 0;
for (const at of visibleRanks(panel).filter((_, i) => i % 5 === 0)) {
  const track = panel.ranks[at].tracks[0];
  const [top, tall] = rowPlace(panel, at, "compute");
  const y = Math.round(top + tall / 2);
  for (let left = LEFT; left + size < LEFT + panel.plotWidth; left += size) {
    const [from, to] = [timeAt(panel, left), timeAt(panel, left + size)];
    const expected = [0, 0, 0];
    let covered = 0;
    for (let n = track.first; n < track.end; n++) {
      const share = (Math.min(panel.end[n], to) - Math.max(panel.start[n], from)) / (to - from);
      if (share <= 0) continue;
      covered += share;
      for (let c = 0; c < 3; c++) expected[c] += share * theme.linear[panel.fill[n]][c];
    }
    if (covered < 0.999) continue;
    windows++;
    const data = panel.base.getImageData(left, y, size, 1).data;
    for (let c = 0; c < 3; c++) {
      let mean = 0;
      for (let k = 0; k < size; k++) mean += linear(data[4 * k + c] / 255) / size;
      worst = Math.max(worst, Math.abs(mean - expected[c]));
    }
  }
}
return { worst, windows, ratio: devicePixelRatio, mixed: panel.hasMixed, width: innerWidth };
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("zb-h2", 64, 256), ("zb-h1", 16, 64)])
def test_a_narrow_window_shows_no_bands_that_are_not_there(
    browse: Browse, name: str, ranks: int, microbatches: int
) -> None:
    found = browse(page_of(simulated_program(name, ranks, microbatches)), COLOURS, width=390)
    assert found["width"] == 390 and found["ratio"] == 1 and found["mixed"]
    assert found["windows"] > 20
    assert found["worst"] < 0.03


LABELS = """
const wrong = [];
const original = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (value, px, y) {
  const wide = this.measureText(value).width;
  const left = { left: px, center: px - wide / 2, right: px - wide }[this.textAlign];
  if (left < 0 || left + wide > this.canvas.width / devicePixelRatio) wrong.push([value, left, wide]);
  original.call(this, value, px, y);
};
for (const action of ACTIONS) {
  action();
  for (const panel of panels) {
    markStale(panel);
    paint(panel);
    if (panel.curve) paintMemory(panel);
  }
}
for (const element of document.querySelectorAll("header *, nav *, #selection *, footer *"))
  if (element.getBoundingClientRect().right > innerWidth + 0.5) wrong.push([element.tagName, element.textContent]);
return { wrong, wider: document.documentElement.scrollWidth - innerWidth };
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [390, 800])
@pytest.mark.parametrize("kind", ["schedule", "run"])
def test_labels_are_not_cut_off(browse: Browse, kind: str, width: int) -> None:
    one, other = simulated_program("zb-h1"), simulated_program("zb-v")
    text = page_of(one, other, limit=5.5) if kind == "schedule" else run_page()
    actions = """
    const ACTIONS = [
      () => {},
      () => (view.cursor = view.last),
      () => (view.cursor = view.first),
      () => zoom(0.2, view.last),
      () => type("SEND"),
      () => IS_SCHEDULE && select(panels[1], 40),
    ];
    """
    found = browse(text, actions + LABELS, width=width)
    assert found["wrong"] == [] and found["wider"] <= 0


@pytest.mark.parametrize(("dark", "word"), [(False, "lighter"), (True, "darker")])
def test_the_legend_says_how_later_chunks_look(browse: Browse, dark: bool, word: str) -> None:
    found = browse(page_of(simulated_program("zb-v")), "return { legend: byId('legend').textContent };", dark=dark)
    assert f"{word}: a rank's second chunk" in found["legend"]


# ---- the page of a sweep ----

SEEN = """
const texts = (where) => [...document.querySelectorAll(where)].map((each) => each.textContent);
const grip = document.querySelector(".grip[aria-label=pp]");
const all = texts("#trials tbody tr").length;
if (grip) press("ArrowUp", grip);
return {
  all, chosen: texts("#trials tbody tr").length, map: texts("#map td b"), causes: texts("#trials .cause"),
  pruned: document.querySelectorAll("#lines .line.pruned").length,
  failed: document.querySelectorAll("#lines .line.failed").length,
  faded: document.querySelectorAll("#lines .line.out").length,
  names: texts("#lines text.name"), wide: document.documentElement.scrollWidth > innerWidth,
};
"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_the_best_trial_is_in_the_map_and_an_axis_selects(browse: Browse, width: int, dark: bool) -> None:
    seen = browse(sweep_of(*ROWS), SEEN, width=width, dark=dark)
    assert seen["map"] == ["44.0 %", "\u2013"] and seen["names"] == ["GPUs", "pp", "tokens/s"]
    assert (seen["all"], seen["chosen"], seen["faded"]) == (7, 4, 3)
    assert (seen["pruned"], seen["failed"], seen["wide"]) == (1, 1, False)
    assert seen["causes"] == ["pruned: does not fit: </script>"]


@pytest.mark.slow
@pytest.mark.parametrize("row", [PRUNED, ROWS[0]])
def test_a_sweep_of_one_trial_is_drawn(browse: Browse, row: dict) -> None:
    assert browse(sweep_of(row), SEEN)["all"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_names_and_values_of_all_axes_of_a_sweep_are_whole(browse: Browse, width: int) -> None:
    cut = """
    const frame = document.querySelector("#lines svg").getBoundingClientRect();
    const isCut = (box) => box.left < frame.left || box.right > frame.right + 0.5;
    const cut = [...document.querySelectorAll("#lines text")].filter((text) => isCut(text.getBoundingClientRect()));
    return { cut: cut.map((text) => text.textContent) };
    """
    assert browse(sweep_of(*(row | {"device": "cpu"} for row in ROWS)), cut, width=width)["cut"] == []
