"""`pentad data build` and `pentad data inspect`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from pentad.orchestrator.cli.arguments import Json

if TYPE_CHECKING:
    from pentad.workers.preprocess.build import BuildProgress

data = typer.Typer(help="Build and inspect token shards.", no_args_is_help=True)
_LINE_EVERY = 10.0  # seconds, where the progress line cannot be rewritten


@data.command()
def build(
    sources: Annotated[
        list[str], Argument(metavar="SOURCE", help="Files, folders, patterns or URIs (see docs/data-build.md).")
    ],
    out: Annotated[str, Argument(metavar="OUT", help="A new or empty folder or URI, or that of an unfinished build.")],
    vocab: Annotated[int | None, Option(help="Size of the tokenizer to train (default: 32,768).")] = None,
    tokenizer: Annotated[Path | None, Option(help="Use this tokenizer.json, or the one in this folder.")] = None,
    field: Annotated[str | None, Option(help="The column with the text (default: text) or conversations.")] = None,
    chat: Annotated[bool, Option("--chat", help="Rows are conversations; train on what the assistant says.")] = False,
    chat_template: Annotated[
        Path | None, Option(help="A Jinja file to use instead of the tokenizer's template.")
    ] = None,
    workers: Annotated[int | None, Option(min=1, help="Processes (default: one per CPU).")] = None,
    as_json: Json = False,
) -> None:
    """Turn text or conversations into token shards.

    Continues a build that was interrupted.
    """
    from pentad.schedules.ir.regular_files import MOST_JSON, regular_file
    from pentad.workers.data.corpus_index import plural
    from pentad.workers.preprocess.build import BuildRequest, build_corpus

    for path in (each for each in (tokenizer, chat_template) if each is not None):
        regular_file(path / "tokenizer.json" if path.is_dir() else path, MOST_JSON)
    request = BuildRequest(tuple(sources), out, tokenizer, vocab, field, chat, chat_template, workers=workers)
    with _ProgressLine() as line:
        corpus = build_corpus(request, line.note, line.show)
    facts = {"path": str(out), "tokens": corpus.tokens, "documents": corpus.documents, "vocab_size": corpus.vocab_size}
    if as_json:
        print(json.dumps({**facts, "fingerprint": corpus.fingerprint}))
    else:
        held = f"{plural(corpus.tokens, 'token')} in {plural(corpus.documents, 'document')}"
        print(f"{out}: {held}, vocabulary of {corpus.vocab_size:,}")


class _ProgressLine(AbstractContextManager["_ProgressLine"]):
    """Notes, and one line on stderr that is rewritten; if it cannot be, prints a new line now and then."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.status = self.console.status("") if self.console.is_terminal else None
        self.shown = 0.0

    def __exit__(self, *_: object) -> None:
        if self.status:
            self.status.stop()

    def note(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def show(self, progress: BuildProgress) -> None:
        if self.status:
            self.status.update(Text(progress_text(progress)))
            self.status.start()
        elif progress.seconds < self.shown or progress.seconds - self.shown >= _LINE_EVERY:
            self.shown = progress.seconds
            self.note(progress_text(progress))


def progress_text(progress: BuildProgress) -> str:
    """'encoding: 41 of 97 MB, 18.2 MB/s, 3 s left'; the time left is known once a part is done."""
    megabytes, rate = progress.characters / 1e6, progress.characters / 1e6 / max(progress.seconds, 1e-9)
    text = f"{progress.phase}: {megabytes:,.0f} MB of text, {rate:.1f} MB/s"
    if 0 < progress.bytes < progress.total:
        left = progress.seconds * (progress.total - progress.bytes) / progress.bytes
        text += f", {progress.bytes / progress.total:.0%}, {_duration(left)} left"
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


@data.command()
def inspect(
    path: Annotated[str, Argument(metavar="PATH", help="A folder or URI that `pentad data build` wrote.")],
    samples: Annotated[int, Option(min=0, help="Documents to show the beginning of.")] = 2,
    as_json: Json = False,
) -> None:
    """Verify token shards and show what is in them."""
    from pentad.orchestrator.checked_folders import check_corpora
    from pentad.workers.data.corpus_index import plural
    from pentad.workers.preprocess.inspect import inspect_corpus

    check_corpora([path])
    facts = inspect_corpus(path, samples, length=128)
    if as_json:
        print(json.dumps(facts))
        return
    console = Console(highlight=False, soft_wrap=True)
    held = f"{plural(facts['tokens'], 'token')} in {plural(facts['documents'], 'document')}"
    console.print(f"{path}: {held}, {plural(len(facts['shards']), 'shard')}", markup=False)
    console.print(f"vocabulary of {facts['vocab_size']:,}, fingerprint {facts['fingerprint'][:12]}, verified")
    masked = facts["trained_tokens"] != facts["tokens"]
    if masked:
        share = facts["trained_tokens"] / facts["tokens"]
        marks = "in colour" if console.color_system else "between « and »"
        console.print(f"{share:.1%} of the tokens are trained; they are {marks}")
    console.print()
    console.print(_length_bars(facts["lengths"], console.width))
    for number, segments in enumerate(facts["samples"]):
        console.print(f"\n--- document {number}")
        console.print(_marked(segments, masked, console.color_system is not None))


def _length_bars(lengths: list[dict[str, int]], width: int) -> Text:
    """A line for each range of lengths: its documents, its share of the tokens, and a bar as long as that share."""
    names = [f"{each['shortest']:,} to {each['longest']:,}" for each in lengths]
    counts = [f"{each['documents']:,}" for each in lengths]
    total = max(1, sum(each["tokens"] for each in lengths))
    most = max((each["tokens"] for each in lengths), default=1) or 1
    of_name, of_count = (max(map(len, (head, *texts))) for head, texts in (("tokens", names), ("documents", counts)))
    heads = f"{'tokens':>{of_name}}  {'documents':>{of_count}}  share of tokens\n"
    text, room = Text(heads, "bold"), max(8, min(60, width - of_name - of_count - 12))
    for name, count, each in zip(names, counts, lengths, strict=True):
        share = f"{each['tokens'] / total:6.1%}"
        text.append(f"{name:>{of_name}}  {count:>{of_count}}  {share} ", "default")
        text.append("█" * round(room * each["tokens"] / most), "cyan")
        text.append("\n")
    text.rstrip()
    return text


def _marked(segments: list[dict[str, Any]], masked: bool, colour: bool) -> Text:
    """The text of a sample. Trained parts are bold and green, or in angle quotes if there are no colours."""
    text = Text()
    for segment in segments:
        trained, words = masked and segment["trained"], _printable(segment["text"])
        text.append(f"«{words}»" if trained and not colour else words, "bold green" if trained and colour else "")
    return text


def _printable(text: str) -> str:
    """Replaces control characters, which could move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
