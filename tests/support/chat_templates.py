"""Chat templates in the style of the model families, and tokenizers for them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot|>", "<|head|>", "<|/head|>"]

# ChatML, as in SmolLM2: with a default system turn.
_CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}BEGIN{{ message['content'] + '<|im_end|>' }}END
{%- else %}{{ message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As in Llama 3.1: bos_token, trimmed contents, tools as JSON, tool calls, alternating roles.
HEADERS = """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|head|>system<|/head|>\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|head|>ipython<|/head|>\\n\\n' + message.content | tojson + '<|eot|>' }}
    {%- elif message.tool_calls is defined %}
        {{- '<|head|>assistant<|/head|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
        {%- endfor %}
        {{- '<|eot|>' }}
    {%- elif message.role in ['system', 'user', 'assistant'] %}
        {{- '<|head|>' + message.role + '<|/head|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}"""

# As in Mistral: no generation prompt; the assistant's turn begins with a space.
INSTRUCT = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' +
message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{%
endif %}{% endfor %}"""

# Thoughts of earlier turns are dropped, as in Qwen3.
_FORGETFUL = _CHATML.replace(
    "BEGIN{{ message['content'] + '<|im_end|>' }}",
    "BEGIN{{ (message.content if loop.last else message.content.split('</think>')[-1]) + '<|im_end|>' }}",
)


def _with(template: str, begin: str, end: str) -> str:
    return template.replace("BEGIN", begin).replace("END", end)


CHATML, FORGETFUL = (_with(template, "", "") for template in (_CHATML, _FORGETFUL))
MARKED_CHATML, MARKED_FORGETFUL = (
    _with(template, "{% generation %}", "{% endgeneration %}") for template in (_CHATML, _FORGETFUL)
)


def chat_tokenizer(trim_offsets: bool = False) -> Tokenizer:
    """A byte-level BPE with the special tokens of all templates here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = ["user assistant system tool What is the answer? It is 42, of course.\n\n  é 山 \U0001f3d4 "] * 3
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def write_tokenizer(folder: Path, template: str | None, trim_offsets: bool = False) -> Path:
    """The folder of a chat model's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer(trim_offsets).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder
