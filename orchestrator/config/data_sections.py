"""The sections on data: what is trained on and what is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, field_validator

from pentad.orchestrator.config.errors import Broken, two_costs, within_or_auto
from pentad.orchestrator.config.sections import Count, CountOrZero, Section, Text
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.data import DataSpec, SourceSpec, WeightChange
from pentad.schedules.spec.eval_spec import HOLDOUT
from pentad.workers.data.mixture import shares_of

MOST_FACTOR = 100
Factor = Annotated[float, Field(ge=1, le=MOST_FACTOR)]
FactorOrAuto = Annotated[Factor | Literal["auto"], BeforeValidator(within_or_auto(1, MOST_FACTOR))]
Cost = Annotated[float, Field(ge=0)]
CostsOrAuto = Annotated[list[Cost] | Literal["auto"], BeforeValidator(two_costs)]


class SourceSection(Section):
    """A corpus of the mixture."""

    path: Text = Field(description="folder that `pentad data build` wrote, or builtin:pydoc")
    weight: NonNegativeFloat = 1.0
    """share of the sequences, relative to the weights of the other sources"""
    epochs: PositiveFloat | None = None
    """passes over the source after which it drops out and the others share its weight; null: no limit"""
    name: Text | None = None
    """name in metrics and messages; null: the last part of `path`"""


class WeightChangeSection(Section):
    """A change of the mixture."""

    step: Count = Field(description="first step, counted from 0, with these weights")
    weights: dict[Text, NonNegativeFloat] = Field(
        description="new weights by name of the source; the others keep theirs"
    )


class DataSection(Section):
    """What the model is trained on: one corpus, or a mixture of `sources` (docs/data.md)."""

    path: Text | None = None
    """folder that `pentad data build` wrote, or builtin:pydoc; null: see `sources`"""
    sources: list[SourceSection] | None = None
    """corpora to mix, in place of `path`; null: one corpus"""
    curriculum: list[WeightChangeSection] | None = None
    """changes of the weights during the run, by step; null: none"""
    holdout: float = Field(default=0.0, ge=0, le=0.5)
    """share of the tokens that is held out from training for evaluation: the last documents of each corpus"""
    packing: Literal["windows", "documents"] = "windows"
    """what a sequence holds. windows: a window of all documents laid end to end, cut where it ends; documents: as many
    documents as fit, of which only those longer than a sequence are cut"""
    document_mask: bool = False
    """attend only within a document if a sequence holds several"""
    eod_mask_loss: bool | None = None
    """no loss where the end of a document would predict the start of the next; null: as data.document_mask"""
    balance: Literal["none", "documents", "dynamic"] = "none"
    """how a step is divided over ranks and microbatches. none: sequences in the order drawn; documents: sequences
    placed by the work of their documents, so that replicas have as equal work as possible; dynamic: document by
    document, each on as many of the dp x ep x cp ranks as it needs, chosen anew in every step"""
    document_costs: CostsOrAuto = "auto"
    """cost of a document in balance, relative to 1 for each of its tokens: a factor on the square of its tokens, for
    attention, and one on each token that the ranks of a group pass to each other, such as [2.0e-5, 0.01]. auto: by the
    rates of the plan; a resumed run keeps its costs"""
    capacity_factor: FactorOrAuto = 1.25
    """with balance dynamic, the most tokens of a microbatch on one rank, relative to an equal division over all ranks.
    auto: as many as its memory has room for, up to 3 times; a resumed run keeps its factor"""
    microbatch_factor: Factor = 1.0
    """with balance dynamic, the most microbatches of a pipeline in a step, relative to schedule.microbatches"""
    cache: Text = "~/.cache/pentad"
    """folder in which built-in corpora are built"""

    @property
    def spec(self) -> DataSpec:
        """The spec of sources that have not been opened yet."""
        if self.path is not None:
            sources: tuple[SourceSpec, ...] = (SourceSpec("data", self.path),)
        else:
            sources = tuple(
                SourceSpec(name, source.path, f"data.sources[{number}].path", source.weight, source.epochs)
                for number, (name, source) in enumerate(zip(self._names, self.sources or (), strict=True))
            )
        masked = self.document_mask if self.eod_mask_loss is None else self.eod_mask_loss
        return DataSpec(
            sources, self.cache, tuple(self._changes()), self.packing, self.document_mask, masked, self.holdout
        )

    @property
    def held_out(self) -> dict[str, str]:
        """The path of each corpus with held-out documents, by the name of their data set."""
        if not self.holdout:
            return {}
        if self.path is not None:
            return {HOLDOUT: self.path}
        return {f"{HOLDOUT}-{name}": each.path for name, each in zip(self._names, self.sources or (), strict=True)}

    def rules(self) -> Iterator[Broken | str]:
        if (self.path is None) == (not self.sources):
            found = "null" if self.path is None else f"{self.path}, but there are data.sources"
            yield Broken("path", "a corpus, or null and data.sources", found)
            return
        if self.packing == "documents" and not self.document_mask:
            yield Broken("document_mask", "true for data.packing = documents")
        elif self.balance != "none" and not self.document_mask:
            yield Broken("document_mask", f"true for data.balance = {self.balance}")
        if self.capacity_factor == "auto" and self.balance != "dynamic":
            found = f"auto, but data.balance is {self.balance}, with which ranks have equally many tokens"
            yield Broken("capacity_factor", "a number, or data.balance = dynamic", found)
        names = self._names
        for number, name in enumerate(names):
            if name in names[:number]:
                first = f"data.sources[{names.index(name)}]"
                yield f"data.sources[{number}].name is {name}: expected another than {first} has"
        yield from self._curriculum_rules()

    def _curriculum_rules(self) -> Iterator[Broken | str]:
        names = self._names
        for number, change in enumerate(self.curriculum or ()):
            if unknown := [name for name in change.weights if name not in names]:
                expected = f"names of data.sources ({', '.join(names) or 'there are none'})"
                yield f"data.curriculum[{number}].weights has {unknown[0]}: expected {expected}"
                return
        for number, (change, following) in enumerate(pairwise(self.curriculum or ()), 1):
            if following.step <= change.step:
                yield f"data.curriculum[{number}].step is {following.step}: expected more than {change.step}"
        if self.sources:
            yield from _weight_rules("data.sources", tuple(source.weight for source in self.sources))
        for number, each in enumerate(self._changes()):
            yield from _weight_rules(f"data.curriculum[{number}]", each.weights)

    @property
    def _names(self) -> list[str]:
        return [source.name or source.path.rstrip("/").rpartition("/")[2] for source in self.sources or ()]

    def _changes(self) -> Iterator[WeightChange]:
        weights = {name: source.weight for name, source in zip(self._names, self.sources or (), strict=True)}
        for change in self.curriculum or ():
            weights |= change.weights
            yield WeightChange(change.step, tuple(weights.values()))


def name_of(path: str) -> str:
    """The name of a corpus that was given none: the last part of its path, without the options of a URI."""
    bare = path.partition("?")[0] if "://" in path else path
    return Path(bare.removeprefix("builtin:")).name or path


def _weight_rules(key: str, weights: tuple[float, ...]) -> Iterator[str]:
    if not any(weights):
        yield f"{key} has weights that sum to 0: expected a positive weight"
        return
    try:
        shares_of(weights)
    except PentadError as error:
        yield f"{key}: {error}"


class EvalDataSection(Section):
    """A data set to evaluate on."""

    name: Text = Field(description="what tables, metrics and checkpoint.keep_best call it")
    path: Text = Field(description="folder that `pentad data build` wrote, or builtin:pydoc")


class EvalSection(Section):
    """Evaluation on data that is not trained on ([evaluation](evaluation.md)), if there is any: data.holdout or
    eval.data."""

    data: list[EvalDataSection] | None = None
    """a corpus, or a list of {name, path}; evaluated besides what data.holdout holds out, which is called holdout"""
    every: CountOrZero = 0
    """steps between evaluations; 0: only after the last step of the run"""
    at_start: bool = False
    """evaluate before the first step too"""
    sequences: Count | None = 256
    """sequences of each data set, the first ones in its own order; null: all"""

    @field_validator("data", mode="before")
    @classmethod
    def _name_single_path(cls, value: Any) -> Any:
        """A single corpus is named after its folder."""
        if isinstance(value, str) and value:
            return [{"name": name_of(value), "path": value}]
        return value

    def next_due(self, first: int, steps: int) -> int | None:
        """The step after which the next evaluation is due, `first` at the earliest, in a run of `steps` steps; None if
        there is no further one."""
        if first > steps:
            return None
        if first <= 0 and self.at_start:
            return 0
        return min(steps, -(-max(1, first) // self.every) * self.every) if self.every else steps

    def count(self, steps: int) -> int:
        """The number of evaluations in a run of this many steps."""
        return self.at_start + (-(-steps // self.every) if self.every else 1)

    def rules(self) -> Iterator[Broken | str]:
        names = [each.name for each in self.data or ()]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Broken("data", "different names", f"a list with the name {name} twice")
