"""Model folders that others wrote, of Hugging Face, PEFT and torch.distributed.checkpoint; and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import rmtree

import torch
from chat_templates import CHATML, HEADERS, INSTRUCT
from damage import damaged_bytes
from fuzz_readers import JSON, TEXT, Reader, _written
from hf_files import INDEX, SINGLE, take
from peft_files import ATTENTION, write_adapter
from plans import MODEL
from safetensors.torch import save_file
from small_models import FAMILIES

from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.model import Experts
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.dcp.reader import METADATA, open_dcp
from pentad.workers.hf.config import make_config, parse_config
from pentad.workers.hf.exporter import ExportRequest
from pentad.workers.hf.folder import TensorFiles, read_config
from pentad.workers.hf.names import CONFIG, tensor_table
from pentad.workers.hf.peft import read_adapter
from pentad.workers.preprocess.chat_template import ChatTemplate, read_chat_template, special_tokens

SMALL = replace(MODEL, layers=2, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=32)
MIXTRAL = replace(MODEL, ffn=12, experts=Experts(num_experts=4, top_k=2, intermediate_size=12))


def model_folder(folder: Path) -> Path:
    """A small Llama with random weights."""
    config = make_config("llama", SMALL, positions=64)
    family, model = parse_config(config)
    tensors: dict[str, torch.Tensor] = {}
    for entry in tensor_table(family, model).entries:
        tensors |= {part.name: torch.randn(part.shape) for part in entry.parts}
    source = folder / "model"
    source.mkdir()
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    (source / CONFIG).write_text(json.dumps(config))
    return source


@contextmanager
def model_configs(folder: Path) -> Iterator[Reader]:
    """config.json of several families, read to list the model's tensors."""
    models = {"llama": MODEL, "qwen2": FAMILIES["qwen2"], "gemma2": FAMILIES["gemma2"], "mixtral": MIXTRAL}
    intact = tuple(json.dumps(make_config(name, model, positions=64)).encode() for name, model in models.items())

    def read() -> None:
        family, model = parse_config(read_config(folder))
        num_parameters(model)
        assert tensor_table(family, model).entries

    yield Reader(intact, JSON, _written(folder / CONFIG, read))


@contextmanager
def imports(folder: Path) -> Iterator[Reader]:
    """Imports of an entire folder with another config.json."""
    source = model_folder(folder)
    yield Reader(((source / CONFIG).read_bytes(),), JSON, _written(source / CONFIG, lambda: _import(source)))


@contextmanager
def imported_weights(folder: Path) -> Iterator[Reader]:
    """Imports with another safetensors file, whose first part is its header."""
    source = model_folder(folder)
    intact = (source / SINGLE).read_bytes()

    def damaged_header(data: bytes, seed: int) -> bytes:
        length = 8 + int.from_bytes(data[:8], "little")
        damage = TEXT[seed // 3 % 2]
        header = damage(data[8:length], seed)
        return len(header).to_bytes(8, "little") + header + data[length:]

    damages = (damaged_header, damaged_header, damaged_bytes)
    yield Reader((intact,), damages, _written(source / SINGLE, lambda: _import(source)))


@contextmanager
def weight_maps(folder: Path) -> Iterator[Reader]:
    source = model_folder(folder)
    with TensorFiles(source) as files:
        found = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(files.files, SINGLE)}
    read = _written(source / INDEX, lambda: _import(source))
    yield Reader((json.dumps(found).encode(),), JSON, read)


def _import(source: Path) -> None:
    out = source.parent / "out"
    try:
        take(source, out)
    finally:
        rmtree(out, ignore_errors=True)


@contextmanager
def adapters(folder: Path) -> Iterator[Reader]:
    source = write_adapter(folder / "adapter", SMALL)
    request, lora = ExportRequest("llama", SMALL, 64), LoraSpec(2, 4.0, ATTENTION)
    path = source / "adapter_config.json"
    read_adapter(source, request, lora)
    read = _written(path, lambda: read_adapter(source, request, lora))
    more = {"target_modules": ["q_proj"], "target_parameters": [], "lora_bias": False, "init_lora_weights": True}
    yield Reader((json.dumps(json.loads(path.read_bytes()) | more).encode(), path.read_bytes()), JSON, read)


@contextmanager
def torch_checkpoints(folder: Path) -> Iterator[Reader]:
    """.metadata and a file of tensors: the first byte says which."""
    from dcp_files import save

    state = {"a": torch.randn(3, 4), "nested": {"b": torch.randn(5).bfloat16(), "c": [torch.arange(3)]}, "step": 7}
    save(state, folder)
    data = next(folder.glob("*.distcp"))
    originals = {b"M": (folder / METADATA).read_bytes(), b"D": data.read_bytes()}

    def damage(content: bytes, seed: int) -> bytes:
        return content[:1] + damaged_bytes(content[1:], seed)

    def read(content: bytes) -> None:
        path = folder / METADATA if content[:1] == b"M" else data
        path.write_bytes(content[1:])
        try:
            for tensor in open_dcp(folder).values():
                for chunk in tensor.chunks:
                    chunk.read()
        finally:
            path.write_bytes(originals[content[:1]])

    yield Reader(tuple(kind + content for kind, content in originals.items()), (damage,), read)


@contextmanager
def chat_templates(folder: Path) -> Iterator[Reader]:
    """Templates in tokenizer_config.json; the default one is rendered."""
    path, messages = (
        folder / "tokenizer_config.json",
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    )
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    several = [{"name": "default", "template": HEADERS}, {"name": "other", "template": INSTRUCT}]
    intact = [json.dumps(each).encode() for each in (tokens, tokens | {"chat_template": several})]

    def damaged_template(data: bytes, seed: int) -> bytes:
        changed = damaged_bytes(Random(seed).choice((CHATML, HEADERS, INSTRUCT)).encode(), seed)
        return json.dumps(tokens | {"chat_template": changed.decode(errors="replace")}).encode()

    def read() -> None:
        name, text = read_chat_template(folder, None)
        ChatTemplate(name, text, special_tokens(folder)).render(messages)

    yield Reader(tuple(intact), (damaged_template, damaged_template, *JSON), _written(path, read))
