"""SmolLM2-135M on real text: imported with transformers' loss, trained, and exported with the loss of training."""

from __future__ import annotations

import _pydecimal
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_files import stage_of
from plans import data_of, global_batch, is_close, plan_of
from real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.schedules.spec.batch import BatchSpec
from pentad.workers.checkpoint.checkpoint import folder_of, open_checkpoint
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.samples import Windows
from pentad.workers.data.sources import open_dataset
from pentad.workers.data.tokenizer import encode, load_tokenizer
from pentad.workers.hf.config import parse_section
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.parallel.async_ops import run_to_completion

COMMAND = [sys.executable, "-P", "-c", "import sys; from pentad.orchestrator.cli.cli import main; sys.exit(main())"]
TOLERANCE = 1e-4
MAX_LOSS = 3.5  # nats a token: a model with, say, its heads mixed up has more
READ = 512  # tokens of the first text
SEQUENCES, LENGTH, EPOCHS, STEPS = 2, 128, 3, 9
EPOCH = STEPS // EPOCHS  # steps
WINDOWS = SEQUENCES * EPOCH
FALL, FALL_UNSEEN = 0.5, 0.1  # nats a token, at least
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(840)]


@pytest.fixture(scope="module")
def source() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def home(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model imported as the run `real`; gigabytes, so it is removed."""
    folder = tmp_path_factory.mktemp("real")
    facts = pentad(folder, "import-hf", str(source), "real")
    assert (facts["family"], facts["parameters"]) == ("llama", 134_515_008)
    yield folder
    shutil.rmtree(folder)


def pentad(folder: Path, *arguments: str) -> Any:
    """The JSON that a command prints, run in `folder`."""
    done = subprocess.run([*COMMAND, *arguments, "--json"], cwd=folder, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def reference_losses(
    folder: Path, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, float]]:
    """transformers' logits and loss in float32 for the inputs and targets of each batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = [(model(input_ids=inputs).logits, targets) for inputs, targets in batches]
    return [(logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()) for logits, targets in found]


def inputs_targets(tokens: list[int]) -> Batch:
    """Inputs and targets of one sequence."""
    return torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]])


def test_the_loss_of_an_import_is_that_of_transformers(source: Path, home: Path) -> None:
    tokenizer = load_tokenizer(home / "real" / "hf" / "tokenizer.json")
    (tokens,) = encode(tokenizer, [topics["objects"]])
    assert tokens == AutoTokenizer.from_pretrained(source)(topics["objects"])["input_ids"]
    inputs, targets = inputs_targets(tokens[: READ + 1])
    [(logits, loss)] = reference_losses(source, [(inputs, targets)])
    assert loss < MAX_LOSS

    folder = folder_of(home / "real" / "checkpoints", 0)
    _, shape = parse_section(open_checkpoint(folder).meta["model"])
    plan = replace(plan_of("gpipe", 1, 1, 1, "", "float32", model=shape), batch=BatchSpec(1, READ, 1, 1))
    stage = stage_of(plan, folder)
    no_mtp = torch.empty(0, READ, dtype=torch.int64)
    with torch.no_grad():
        run_to_completion(stage.forward(0, StageInputs(None, inputs.flatten(), targets.flatten(), no_mtp)))
    ending = stage.saved[0].head
    assert ending is not None
    assert stage.loss_sums.item() / READ == pytest.approx(loss, rel=TOLERANCE)
    assert is_close(ending.loss.logits, logits[0], TOLERANCE)


def test_an_import_trains_and_its_export_has_the_same_loss(source: Path, home: Path) -> None:
    unseen = write_corpus(home)
    (home / "run.yaml").write_text(dump_yaml(configuration(home)))
    summary = pentad(home, "train", "run.yaml")
    losses = [json.loads(line)["loss"] for line in (home / "real" / "metrics.jsonl").read_text().splitlines()]
    assert (summary["state"], len(losses)) == ("finished", STEPS)
    assert mean(losses[-EPOCH:]) < mean(losses[:EPOCH]) - FALL  # on the same tokens

    last = STEPS - 1
    pentad(home, "export-hf", str(folder_of(home / "real" / "checkpoints", last)), "out")
    (_, first_loss), (_, unseen_before) = reference_losses(source, [batch(home, 0), unseen])
    (_, last_loss), (_, unseen_after) = reference_losses(home / "out", [batch(home, last), unseen])
    assert losses[0] == pytest.approx(first_loss, rel=TOLERANCE)
    assert losses[last] == pytest.approx(last_loss, rel=TOLERANCE)
    assert unseen_after < unseen_before - FALL_UNSEEN
    assert AutoTokenizer.from_pretrained(home / "out").decode(unseen[0][0]) in inspect.getsource(_pydecimal)


def write_corpus(home: Path) -> Batch:
    """Builds a corpus of one epoch from the standard library's decimal module; returns a sequence that follows it."""
    tokenizer = home / "real" / "hf" / "tokenizer.json"
    loaded = load_tokenizer(tokenizer)
    text = inspect.getsource(_pydecimal)[20_000:40_000]
    (tokens,) = encode(loaded, [text])
    count = WINDOWS * LENGTH + LENGTH // 2
    (home / "text.txt").write_text(loaded.decode(tokens[:count]))
    facts = pentad(home, "data", "build", "text.txt", "corpus", "--tokenizer", str(tokenizer))
    assert facts["vocab_size"] == loaded.get_vocab_size()
    assert Windows(open_corpus(home / "corpus"), LENGTH).sequences == WINDOWS
    return inputs_targets(tokens[count : count + 2 * LENGTH + 1])


def batch(home: Path, step: int) -> Batch:
    """Inputs and targets that the run reads in a step."""
    data, sizes = data_of(str(home / "corpus")), BatchSpec(SEQUENCES, LENGTH, 1, 1)
    inputs, following, *_ = global_batch(open_dataset(data, sizes, 2**20, 0), step)
    return inputs, following


def configuration(home: Path) -> dict[str, Any]:
    """A run that resumes from the import and keeps its checkpoints before and after the last step."""
    return load_yaml((home / "real" / "model.yaml").read_text(), "model.yaml") | {
        "run": {"name": "real", "folder": str(home), "steps": STEPS},
        "mesh": {"pp": 2},
        "schedule": {"name": "zb-h1", "microbatches": SEQUENCES},
        "batch": {"global_batch_size": SEQUENCES, "sequence_length": LENGTH},
        "data": {"path": str(home / "corpus")},
        "optimizer": {"learning_rate": 1e-4, "warmup_steps": 1},
        "precision": {"compute": "float32"},
        "checkpoint": {"every": STEPS - 1},
        "cluster": {"device": "cpu", "dashboard": False, "start_timeout_seconds": 180.0},
        "elastic": {"max_failures": 0, "hang_seconds": 120.0},
    }
