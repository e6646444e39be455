"""Builds one part of a corpus: a folder of shards with an index of its own."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import sync_folder, write_file
from pentad.workers.data.corpus_index import INDEX_FILE, TOKENIZER_FILE, Index, Origin, TokenizerFile, index_text
from pentad.workers.data.corpus_writer import Document, index_of, token_dtype, write_shards
from pentad.workers.data.encoder import Encoder, TextChunk
from pentad.workers.data.tokenizer import parse_tokenizer, vocab_size
from pentad.workers.preprocess.chat import ChatEncoder, chat_columns
from pentad.workers.preprocess.chat_template import ChatTemplate
from pentad.workers.preprocess.parts import BuildPart
from pentad.workers.preprocess.readers import Columns, FileSpan, SourceRow, read_rows, read_text
from pentad.workers.preprocess.source_files import reason

_REPORTED = 2**22  # characters


@dataclass(frozen=True)
class Options:
    """Everything that determines the content of a corpus besides its sources.

    `tokenizer` is the text of a tokenizer.json. Either `end` is the id that ends a document, or there is a `template`
    and the rows are conversations. `field` names the column (None: text, or those of conversations).
    """

    tokenizer: str
    end: int | None
    field: str | None
    template: ChatTemplate | None
    shard_tokens: int

    @property
    def columns(self) -> Columns:
        return text_columns(self.field) if self.template is None else chat_columns(self.field)


class PartBuilder:
    """Builds parts below the folder `partial` of the corpus `out`. One object for many parts sets up its encoder only
    once."""

    def __init__(self, out: Path, partial: Path, options: Options, note: Callable[[str], None]) -> None:
        self.out, self.partial, self.options = out, partial, options
        tokenizer = parse_tokenizer(options.tokenizer)
        self.file = TokenizerFile(TOKENIZER_FILE, hashlib.sha256(options.tokenizer.encode()).hexdigest())
        self.vocab = vocab_size(tokenizer)
        self.chat = ChatEncoder(tokenizer, options.template) if options.template else None
        self.text = None if options.end is None else Encoder(tokenizer, options.end, note)

    def build(self, part: BuildPart, key: str, report: Callable[[int], None]) -> None:
        """Writes the folder `key`, completely or not at all; calls `report` with the characters read since its last
        call.

        Raises PentadError for a faulty source, and for a folder that cannot be written.
        """
        folder = self.partial / f"{key}.{secrets.token_hex(4)}"
        try:
            folder.mkdir()
            index = self._write(part, folder, report)
            write_file(folder / INDEX_FILE, [memoryview(index_text(index).encode())])
            sync_folder(folder)
            os.rename(folder, self.partial / key)
            sync_folder(self.partial)
        except OSError as error:  # from writing: errors of reading are PentadErrors
            raise cannot_write(self.out, error) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, part: BuildPart, folder: Path, report: Callable[[int], None]) -> Index:
        skipped = {"empty": 0, "untrained": 0}
        documents = self._documents(part, skipped, report)
        shards = write_shards(folder, documents, token_dtype(self.vocab), self.options.shard_tokens)
        for span in part.spans:
            span.file.require_unchanged()
        template = self.options.template
        fields = " or ".join("+".join(columns) for columns in self.options.columns.alternatives)
        origin = Origin(fields, template.sha256 if template else "", skipped["empty"], skipped["untrained"])
        return index_of(self.file, self.vocab, shards, origin)

    def _documents(self, part: BuildPart, skipped: dict[str, int], report: Callable[[int], None]) -> Iterator[Document]:
        if self.chat:
            rows = (row for span in part.spans for row in _chat_rows(span, self.options.columns))
            return self.chat.documents(rows, skipped, report)
        assert self.text, "documents of text end with a token"
        chunks = text_chunks(part.spans, self.options.columns, skipped)
        return self.text.documents(_reported(chunks, report))


def cannot_write(out: Path, error: OSError) -> PentadError:
    fault = f"which cannot be written ({reason(error)})"
    return PentadError(f"OUT is '{out}', {fault}: expected a writable folder with free space")


def text_columns(field: str | None) -> Columns:
    return Columns(((field or "text",),), hint=" (--field names the column, --chat takes conversations)")


def text_chunks(spans: Iterable[FileSpan], columns: Columns, skipped: dict[str, int]) -> Iterator[TextChunk]:
    """The documents: one per text file, or one per row. Counts rows that are null or empty in `skipped`."""
    for span in spans:
        if span.file.format == ".txt":
            yield from _chunks(read_text(span.file))
            continue
        for row in read_rows(span, columns):
            (name, text), *_ = row.values.items()
            if text is not None and not isinstance(text, str):
                fault = f"has '{name}' of type {type(text).__name__}"
                raise PentadError(f"{row.where()} {fault}: expected a string")
            if not text:
                skipped["empty"] += 1
            else:
                yield TextChunk(text, True)


def _chunks(blocks: Iterable[str]) -> Iterator[TextChunk]:
    """The chunks of one document; none if it is empty."""
    pending = ""
    for block in blocks:
        if block:
            if pending:
                yield TextChunk(pending, False)
            pending = block
    if pending:
        yield TextChunk(pending, True)


def _chat_rows(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    if span.file.format == ".txt":
        raise PentadError(f"{span.file.uri} is a text file: expected conversations in JSONL, Parquet or Arrow (--chat)")
    return read_rows(span, columns)


def _reported(chunks: Iterable[TextChunk], report: Callable[[int], None]) -> Iterator[TextChunk]:
    read = 0
    for chunk in chunks:
        yield chunk
        read += len(chunk.text)
        if read >= _REPORTED:
            report(read)
            read = 0
    report(read)
