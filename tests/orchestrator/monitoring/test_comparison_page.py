"""The page of a run whose program is known: dependencies sent once, and the critical path of each step."""

from __future__ import annotations

from itertools import accumulate

import pytest
from html_pages import dependencies_of, keys_of, payload
from measured_steps import NAMES, MeasuredRun, measured_run

from pentad.schedules.draw.page_program import rank_groups
from pentad.schedules.spec.mesh import Mesh

runs = pytest.mark.parametrize("run", NAMES, indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> MeasuredRun:
    return measured_run(request.param)


@runs
def test_every_dependency_is_one_of_the_program_and_is_sent_once(run: MeasuredRun) -> None:
    data = payload(run.page())
    expected = {
        (rank, str(part.key)): {(rank, str(key)) for key in (action.waits if part is action.parts[0] else part.waits)}
        for rank, stream in enumerate(run.program.streams)
        for action in stream
        for part in action.parts
    }
    assert dependencies_of(data, 0) == expected
    assert len(data["programs"]) == 1 and {panel["program"] for panel in data["panels"]} == {0}


@runs
def test_the_path_of_every_step_ends_with_it_and_adds_up_to_its_time(run: MeasuredRun) -> None:
    data = payload(run.page())
    for panel, timeline in zip(data["panels"], (run.measured, run.simulated), strict=True):
        for step in panel["steps"]:
            spans, path = timeline.of_step(step["step"]).spans, step["path"]
            keys = keys_of(data, {"steps": [step]})
            first, last = min(span.start for span in spans), max(span.end for span in spans)
            assert step["zero"] + path["begin"] / 1e9 == pytest.approx(first, abs=2e-9)
            assert sum(path["length"]) == pytest.approx((last - first) * 1e9, abs=4)
            assert min(path["length"]) >= 0
            ends = {(span.rank, span.name): span.end for span in spans}
            for number, end in zip(path["number"], accumulate(path["length"], initial=path["begin"]), strict=False):
                assert keys[number] in ends and step["zero"] + end / 1e9 <= last + 2e-9
            assert last == max(ends[key] for key in run.pair_of(keys[path["number"][-1]]))
            assert len(path["part"]) == len(path["number"]) and {*path["part"]} <= {*range(len(data["parts"]))}


def test_a_step_of_another_program_has_no_path() -> None:
    data = payload(measured_run("zb-h2").page(other_step="1f1b"))
    assert [step["path"] is None for step in data["panels"][0]["steps"]] == [True, False, False]


def test_ranks_of_the_mesh_share_transfers_and_collectives_as_their_groups_do() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2)
    groups = rank_groups(mesh)
    for one in range(mesh.size):
        for other in range(mesh.size):
            a, b = mesh.coordinates(one), mesh.coordinates(other)
            assert (groups["replica"][one] == groups["replica"][other]) == ((a.dp, a.tp) == (b.dp, b.tp))
            assert (groups["collective"][one] == groups["collective"][other]) == (a.tp == b.tp)


def test_more_steps_cost_no_more_dependencies() -> None:
    """Each step adds its spans, and a path that refers to some of them."""
    run = measured_run("zb-h2")
    one, three = (payload(run.page(steps)) for steps in ((5,), (3, 4, 5)))
    assert len(str(one["programs"])) == len(str(three["programs"]))
    path, spans = (sum(len(str(step[part])) for step in three["panels"][0]["steps"]) for part in ("path", "ranks"))
    assert path < 0.4 * spans
