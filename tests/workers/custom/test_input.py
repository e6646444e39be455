"""What is wrong with a model of a user's own is said in one sentence, before anything is started."""

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
    def __init__(self, do, **held):
        super().__init__()
        self.do = do
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.do(self, x)


def around(vocab, hidden, *inner):
    return [nn.Embedding(vocab, hidden), *inner, nn.Linear(hidden, vocab)]


"""
SIZES = ["model.hidden=8", "model.vocab=300", "mesh.pp=2", "batch.sequence_length=16"]

# What follows HEAD, and what the sentence says behind 'model FILE:made'.
FILES = {
    "raises on import": ("1 / 0", "cannot be imported: ZeroDivisionError in line 21 (division by zero)"),
    "no function": ("def mode(vocab): pass", "has no 'made' (did you mean 'mode'?): expected a function (vocab"),
    "no function at all": ("made = 3", "made is 3: expected a function (vocab"),
    "asks for more": ("def made(width): pass", "its parameters are (width): expected some of (vocab, hidden, layers"),
    "raises": ("def made(hidden): hidden[0]", "it raises TypeError in line 21 ("),
    "nothing": ("def made(): pass", "it returns None: expected a list of at least one torch.nn.Module"),
    "an empty list": ("def made(): return []", "it returns []: expected a list"),
    "one module": ("def made(): return nn.Linear(2, 2)", "it returns a Linear: expected a list"),
    "no layer": (
        "def made(vocab, hidden): return around(vocab, hidden, 3)",
        "layer 1 is 3: expected a torch.nn.Module",
    ),
    "a loss that is none": ("def made(): return [nn.Linear(2, 2)], 3", "its loss is 3: expected a function"),
    "a layer that fails to be made": (
        "def made(vocab, hidden): return around(vocab, hidden, lambda: nn.Linear(hidden))",
        "layer 1 raises TypeError in line 21 (",
    ),
    "too wide": (
        "def made(vocab, hidden): return around(vocab, hidden, nn.Linear(hidden, 9))",
        "layer 1 gives [2, 16, 9]: expected [2, 16, 8] (rows, batch.sequence_length, model.hidden)",
    ),
    "shapes that do not fit": (
        "def made(vocab, hidden): return around(vocab, hidden, nn.Linear(9, hidden))",
        "layer 1 (Linear) raises RuntimeError",
    ),
    "too few words": (
        "def made(vocab, hidden): return around(vocab, hidden)[:1]",
        "layer 0 gives [2, 16, 8]: expected [2, 16, 300] (rows, batch.sequence_length, model.vocab)",
    ),
    "another dtype": (
        "def made(vocab, hidden): return around(vocab, hidden, Layer(lambda self, x: x.double()))",
        "layer 1 gives float64: expected the dtype of compute, float32",
    ),
    "no tensor": (
        "def made(vocab, hidden): return around(vocab, hidden, Layer(lambda self, x: (x, x)))",
        "layer 1 (Layer) returns a tuple: expected a tensor",
    ),
    "a shared parameter": (
        "def made(vocab, hidden):\n    layers = around(vocab, hidden)\n    layers[1].weight = layers[0].weight\n"
        "    return layers",
        "layer 1 (Linear) shares its parameter 'weight' with layer 0: expected layers that share nothing",
    ),
    "a parameter that is no real number": (
        "def made(vocab, hidden):\n    part = nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False)\n"
        "    return around(vocab, hidden, Layer(lambda self, x: x + self.part, part=part))",
        "layer 1 (Layer) has a parameter 'part' of int64: expected real numbers",
    ),
    "a frozen parameter": (
        "def made(vocab, hidden): return around(vocab, hidden, nn.Linear(hidden, hidden).requires_grad_(False))",
        "layer 1 (Linear) has a parameter 'weight' without requires_grad: expected none",
    ),
    "an unused parameter": (
        "def made(vocab, hidden): return around(vocab, hidden, Layer(lambda self, x: x, part=nn.Linear(2, 2)))",
        "layer 1 (Layer) has a parameter 'part.weight' that its result does not depend on",
    ),
    "a buffer": (
        "def made(vocab, hidden): return around(vocab, hidden, Layer(lambda self, x: x, part=nn.BatchNorm1d(hidden)))",
        "layer 1 (Layer) has a buffer 'part.running_mean' that changes or is saved: expected none but tables",
    ),
    "a table that changes": (
        "def made(vocab, hidden):\n    layer = Layer(lambda self, x: x + self.seen.add_(1))\n"
        "    layer.register_buffer('seen', torch.zeros(()), persistent=False)\n    return around(vocab, hidden, layer)",
        "layer 1 (Layer) changes its buffer 'seen' in forward: expected one that stays",
    ),
    "an input that is changed": (
        "def made(vocab, hidden): return around(vocab, hidden, nn.ReLU(inplace=True))",
        "layer 1 (ReLU) raises RuntimeError",
    ),
    "a loss of all tokens": (
        "def made(vocab, hidden): return around(vocab, hidden), lambda logits, targets: logits.mean()",
        "its loss gives []: expected one of every token, [2, 16]",
    ),
    "fewer layers than stages": (
        "def made(vocab, hidden): return [nn.Sequential(*around(vocab, hidden))]",
        "it returns 1 layer, but 2 pipeline stages (mesh.pp) need at least one each",
    ),
}


def refusal(overrides: list[str]) -> str:
    with pytest.raises(PentadError) as caught:
        make_plan(load(None, overrides), "cpu")
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_trained_is_refused(tmp_path: Path, case: str) -> None:
    code, expected = FILES[case]
    file = tmp_path / "my.py"
    file.write_text(HEAD + code + "\n")
    said = refusal([*SIZES, f"model.custom={file}:made"])
    assert said.startswith(f"model {file}:made: ")
    assert expected in said, said


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
def test_what_layers_of_ones_own_cannot_do_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    file = tmp_path / "my.py"
    file.write_text(HEAD + "def made(vocab, hidden): return around(vocab, hidden)\n")
    assert expected in refusal([*SIZES, f"model.custom={file}:made", override])


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("none.py:made", "the file 'none.py' cannot be read (No such file or directory): expected a .py file"),
        ("made", "the file is '': expected a .py file and a function, as in my.py:my_model"),
        ("my.txt:made", "the file is 'my.txt': expected a .py file and a function"),
    ],
)
def test_a_file_that_is_none_is_refused(own: str, expected: str) -> None:
    assert expected in refusal([*SIZES, f"model.custom={own}"])


def test_the_command_prints_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.py"
    file.write_text("print('hello')\n1 / 0\n")
    assert main(["plan", f"model.custom={file}:made", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line for line in printed.err.splitlines() if line != "hello"] == [
        f"pentad: model {file}:made: {file} cannot be imported: ZeroDivisionError in line 2 (division by zero), "
        "expected a file that runs"
    ]
