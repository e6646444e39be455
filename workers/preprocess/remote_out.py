"""Uploads a corpus that was built locally to a remote folder, its index last.

An object store can neither rename nor lock, so a claim, which is a file in the folder, says which build may write
there. The same build gives the same bytes, so a file of the right size need not be copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.location import first_line
from pentad.workers.data.corpus_index import INDEX_FILE
from pentad.workers.data.storage import Folder, remote_sizes

_CLAIM = "building"
_AT_ONCE = 4  # files


@dataclass(frozen=True)
class RemoteOut:
    """The remote `folder` of a corpus, for the build called `key`. Methods raise PentadError."""

    folder: Folder
    key: str

    def claim(self) -> None:
        """Claims the folder, and removes what another build left there unfinished. Raises PentadError if it holds
        something else."""
        with self._writing():
            found = self._sizes()
            if INDEX_FILE in found or (found and _CLAIM not in found):
                fault = "which exists and is not empty"
                raise PentadError(f"OUT is '{self.folder.name}', {fault}: expected a new or empty folder")
            if found and self._claimed_by() != self.key:
                for name in found:
                    self._filesystem.delete_file(self._path(name))
            self._filesystem.create_dir(self.folder.path)
            self._write(_CLAIM, self.key.encode())

    def upload(self, corpus: Path, report: Callable[[int, int], None]) -> None:
        """Uploads the corpus in the local folder `corpus`; calls `report` with the bytes uploaded so far and in all."""
        content = {file.name: file.stat().st_size for file in sorted(corpus.iterdir()) if file.name != INDEX_FILE}
        total = sum(content.values())
        with self._writing():
            missing = self._missing(content)
            done = total - sum(content[name] for name in missing)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for name in pool.map(lambda name: self._copy(corpus, name), missing):
                    done += content[name]
                    report(done, total)
            if incomplete := self._missing(content):
                raise OSError(f"{incomplete[0]} has another size there")
            if self._claimed_by() != self.key:
                fault = "which another build is writing"
                raise PentadError(f"OUT is '{self.folder.name}', {fault}: expected a folder of its own")
            self._write(INDEX_FILE, (corpus / INDEX_FILE).read_bytes())
            self._filesystem.delete_file(self._path(_CLAIM))

    @property
    def _filesystem(self) -> fs.FileSystem:
        assert self.folder.filesystem is not None, "a remote folder"
        return self.folder.filesystem

    def _sizes(self) -> dict[str, int]:
        return remote_sizes(self._filesystem, self.folder.path)

    def _path(self, name: str) -> str:
        return f"{self.folder.path}/{name}"

    def _claimed_by(self) -> str:
        return self.folder.read(_CLAIM).decode() if _CLAIM in self._sizes() else ""

    def _missing(self, content: dict[str, int]) -> list[str]:
        there = self._sizes()
        return [name for name, size in content.items() if there.get(name) != size]

    def _copy(self, corpus: Path, name: str) -> str:
        fs.copy_files(str(corpus / name), self._path(name), fs.LocalFileSystem(), self._filesystem, use_threads=False)
        return name

    def _write(self, name: str, content: bytes) -> None:
        with self._filesystem.open_output_stream(self._path(name)) as sink:
            sink.write(content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            fault = f"which cannot be written ({first_line(error)})"
            expected = "expected a folder that can be written (the same command continues)"
            raise PentadError(f"OUT is '{self.folder.name}', {fault}: {expected}") from None
