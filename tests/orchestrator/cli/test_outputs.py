"""What the command line writes to pipes, devices and full disks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SIZES, Pentad
from paths import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / ".typings")}
COMMAND = (sys.executable, "-P", "-c", "import sys; from pentad.orchestrator.cli.cli import main; sys.exit(main())")


@pytest.mark.sampled(1)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [("schedule", "1f1b", *SIZES), ("schedules",)])
def test_a_full_stdout_is_reported_in_one_sentence(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            (*COMMAND, *arguments), cwd=tmp_path, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert re.fullmatch(r"pentad: I/O error: .*No space left on device\n", ended.stderr)


def test_a_device_is_written_as_it_is(pentad: Pentad) -> None:
    assert pentad("schedule", "1f1b", *SIZES, "--svg", "/dev/null")[0] == 0
    assert not Path("/dev/null").is_file()


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    command = (*COMMAND, "schedule", "1f1b", "--ranks", "8", "--microbatches", "600", "--json")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=tmp_path, env=ENVIRONMENT) as child:
        assert child.stdout and child.stderr
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_stdout_cannot_encode_is_replaced(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("山 é " * 20, encoding="utf-8")
    environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding}
    for arguments in (("build", "a.txt", "corpus", "--vocab", "300"), ("inspect", "corpus")):
        command = (*COMMAND, "data", *arguments)
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert "? é ".encode(encoding, "replace") in ended.stdout
