"""The folder of a corpus under construction: finished parts stay there, and a later build continues from them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import make_folder, sync_folder, write_file
from pentad.workers.data.corpus_index import (
    INDEX_FILE,
    TOKENIZER_FILE,
    Index,
    Origin,
    Shard,
    checksum_file,
    index_text,
    parse_index,
)
from pentad.workers.data.corpus_writer import index_of
from pentad.workers.preprocess.part_builder import Options, cannot_write

_PARTIAL, _FINISHING = ".partial", "finishing"
RESUMABLE = "what is built stays in OUT, and the same command continues"


@contextmanager
def build_folder(out: Path) -> Iterator[Path]:
    """A folder inside `out` for the parts of a build, locked against other builds.

    If the block fails, the folder stays if a part is complete; otherwise everything is left as it was. Raises
    PentadError if `out` holds something else or another build is writing it, and for every OSError."""
    created = [folder for folder in (out, *out.parents) if not os.path.lexists(folder)]
    try:
        with _locked(out):
            partial = _partial(out)
            try:
                yield partial
            except BaseException as error:
                if any(partial.glob(f"*/{INDEX_FILE}")):
                    if isinstance(error, PentadError):
                        raise PentadError(f"{error} ({RESUMABLE})") from None
                    raise
                shutil.rmtree(partial, ignore_errors=True)
                for folder in created:
                    with suppress(OSError):
                        folder.rmdir()
                raise
    except OSError as error:
        raise cannot_write(out, error) from None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    if os.path.lexists(out) and not out.is_dir():
        raise _occupied(out)
    make_folder(out)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PentadError(f"OUT is '{out}', which another build is writing: expected a folder of its own") from None
        yield
    finally:
        os.close(descriptor)


def _partial(out: Path) -> Path:
    partial = out / _PARTIAL
    if any(out.iterdir()) and not partial.is_dir():
        raise _occupied(out)
    partial.mkdir(exist_ok=True)
    return partial


def _occupied(out: Path) -> PentadError:
    return PentadError(f"OUT is '{out}', which exists and is not empty: expected a new or empty folder")


def keep_only(out: Path, partial: Path, build: str, names: set[str]) -> None:
    """Removes what an earlier build left and the build of this name, which needs the entries `names`, cannot use.

    Raises PentadError if the earlier build was a different one and has finished.
    """
    record = partial / _FINISHING
    if record.exists() and record.read_text() != build:  # the earlier build had begun to move its shards
        if is_finished(out):
            shutil.rmtree(partial)
            raise _occupied(out)
        for file in out.iterdir():
            if file.is_file():
                file.unlink()
        names = set()
    for entry in partial.iterdir():
        if entry.name not in names | {_FINISHING}:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not names:
        record.unlink(missing_ok=True)


def is_finished(out: Path) -> bool:
    """Whether the corpus is finished, although leftovers of the build may remain to be removed."""
    return (out / INDEX_FILE).exists()


def is_complete(out: Path) -> bool:
    """Whether the corpus is finished and all leftovers of the build are removed."""
    return is_finished(out) and not (out / _PARTIAL).exists()


def is_built(partial: Path, key: str) -> bool:
    return (partial / key / INDEX_FILE).exists()


def finish(out: Path, partial: Path, build: str, keys: Sequence[str], options: Options) -> Origin:
    """Moves the shards of all parts to `out` in order, and writes the index last.

    May be killed at any moment and called again. Raises PentadError if there is no text.
    """
    if not is_finished(out):
        parts = [_index(partial / key) for key in keys]
        if not any(part.documents for part in parts):
            shutil.rmtree(partial)
            raise PentadError(_nothing(parts, options))
        write_file(partial / _FINISHING, [memoryview(build.encode())])
        _assemble(out, partial, keys, parts, options)
    for entry in partial.iterdir():
        if entry.name != _FINISHING:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(partial)
    return _index(out).origin


def _assemble(out: Path, partial: Path, keys: Sequence[str], parts: Sequence[Index], options: Options) -> None:
    shards = list[Shard]()
    for key, part in zip(keys, parts, strict=True):
        for shard in part.shards:
            name = f"tokens-{len(shards):05d}.arrow"
            for old, new in ((shard.file, name), (checksum_file(shard.file), checksum_file(name))):
                if (partial / key / old).exists():
                    os.replace(partial / key / old, out / new)
            shards.append(replace(shard, file=name))
    origin = Origin(
        parts[0].origin.fields,
        parts[0].origin.chat_template,
        sum(part.origin.empty_rows for part in parts),
        sum(part.origin.untrained_conversations for part in parts),
    )
    write_file(partial / TOKENIZER_FILE, [memoryview(options.tokenizer.encode())])
    index = index_of(parts[0].tokenizer, parts[0].vocab_size, shards, origin)
    write_file(partial / INDEX_FILE, [memoryview(index_text(index).encode())])
    for name in (TOKENIZER_FILE, INDEX_FILE):
        os.replace(partial / name, out / name)
        sync_folder(out)


def _index(folder: Path) -> Index:
    return parse_index((folder / INDEX_FILE).read_text("utf-8"), folder / INDEX_FILE)


def _nothing(parts: Sequence[Index], options: Options) -> str:
    if options.template is None:
        return "SOURCE holds no text: expected at least one character"
    count = sum(part.origin.untrained_conversations for part in parts)
    return (
        f"SOURCE holds no conversation with a turn of the assistant to train ({count} without): expected at least one"
    )
