"""The page of a schedule: what waits for what, what is kept, the critical path, two schedules on one page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from html_pages import Page, payload, spans_of, spelled_out
from plain_graph import build

from pentad.orchestrator.cli.cli import main
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.html import schedule_page
from pentad.schedules.draw.page_program import Drawn
from pentad.schedules.simulate.analysis import critical_path
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import activations_over_time
from pentad.schedules.simulate.simulate import simulate

NAMES = ["1f1b", "zb-h2", "zb-v", "interleaved-zb", "dualpipe", "seq-1f1b", "zb-h2 ahead"]
SIZES = ("--ranks", "4", "--microbatches", "8")
Key = tuple[int, str]  # rank and name of an instruction


def drawn(name: str, ranks: int = 4, microbatches: int = 8) -> Drawn:
    """'NAME ahead' has steps that run ahead of their norm."""
    name, _, ahead = name.partition(" ")
    program = compile_program(name, ranks, microbatches, replicas=2, validated=bool(ahead))
    parts = {"chunks": program.chunks, "slices": program.slices}
    costs = Costs.uniform(program.stages, 1.0, 1.2, 0.8, **parts, transfer=0.07)
    return Drawn(program, costs, simulate(program, costs))


def page(*shown: Drawn, limit: float | None = None) -> str:
    return schedule_page(shown, title="t", facts={}, limit=limit)


def keys_of(data: dict, panel: dict) -> list[Key]:
    """Rank and name of the spans of a panel, by their numbers."""
    names = spelled_out(data["kinds"])["name"]
    ranks = panel["steps"][0]["ranks"]
    return [(rank["rank"], names[kind]) for rank in ranks for track in rank["tracks"] for kind in track["kind"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_the_timeline(name: str) -> None:
    shown = drawn(name)
    data = payload(page(shown))
    found, expected = spans_of(data, data["panels"][0]), sorted(shown.timeline.spans)
    assert [span[:8] for span in found] == [span[:8] for span in expected]
    assert [span[8] for span in found] == pytest.approx([span.start for span in expected], abs=1.1e-9, rel=0)
    assert [span[9] for span in found] == pytest.approx([span.end for span in expected], abs=1.1e-9, rel=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_waits_on_the_page_waits_in_the_program(name: str) -> None:
    program = drawn(name).program
    data = payload(page(drawn(name)))
    panel = data["panels"][0]
    keys, own = keys_of(data, panel), panel["program"]
    numbers = iter(own["waits"]["number"])
    found = {key: {keys[next(numbers)] for _ in range(n)} for key, n in zip(keys, own["waits"]["count"], strict=True)}
    expected = {
        (rank, str(part.key)): {(rank, str(key)) for key in (unit.waits if part is unit.parts[0] else part.waits)}
        for rank, stream in enumerate(program.streams)
        for unit in stream
        for part in unit.parts
    }
    assert found == expected and not list(numbers)
    slots = {(r, str(p.key)): p.slot for r, stream in enumerate(program.streams) for u in stream for p in u.parts}
    assert dict(zip(keys, own["slot"], strict=True)) == slots


@pytest.mark.parametrize("name", NAMES)
def test_what_meets_on_the_page_is_one_event_of_the_program(name: str) -> None:
    program = drawn(name).program
    data = payload(page(drawn(name)))
    keys = keys_of(data, data["panels"][0])
    found = {frozenset(keys[number] for number in group) for group in data["panels"][0]["program"]["meets"]}
    graph = build(program)
    events = ({(node.rank, str(program.streams[node.rank][node.at].key)) for node in event} for event in graph.members)
    assert found == {frozenset(event) for event in events if len(event) > 1}


def test_the_first_halves_of_pairs_are_marked() -> None:
    shown = drawn("dualpipe")
    data = payload(page(shown))
    keys = keys_of(data, data["panels"][0])
    streams = enumerate(shown.program.streams)
    expected = [(rank, str(unit.key)) for rank, stream in streams for unit in stream if len(unit.parts) == 2]
    assert expected and [keys[number] for number in data["panels"][0]["program"]["pairs"]] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_curves_are_the_activations_kept(name: str) -> None:
    shown = drawn(name)
    memory = payload(page(shown, limit=5.5))["panels"][0]["program"]["memory"]
    assert memory["limit"] == 5.5
    for rank, changes in zip(memory["ranks"], activations_over_time(shown.program, shown.timeline), strict=True):
        assert [time * 1e-9 for time in accumulate(rank["gap"])] == pytest.approx([t for t, _ in changes], abs=1.1e-9)
        assert [kept * memory["unit"] for kept in rank["kept"]] == pytest.approx([kept for _, kept in changes])


@pytest.mark.parametrize("name", NAMES)
def test_the_critical_path_is_the_programs(name: str) -> None:
    shown = drawn(name)
    data = payload(page(shown))
    keys, critical = keys_of(data, data["panels"][0]), data["panels"][0]["program"]["critical"]
    path = critical_path(shown.program, shown.costs)
    assert [keys[number] for number in critical["number"]] == [(step.rank, step.key) for step in path]
    assert critical["why"] == [step.why for step in path]


def test_a_rank_has_its_chunks_in_the_order_of_its_placement() -> None:
    ranks = payload(page(drawn("dualpipe")))["panels"][0]["steps"][0]["ranks"]
    assert [rank["stages"] for rank in ranks] == [[0, 3], [1, 2], [2, 1], [3, 0]]


def test_a_span_takes_few_bytes() -> None:
    shown = drawn("zb-h1", 8, 64)
    bare = len(page(drawn("zb-h1", 1, 1)))
    assert len(page(shown)) - bare < 70 * len(shown.timeline.spans)


def test_two_schedules_share_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.html"
    limited = ("zb-2p", *SIZES, "--memory-limit", "6", "--comm", "0.1")
    assert main(["schedule", *limited, "--html", str(file), "--beside", "zb-v"]) == 0
    data = payload(file.read_text())
    assert [panel["program"]["name"] for panel in data["panels"]] == ["zb-2p", "zb-v"]
    assert main(["schedule", "zb-v", *SIZES, "--comm", "0.1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["panels"][1]["steps"][0]["makespan"] == alone["makespan"]
    assert data["panels"][1]["steps"][0]["bubble"] == alone["bubble"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--html", "a.html", "--beside", "zb-w"), "--beside is 'zb-w': .*did you mean 'zb-v'"),
        (("--html", "a.html", "--beside", "none.csv"), "--beside is 'none.csv': .*none.csv"),
        (("--html", "a.html", "--beside", "none.py:f"), "--beside is 'none.py:f': .*cannot be read"),
        (("--beside", "zb-v"), "--beside is 'zb-v', but .*no --html"),
    ],
)
def test_a_bad_other_is_one_sentence(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "zb-h1", *SIZES, *options]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(f"pentad: {words}.*\n", said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["{{data}} \"'&amp;", "<b>&", "<!--<script>"])
def test_a_path_as_a_name_stays_text(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    own = tmp_path / folder / "x.py"
    own.write_text(
        "def f(rank, ranks, microbatches):\n"
        "    return [f'{rank}{op}{m}' for op in ('F', 'BW') for m in range(microbatches)]\n"
    )  # fmt: skip
    texts = []
    for name in ("gpipe", f"{own}:f"):
        file = tmp_path / "a.html"
        assert main(["schedule", name, *SIZES, "--html", str(file), "--beside", name]) == 0
        texts.append(file.read_text())
    plain, found, text = Page(texts[0]), Page(texts[1]), texts[1]
    assert found.tags == plain.tags and found.links == []
    assert str(own) in found.texts["h1"] and str(own) in payload(text)["panels"][1]["program"]["name"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|\bsrc=|\bhref=", text.replace(str(own), ""))


CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
Browse = Callable[[str, str], dict]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page in a browser, runs a script in it, and returns what the script makes."""

    def run(text: str, script: str) -> dict:
        file = tmp_path / "page.html"
        tail = f"<script>document.title = JSON.stringify((() => {{{script}}})())</script></body>"
        file.write_text(text.replace("</body>", tail))
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        done = subprocess.run([CHROME, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True)
        found = Page(done.stdout).texts["title"]
        return json.loads(found)

    return run


@pytest.mark.skipif(not CHROME, reason="wants: chromium")
def test_a_browser_shows_what_a_chosen_instruction_waits_for(browse: Browse) -> None:
    shown = drawn("zb-h1")
    data = payload(page(shown))
    number = keys_of(data, data["panels"][0]).index((2, "2F4"))
    told = browse(
        page(shown, drawn("zb-h2")),
        f"""
        const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
        const told = () => document.querySelector("#chosen b")?.textContent ?? "";
        pick(panels[0], {number});
        const leaves = (some) => some.map((l) => [kinds.name[kindOf(panels[0], l.n)], l.bound, leaves(l.below)]);
        const needs = leaves(panels[0].chosen.needs);
        const chosen = told();
        press("ArrowRight");
        const after = told();
        press("ArrowDown");
        const below = rankOf(panels[0], panels[0].chosen.n);
        press("Escape");
        const heads = [...document.querySelectorAll("section > header")].map((h) => h.textContent);
        return {{ needs, chosen, after, below, none: view.chosen, heads }};
        """,
    )
    spans = {(span.rank, span.name): span for span in shown.timeline.spans}
    names = [name for name, _, _ in told["needs"]]
    assert told["chosen"] == "2F4" and "2RECV_F4" in names
    for name, bound, _ in told["needs"]:
        assert bound == (abs(spans[2, name].end - spans[2, "2F4"].start) < 1e-9)
    assert any(bound for _, bound, _ in told["needs"])
    beyond = next(below for name, _, below in told["needs"] if name == "2RECV_F4")
    assert "1F4" in [name for name, _, _ in beyond]
    compute = [str(part.key) for unit in shown.program.compute().streams[2] for part in unit.parts]
    assert told["after"] == compute[compute.index("2F4") + 1]
    assert told["below"] == 3 and told["none"] is None
    assert all("makespan" in head and "longest" in head and "bubble" in head for head in told["heads"])


@pytest.mark.skipif(not CHROME, reason="wants: chromium")
@pytest.mark.parametrize("name", NAMES)
def test_in_a_browser_every_start_is_bound_by_what_ended_last(browse: Browse, name: str) -> None:
    told = browse(
        page(drawn(name), limit=6.0),
        """
        const panel = panels[0];
        const wrong = [];
        for (let n = 0; n < panel.count; n++) {
          const needs = tree(panel, n, true);
          const held = needs.some((leaf) => leaf.bound) || startOf(panel, n) === panel.first;
          const causal = needs.every((leaf) => leaf.slack >= -1);
          const both = needs.every((leaf) => tree(panel, leaf.n, false).some((l) => membersOf(panel, l.n).includes(n)));
          if (!held || !causal || !both) wrong.push(kinds.name[kindOf(panel, n)]);
        }
        byId("critical").click();
        for (const row of ROWS) toggle(row, true);
        pick(panel, panel.critical.number.at(-2));
        for (const factor of [0.3, 0.3, 3]) zoom(factor);
        paint(panel);
        paintCurve(panel);
        return { wrong, lines: edges(panel).length, count: panel.count };
        """,
    )
    assert told["wrong"] == [] and told["lines"] > 0
    assert told["count"] == len(drawn(name).timeline.spans)
