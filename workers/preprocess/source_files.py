"""The files meant by SOURCE: named ones, those that match a pattern, or those in a folder; local or remote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
from pyarrow import fs

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded

TABLES = (".jsonl", ".parquet", ".arrow", ".csv")
FORMATS = (".txt", ".md", ".rst", *TABLES)
CODECS = {".gz": "gzip", ".zst": "zstd"}
_WILD = re.compile(r"[*?[]")
_EXPECTED = f"expected files that end in {', '.join(FORMATS)}, also with {' or '.join(CODECS)}"


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file as it was found: `uri` is a path or scheme://path, `size` in bytes, `mtime` in ns."""

    uri: str
    size: int
    mtime: int

    @property
    def codec(self) -> str | None:
        return _codec(_without_query(self.uri)[0])

    @property
    def format(self) -> str:
        """One of TABLES, or .txt for all other endings."""
        suffix = _suffix(_without_query(self.uri)[0])
        return suffix if suffix in TABLES else ".txt"

    def open(self) -> pa.NativeFile:
        """Opens the file, decompressed; seekable only without a codec. Raises OSError."""
        system, path = _located(self.uri)
        raw = system.open_input_file(path)
        return pa.CompressedInputStream(raw, self.codec) if self.codec else raw

    def require_unchanged(self) -> None:
        """Raises PentadError if the file has changed since it was found."""
        with readable(self.uri):
            system, path = _located(self.uri)
            found = _source_file(self.uri, system.get_file_info(path))
        if found != self:
            raise PentadError(f"{self.uri} changed while it was read: expected files that stay as they are")


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns a failure to read the file `name` into a PentadError."""
    try:
        yield
    except OSError as error:
        raise PentadError(f"{name} cannot be read ({reason(error)}): expected a readable file") from None


def reason(error: OSError) -> str:
    """The reason that the system gives, without the details that pyarrow adds."""
    return os.strerror(error.errno) if error.errno else str(error).partition(". Detail:")[0]


def find_files(sources: Iterable[str]) -> tuple[SourceFile, ...]:
    """The files of all `sources`, in their order and sorted by path within each; every file once.

    A source is a file, a pattern with *, **, ? or [abc] (in URIs only * and **), or a folder, of which all files in a
    known format are taken, except hidden ones. From a folder saved by `datasets`, the files in its state.json are
    taken. Raises PentadError for a source without files.
    """
    return tuple(dict.fromkeys(file for source in sources for file in _files_of(source)))


def _files_of(source: str) -> list[SourceFile]:
    root = source if "://" in source else os.path.abspath(expanded(source))
    with _named(source):
        system, path = _located(root)
        name, query = _without_query(root)
        prefix = name.removesuffix(path)
        info = system.get_file_info(path)
        if info.type == fs.FileType.File:
            return [_source_file(root, info)]
        if info.type == fs.FileType.Directory:
            files = _in_folder(system, path, source)
        else:
            files = _matching(system, path) if _WILD.search(path) else []
    if not files:
        missing = info.type == fs.FileType.NotFound and not _WILD.search(path)
        raise PentadError(f"SOURCE is '{source}'{', which does not exist' if missing else ''}: {_EXPECTED}")
    found = [_source_file(f"{prefix}{info.path}{query}", info) for info in files]
    return sorted(found, key=lambda file: PurePosixPath(file.uri).parts)


def _in_folder(system: fs.FileSystem, path: str, source: str) -> list[fs.FileInfo]:
    selected = system.get_file_info(fs.FileSelector(path, recursive=True))
    files = {info.path: info for info in selected if info.type == fs.FileType.File}
    names = {name: PurePosixPath(name).relative_to(path) for name in files}
    for name, relative in names.items():
        if relative.name == "dataset_dict.json":
            splits = ", ".join(json.loads(_content(system, name))["splits"])
            raise PentadError(f"SOURCE is '{source}', which holds the splits {splits}: expected the folder of one")
    listed = {  # by folder: the files of a data set, without its cache files
        str(PurePosixPath(name).parent): {
            data["filename"] for data in json.loads(_content(system, name))["_data_files"]
        }
        for name, relative in names.items()
        if relative.name == "state.json" and str(PurePosixPath(name).with_name("dataset_info.json")) in files
    }
    return [
        info
        for name, info in files.items()
        if not any(part.startswith(".") for part in names[name].parts)
        and _suffix(name) in FORMATS
        and (
            _suffix(name) != ".arrow" or info.base_name in listed.get(str(PurePosixPath(name).parent), [info.base_name])
        )
    ]


def _codec(name: str) -> str | None:
    return CODECS.get(PurePosixPath(name).suffix.lower())


def _suffix(name: str) -> str:
    """The ending in lower case; of a compressed file, the one before the codec's."""
    path = PurePosixPath(name)
    return (path.with_suffix("") if _codec(name) else path).suffix.lower()


def _without_query(uri: str) -> tuple[str, str]:
    """A name, and the file system's options that follow it in a URI."""
    name, mark, query = uri.partition("?") if "://" in uri else (uri, "", "")
    return name, mark + query


def _matching(system: fs.FileSystem, pattern: str) -> list[fs.FileInfo]:
    """The files that match a pattern; ** stands for any number of folders, and wildcards match no leading dot."""
    parts = PurePosixPath(pattern).parts
    parts = (*parts, "*") if parts[-1] == "**" else parts
    first = next(number for number, part in enumerate(parts) if _WILD.search(part))
    base = str(PurePosixPath(*parts[:first]))
    expression = re.compile("".join(_expression(part) for part in parts[first:]).removesuffix("/"))
    selector = fs.FileSelector(base, allow_not_found=True, recursive=first < len(parts) - 1)
    return [
        info
        for info in system.get_file_info(selector)
        if info.type == fs.FileType.File and expression.fullmatch(str(PurePosixPath(info.path).relative_to(base)))
    ]


def _expression(part: str) -> str:
    """The regular expression for one part of a pattern and the slash after it."""
    if part == "**":
        return r"(?:[^./][^/]*/)*"
    pieces = {"*": "[^/]*", "?": "[^/]"}
    hidden = "" if part.startswith(".") else r"(?!\.)"
    tokens = re.findall(r"\[!?\]?[^]]*\]|.", part)
    return hidden + "".join(pieces.get(token) or _class(token) for token in tokens) + "/"


def _class(token: str) -> str:
    """A character set or a single character of a pattern, as a regular expression."""
    if len(token) == 1:
        return re.escape(token)
    inner = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
    return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"


def _located(uri: str) -> tuple[fs.FileSystem, str]:
    return fs.FileSystem.from_uri(uri) if "://" in uri else (fs.LocalFileSystem(), uri)


def _source_file(uri: str, info: fs.FileInfo) -> SourceFile:
    return SourceFile(uri, info.size or 0, info.mtime_ns or 0)


def _content(system: fs.FileSystem, path: str) -> bytes:
    with system.open_input_file(path) as source:
        return bytes(source.read())


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Turns a file system's errors into a PentadError that names the source."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        fault = reason(error) if isinstance(error, OSError) else str(error)
        raise PentadError(f"SOURCE is '{source}', which cannot be read ({fault}): {_EXPECTED}") from None
