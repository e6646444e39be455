"""The command line does what it says, or explains in one sentence why not."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import SIZES, Pentad
from full_disk import largest_file
from paths import ROOT

from pentad.orchestrator.config.config import dump, load
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.grid import time_grid
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks
from pentad.schedules.spec.schedule_spec import ScheduleOptions

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / ".typings")}


def uniform(name: str, *costs: float) -> Costs:
    """Uniform costs of a schedule on four ranks."""
    program = generate(name, 4, 8)
    return Costs.uniform(program.stages, *costs, chunks=program.chunks, slices=program.slices)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CATALOGUE)
def test_schedule_json_is_one_object_with_the_agreed_keys(pentad: Pentad, name: str) -> None:
    status, out, err = pentad("schedule", name, *SIZES, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    facts = json.loads(out)
    sizes, times = ["name", "ranks", "microbatches", "chunks"], ["makespan", "longest", "bubble", "peak_activations"]
    assert list(facts) == [*sizes, "slices", "placement", *times, "streams", "program", "hash"]
    assert [facts[key] for key in sizes] == [name, 4, 8, CATALOGUE[name].chunks]
    assert set(facts["bubble"]) == {"makespan", "longest"}
    for key in ("placement", "peak_activations", "streams", "program"):
        assert len(facts[key]) == 4
    assert facts["hash"] == compile_program(name, 4, 8, costs=uniform(name)).hash


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1)])
def test_the_printed_grid_is_the_time_grid(pentad: Pentad, name: str, costs: tuple[int, int, int]) -> None:
    status, out, _ = pentad("schedule", name, *SIZES, "--costs", ",".join(map(str, costs)), "--grid")
    full_costs = uniform(name, *costs)
    program = compile_program(name, 4, 8, costs=full_costs)
    assert status == 0
    assert out.startswith(time_grid(program, simulate(program, full_costs), full_costs) + "\n\n")
    assert "longest" in out
    assert "makespan" in out


def test_costs_and_comm_reach_the_simulation(pentad: Pentad) -> None:
    def makespan(*options: str) -> float:
        return json.loads(pentad("schedule", "1f1b", *SIZES, "--json", *options)[1])["makespan"]

    assert makespan("--costs", "2,2,2") == 2 * makespan()
    assert makespan("--comm", "0.5") > makespan()


def test_slices_are_an_option_and_reported(pentad: Pentad) -> None:
    status, out, _ = pentad("schedule", "seq-1f1b", *SIZES, "--slices", "2", "--comm", "0.5", "--json")
    facts = json.loads(out)
    costs = Costs.uniform(4, slices=2, transfer=0.5)
    expected = compile_program("seq-1f1b", 4, 8, costs=costs, options=ScheduleOptions(slices=2))
    assert (status, facts["slices"], facts["hash"]) == (0, 2, expected.hash)
    assert facts["makespan"] == simulate(expected, costs).makespan
    assert "8 microbatches of 4 slices, proven" in pentad("schedule", "seq-1f1b", *SIZES)[1]
    status, _, err = pentad("schedule", "seq-1f1b", *SIZES, "--csv", "a.csv")
    assert status != 0
    found = "schedule seq-1f1b cuts sequences into 4 slices"
    assert err == f"pentad: {found}: expected 1, because torch's CSV has no slices\n"
    assert pentad("schedule", "seq-1f1b", *SIZES, "--slices", "1", "--csv", "a.csv")[0] == 0


def test_every_requested_file_is_written(pentad: Pentad) -> None:
    files = ("--svg", "a.svg", "--html", "a.html", "--arrow", "a.arrow", "--csv", "a.csv")
    status, out, _ = pentad("schedule", "zb-h1", *SIZES, *files)
    assert status == 0
    assert not out.startswith("F0")
    assert all(f"written to {name}" in out for name in files[1::2])
    assert ElementTree.parse("a.svg").getroot().tag.endswith("svg")
    assert "<!doctype html>" in Path("a.html").read_text().lower()
    assert Program.load(Path("a.arrow")) == compile_program("zb-h1", 4, 8)
    with_grid = pentad("schedule", "zb-h1", *SIZES, "--csv", "a.csv", "--grid")[1]
    assert with_grid.startswith("F0 F1")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe", "seq-1f1b", "zb-v"])
def test_a_saved_program_can_be_used_as_a_schedule(pentad: Pentad, name: str) -> None:
    assert pentad("schedule", name, *SIZES, "--arrow", "a.arrow")[0] == 0
    report, saved = json.loads(pentad("schedule", "a.arrow", *SIZES, "--json")[1]), Program.load(Path("a.arrow"))
    assert (report["hash"], report["slices"]) == (saved.hash, saved.slices)


@pytest.mark.parametrize(
    ("content", "ranks", "message"),
    [
        (None, "4", "a.arrow is not a readable program: [Errno 2] No such file or directory: 'a.arrow'"),
        (b"", "4", "a.arrow is not a readable program: 0 bytes are not an intact Arrow file"),
        (compile_program("zb-h1", 4, 8).to_bytes()[:-9], "4", "are not an intact Arrow file"),
        (compile_program("zb-h1", 4, 8).to_bytes(), "2", "schedule a.arrow: the file has 4 ranks: expected 2"),
    ],
)
def test_a_foreign_arrow_file_is_reported_in_one_sentence(
    pentad: Pentad, content: bytes | None, ranks: str, message: str
) -> None:
    if content is not None:
        Path("a.arrow").write_bytes(content)
    status, _, err = pentad("schedule", "a.arrow", "--ranks", ranks, "--microbatches", "8")
    assert status == 1
    assert message in err and err.count("\n") == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.slices == 1])
def test_torch_reads_the_csv(pentad: Pentad, name: str) -> None:
    from torch.distributed.pipelining import schedules as torch_schedules

    assert pentad("schedule", name, *SIZES, "--csv", "order.csv")[0] == 0
    with open("order.csv", newline="") as file:
        rows = [[torch_schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    letters = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    read = [
        [
            (letters[a.computation_type.value], a.stage_index, a.microbatch_index)
            for u in row
            for a in u.sub_actions or (u,)
        ]
        for row in rows
    ]
    program = compile_program(name, 4, 8)
    streams = program.compute().streams
    assert read == [[tuple(part.key) for action in stream for part in action.parts] for stream in streams]
    if name != "dualpipe":  # torch expects each stage on one rank
        torch_schedules._validate_schedule(dict(enumerate(rows)), 4, program.stages, 8)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("schedule", "zbh2", *SIZES), "schedule.name is 'zbh2': expected one of gpipe"),
        (("schedule", "1f1b", *SIZES, "--costs", "1,1"), "--costs is '1,1': expected three numbers F,B,W"),
        (("schedule", "1f1b", *SIZES, "--costs", "1,0,1"), "--costs: B is 0.0"),
        (("schedule", "1f1b", *SIZES, "--comm", "-1"), "--comm is -1.0"),
        (("schedule", "1f1b", *SIZES, "--chunks", "2"), "chunks is 2: expected 1 for schedule 1f1b"),
        (("schedule", "1f1b", *SIZES, "--group", "2"), "group is 2: expected none (schedule 1f1b has no such option)"),
        (
            ("schedule", "1f1b", *SIZES, "--memory-limit", "2"),
            "memory_limit is 2: expected none (schedule 1f1b has no such option)",
        ),
        (("schedule", "1f1b", "--ranks", "0", "--microbatches", "8"), "ranks (mesh.pp) is 0"),
        (("schedule", "1f1b", *SIZES, "--svg", "no/a.svg"), "--svg is 'no/a.svg', which cannot be written"),
        (("plan", "none.yaml"), "CONFIG is 'none.yaml', which cannot be read"),
        (("plan", "mesh.tp=3"), "model.heads is 8: expected a multiple of mesh.tp = 3"),
        (
            ("plan", "mesh.tp=16", "model.heads=16", "model.hidden=256", "--device", "cuda"),
            "mesh.tp is 16: expected at most 8",
        ),
        (("train", "run.bananas=1"), "run.bananas is unknown"),
        (("timeline", "nope"), "RUN is 'nope': expected a run's folder or a name under runs/: there are none"),
        (("data", "inspect", "nope"), "PATH is 'nope'"),
        (("data", "build", "nope", "out"), "nope"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence_with_status_1(
    pentad: Pentad, arguments: tuple[str, ...], sentence: str
) -> None:
    status, out, err = pentad(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("pentad: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("trian",), "Did you mean 'train'?"),
        (("data", "buidl"), "Did you mean 'build'?"),
        (("schedule", "1f1b", "--rank", "4"), "--ranks"),
        (("schedule", "1f1b", "--ranks", "4"), "--microbatches"),
        (("schedule", "1f1b", "--ranks", "four", "--microbatches", "8"), "--ranks"),
        (("plan", "a.yaml", "b.yaml"), "CONFIG is given twice, 'a.yaml' and 'b.yaml'"),
        (("plan", "--device", "tpu"), "--device"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_sentence_with_status_2(
    pentad: Pentad, arguments: tuple[str, ...], sentence: str
) -> None:
    status, out, err = pentad(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("pentad: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_plan_shows_ranks_memory_and_both_bubbles(pentad: Pentad) -> None:
    status, out, err = pentad("plan", "run.name=trial", "--device", "cpu", "schedule.name=1f1b")
    assert (status, err) == (0, "")
    for word in ("trial", "1f1b", "dp0 pp3", " head", "longest", "makespan", "send f", "fits: all ranks together need"):
        assert word in out


def test_plan_json_is_one_object(pentad: Pentad) -> None:
    facts = json.loads(pentad("plan", "--json", "--device", "cuda", "mesh.dp=2")[1])
    assert (facts["device"], facts["dtype"], facts["transport"]["pp"]) == ("cuda", "bfloat16", "peer")
    assert facts["mesh"] == {"dp": 2, "pp": 4, "cp": 1, "tp": 1, "ep": 1}
    assert [rank["rank"] for rank in facts["ranks"]] == list(range(8))
    assert facts["ranks"][7]["stages"] == [3]
    assert facts["ranks"][7]["layers"][0][1] == 8
    assert facts["predicted"]["bubble"].keys() == {"longest", "makespan"}
    assert facts["fits"]["ok"] is True


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_so(pentad: Pentad) -> None:
    sizes = ("--device", "cuda", "model.hidden=32768", "model.ffn=131072")
    status, out, _ = pentad("plan", *sizes, "--json")
    facts = json.loads(out)
    assert (status, facts["fits"]["ok"]) == (1, False)
    assert facts["fits"]["needed"] == max(rank["memory"]["total"] for rank in facts["ranks"])
    status, out, _ = pentad("plan", *sizes)
    assert status == 1
    assert re.search(r"does not fit: rank \d needs [\d.]+ GiB of an NVIDIA H200.*, which has 134.2 GiB \(rank", out)


def test_overrides_may_come_anywhere(pentad: Pentad) -> None:
    Path("run.yaml").write_text(dump(load(None, ["run.name=from-file"])))
    facts = json.loads(pentad("plan", "run.seed=1", "run.yaml", "--json", "mesh.pp=2")[1])
    assert (facts["run"], facts["mesh"]["pp"]) == ("from-file", 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in runs/trial whose measured steps 3 and 4 are a little slower than planned."""
    config = load(None, [f"run.folder={tmp_path / 'runs'}", "run.name=trial", "mesh.dp=2"])
    plan = make_plan(config, "cpu")
    costs = costs_of(plan)
    wide = to_mesh_ranks(simulate(plan.program, costs), plan.mesh)
    spans = [
        span._replace(step=step, start=1000 * step + 1.1 * span.start, end=1000 * step + 1.1 * span.end)
        for step in (3, 4)
        for span in wide.spans
    ]
    with RunFolder(config, plan) as folder:
        folder.timelines(Timeline("measured", tuple(spans)), costs)
    return folder.path


def test_timeline_compares_the_last_measured_step(pentad: Pentad, run: Path) -> None:
    files = ("--html", "a.html", "--trace", "a.json.gz", "--svg", "a.svg")
    status, out, err = pentad("timeline", "trial", *files)
    assert (status, err) == (0, "")
    assert "step 4 of trial" in out
    assert len(re.findall(r"^ +\d measured ", out, re.M)) == len(re.findall(r"^ +simulated +[F.]", out, re.M)) == 8
    assert Path("a.html").stat().st_size > 1000
    assert Path("a.svg").read_text().startswith("<svg ")
    assert Path("a.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    facts = json.loads(pentad("timeline", str(run), "--json")[1])
    assert facts["step"] == 4
    assert facts["measured"]["makespan"] == pytest.approx(facts["simulated"]["makespan"], rel=1e-3)
    assert len(facts["busy_seconds"]) == 8
    assert json.loads(pentad("timeline", "trial", "--step", "3", "--json")[1])["step"] == 3
    status, _, err = pentad("timeline", "trial", "--step", "5")
    assert (status, err) == (1, "pentad: --step is 5: expected a measured step, 3, 4\n")


def test_a_step_is_explained_by_parts_that_add_up(pentad: Pentad, run: Path) -> None:
    facts = json.loads(pentad("timeline", "trial", "--explain", "--json")[1])
    assert facts["step"] == 4 and len(facts["ranks"]) == 8
    for rank in facts["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["seconds"], rel=1e-12)
    assert sum(facts["parts"].values()) == pytest.approx(facts["seconds"], rel=1e-12)
    assert facts["replayed_seconds"] == pytest.approx(facts["seconds"], rel=0.02)
    assert 0 < len(facts["causes"]) <= 5
    assert all(set(cause) == {"cause", "remedy", "seconds"} and cause["seconds"] > 0 for cause in facts["causes"])
    status, out, err = pentad("timeline", "trial", "--explain", "--step", "3")
    assert (status, err) == (0, "") and "step 3 of trial" in out and "saves" in out
    status, _, err = pentad("timeline", "trial", "--explain", "--svg", "a.svg")
    assert (status, err.count("\n")) == (1, 1) and "--svg is given: expected --explain without it" in err


def test_a_run_without_a_timeline_is_reported(pentad: Pentad, run: Path) -> None:
    (run / "timeline.arrow").unlink()
    status, _, err = pentad("timeline", "trial")
    assert status == 1
    assert "has no timeline.arrow: expected a run that measured a step" in err


def test_data_is_built_and_inspected(pentad: Pentad) -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog \x1b[31m. " * 200)
    status, out, _ = pentad("data", "build", "text.txt", "corpus", "--vocab", "300", "--json")
    assert status == 0
    built = json.loads(out)
    assert built["tokens"] > 200
    facts = json.loads(pentad("data", "inspect", "corpus", "--samples", "1", "--json")[1])
    assert facts["fingerprint"] == built["fingerprint"]
    assert "fox" in facts["samples"][0][0]["text"]
    status, out, _ = pentad("data", "inspect", "corpus")
    assert status == 0
    assert "\x1b" not in out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [("schedule", "zb-h2", *SIZES, "--html", "a.html", "--csv", "a.csv"), ("plan",), ("plan", "--json"), ("--help",)],
)
def test_neither_torch_nor_ray_is_needed_to_plan(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = f"""
import sys
class Blocker:
    def find_spec(self, name: str, path=None, target=None):
        assert name.partition(".")[0] not in ("torch", "ray", "tokenizers"), name
sys.meta_path.insert(0, Blocker())
from pentad.orchestrator.cli.cli import main
sys.exit(main({list(arguments)!r}))
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", ["train run.init_from=", "checkpoint list ", "import-hf "])
def test_a_path_that_is_too_long_costs_one_short_sentence(pentad: Pentad, words: str) -> None:
    status, _, err = pentad(*f"{words}{'x' * 5000}".split(), *["out"] * (words == "import-hf "))
    sentence = err.splitlines()[-1]
    assert status == 1 and sentence.startswith("pentad: 'xxx") and sentence.endswith("path of a file or a folder")
    assert len(sentence) < 2000


def test_ctrl_c_is_reported(pentad: Pentad, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pentad.orchestrator.cli.show_schedule.show_schedule", interrupted)
    assert pentad("schedule", "1f1b", *SIZES) == (130, "", "pentad: interrupted\n")


@pytest.mark.parametrize("option", ["--svg", "--html", "--trace"])
def test_a_full_disk_leaves_the_file_of_before_or_none(pentad: Pentad, run: Path, option: str) -> None:
    for content in (None, b"mine"):
        if content is not None:
            Path("a.out").write_bytes(content)
        before = sorted(Path().iterdir())
        with largest_file(100):
            status, _, err = pentad("timeline", str(run), option, "a.out")
        sentence = f"pentad: {option} is 'a.out', which cannot be written (File too large): expected a file's path\n"
        assert (status, err) == (1, sentence)
        assert sorted(Path().iterdir()) == before and (content is None or Path("a.out").read_bytes() == content)


def test_the_critical_path_and_what_if_results_are_reported(pentad: Pentad) -> None:
    status, out, _ = pentad("schedule", "zb-h2", *SIZES, "--comm", "0.1", "--what-if", "--json")
    facts = json.loads(out)
    assert status == 0
    assert sum(facts["critical_path"]["by_op"].values()) == pytest.approx(1)
    assert sum(facts["critical_path"]["by_rank"].values()) == pytest.approx(1)
    rows = {row["name"]: row for row in facts["what_if"]}
    assert rows["as it is"]["makespan"] == pytest.approx(facts["makespan"])
    assert rows["rank 3 1.2x slower"]["change"] > rows["rank 0 1.2x slower"]["change"] > 0 > rows["W free"]["change"]
    status, out, _ = pentad("schedule", "zb-h2", *SIZES, "--what-if")
    assert status == 0 and "critical " in out and "links at half speed" in out


def test_an_order_written_for_torch_can_be_read_back(pentad: Pentad) -> None:
    assert pentad("schedule", "zb-v", *SIZES, "--csv", "order.csv")[0] == 0
    facts = [json.loads(pentad("schedule", name, *SIZES, "--json")[1]) for name in ("zb-v", "order.csv")]
    for key in ("streams", "placement", "chunks", "hash"):
        assert facts[0][key] == facts[1][key]
    status, _, err = pentad("schedule", "order.csv", "--ranks", "4", "--microbatches", "9")
    assert (status, err) == (1, "pentad: schedule order.csv: the file has 8 microbatches: expected 9\n")
    status, _, err = pentad("schedule", "none.csv", *SIZES)
    assert status == 1 and err.startswith("pentad: none.csv cannot be read (No such file or directory)")
