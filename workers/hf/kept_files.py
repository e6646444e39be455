"""The files of a Hugging Face folder other than its weights: an import keeps them, and an export writes them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pentad.schedules.ir.errors import PentadError

FOLDER = "hf"  # folder for them in an import, beside its checkpoints
SUBFOLDERS = ("additional_chat_templates",)
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".onnx"),
    ".index.json",  # the index of weights in several files
)


def read_files(folder: Path) -> dict[str, bytes]:
    """Files by their path below `folder`, without weights and hidden files; none if the folder does not exist.

    Raises PentadError naming a file that cannot be read.
    """
    found = {}
    for path in sorted(_paths(folder)):
        try:
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
        except OSError as error:
            raise PentadError(f"{path} cannot be read ({error.strerror}): expected a readable file") from None
    return found


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `read_files` returned. Raises OSError."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _paths(folder: Path) -> Iterator[Path]:
    for each in (folder, *(folder / name for name in SUBFOLDERS)):
        for path in each.iterdir() if each.is_dir() else ():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
                yield path
