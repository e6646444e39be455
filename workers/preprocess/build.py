"""`pentad data build`: turns text or conversations into a corpus, in parallel, and continues an unfinished build."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.workers.background import in_daemon
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.corpus_index import VERSION, plural, require_vocab
from pentad.workers.data.storage import folder_at
from pentad.workers.data.tokenizer import end_token, load_tokenizer, tokenizer_text, train_tokenizer
from pentad.workers.preprocess.build_folder import (
    RESUMABLE,
    build_folder,
    finish,
    is_built,
    is_complete,
    is_finished,
    keep_only,
)
from pentad.workers.preprocess.chat_template import ChatTemplate, read_chat_template, special_tokens
from pentad.workers.preprocess.part_builder import Options, text_chunks, text_columns
from pentad.workers.preprocess.parts import BuildPart, cut
from pentad.workers.preprocess.pool import Done, Task, build_parts
from pentad.workers.preprocess.readers import Columns
from pentad.workers.preprocess.remote_out import RemoteOut
from pentad.workers.preprocess.source_files import TABLES, SourceFile, find_files

VOCAB = 2**15
_LAST_SECONDS = 1.0  # for an interrupted training of a tokenizer to end


@dataclass(frozen=True)
class BuildRequest:
    """What to build. Without a `tokenizer`, one of `vocab` tokens (None: VOCAB) is trained on all of the text first.

    `chat`: rows are conversations, rendered with the template in the file `template` or the tokenizer's own. `field`
    names the column (None: text, or those of conversations). `workers` is the number of processes (None: one per CPU).
    An `out` with :// is built below `staging` first.
    """

    sources: tuple[str, ...]
    out: Path | str
    tokenizer: Path | None = None
    vocab: int | None = None
    field: str | None = None
    chat: bool = False
    template: Path | None = None
    shard_tokens: int = 2**26
    workers: int | None = None
    staging: Path = Path("~/.cache/pentad/builds")


class BuildProgress(NamedTuple):
    """The progress of a phase: source bytes done, of the `total` for this call, and characters read."""

    phase: str
    bytes: int
    total: int
    characters: int
    seconds: float


Show = Callable[[BuildProgress], None]


def build_corpus(request: BuildRequest, note: Callable[[str], None], progress: Show) -> Corpus:
    """Builds the corpus and opens it; continues where an earlier call with the same request was interrupted.

    The same sources and options give the same bytes, whatever the number of workers and interruptions. `note` gets
    messages for the user, `progress` the progress. Raises PentadError for faults of the request, the sources, or the
    folder.
    """
    _check(request)
    files = find_files(request.sources)
    if request.field and all(file.format not in TABLES for file in files):
        found = f"--field is '{request.field}', but {files[0].uri} is read as text"
        raise PentadError(f"{found}: expected a name that ends in {', '.join(TABLES)}")
    if "://" in str(request.out):
        return _build_remote(request, files, note, progress)
    _build_local(request, Path(request.out), files, note, progress)
    return open_corpus(request.out, argument="OUT")


def _build_remote(
    request: BuildRequest, files: Sequence[SourceFile], note: Callable[[str], None], progress: Show
) -> Corpus:
    """Builds in a local folder, which is removed once all of it has been uploaded."""
    key = _sha256((VERSION, files, replace(request, workers=None, staging=Path())))
    remote, local = RemoteOut(folder_at(request.out, "OUT"), key), expanded(request.staging) / key
    remote.claim()
    if not is_complete(local):
        _build_local(request, local, files, note, progress)
    began = time.monotonic()
    remote.upload(
        local, lambda done, total: progress(BuildProgress("uploading", done, total, done, time.monotonic() - began))
    )
    shutil.rmtree(local)
    return open_corpus(request.out, argument="OUT")


def _build_local(
    request: BuildRequest, out: Path, files: Sequence[SourceFile], note: Callable[[str], None], progress: Show
) -> None:
    note(f"{plural(len(files), 'file')}, {sum(file.size for file in files) / 1e6:,.1f} MB")
    parts, options = cut(files), _options(request, request.tokenizer) if request.tokenizer else None
    try:
        with build_folder(out) as partial:
            trained = partial / f"{_sha256((files, request.field, request.vocab or VOCAB))}.json"
            if options is None:
                _train(request, parts, trained, _reporter("training the tokenizer", parts, progress))
                options = _options(request, trained)
            how = _sha256((VERSION, options))
            tasks = [Task(part, part.key(how)) for part in parts]
            build = _sha256([task.key for task in tasks])
            keep_only(out, partial, build, {trained.name, *(task.key for task in tasks)})
            _build_missing(request, out, tasks, options, partial, note, progress)
            origin = finish(out, partial, build, [task.key for task in tasks], options)
    except KeyboardInterrupt:
        if out.exists():
            note(RESUMABLE)
        raise
    if origin.empty_rows:
        note(f"left out: {plural(origin.empty_rows, 'empty row')}")
    if origin.untrained_conversations:
        note(f"left out: {plural(origin.untrained_conversations, 'conversation')} without a turn to train")


def _check(request: BuildRequest) -> None:
    if request.shard_tokens < 1:
        raise PentadError(f"shard_tokens is {request.shard_tokens}: expected at least 1")
    if request.workers is not None and request.workers < 1:
        raise PentadError(f"--workers is {request.workers}: expected at least 1")
    if request.vocab is not None:
        if request.tokenizer:
            found = f"--vocab is {request.vocab} beside --tokenizer {request.tokenizer}"
            raise PentadError(f"{found}: expected one of them")
        require_vocab(request.vocab, "--vocab")
    if request.chat and not request.tokenizer:
        raise PentadError(
            "--chat is given without --tokenizer: expected the folder of a model's tokenizer and template"
        )
    if request.template and not request.chat:
        raise PentadError(f"--chat-template is '{request.template}' without --chat: expected both or neither")


def _options(request: BuildRequest, path: Path) -> Options:
    tokenizer = load_tokenizer(path)
    special = special_tokens(path)
    template = None
    if request.chat:
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        template = ChatTemplate(*read_chat_template(path, request.template), special, tuple(added))
        template.check()
    end = None if template else end_token(tokenizer, special.get("eos_token"))
    return Options(tokenizer_text(tokenizer), end, request.field, template, request.shard_tokens)


def _train(request: BuildRequest, parts: Sequence[BuildPart], path: Path, report: Callable[[Done], None]) -> None:
    """Writes the file of a tokenizer trained on all of the text, unless an unfinished build already has it."""
    if path.exists():
        return
    interrupted = threading.Event()

    def reported(news: Done) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        report(news)

    texts = _texts(parts, text_columns(request.field), reported)
    training = in_daemon(lambda: train_tokenizer(texts, request.vocab or VOCAB))
    try:
        trained = training.result()  # in this thread, Rust would notice Ctrl-C only at the end
    except KeyboardInterrupt:
        interrupted.set()
        wait([training], _LAST_SECONDS)
        raise
    write_file(path, [memoryview(tokenizer_text(trained).encode())])


def _texts(parts: Iterable[BuildPart], columns: Columns, report: Callable[[Done], None]) -> Iterator[str]:
    for part in parts:
        for chunk in text_chunks(part.spans, columns, {"empty": 0}):
            yield chunk.text
            report(Done(len(chunk.text)))
        report(Done(0, part))


def _build_missing(
    request: BuildRequest,
    out: Path,
    tasks: list[Task],
    options: Options,
    partial: Path,
    note: Callable[[str], None],
    progress: Show,
) -> None:
    """Builds the parts that no earlier call has built."""
    missing = [] if is_finished(out) else [task for task in tasks if not is_built(partial, task.key)]
    if len(missing) < len(tasks):
        note(f"continues an unfinished build: {len(tasks) - len(missing)} of {plural(len(tasks), 'part')} are there")
    if missing:
        report = _reporter("encoding", [task.part for task in missing], progress)
        build_parts(out, partial, options, missing, request.workers or _cpus(), report, note)


def _reporter(phase: str, parts: Iterable[BuildPart], progress: Show) -> Callable[[Done], None]:
    """A function that takes what was done and reports the progress of a phase to `progress`."""
    total, began, done, characters = sum(part.bytes for part in parts), time.monotonic(), 0, 0

    def report(news: Done) -> None:
        nonlocal done, characters
        done, characters = done + (news.part.bytes if news.part else 0), characters + news.characters
        progress(BuildProgress(phase, done, total, characters, time.monotonic() - began))

    return report


def _sha256(value: object) -> str:
    """The first 32 hexadecimal digits of the sha256 of plain data's repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def _cpus() -> int:
    """The number of CPUs that this process may use or, if the system does not say, that exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
