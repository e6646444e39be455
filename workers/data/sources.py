"""Opens the sources of a run's data: folders, URIs, or `builtin:NAME`, text that every Python installation has.

Imports no torch: the driver checks the data before it starts anything.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.schedules.spec.batch import BatchSizes, BatchSpec
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.eval_spec import EvalData
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.corpus_index import INDEX_FILE, VERSION, parse_index, plural, require_vocab
from pentad.workers.data.holdout import CorpusPart, evaluation_part, training_part
from pentad.workers.data.mixture import another_corpus, require_lasting
from pentad.workers.data.packing import Packs, is_packed
from pentad.workers.data.samples import Dataset, OpenSource, Sequences, Windows

_BUILTIN_VOCAB = 4096  # half a megabyte of text cannot train more tokens well
_SHARD_TOKENS = 2**26
_VERIFIED_TOKENS = 2**28  # checked within a second; larger corpora are checked as they are read
# pydoc: Python's language reference as shown by `help()`, 80 topics, 0.5 MB of English.
_TEXTS: dict[str, Callable[[], list[str]]] = {"pydoc": lambda: [topics[name] for name in sorted(topics)]}


def open_sources(data: DataSpec, vocab: int, length: int, *, verify: bool = False) -> list[OpenSource]:
    """Opens all sources, building built-in ones in the folder `data.cache` on first use, and cuts them into sequences
    of `length` tokens.

    With `verify` the content of small corpora is checked too, before a rank reads them. Raises PentadError for a corpus
    that is missing, damaged, not the one that `data` specifies, shorter than one sequence, or has more token ids than
    `vocab`; and for sources that are the same or have different tokenizers.
    """
    return _cut(data, _open_corpora(data, vocab, verify=verify), length)


def _open_corpora(data: DataSpec, vocab: int, *, verify: bool = False) -> list[Corpus]:
    """The open corpora without what is held out."""
    corpora = list[Corpus]()
    for spec in data.sources:
        corpus = _open(spec, vocab, data.cache, verify=verify)
        for earlier, other in zip(data.sources, corpora, strict=False):
            if other.fingerprint == corpus.fingerprint:
                raise PentadError(f"{spec.key} is {spec.path}, the corpus of {earlier.key}: expected another one")
        if corpora and corpus.tokenizer != corpora[0].tokenizer:
            found = f"{spec.key} is {spec.path}, whose tokenizer has sha256 {corpus.tokenizer[:12]}"
            expected = f"{corpora[0].tokenizer[:12]}, the tokenizer of {data.sources[0].key}"
            raise PentadError(f"{found}: expected {expected}")
        corpora.append(training_part(corpus, data.holdout))
    return corpora


def _open(spec: SourceSpec, vocab: int, cache: str, *, verify: bool) -> Corpus:
    corpus = open_corpus(corpus_folder(spec.path, vocab, cache), argument=spec.key, cache=cache)
    if verify and corpus.tokens <= _VERIFIED_TOKENS:
        corpus.verify()
    if corpus.vocab_size > vocab:
        expected = f"expected at least {corpus.vocab_size}, the vocabulary of {spec.path}"
        raise PentadError(f"model.vocab is {vocab}: {expected}")
    if spec.fingerprint and corpus.fingerprint != spec.fingerprint:
        raise another_corpus(spec, corpus.fingerprint, spec.fingerprint)
    return corpus


def _cut(data: DataSpec, corpora: list[Corpus], length: int) -> list[OpenSource]:
    def cut(corpus: Corpus, key: str) -> Sequences:
        if data.packing == "documents":
            return Packs(corpus, length, Path(data.cache), key)
        return Windows(corpus, length, key)

    return [OpenSource(each, cut(each, spec.key)) for spec, each in zip(data.sources, corpora, strict=True)]


def _is_cut(data: DataSpec, corpora: list[Corpus], length: int) -> bool:
    """Whether the sources can be cut without packing documents first."""
    return data.packing == "windows" or all(is_packed(each, length, Path(data.cache)) for each in corpora)


def open_eval_data(
    data_set: EvalData, vocab: int, length: int, cache: str, *, verify: bool = False, argument: str = "eval.data"
) -> CorpusPart:
    """The part of a corpus on which a data set is evaluated. Raises PentadError as `open_sources` does."""
    spec = SourceSpec(data_set.name, data_set.data, argument, fingerprint=data_set.fingerprint)
    corpus = _open(spec, vocab, cache, verify=verify)
    Windows(corpus, length, argument)  # checks its length
    part = evaluation_part(corpus, data_set.holdout)
    if not part.windows(length):
        found = f"which holds {part.end - part.first} tokens of '{corpus.path}' out"
        expected = f"a share of at least {length + 1} (batch.sequence_length + 1)"
        raise PentadError(f"data.holdout is {data_set.holdout:g}, {found}: expected {expected}")
    return part


def count_eval_sequences(data_set: EvalData, vocab: int, length: int, cache: str) -> int | None:
    """The number of sequences in a data set; None if it is a built-in corpus that has not been built yet. Raises
    PentadError as `open_sources` does."""
    if not _is_built(data_set.data, vocab, cache):
        return None
    argument = "data.path" if data_set.holdout else "eval.data"
    return open_eval_data(data_set, vocab, length, cache, argument=argument).windows(length)


def open_dataset(data: DataSpec, batch: BatchSpec, vocab: int, seed: int) -> Dataset:
    """All samples of a run. Raises PentadError as `open_sources` does."""
    return _dataset(data, _open_corpora(data, vocab), batch, seed)


def open_prepared(data: DataSpec, batch: BatchSpec, vocab: int, seed: int) -> Dataset | None:
    """As `open_dataset`, or None if that would have to build a corpus, pack documents, or read a remote corpus."""
    if not all("://" not in spec.path and _is_built(spec.path, vocab, data.cache) for spec in data.sources):
        return None
    corpora = _open_corpora(data, vocab)
    return _dataset(data, corpora, batch, seed) if _is_cut(data, corpora, batch.sequence_length) else None


def _dataset(data: DataSpec, corpora: list[Corpus], batch: BatchSpec, seed: int) -> Dataset:
    sources = _cut(data, corpora, batch.sequence_length)
    return Dataset(described(data, sources), sources, seed, batch.sequence_length, batch.sizes)


def described(data: DataSpec, sources: list[OpenSource]) -> DataSpec:
    """`data` with the fingerprints and sizes of its opened sources. Raises PentadError for `epochs` of less than one
    sequence."""
    found = []
    for spec, source in zip(data.sources, sources, strict=True):
        found.append(replace(spec, fingerprint=source.corpus.fingerprint, sequences=source.cut.sequences))
        if spec.epochs is not None and spec.epochs * source.cut.sequences < 1:
            key, count = spec.key.replace(".path", ".epochs"), plural(source.cut.sequences, "sequence")
            raise PentadError(f"{key} is {spec.epochs:g} of {count}: expected at least one sequence")
    return replace(data, sources=tuple(found))


def corpus_folder(data: str, vocab: int, cache: str) -> str | Path:
    """The folder or URI of the corpus `data`. A built-in one is built first if needed, with at most `vocab` tokens."""
    if data.startswith("builtin:"):
        return builtin_corpus(data.removeprefix("builtin:"), vocab, Path(cache))
    return data if "://" in data else expanded(data)


def tokenizer_file(data: str, vocab: int, cache: str) -> Path | None:
    """The tokenizer.json of the corpus `data`; None unless the corpus is in a local folder."""
    index = Path(corpus_folder(data, vocab, cache)) / INDEX_FILE
    if not index.is_file():
        return None
    return index.with_name(parse_index(index.read_text(encoding="utf-8"), index).tokenizer.file)


def check_data(data: DataSpec, vocab: int, length: int, sizes: BatchSizes, steps: int) -> None:
    """Raises PentadError as `open_sources` does, and if the data does not last for `steps`. Builds no built-in corpus,
    packs no documents and reads no tokens, and checks only what is possible without that."""
    if not all(_is_built(spec.path, vocab, data.cache) for spec in data.sources):
        return
    corpora = _open_corpora(data, vocab)
    if _is_cut(data, corpora, length):
        require_lasting(described(data, _cut(data, corpora, length)), sizes, steps)


def _is_built(data: str, vocab: int, cache: str) -> bool:
    """Whether a corpus can be opened without building it. Raises PentadError for a built-in one that cannot be
    built."""
    if not data.startswith("builtin:"):
        return True
    require_vocab(vocab, "model.vocab")
    folder, _ = _builtin_folder(data.removeprefix("builtin:"), vocab, Path(cache))
    return (folder / INDEX_FILE).exists()


def _builtin_folder(name: str, vocab: int, cache: Path) -> tuple[Path, list[str]]:
    """Where a built-in corpus is or would be, and its documents. Raises PentadError for an unknown name."""
    if name not in _TEXTS:
        known = ", ".join(f"builtin:{known}" for known in _TEXTS)
        raise PentadError(f"data.path is builtin:{name}: expected one of {known}")
    documents = _TEXTS[name]()
    digest = hashlib.sha256("\0".join([str(VERSION), *documents]).encode()).hexdigest()
    size = min(vocab, _BUILTIN_VOCAB)
    return expanded(cache) / f"{name}-{size}-python{platform.python_version()}-{digest[:16]}", documents


def builtin_corpus(name: str, vocab: int, cache: Path) -> Path:
    """The folder of the corpus `builtin:NAME`, which is built below `cache` if absent, with at most `vocab` tokens.

    If processes race, one folder remains and all use it. Raises PentadError for an unknown name.
    """
    out, documents = _builtin_folder(name, vocab, cache)
    if not (out / INDEX_FILE).exists():
        try:
            with new_folder(out, "data.cache") as folder:
                _write_builtin(folder, documents, vocab)
        except PentadError:
            if not (out / INDEX_FILE).exists():  # otherwise another process has built it meanwhile
                raise
    return out


def _write_builtin(folder: Path, documents: list[str], vocab: int) -> None:
    # These import tokenizers, which `pentad plan` does not need.
    from pentad.workers.data.corpus_writer import write_index, write_shards
    from pentad.workers.data.encoder import Encoder, TextChunk
    from pentad.workers.data.tokenizer import end_token, train_tokenizer

    tokenizer = train_tokenizer(documents, min(vocab, _BUILTIN_VOCAB), argument="model.vocab")
    encoder = Encoder(tokenizer, end_token(tokenizer))
    encoded = encoder.documents(TextChunk(document, True) for document in documents)
    shards = write_shards(folder, encoded, encoder.dtype, _SHARD_TOKENS)
    write_index(folder, tokenizer, shards)
