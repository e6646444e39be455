"""Trains on documents of very different lengths with each data.balance, on meshes of one host without Ray.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/dynamic_groups.py --out OUT --gpus 2 \\
    deploy/jobs/llama-8b.yaml model.layers=8 batch.sequence_length=65536 batch.global_batch_size=8 \\
    schedule.microbatches=4

The words after the configuration override it for every run; all GPUs are on cp, then on dp. Documents are of random
tokens, their lengths those of `--mix` (see uneven.py), cut at batch.sequence_length. Every run trains on the same
documents. Seconds are means over the steps after the first WARMUP; a run that fails is an error in the results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from meshes import train
from ranks import Ranks
from record import stamp, write
from uneven import MIXES

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.balance import data_balance
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.sources import open_dataset
from pentad.workers.data.tokenizer import train_tokenizer

WARMUP, STEPS = 3, 12
DTYPE = np.dtype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--mix", choices=MIXES, default="bimodal, as in fine-tuning")
    parser.add_argument("--tokens", type=int, default=2**24, help="of the corpus")
    parser.add_argument("--limit", type=float, default=240.0, help="time limit of a run, in seconds")
    parser.add_argument("config", type=Path)
    args, overrides = parser.parse_known_args()
    ranks, rows = Ranks(args.limit, train), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"), args.mix, args.tokens)
        data = [f"data.path={folder}/corpus", f"data.cache={folder}", "data.packing=documents"]
        common = [*overrides, *data, "data.document_mask=true", f"run.steps={STEPS}"]
        for cp in (args.gpus, 1):
            mesh = [f"mesh.dp={args.gpus // cp}", f"mesh.cp={cp}"]
            for balance in ("none", "documents", "dynamic"):
                row = {"mix": args.mix, "mesh": mesh, "balance": balance}
                row |= measured(ranks, args, [*common, *mesh, f"data.balance={balance}"])
                rows.append(row)
                print(json.dumps(row), flush=True)
                write(args.out, {**stamp(), "about": __doc__, "overrides": overrides, "runs": rows})
    ranks.stop()


def write_corpus(folder: Path, mix: str, tokens: int) -> None:
    """Random tokens below 256, the last one of a document 0."""
    folder.mkdir()
    random, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < tokens:
        lengths += np.maximum(2, MIXES[mix](random, 256)).astype(int).tolist()
    documents = (Document(np.append(random.integers(1, 257, n - 1), 0).astype(DTYPE), None) for n in lengths)
    write_index(folder, train_tokenizer(["a"], 300), [write_shard(folder, 0, documents, DTYPE)])


def measured(ranks: Ranks, args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    try:
        plan = make_plan(load(args.config, overrides), args.device)
        dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
        balance = data_balance(plan, dataset, STEPS)
        answers = ranks.run(plan)
    except PentadError as error:
        return {"error": str(error)}
    results, peaks, devices = zip(*answers, strict=True)
    starts = [min(span.start for its in results for span in its[step].spans) for step in range(STEPS)]
    ends = [max(span.end for its in results for span in its[step].spans) for step in range(STEPS)]
    seconds = fmean(end - start for start, end in list(zip(starts, ends, strict=True))[WARMUP:])
    targets = fmean(sum(each.target_tokens for each in its.sources) for its in results[0][WARMUP:])
    waits = [max(its[step].data_wait_seconds for its in results) for step in range(WARMUP, STEPS)]
    return {
        "device": devices[0],
        "step_seconds": round(seconds, 4),
        "target_tokens_per_second": round(targets / seconds, 1),
        "data_wait_seconds": round(fmean(waits), 4),
        "peak_gib": round(max(peaks) / 2**30, 2),
        "balance": balance._asdict(),
        "first_loss": round(sum(results[0][0].losses.values()), 3),
    }


if __name__ == "__main__":
    main()
