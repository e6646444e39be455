"""`pentad checkpoint list`, `verify` and `prune` on the folder of a run that has ended, intact and damaged."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from commands import Pentad
from small_checkpoint import FILE, save_small

from pentad.orchestrator.config.config import dump, load
from pentad.workers.checkpoint.checkpoint import MANIFEST

STEPS = (4, 8, 10, 12, 16, 20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that keeps the newest two checkpoints, every 8th and the best, step 10; that of step 18 is incomplete."""
    folder = tmp_path / "runs" / "trial"
    (folder / "checkpoints").mkdir(parents=True)
    keys = ("every=2", "keep=2", "keep_every=8", "keep_best=true")
    overrides = ["run.name=trial", "data.holdout=0.1", "eval.every=2", *(f"checkpoint.{key}" for key in keys)]
    (folder / "config.yaml").write_text(dump(load(None, overrides)))
    for step in STEPS:
        save_small(folder / "checkpoints" / f"step-{step:08d}", step)
    (folder / "checkpoints" / "step-00000018").mkdir()
    (folder / "checkpoints" / "step-00000018" / FILE).write_bytes(b"some bytes")
    times = {"time": 0.0, "perplexity": 1.0, "tokens": 1, "sequences": 1, "seconds": 1.0, "generation": 1}
    rows = [{"step": step, "data": "holdout", "loss": abs(step - 10) + 1.0, **times} for step in STEPS]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def damage(run: Path, step: int) -> None:
    """Changes the last byte of a file."""
    path = run / "checkpoints" / f"step-{step:08d}" / FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (run / "checkpoints").iterdir())


def test_a_copy_of_a_run_without_its_checkpoints_has_none(run: Path, pentad: Pentad) -> None:
    """Its config.yaml still names the original folder, whose checkpoints the copy must not prune."""
    config = load(run / "config.yaml", [f"run.folder={run.parent}"])
    copy = run.parent.parent / "copy"
    copy.mkdir()
    (copy / "config.yaml").write_text(dump(config))
    assert pentad("checkpoint", "list", str(copy))[:2] == (0, f"no checkpoints in {copy}/checkpoints\n")
    assert pentad("checkpoint", "prune", str(copy))[:2] == (0, "0 checkpoints, 0 B\n")
    assert steps(run) == sorted([*STEPS, 18])


def test_checkpoints_are_listed(run: Path, pentad: Pentad) -> None:
    status, out, err = pentad("checkpoint", "list", "trial", "--json")
    rows = json.loads(out)["checkpoints"]
    assert (status, err) == (0, "")
    assert [row["step"] for row in rows] == sorted([*STEPS, 18])
    assert {row["step"]: row["kept_as"] for row in rows if row["kept_as"]} == {
        8: ["milestone"], 10: ["best"], 16: ["milestone"],
    }  # fmt: skip
    assert [row["step"] for row in rows if row["state"] != "complete"] == [18]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in Path(rows[0]["folder"]).iterdir())
    status, out, _ = pentad("checkpoint", "list", str(run))
    lines = out.splitlines()
    assert status == 0 and len(lines) == 1 + len(rows)
    assert "milestone" in lines[2] and "best" in lines[3] and "incomplete" in lines[6]


def test_every_checkpoint_is_verified_and_the_broken_file_is_named(run: Path, pentad: Pentad) -> None:
    status, out, err = pentad("checkpoint", "verify", "trial")
    assert (status, err) == (0, "") and out.count(": intact, ") == len(STEPS)
    damage(run, 12)
    status, out, err = pentad("checkpoint", "verify", "trial")
    assert (status, err) == (1, "") and out.count(": intact, ") == len(STEPS) - 1
    (line,) = (line for line in out.splitlines() if "intact" not in line)
    assert line.startswith(f"step-00000012: damaged: {FILE} has sha256 ")
    status, out, _ = pentad("checkpoint", "verify", "trial", "--json")
    found = json.loads(out)
    assert (status, found["intact"]) == (1, False)
    assert [row["step"] for row in found["checkpoints"] if row["state"] != "complete"] == [12]


def test_one_checkpoint_is_verified(run: Path, pentad: Pentad) -> None:
    damage(run, 12)
    for step, expected in ((8, 0), (12, 1), (18, 1)):
        status, out, _ = pentad("checkpoint", "verify", f"runs/trial/checkpoints/step-{step:08d}")
        assert status == expected and out.startswith(f"step-{step:08d}: ") and out.count("\n") == 1


def test_prune_deletes_what_is_not_kept(run: Path, pentad: Pentad) -> None:
    status, out, _ = pentad("checkpoint", "prune", "trial", "--dry-run", "--json")
    found = json.loads(out)
    assert (status, found["dry_run"], [row["step"] for row in found["deleted"]]) == (0, True, [4, 12, 18])
    assert steps(run) == sorted([*STEPS, 18])
    status, out, err = pentad("checkpoint", "prune", "trial")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "deleted step-00000004 (complete)" and out.splitlines()[-1].startswith(
        "3 checkpoints"
    )
    assert steps(run) == [8, 10, 16, 20]
    assert pentad("checkpoint", "prune", "trial")[1].startswith("0 checkpoints, 0 B")


def test_prune_counts_no_damaged_checkpoint_among_those_to_keep(run: Path, pentad: Pentad) -> None:
    damage(run, 16)
    assert pentad("checkpoint", "prune", "trial")[0] == 0
    assert steps(run) == [8, 10, 12, 16, 20]  # 16 is a milestone, 12 the second intact one


def test_prune_needs_an_intact_checkpoint_and_a_run_that_has_ended(run: Path, pentad: Pentad) -> None:
    with (run / ".lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = pentad("checkpoint", "prune", "trial")
    assert (status, err) == (1, "pentad: RUN is 'trial', which is running (process 4711) and deletes them itself\n")
    for step in STEPS:
        damage(run, step)
    status, _, err = pentad("checkpoint", "prune", "trial")
    assert status == 1 and "is intact: expected one, or nothing is deleted" in err and err.count("\n") == 1
    assert steps(run) == sorted([*STEPS, 18])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("list", "other"), "RUN is 'other': expected a run's folder or a name under runs/"),
        (("verify", "other"), "RUN is 'other': expected a run's folder or a name under runs/"),
        (("verify", "step-00000003"), "RUN is 'step-00000003', which has no checkpoint: expected at least one"),
        (("prune", "other"), "RUN is 'other': expected a run's folder or a name under runs/"),
        (("prune", "trial/checkpoints"), "RUN is 'trial/checkpoints': expected a run's folder"),
    ],
)
def test_bad_input_is_one_sentence(run: Path, pentad: Pentad, words: tuple[str, ...], sentence: str) -> None:
    before = sorted(run.rglob("*"))
    status, out, err = pentad("checkpoint", *words)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"pentad: {sentence}")
    assert sorted(run.rglob("*")) == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 9, b"[" * 10_000])
def test_a_manifest_that_is_none_is_damage(run: Path, pentad: Pentad, content: bytes) -> None:
    (run / "checkpoints" / "step-00000020" / MANIFEST).write_bytes(content)
    status, out, err = pentad("checkpoint", "verify", "trial")
    assert (status, err) == (1, "") and f"step-00000020: damaged: {MANIFEST} " in out
    status, out, _ = pentad("checkpoint", "list", "trial", "--json")
    assert json.loads(out)["checkpoints"][-1]["state"] == "damaged"


def test_an_unknown_sub_command_is_refused(run: Path, pentad: Pentad) -> None:
    status, _, err = pentad("checkpoint", "trial")
    assert status == 2 and "trial" in err and "pentad checkpoint --help" in err
