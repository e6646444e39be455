"""`pentad.train` accepts every form of a configuration, and runs wherever Python does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pentad
from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.planning import hardware

SECTIONS = {"run": {"name": "trial", "steps": 7}, "mesh": {"pp": 2}, "optimizer": {"beta1": 0.8}}
EXPECTED = load(None, sections=SECTIONS)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of calls that reach the driver, which trains nothing."""
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = []

    def train(config: RunConfig, **others: Any) -> dict[str, Any]:
        folder = Path("runs", config.run.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config))
        calls.append({"config": config, **others})
        return {"folder": str(folder)}

    monkeypatch.setattr("pentad.orchestrator.run.train.train", train)
    monkeypatch.setattr("pentad.orchestrator.run.train.prepare", lambda config: "plan")
    return calls


@pytest.mark.parametrize("kind", ["sections", "path", "text", "mapping", "config"])
def test_a_configuration_is_a_file_a_mapping_or_a_config(started: list[dict[str, Any]], kind: str) -> None:
    path = Path("given.yaml")
    path.write_text(dump(EXPECTED))
    given = {"path": path, "text": str(path), "mapping": EXPECTED.model_dump(), "config": EXPECTED}
    run = pentad.train(given[kind]) if kind in given else pentad.train(**SECTIONS)  # type: ignore[arg-type]
    assert started[0]["config"] == EXPECTED == run.config
    assert started[0]["plan"] == "plan"
    changed = pentad.train(given.get(kind), **SECTIONS | {"mesh": {"pp": 4}})  # type: ignore[arg-type]
    assert changed.config.mesh.pp == 4 and changed.config.optimizer.beta1 == 0.8


@pytest.mark.parametrize(("sections", "pp"), [({}, 2), ({"mesh": {"dp": 1}}, 4), ({"cluster": {"device": "cpu"}}, 4)])
def test_the_quickstart_uses_the_available_gpus(
    started: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    pp: int,
) -> None:
    monkeypatch.setattr(hardware, "local_gpus", lambda: 2)
    assert pentad.train(**sections).config.mesh.pp == pp
    assert ("the quickstart runs with mesh.pp = 2" in capsys.readouterr().out) == (pp == 2)


def test_nothing_is_printed_if_quiet_and_callbacks_reach_the_driver(
    started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    pentad.train(on_step=print, quiet=True)
    assert (capsys.readouterr().out, started[0]["on_step"]) == ("", print)


@pytest.mark.parametrize(
    ("config", "sections", "sentence"),
    [
        ("none.yaml", {}, "CONFIG is 'none.yaml', which cannot be read"),
        (None, {"mesh": 2}, "mesh is 2: expected a mapping with keys such as mesh.dp"),
        (None, {"mehs": {"pp": 2}}, r"mehs.pp is unknown; did you mean mesh.pp\?"),
        ({"run": {"name": "x"}}, {}, "run.steps is missing"),
    ],
)
def test_a_mistake_starts_nothing(
    started: list[dict[str, Any]], config: Any, sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(pentad.PentadError, match=sentence):
        pentad.train(config, **sections)
    assert not started and not Path("runs").exists()


@pytest.mark.parametrize("address", ["local", "auto"])
def test_a_process_with_a_ray_session_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pentad.orchestrator.run.train.prepare", lambda config: None)
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    found = (
        f"^cluster.address is {address}, but this process is connected to the Ray cluster at 10.0.0.1:6379 already: "
    )
    with pytest.raises(pentad.PentadError, match=rf"{found}expected a ray.shutdown\(\) before training$"):
        pentad.train(cluster={"address": address, "dashboard": False}, quiet=True)
    assert not list(tmp_path.iterdir())


ANYWHERE = """
import asyncio, threading
import pentad

small = dict(
    mesh={"pp": 2}, schedule={"name": "1f1b"}, cluster={"device": "cpu", "dashboard": False}, quiet=True,
    model={"layers": 2, "hidden": 32, "ffn": 64, "vocab": 300}, batch={"sequence_length": 32},
)

async def loop():
    return pentad.train(run={"name": "loop", "steps": 2}, **small)

def fails(row):
    raise KeyError(row["step"])

def thread():
    try:
        pentad.train(run={"name": "thread", "steps": 10**6}, on_step=fails, **small)
    except KeyError as error:
        print("raised", error)

print(asyncio.run(loop()))
other = threading.Thread(target=thread)
other.start()
other.join()
run = pentad.Run("thread")
print(run.status()["state"], max(run.checkpoints()) == run.metrics().num_rows)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_follow_each_other_in_an_event_loop_and_a_thread(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", ANYWHERE], cwd=tmp_path, capture_output=True, text=True)
    loop, raised, thread = done.stdout.splitlines()
    assert loop.startswith("<Run loop: finished, 2 of 2 steps"), done
    assert (raised, thread) == ("raised 0", "stopped True"), done.stderr
