"""Results of the Python API are those of the command line, as objects that print what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import SIZES, Pentad
from small_checkpoint import save_small

import pentad as api
from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks

OPTIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("zb-h2", {}, ()),
    ("interleaved", {"chunks": 2, "group": 4, "comm": 0.1}, ("--chunks", "2", "--group", "4", "--comm", "0.1")),
    ("1f1b", {"costs": (1, 2, 1), "recompute": "all"}, ("--costs", "1,2,1", "--recompute", "all")),
    ("1f1b", {"recompute": [0, 2], "max_resident": 2}, ("--recompute", "0,2", "--max-resident", "2")),
    ("zb-v", {"zero": 3, "prefetch": 0, "max_gathered": 2}, ("--zero", "3", "--prefetch", "0", "--max-gathered", "2")),
    ("zb-h1", {"post_validation": True}, ("--post-validation",)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "keywords", "options"), OPTIONS)
def test_a_schedule_is_that_of_the_command_line(
    pentad: Pentad, name: str, keywords: dict[str, Any], options: tuple[str, ...]
) -> None:
    found = api.schedule(name, 4, 8, **keywords)
    assert found.facts() == json.loads(pentad("schedule", name, *SIZES, *options, "--json")[1])
    assert repr(found) == pentad("schedule", name, *SIZES, *options)[1].rstrip("\n")
    assert ElementTree.fromstring(found._repr_svg_()).tag.endswith("svg")
    assert found.html(found).count(found.program.hash[:12]) >= 2


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"recompute": [0, 4]}, "--recompute is '0,4': expected all or stages of 0 to 3, such as 0,1"),
        ({"recompute": []}, "--recompute is '': expected all or stages of 0 to 3"),
        ({"costs": (1, 2)}, "--costs is '1,2': expected three numbers F,B,W such as 1,1,1"),
        ({"zero": 5}, "--zero is 5: expected a stage of ZeRO, 0 to 3"),
        ({"max_resident": 0}, "--max-resident is 0: expected a number of microbatches greater than 0"),
    ],
)
def test_a_mistake_is_the_sentence_of_the_command_line(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(api.PentadError, match=f"^{re.escape(sentence)}"):
        api.schedule("1f1b", 4, 8, **keywords)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overrides", [{}, {"mesh": {"pp": 2, "cp": 2}, "data": {"path": "nowhere"}}])
def test_a_plan_is_that_of_the_command_line(pentad: Pentad, overrides: dict[str, Any]) -> None:
    words = [f"{section}.{key}={value}" for section, keys in overrides.items() for key, value in keys.items()]
    found = api.plan(device="cuda", device_gib=80.0, **overrides)
    status, out, _ = pentad("plan", *words, "--device", "cuda", "--memory", "80", "--json")
    assert (json.dumps(found.facts()), int(not found.ok)) == (out.rstrip("\n"), status)
    plain = pentad("plan", *words, "--device", "cuda", "--memory", "80")[1]
    for sentence in (found.fit.sentence, found.plan.program.hash[:12], *filter(None, [found.data_error])):
        assert sentence in repr(found) and sentence in plain
    assert ElementTree.fromstring(found._repr_svg_()).tag.endswith("svg")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> api.Run:
    """A run of four steps in runs/trial, with measurements of the last two."""
    monkeypatch.chdir(tmp_path)
    config = load(None, ["run.name=trial", "run.steps=4"])
    plan = make_plan(config, "cpu")
    costs = costs_of(plan)
    spans: list[Span] = []
    for step in (2, 3):
        spans += to_mesh_ranks(simulate(plan.program, costs, step=step), plan.mesh).spans
    with RunFolder(config, plan) as folder:
        for step in range(4):
            extra = {"spike": True} if step == 2 else {}
            folder.metrics(
                {
                    **dict.fromkeys(METRIC_KEYS, 0.5),
                    "generation": 1,
                    "step": step,
                    "loss": 4.0 - step,
                    "mfu": None,
                    "target_tokens": 8,
                    **extra,
                }
            )
        folder.event("start", generation=1)
        folder.event("end", step=4)
        folder.timelines(Timeline("measured", tuple(spans)), costs)
        for step in (4, 2):
            save_small(folder.checkpoint(step), step)
        (folder.path / "checkpoints" / "step-00000003").mkdir()  # not committed
    return api.Run("trial")


def test_to_look_at_a_run_executes_no_file_that_it_names(run: api.Run, pentad: Pentad) -> None:
    file = Path("my.py")
    file.write_text("open('executed', 'w')\ndef model(): ...\ndef schedule(rank, ranks, microbatches): ...\n")
    own = {"model": {"custom": "my.py:model"}, "schedule": {"name": "my.py:schedule"}}
    (run.folder / "config.yaml").write_text(dump(load(run.config, sections=own)))
    for verb in ("status", "logs", "timeline", "curves"):
        assert pentad(verb, "trial")[0] == 0, verb
    assert pentad("runs")[0] == 0
    for verb in ("pause", "stop"):
        assert pentad(verb, "trial")[::2] == (1, "pentad: run trial is finished at step 4: expected a live one\n")
    assert pentad("timeline", "trial", "--html", "page.html")[0] == 0
    assert "my.py:model" in Path("page.html").read_text()
    assert not Path("executed").exists()


def test_a_run_gives_back_what_is_in_its_folder(run: api.Run) -> None:
    table = run.metrics()
    assert table.column("step").to_pylist() == [0, 1, 2, 3]
    assert table.column("loss").to_pylist() == [4.0, 3.0, 2.0, 1.0]
    assert table.column("spike").to_pylist() == [None, None, True, None]
    assert set(METRIC_KEYS) <= set(table.column_names)
    assert [event["event"] for event in run.journal()] == ["start", "end"]
    assert run.timeline().steps == (2, 3) and run.timeline().to_arrow().num_rows == len(run.timeline().spans)
    assert run.program().hash == make_plan(run.config, "cpu").program.hash
    assert list(run.checkpoints()) == [2, 4] and run.checkpoints()[4].name == "step-00000004"
    assert (run.name, run.config.run.steps, run.status()["state"]) == ("trial", 4, "finished")
    assert repr(run) == f"<Run trial: finished, 4 of 4 steps, loss 1.0000, in {Path.cwd()}/runs/trial>"
    assert repr(api.Run(run.folder)) == repr(run)


def test_a_comparison_is_what_the_command_line_prints(pentad: Pentad, run: api.Run) -> None:
    found = run.compare(2)
    facts = json.loads(pentad("timeline", "trial", "--step", "2", "--json")[1])
    assert {"run": "runs/trial", **found.facts()} == facts and facts["step"] == 2
    assert repr(run.compare()).startswith(" step 3 of trial, zb-h2\n 0 measured ")
    assert ElementTree.fromstring(found._repr_svg_()).tag.endswith("svg")
    with pytest.raises(api.PentadError, match=r"expected a measured step, 2, 3$"):
        run.compare(0)


def test_a_run_that_is_not_there_is_named(run: api.Run) -> None:
    with pytest.raises(api.PentadError, match=r"^RUN is 'trail' \(did you mean trial\?\): expected a run's folder"):
        api.Run("trail")


def test_a_run_without_steps_has_an_empty_table(run: api.Run) -> None:
    (run.folder / "metrics.jsonl").unlink()
    assert run.metrics().num_rows == 0 and set(run.metrics().column_names) == set(METRIC_KEYS)
    assert run.evaluations().num_rows == 0 and {"data", "loss"} <= set(run.evaluations().column_names)
