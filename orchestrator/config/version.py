"""The version of pentad."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed package's version, or "checkout" if pentad runs from its sources."""
    try:
        return version("pentad")
    except PackageNotFoundError:
        return "checkout"
