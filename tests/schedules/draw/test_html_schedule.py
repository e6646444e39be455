"""The page of schedules: dependencies, saved activations, the critical path, two schedules on one page."""

from __future__ import annotations

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from dependency_graph import build
from html_pages import (
    NAMES,
    Page,
    assert_holds,
    dependencies_of,
    keys_of,
    page_of,
    payload,
    rows_of,
    simulated_program,
)
from saved_activations import activations_over_time

from pentad.orchestrator.cli.cli import main
from pentad.schedules.simulate.critical_path import critical_path

SIZES = ("--ranks", "4", "--microbatches", "8")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_the_timeline(name: str) -> None:
    schedule = simulated_program(name)
    data = payload(page_of(schedule))
    assert_holds(data, data["panels"][0], schedule.timeline)


@pytest.mark.parametrize("name", NAMES)
def test_dependencies_are_the_waits_of_the_program(name: str) -> None:
    schedule = simulated_program(name)
    data = payload(page_of(schedule))
    streams = schedule.program.streams
    expected = {
        (rank, str(part.key)): {(rank, str(key)) for key in (action.waits if part is action.parts[0] else part.waits)}
        for rank, stream in enumerate(streams)
        for action in stream
        for part in action.parts
    }
    assert dependencies_of(data, 0) == expected
    slots = {
        (rank, str(p.key)): p.slot for rank, stream in enumerate(streams) for action in stream for p in action.parts
    }
    assert dict(zip(rows_of(data, 0), data["programs"][0]["slots"], strict=True)) == slots


@pytest.mark.parametrize("name", NAMES)
def test_events_are_those_of_the_program(name: str) -> None:
    program = simulated_program(name).program
    data = payload(page_of(simulated_program(name)))
    rows, events = rows_of(data, 0), data["programs"][0]["events"]
    found = {frozenset(rows[row] for row in event) for scope in events.values() for event in scope}
    expected = (
        {(node.rank, str(program.streams[node.rank][node.at].key)) for node in event}
        for event in build(program).members
    )
    assert {event for event in found if len(event) > 1} == {frozenset(event) for event in expected if len(event) > 1}


def test_the_first_halves_of_overlapped_pairs_are_marked() -> None:
    schedule = simulated_program("dualpipe")
    data = payload(page_of(schedule))
    rows, streams = rows_of(data, 0), enumerate(schedule.program.streams)
    expected = [(rank, str(action.key)) for rank, stream in streams for action in stream if len(action.parts) == 2]
    assert expected and [rows[row] for row in data["programs"][0]["overlapped"]] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_is_that_of_the_saved_activations(name: str) -> None:
    """At the times of the timeline; changes at the same time come in program order."""
    schedule = simulated_program(name)
    data = payload(page_of(schedule, limit=5.5))
    found = data["programs"][0]["memory"]
    assert found["limit"] == 5.5 and not found["in_bytes"] and not any(found["held"])
    spans = {(span.rank, span.name): span for span in schedule.timeline.spans}
    changes = [list[tuple[float, float]]() for _ in schedule.program.streams]
    for key, start, end in zip(rows_of(data, 0), found["starts"], found["ends"], strict=True):
        changes[key[0]] += [(spans[key].start, start * found["unit"]), (spans[key].end, end * found["unit"])]
    for own, expected in zip(changes, activations_over_time(schedule.program, schedule.timeline), strict=True):
        own = sorted((change for change in own if change[1]), key=lambda change: change[0])
        levels = zip([time for time, _ in own], accumulate(by for _, by in own), strict=True)
        times, saved = zip(*levels, strict=True)
        kept = [now for before, now in pairwise([(0.0, 0.0), *expected]) if now[1] != before[1]]
        assert times == pytest.approx([time for time, _ in kept])
        assert saved == pytest.approx([level for _, level in kept])


@pytest.mark.parametrize("name", NAMES)
def test_the_critical_path_is_that_of_the_program(name: str) -> None:
    schedule = simulated_program(name)
    data = payload(page_of(schedule))
    keys, found = keys_of(data, data["panels"][0]), data["panels"][0]["steps"][0]["path"]
    path = critical_path(schedule.program, schedule.costs)
    assert [keys[number] for number in found["number"]] == [(segment.rank, segment.key) for segment in path]
    ends = accumulate(found["length"], initial=found["begin"])
    zero = data["panels"][0]["steps"][0]["zero"]
    assert [zero + end / 1e9 for end in ends] == pytest.approx([0.0, *(each.end for each in path)], abs=1.1e-9)


def test_chunks_are_in_the_order_of_the_placement() -> None:
    ranks = payload(page_of(simulated_program("dualpipe")))["panels"][0]["steps"][0]["ranks"]
    assert [rank["stages"] for rank in ranks] == [[0, 3], [1, 2], [2, 1], [3, 0]]


def test_a_span_takes_few_bytes() -> None:
    schedule = simulated_program("zb-h1", 8, 64)
    empty = len(page_of(simulated_program("zb-h1", 1, 1)))
    assert len(page_of(schedule)) - empty < 70 * len(schedule.timeline.spans)


def test_two_schedules_share_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.html"
    limited = ("zb-2p", *SIZES, "--memory-limit", "6", "--comm", "0.1")
    assert main(["schedule", *limited, "--html", str(file), "--beside", "zb-v"]) == 0
    data = payload(file.read_text())
    assert [program["name"] for program in data["programs"]] == ["zb-2p", "zb-v"]
    assert main(["schedule", "zb-v", *SIZES, "--comm", "0.1", "--json"]) == 0
    separate = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["panels"][1]["steps"][0]["makespan"] == separate["makespan"]
    assert data["panels"][1]["steps"][0]["bubble"] == separate["bubble"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--html", "a.html", "--beside", "zb-w"), "--beside is 'zb-w': .*did you mean 'zb-v'"),
        (("--html", "a.html", "--beside", "none.csv"), "--beside is 'none.csv': .*none.csv"),
        (("--html", "a.html", "--beside", "none.py:f"), "--beside is 'none.py:f': .*cannot be read"),
        (("--beside", "zb-v"), "--beside is 'zb-v' without --html: expected both"),
    ],
)
def test_a_mistake_in_the_second_schedule_is_one_sentence(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "zb-h1", *SIZES, *options]) == 1
    assert re.fullmatch(f"pentad: {message}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["{{data}} \"'&amp;", "<b>&", "<!--<script>"])
def test_a_path_as_a_name_stays_text(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    custom = tmp_path / folder / "x.py"
    custom.write_text(
        "def f(rank, ranks, microbatches):\n"
        "    return [f'{rank}{op}{m}' for op in ('F', 'BW') for m in range(microbatches)]\n"
    )  # fmt: skip
    texts = []
    for name in ("gpipe", f"{custom}:f"):
        file = tmp_path / "a.html"
        assert main(["schedule", name, *SIZES, "--html", str(file), "--beside", name]) == 0
        texts.append(file.read_text())
    plain, found, text = Page(texts[0]), Page(texts[1]), texts[1]
    assert found.tags == plain.tags and found.links == []
    assert str(custom) in found.texts["h1"] and str(custom) in payload(text)["programs"][1]["name"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|\bsrc=|\bhref=", text.replace(str(custom), ""))
