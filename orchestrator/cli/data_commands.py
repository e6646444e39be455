"""`pentad data build` and `pentad data inspect`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pentad.orchestrator.cli.arguments import Json

data = typer.Typer(help="Build and inspect token shards.", no_args_is_help=True)


@data.command()
def build(
    source: Annotated[Path, Argument(help="A text, JSONL or Parquet file, or a folder of them.")],
    out: Annotated[Path, Argument(help="A new or empty folder.")],
    vocab: Annotated[int, Option(help="Size of the tokenizer to train.")] = 2**15,
    tokenizer: Annotated[Path | None, Option(help="A tokenizer.json to use instead of training one.")] = None,
    field: Annotated[str, Option(help="The field that holds the text, in JSONL and Parquet.")] = "text",
    as_json: Json = False,
) -> None:
    """Turn text into token shards."""
    from pentad.workers.data.build import build_corpus
    from pentad.workers.data.corpus_index import plural

    log = partial(print, file=sys.stderr)
    corpus = build_corpus(source, out, tokenizer=tokenizer, vocab=vocab, field=field, progress=log)
    facts = {"path": str(out), "tokens": corpus.tokens, "documents": corpus.documents, "vocab_size": corpus.vocab_size}
    if as_json:
        print(json.dumps({**facts, "fingerprint": corpus.fingerprint}))
    else:
        held = f"{plural(corpus.tokens, 'token')} in {plural(corpus.documents, 'document')}"
        print(f"{out}: {held}, vocabulary of {corpus.vocab_size:,}")


@data.command()
def inspect(
    path: Annotated[Path, Argument(help="A folder that `pentad data build` wrote.")],
    samples: Annotated[int, Option(min=0, help="Sequences to show as text.")] = 2,
    as_json: Json = False,
) -> None:
    """Verify token shards and show what is in them."""
    from pentad.workers.data.build import inspect_corpus
    from pentad.workers.data.corpus_index import plural

    facts = inspect_corpus(path, samples, length=64, seed=0)
    if as_json:
        print(json.dumps(facts))
        return
    held = f"{plural(facts['tokens'], 'token')} in {plural(facts['documents'], 'document')}"
    print(f"{path}: {held}, {plural(len(facts['shards']), 'shard')}")
    print(f"vocabulary of {facts['vocab_size']:,}, fingerprint {facts['fingerprint'][:12]}, verified")
    for number, text in enumerate(facts["samples"]):
        print(f"\n--- sequence {number}\n{_printable(text)}")


def _printable(text: str) -> str:
    """Replaces control characters, which could move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
