"""Writes real texts, each as NAME.jsonl with one document a line: by default three, of eight megabytes each.

apt-get download anarchism dict-gcide && for package in *.deb; do dpkg-deb -x "$package" debian; done
python tests/bench/real_texts.py debian OUT

Essays are pages of An Anarchist FAQ, entries those of the Collaborative International Dictionary of English, and code
is the standard library of this Python. They are ordered by hash, so that the last documents are like the others.
`--only manuals kernel` writes others instead: documentation of Linux, Python and Perl (linux-doc-6.1, python3.11-doc,
perl-doc), and the C sources of Linux (linux-source-6.1).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from itertools import accumulate, takewhile
from pathlib import Path

KERNEL = "usr/src/linux-source-6.1.tar.xz"
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
    """Entries of a dictionary: each begins with a headword at the start of a line, after an empty line."""
    text = gzip.decompress((debian / "usr/share/dictd/gcide.dict.dz").read_bytes()).decode("utf-8", errors="replace")
    return (entry for entry in re.split(r"\n\n(?=\S)", text) if "\n   " in entry)


def code() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not NO_SOURCES & set(path.relative_to(root).parts):
            yield path.read_text("utf-8", errors="replace")


def manuals(debian: Path) -> Iterator[str]:
    """Manuals in reStructuredText and in Perl's pod."""
    for pattern in (
        "usr/share/doc/*/**/*.rst",
        "usr/share/doc/*/**/*.rst.gz",
        "usr/share/doc/*/html/_sources/**/*.txt",
    ):
        for path in sorted(debian.glob(pattern)):
            if not path.is_symlink():
                content = path.read_bytes()
                content = gzip.decompress(content) if path.suffix == ".gz" else content
                yield content.decode("utf-8", errors="replace")
    for path in sorted(debian.glob("usr/share/perl/*/**/*.pod")):
        yield path.read_text("utf-8", errors="replace")


def kernel(debian: Path) -> Iterator[str]:
    """The C files; headers of registers are tables of numbers."""
    with tarfile.open(debian / KERNEL, "r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".c"):
                content = archive.extractfile(member)
                assert content is not None
                yield content.read().decode("utf-8", errors="replace")


def documents(found: Iterable[str], size: int) -> list[str]:
    """Distinct documents in the order of their hashes, of `size` bytes in total."""
    ordered = sorted(set(found) - {""}, key=lambda text: hashlib.sha256(text.encode()).digest())
    sizes = accumulate(len(text.encode()) for text in ordered)
    return [text for text, _ in takewhile(lambda pair: pair[1] <= size, zip(ordered, sizes, strict=True))]


def main() -> None:
    texts: dict[str, Callable[[Path], Iterator[str]]] = {
        "essays": essays,
        "dictionary": dictionary,
        "code": lambda debian: code(),
        "manuals": manuals,
        "kernel": kernel,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debian", type=Path, help="where the packages were unpacked")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=texts, default=["essays", "dictionary", "code"])
    parser.add_argument("--megabytes", type=float, default=8, help="of each text, at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        chosen = documents(texts[name](options.debian), round(options.megabytes * 1e6))
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))


if __name__ == "__main__":
    main()
