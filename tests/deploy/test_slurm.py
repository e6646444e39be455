"""The Slurm script with fake commands: what it starts on which node, its signals, and its clean-up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "pentad.sbatch"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
# Each command logs its arguments; `ray` and `pentad` also log the mode or size of the token file.
COMMANDS = {
    "srun": 'echo "srun $*" >>"$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'echo n1; [[ $SLURM_JOB_NODELIST != "n[1-2]" ]] || echo n2',
    "hostname": 'echo "10.0.0.1 172.17.0.1"',
    "ray": "if [[ $1 != start ]]; then until [[ -e $LOG.pids ]]; do sleep 0.01; done; exit; fi; "
    'echo "ray $* mode=$(stat -c %a "$RAY_AUTH_TOKEN_PATH")" >>"$LOG"; echo $$ >>"$LOG.pids"; exec sleep 60',
    "pentad": 'trap \'echo "pentad stopped" >>"$LOG"; kill $!; exit 0\' TERM; '
    'echo "pentad $* $RAY_AUTH_MODE $(wc -c <"$RAY_AUTH_TOKEN_PATH")" >>"$LOG"; sleep "$LASTS" & wait; exit "$STATUS"',
}


def start(
    folder: Path, *arguments: str, nodes: str = "n[1-2]", seconds: float = 0, status: int = 0
) -> subprocess.Popen:
    for name, body in COMMANDS.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "4"}
    others = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(folder / "log")}
    others |= {"LASTS": str(seconds), "STATUS": str(status)}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.Popen(command, cwd=folder, env=os.environ | slurm | others, stderr=subprocess.PIPE, text=True)


def logged(folder: Path, prefix: str) -> list[str]:
    path = folder / "log"
    return [line for line in path.read_text().splitlines() if line.startswith(prefix)] if path.exists() else []


def wait_for(folder: Path, prefix: str, count: int = 1) -> None:
    until = time.monotonic() + 20
    while len(logged(folder, prefix)) < count:
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.02)


def assert_cleaned_up(folder: Path) -> None:
    assert not list(folder.glob(".pentad-token*"))
    for pid in map(int, (folder / "log.pids").read_text().split()):
        until = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/cmdline").read_text():
            assert time.monotonic() < until, f"process {pid} still runs"
            time.sleep(0.02)


def test_bash_and_shellcheck_find_nothing() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], timeout=10).returncode == 0
    if SHELLCHECK is None:
        pytest.skip("no shellcheck")
    found = subprocess.run([SHELLCHECK, SCRIPT], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stdout


def test_the_driver_joins_a_head_and_workers(tmp_path: Path) -> None:
    process = start(tmp_path, "job.yaml", "run.steps=5", seconds=1)
    wait_for(tmp_path, "ray start", 2)
    assert process.wait(20) == 0
    head, worker = sorted(logged(tmp_path, "ray start"), key=lambda line: "--head" not in line)
    assert "--head --node-ip-address=10.0.0.1 --port=6379" in head
    assert "--address=10.0.0.1:6379" in worker
    for line in (head, worker):
        assert "--block --num-cpus=8 --num-gpus=4" in line and line.endswith("mode=600")
        ports = re.findall(r"port=(\d+)", line)
        assert len(set(ports)) == len(ports) >= 8
    nodes = [re.search(r"--nodelist=(\S+)", line) for line in logged(tmp_path, "srun") if "ray start" in line]
    assert [node and node[1] for node in nodes] in (["n1", "n2"], [])
    assert logged(tmp_path, "pentad") == ["pentad train job.yaml run.steps=5 cluster.address=10.0.0.1:6379 token 64"]
    assert_cleaned_up(tmp_path)


@pytest.mark.parametrize("status", [0, 1])
def test_the_job_ends_with_the_status_of_its_driver(tmp_path: Path, status: int) -> None:
    process = start(tmp_path, "job.yaml", nodes="n1", status=status)
    assert process.wait(20) == status
    assert_cleaned_up(tmp_path)


def test_the_signal_before_the_time_limit_reaches_the_driver(tmp_path: Path) -> None:
    process = start(tmp_path, "job.yaml", seconds=60, status=1)
    wait_for(tmp_path, "pentad train")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert logged(tmp_path, "pentad stopped")
    assert_cleaned_up(tmp_path)


def test_slurm_signals_the_script_early_enough() -> None:
    text = SCRIPT.read_text()
    signal_before = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert signal_before and int(signal_before[1]) >= 120
    assert re.search(r"^#SBATCH --ntasks-per-node=1$", text, re.MULTILINE)


def test_a_missing_config_is_a_usage_line_on_stderr(tmp_path: Path) -> None:
    process = start(tmp_path)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2 and stderr == "usage: sbatch pentad.sbatch CONFIG [a.b=value ...]\n"
    assert not (tmp_path / "log").exists()
