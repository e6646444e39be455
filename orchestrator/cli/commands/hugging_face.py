"""`pentad import-hf`, `pentad export-hf` and `pentad convert`: checkpoints of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from pentad.orchestrator.cli.arguments import Json


def import_hf(
    source: Annotated[Path, Argument(metavar="DIR", help="A folder with config.json and safetensors files.")],
    out: Annotated[Path, Argument(metavar="OUT", help="A new or empty folder.")],
    optimizer: Annotated[
        bool, Option("--optimizer", help="Also read the optimizer's state and step from an export.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face model to a checkpoint of step 0, and its config.json to a model section."""
    from pentad.orchestrator.cli.show_hf import show_import

    show_import(source, out, optimizer=optimizer, as_json=as_json)


def export_hf(
    checkpoint: Annotated[
        str, Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or a run, for its newest checkpoint.")
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="A new or empty folder.")],
    dtype: Annotated[
        Literal["bfloat16", "float32", "fp8"],
        Option(help="Dtype of the weights; fp8: projections in 8 bits with scales, as in DeepSeek-V3's files."),
    ] = "float32",
    max_shard_size: Annotated[float, Option(min=0.000001, help="Size of the largest file, in GB.")] = 5.0,
    optimizer: Annotated[bool, Option("--optimizer", help="Also write the optimizer's state.")] = False,
    adapter: Annotated[bool, Option("--adapter", help="Write only the adapters of a LoRA run, for PEFT.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint of any mesh to a Hugging Face model.

    LoRA adapters are merged into the weights.
    """
    from pentad.orchestrator.cli.show_hf import Output, show_export

    form: Literal["peft", "hf"] = "peft" if adapter else "hf"
    show_export(checkpoint, Output(out, form, dtype, max_shard_size, optimizer), as_json=as_json)


def convert(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="A run, a checkpoint, or a folder of Hugging Face or of torch's DCP.")
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="A new or empty folder.")],
    to: Annotated[
        Literal["pentad", "hf", "dcp", "torchtitan"],
        Option(help="dcp: for torch.distributed.checkpoint, with transformers' names; torchtitan: with torchtitan's."),
    ],
    model: Annotated[
        Path | None, Option(help="The model in a DCP checkpoint: a folder with config.json, or a YAML with `model`.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, Option(help="Dtype of the weights (default: unchanged; hf: float32).")
    ] = None,
    optimizer: Annotated[bool, Option("--optimizer", help="Also write the optimizer's state.")] = False,
    as_json: Json = False,
) -> None:
    """Convert checkpoints between pentad, Hugging Face, torch.distributed.checkpoint and torchtitan."""
    from pentad.orchestrator.cli.show_hf import Output, show_convert

    show_convert(source, Output(out, to, dtype, optimizer=optimizer), model, as_json=as_json)
