"""Writes three real texts as essays.jsonl, dictionary.jsonl and code.jsonl: one document a line, eight megabytes each.

apt-get download anarchism dict-gcide && for package in *.deb; do dpkg-deb -x "$package" debian; done
python tests/bench/real_texts.py debian OUT

Essays are pages of An Anarchist FAQ, entries those of the Collaborative International Dictionary of English, and code
is the standard library of this Python. They are ordered by hash, so that the last documents are like the others.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from itertools import accumulate, takewhile
from pathlib import Path

BYTES = 8_000_000  # of each text
BLOCKS = {"p", "br", "li", "ul", "ol", "div", "h1", "h2", "h3", "h4", "blockquote", "hr"}
NO_SOURCES = {"site-packages", "test", "tests", "pydoc_data", "encodings"}  # prose and tables among the code


class _Text(HTMLParser):
    """The text of a page's body, with a line for each block."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(page.partition("<body>")[2])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.parts.append("\0" if tag in BLOCKS else "")

    def handle_data(self, text: str) -> None:
        self.parts.append(text)

    @property
    def lines(self) -> str:
        blocks = (" ".join(block.split()) for block in "".join(self.parts).split("\0"))
        return "\n".join(block for block in blocks if block)


def essays(debian: Path) -> Iterator[str]:
    for page in sorted(debian.glob("usr/share/doc/anarchism/html/*.html")):
        yield _Text(page.read_text("utf-8", errors="replace")).lines


def dictionary(debian: Path) -> Iterator[str]:
    """An entry begins with its headword at the start of a line, after an empty one."""
    text = gzip.decompress((debian / "usr/share/dictd/gcide.dict.dz").read_bytes()).decode("utf-8", errors="replace")
    return (entry for entry in re.split(r"\n\n(?=\S)", text) if "\n   " in entry)


def code() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not NO_SOURCES & set(path.relative_to(root).parts):
            yield path.read_text("utf-8", errors="replace")


def documents(found: Iterable[str]) -> list[str]:
    """Distinct documents in the order of their hashes, of BYTES together."""
    ordered = sorted(set(found) - {""}, key=lambda text: hashlib.sha256(text.encode()).digest())
    sizes = accumulate(len(text.encode()) for text in ordered)
    return [text for text, _ in takewhile(lambda pair: pair[1] <= BYTES, zip(ordered, sizes, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("debian", type=Path, help="where the packages were unpacked")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"essays": essays(options.debian), "dictionary": dictionary(options.debian), "code": code()}
    for name, texts in found.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents(texts))
        (options.out / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
