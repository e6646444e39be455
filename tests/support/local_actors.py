"""Ray without Ray for actors that answer immediately: they live in this process, where one of them may die or fall
silent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, GetTimeoutError


class Ref:
    """An answer, or the error that is raised when it is fetched; `is_silent` if it never comes."""

    def __init__(self, value: Any, *, is_silent: bool = False) -> None:
        self.value, self.is_silent = value, is_silent


class Actor:
    def __init__(self, ray: LocalRay, bundle: int, made: Any) -> None:
        self.ray, self.bundle, self.made = ray, bundle, made

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(method, *given))

    def _call(self, method: str, *given: Any) -> Ref:
        fault = self.ray.faults.get(self.bundle)
        if fault == "silent":
            return Ref(None, is_silent=True)
        if fault == "dead":
            return Ref(ActorDiedError())
        self.ray.bundle = self.bundle
        return Ref(getattr(self.made, method)(*given))


class LocalRay:
    """Stands in for the module `ray`. `faults` are 'dead' or 'silent', by an actor's bundle. There are two bundles a
    node, each with a GPU if it needs one. Strategies are the bundles themselves."""

    def __init__(self) -> None:
        self.faults: dict[int, str] = {}
        self.needs: list[dict[str, int]] = []
        self.bundle = 0
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.__version__ = "2.60"

    def remote(self, **needs: int) -> Any:
        self.needs.append(needs)

        def options(kind: type, bundle: int) -> Any:
            return SimpleNamespace(remote=lambda *given: Actor(self, bundle, kind(*given)))

        return lambda kind: SimpleNamespace(options=lambda scheduling_strategy: options(kind, scheduling_strategy))

    def get_gpu_ids(self) -> list[int]:
        """The GPUs of the actor that is being called."""
        return [self.bundle % 2] if self.needs[-1]["num_gpus"] else []

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if isinstance(ref, list):
            return [self.get(each, timeout) for each in ref]
        if ref.is_silent:
            raise GetTimeoutError
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def wait(self, refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        silent = [ref for ref in refs if ref.is_silent]
        time.sleep(timeout if silent else 0.0)
        return [ref for ref in refs if not ref.is_silent], silent
