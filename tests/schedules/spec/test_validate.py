"""A mesh is refused, in one sentence, if and only if one of its axes does not divide the model or the batch."""

from itertools import product

import pytest

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.validate import check_divisibility

LENGTH = 12


def model(heads: int, kv_heads: int, experts: int, ffn: int = 12, vocab: int = 12) -> ModelSpec:
    mixture = Experts(experts, 1, 12) if experts else None
    return ModelSpec(layers=2, hidden=24, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, experts=mixture)


def refusal(spec: ModelSpec, mesh: Mesh, rows: int, slices: int = 1) -> str:
    try:
        check_divisibility(spec, mesh, LENGTH, rows, slices)
    except PentadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("experts", [0, 6])
def test_exactly_the_meshes_that_divide_are_accepted(experts: int) -> None:
    accepted = 0
    for (heads, kv_heads), tp, cp, ep, rows, slices in product(
        ((12, 12), (12, 4), (12, 3), (6, 2)), (1, 2, 3, 4, 5, 6), (1, 2, 3), (1, 2, 4), (1, 3), (1, 2)
    ):
        divides = (
            heads % tp == 12 % tp == 0
            and (kv_heads % tp == 0 or tp % kv_heads == 0)
            and (cp == 1 or (slices == 1 and LENGTH % (2 * cp) == 0))
            and (experts % ep == 0 if experts else ep == 1)
            and (rows * LENGTH // slices // cp) % tp == 0
        )
        found = refusal(model(heads, kv_heads, experts), Mesh(1, 1, cp, tp, ep), rows, slices)
        assert bool(found) != divides and "\n" not in found
        accepted += divides
    assert accepted > 20


@pytest.mark.parametrize(
    ("spec", "mesh", "slices", "sentence"),
    [
        (model(12, 12, 0, ffn=10), Mesh(tp=4), 1, "model.ffn is 10: expected a multiple of mesh.tp = 4"),
        (model(12, 12, 0, vocab=9), Mesh(tp=2), 1, "model.vocab is 9: expected a multiple of mesh.tp = 2"),
        (model(12, 4, 0), Mesh(tp=3), 1, "model.kv_heads is 4: expected a multiple or a divisor of mesh.tp = 3"),
        (model(12, 12, 0), Mesh(ep=2), 1, "mesh.ep is 2: expected 1 for a model without experts"),
        (model(12, 12, 6), Mesh(ep=4), 1, "model.experts.num_experts is 6: expected a multiple of mesh.ep = 4"),
        (model(12, 12, 0), Mesh(cp=2), 2, "mesh.cp is 2: expected 1 for a schedule that cuts sequences into 2 slices"),
        (
            *(model(12, 12, 0), Mesh(tp=4), 2),
            "mesh.tp is 4: expected a divisor of the tokens of a microbatch, 1 x 12 / 2 = 6, for sequence parallelism",
        ),
    ],
)
def test_the_sentence_has_the_numbers(spec: ModelSpec, mesh: Mesh, slices: int, sentence: str) -> None:
    assert refusal(spec, mesh, rows=1, slices=slices) == sentence
