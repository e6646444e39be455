"""Runs torchtitan 0.2.2 on random tokens, for comparison with pentad. The options are torchtitan's.

torchrun --nproc-per-node 2 tests/bench/titan.py --model.name llama3 --model.flavor 8B --training.seq_len 8192

It needs neither a data set nor a tokenizer. Flavor 1B has the dimensions of Llama 3.2 1B, 8B14 is 8B with 14 layers,
30B-A3B-8 and 16B-8 are Qwen3's and DeepSeek's mixtures with 8 layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torchtitan.protocols.train_spec as specs
from torchtitan import train
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.tools.logging import init_logger

LLAMA, QWEN, DEEPSEEK = llama3.llama3_args, qwen3.qwen3_args, deepseek_v3.deepseekv3_args
LLAMA["1B"] = TransformerModelArgs(
    dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=256, rope_theta=500000
)
LLAMA |= {f"8B{layers}": replace(LLAMA["8B"], n_layers=layers) for layers in (8, 14, 16, 30)}
QWEN["30B-A3B-8"] = replace(QWEN["30B-A3B"], n_layers=8)
DEEPSEEK["16B"] = replace(DEEPSEEK["16B"], attn_type="sdpa", attn_mask_type="causal")  # as its other models
DEEPSEEK["16B-8"] = replace(DEEPSEEK["16B"], n_layers=8)


class RandomTokens(BaseDataLoader):
    def __init__(self, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> None:
        self.shape = (job_config.training.local_batch_size, job_config.training.seq_len + 1)
        self.random = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(0, 100_000, self.shape, generator=self.random)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    spec = specs.get_train_spec(config.model.name)
    spec.build_tokenizer_fn = spec.build_validator_fn = None
    spec.build_dataloader_fn = RandomTokens
    train.train_spec_module.get_train_spec = lambda name: spec
    trainer = train.Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
