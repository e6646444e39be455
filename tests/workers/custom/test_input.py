"""Errors in a custom model are reported in one sentence, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError

HEAD = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def model(vocab, hidden, *inner):
    return [nn.Embedding(vocab, hidden), *inner, nn.Linear(hidden, vocab)]


"""
SIZES = ["model.hidden=8", "model.vocab=300", "mesh.pp=2", "batch.sequence_length=16"]

# Code after HEAD, and the error after 'model FILE:my_model: '.
FILES = {
    "fails on import": ("1 / 0", "cannot be imported: ZeroDivisionError in line 21 (division by zero)"),
    "misspelled": (
        "def my_mode(vocab): pass",
        "has no 'my_model' (did you mean 'my_mode'?): expected a function (vocab",
    ),
    "no function": ("my_model = 3", "my_model is 3: expected a function (vocab"),
    "unknown parameter": (
        "def my_model(width): pass",
        "its parameters are (width): expected some of (vocab, hidden, layers",
    ),
    "fails": ("def my_model(hidden): hidden[0]", "it raises TypeError in line 21 ("),
    "returns nothing": ("def my_model(): pass", "it returns None: expected a list of at least one torch.nn.Module"),
    "empty list": ("def my_model(): return []", "it returns []: expected a list"),
    "one module": ("def my_model(): return nn.Linear(2, 2)", "it returns a Linear: expected a list"),
    "loss is no function": ("def my_model(): return [nn.Linear(2, 2)], 3", "its loss is 3: expected a function"),
    "no head": (
        "def my_model(vocab, hidden): return model(vocab, hidden)[:1]",
        "layer 0 returns [2, 16, 8]: expected [2, 16, 300] (rows, batch.sequence_length, model.vocab)",
    ),
    "shared parameter": (
        "def my_model(vocab, hidden):\n    layers = model(vocab, hidden)\n    layers[1].weight = layers[0].weight\n"
        "    return layers",
        "layer 1 (Linear) shares its parameter 'weight' with layer 0: expected layers that share nothing",
    ),
    "integer parameter": (
        "def my_model(vocab, hidden):\n    part = nn.Parameter(torch.zeros(8, dtype=torch.long), requires_grad=False)\n"
        "    return model(vocab, hidden, Layer(lambda self, x: x + self.part, part=part))",
        "layer 1 (Layer) has a parameter 'part' of int64: expected floating point",
    ),
    "changing buffer": (
        "def my_model(vocab, hidden):\n    layer = Layer(lambda self, x: x + self.seen.add_(1))\n"
        "    layer.register_buffer('seen', torch.zeros(()), persistent=False)\n    return model(vocab, hidden, layer)",
        "layer 1 (Layer) changes its buffer 'seen' in forward: expected a constant one",
    ),
    "loss of all tokens": (
        "def my_model(vocab, hidden): return model(vocab, hidden), lambda logits, targets: logits.mean()",
        "its loss returns []: expected one loss a token, [2, 16]",
    ),
    "fewer layers than stages": (
        "def my_model(vocab, hidden): return [nn.Sequential(*model(vocab, hidden))]",
        "it returns 1 layer, but 2 pipeline stages (mesh.pp) need at least one each",
    ),
}
# The layer between embedding and head, and the error.
LAYERS = {
    "no module": ("3", "layer 1 is 3: expected a torch.nn.Module"),
    "fails when made": ("lambda: nn.Linear(hidden)", "layer 1 raises TypeError in line 21 ("),
    "wrong output width": (
        "nn.Linear(hidden, 9)",
        "layer 1 returns [2, 16, 9]: expected [2, 16, 8] (rows, batch.sequence_length, model.hidden)",
    ),
    "wrong input width": ("nn.Linear(9, hidden)", "layer 1 (Linear) raises RuntimeError"),
    "wrong dtype": (
        "Layer(lambda self, x: x.double())",
        "layer 1 returns float64: expected the compute dtype, float32",
    ),
    "no tensor": ("Layer(lambda self, x: (x, x))", "layer 1 (Layer) returns a tuple: expected a tensor"),
    "frozen parameter": (
        "nn.Linear(hidden, hidden).requires_grad_(False)",
        "layer 1 (Linear) has a parameter 'weight' without requires_grad: expected none",
    ),
    "unused parameter": (
        "Layer(lambda self, x: x, part=nn.Linear(2, 2))",
        "layer 1 (Layer) has a parameter 'part.weight' that its result does not depend on",
    ),
    "persistent buffer": (
        "Layer(lambda self, x: x, part=nn.BatchNorm1d(hidden))",
        "layer 1 (Layer) has a persistent buffer 'part.running_mean': expected only constant ones (persistent=False)",
    ),
    "input changed in place": ("nn.ReLU(inplace=True)", "layer 1 (ReLU) raises RuntimeError"),
}
CODE = FILES | {
    case: (f"def my_model(vocab, hidden): return model(vocab, hidden, {layer})", expected)
    for case, (layer, expected) in LAYERS.items()
}


def error_of(overrides: list[str]) -> str:
    with pytest.raises(PentadError) as caught:
        make_plan(load(None, overrides), "cpu")
    error = str(caught.value)
    assert "\n" not in error
    return error


@pytest.mark.parametrize("case", CODE)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, case: str) -> None:
    code, expected = CODE[case]
    file = tmp_path / "my.py"
    file.write_text(HEAD + code + "\n")
    error = error_of([*SIZES, f"model.custom={file}:my_model"])
    assert error.startswith(f"model {file}:my_model: ")
    assert expected in error, error


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mesh.tp=2", "mesh.tp is 2: expected 1 for model"),
        ("mesh.cp=2", "mesh.cp is 2: expected 1 for model"),
        ("mesh.ep=2", "mesh.ep is 2: expected 1 for model"),
        ("data.document_mask=true", "data.document_mask is true: expected false for model"),
        ("memory.recompute=selective", "memory.recompute is selective: expected none or full for model"),
        ("schedule.name=seq-1f1b", "expected 1 for model"),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings is true: expected false for model.custom"),
    ],
)
def test_unsupported_options_are_refused(tmp_path: Path, override: str, expected: str) -> None:
    file = tmp_path / "my.py"
    file.write_text(HEAD + "def my_model(vocab, hidden): return model(vocab, hidden)\n")
    assert expected in error_of([*SIZES, f"model.custom={file}:my_model", override])


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        ("none.py:my_model", "the file 'none.py' cannot be read (No such file or directory): expected a .py file"),
        ("my_model", "the file is '': expected a .py file and a function, as in my.py:my_model"),
        ("my.txt:my_model", "the file is 'my.txt': expected a .py file and a function"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(custom: str, expected: str) -> None:
    assert expected in error_of([*SIZES, f"model.custom={custom}"])


def test_the_command_prints_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.py"
    file.write_text("print('hello')\n1 / 0\n")
    assert main(["plan", f"model.custom={file}:my_model", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line for line in printed.err.splitlines() if line != "hello"] == [
        f"pentad: model {file}:my_model: {file} cannot be imported: ZeroDivisionError in line 2 (division by zero): "
        "expected a file that runs"
    ]


def test_attention_counts_heads_of_keys_as_often_as_they_are_read(tmp_path: Path) -> None:
    file, flops = tmp_path / "grouped.py", []
    for heads in (1, 2, 4):
        file.write_text(HEAD + GROUPED.format(heads=heads))
        model = make_plan(load(None, [*SIZES, f"model.custom={file}:my_model"]), "cpu").model
        assert model.custom is not None
        flops.append(model.custom.layers[1].flops)
    assert flops == [2 * 2 * 16 * 16 * 8] * 3  # two products of 16 queries and 16 keys, 4 heads of 2


GROUPED = """
def attend(layer, x):
    q, k = x.unflatten(2, (4, 2)).transpose(1, 2), x.unflatten(2, (4, 2)).transpose(1, 2)[:, :{heads}]
    mixed = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    return layer.weight * mixed.transpose(1, 2).flatten(2)


def my_model(vocab, hidden):
    return model(vocab, hidden, Layer(attend, weight=nn.Parameter(torch.ones(hidden))))
"""
