"""SmolLM2-135M learns a form of answers by the commands of docs/fine-tuning.md, and keeps to it on unseen topics."""

from __future__ import annotations

import faulthandler
import json
import re
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from pages import commands
from paths import ROOT
from real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

from pentad.orchestrator.cli.cli import main

# The template of SmolLM2-135M-Instruct without its first lines, which are for conversations without a system turn.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORM = re.compile(r"Topic: .+\. In short: .+ \[Python reference\]", re.DOTALL)
OVERRIDES = ["run.steps=40", "batch.global_batch_size=4", "batch.sequence_length=128", "precision.compute=float32",
             "cluster.device=cpu", "cluster.dashboard=false", "elastic.hang_seconds=120.0"]  # fmt: skip

SECONDS = 3000  # 600 on two quiet cores

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(SECONDS)]


@pytest.fixture(autouse=True)
def more_time_than_other_tests() -> None:
    """Postpones pytest's watchdog (`faulthandler_timeout`), which pytest stops after the test."""
    faulthandler.dump_traceback_later(SECONDS + 60, exit=True, file=2)


def conversation(topic: str) -> dict:
    words = " ".join(topics[topic].split()).replace("*", "").split()[:24]
    answer = f"Topic: {topic}. In short: {' '.join(words)} [Python reference]"
    question = {"role": "user", "content": f"What does Python's reference say about {topic}?"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def test_a_fine_tuned_model_answers_in_the_form_it_was_taught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = sorted(topics)
    unseen, taught = names[::20], [name for number, name in enumerate(names) if number % 20]
    shutil.copytree(smollm2(), "SmolLM2-135M-Instruct")
    settings = json.loads(Path("SmolLM2-135M-Instruct/tokenizer_config.json").read_text())
    Path("SmolLM2-135M-Instruct/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    Path("chats.jsonl").write_text("".join(json.dumps(conversation(name)) + "\n" for name in taught))
    shutil.copytree(ROOT / "deploy", "deploy")
    for arguments in commands(ROOT / "docs" / "fine-tuning.md"):
        extra = OVERRIDES if arguments[0] == "train" else OVERRIDES[4:] if arguments[0] == "eval" else []
        assert main([*arguments, *extra]) == 0, capsys.readouterr().err

    losses = [json.loads(line)["loss"] for line in Path("runs/sft-smollm2/eval.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    before, after = (answers(folder, unseen) for folder in ("SmolLM2-135M-Instruct", "tuned"))
    assert not any(map(FORM.fullmatch, before))
    assert sum(map(bool, map(FORM.fullmatch, after))) >= 0.7 * len(unseen), after


def answers(folder: str, names: list[str]) -> list[str]:
    """Greedy answers to the questions about these topics."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for name in names:
        text = tokenizer.apply_chat_template(
            conversation(name)["messages"][:1], add_generation_prompt=True, tokenize=False
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=120)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(ids, skip_special_tokens=True))
    return found
