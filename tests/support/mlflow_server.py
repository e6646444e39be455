"""MLflow's own server on a SQLite file, from the package mlflow-skinny and the extra `test-all`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

START_SECONDS = 90


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """The address of a server that is up; it is stopped after the block."""
    options = {
        "--backend-store-uri": f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination": f"{folder}/artifacts",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--workers": "1",
    }
    command = [sys.executable, "-m", "mlflow", "server", *(word for pair in options.items() for word in pair)]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # jobs need further packages
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}", folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
