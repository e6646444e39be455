"""Trains on documents of very different lengths with each data.balance, on ranks of one host without Ray.

PYTHONPATH=.typings:tests/support:tests/bench python tests/bench/dynamic_groups.py --out OUT --gpus 2 \\
    --sequences 4 deploy/jobs/llama-8b.yaml model.layers=8 batch.sequence_length=65536 memory.recompute=auto \\
    zero.stage=1

The words after the configuration override it for every run. A pool is the GPUs of a pipeline stage. `fixed`: all ranks
of the pool share every sequence (mesh.cp), and sequences are trained as they are drawn; `packed`: sequences are dealt
by cost, on the static mesh of which the planner expects the shortest step, of all with as many ranks and pipeline
stages that fit into memory; `dynamic`: documents are dealt to groups of the pool, with the room that its memory has.
The planner's time of a mesh is that of its program, with full sequences of one document, times how much longer the last
rank takes than an even one with these documents (`expected`). Microbatches are of one sequence.

Documents are of random tokens, their lengths those of `--mix` (see uneven.py) over `--scale`, cut at
batch.sequence_length. Every run trains on the same documents. Seconds are means over the steps after the first
`--warmup`; a run that fails is an error in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from meshes import train
from ranks import Ranks
from record import stamp, write
from uneven import MIXES

from pentad.orchestrator.api.plans import PlannedRun, planned
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.sources import open_dataset
from pentad.workers.data.tokenizer import train_tokenizer

DTYPE = np.dtype(np.uint16)
Words = list[str]


def main() -> None:
    args, overrides = parsed()
    ranks, rows = Ranks(args.limit, train), dict[str, Any]()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"), args)
        data = [f"data.path={folder}/corpus", f"data.cache={folder}", "data.packing=documents"]
        steps = [f"run.steps={args.steps}", "optimizer.warmup_steps=0", f"mesh.pp={args.pp}"]
        sizes = [f"batch.global_batch_size={args.sequences}"]
        words, pool = [*overrides, *data, "data.document_mask=true", *steps, *sizes], args.gpus // args.pp
        wide = ["mesh.tp=1", "mesh.dp=1", f"mesh.cp={pool}", f"schedule.microbatches={args.sequences}"]
        pack(args, [*words, *wide])
        meshes = [tuple(mesh) for mesh in static_meshes(pool, args.sequences)]
        expected = {mesh: expected_seconds(args, [*words, *mesh]) for mesh in meshes}
        fitting = {mesh: seconds for mesh, seconds in expected.items() if isinstance(seconds, float)}
        best = [*min(fitting, key=fitting.__getitem__, default=tuple(wide))]
        runs = {
            "fixed": [*wide, "data.balance=none"],
            "packed": [*best, "data.balance=documents"],
            "dynamic": [*wide, "data.balance=dynamic", "data.capacity_factor=auto"],
        }
        for name, mesh in runs.items():
            rows[name] = {"words": mesh, **measured(ranks, args, [*words, *mesh])}
            print(json.dumps({name: rows[name]}), flush=True)
            loads = {"load_before_and_after": [round(each, 1) for each in (load_before, os.getloadavg()[0])]}
            about = {**stamp(), "about": __doc__, **loads, "mix": args.mix, "scale": args.scale}
            times = {" ".join(mesh): seconds for mesh, seconds in expected.items()}
            write(args.out, {**about, "expected": times, "runs": rows})
    ranks.stop()


def parsed() -> tuple[argparse.Namespace, Words]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="or ranks on CPUs")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    parser.add_argument("--mix", choices=MIXES, default="bimodal, as in fine-tuning")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=2**23, help="of the corpus")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="time limit of a run, in seconds")
    parser.add_argument("config", type=Path)
    return parser.parse_known_args()


def write_corpus(folder: Path, args: argparse.Namespace) -> None:
    """Documents of random tokens below 256 that end with token 0."""
    folder.mkdir()
    random, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < args.tokens:
        lengths += np.maximum(2, MIXES[args.mix](random, 256) / args.scale).astype(int).tolist()
    documents = (Document(np.append(random.integers(1, 257, n - 1), 0).astype(DTYPE), None) for n in lengths)
    write_index(folder, train_tokenizer(["a"], 300), [write_shard(folder, 0, documents, DTYPE)])


def pack(args: argparse.Namespace, words: Words) -> None:
    """Packs the corpus: `planned` knows the balance of documents only once they are packed."""
    plan = make_plan(load(args.config, [*words, "memory.recompute=none"]), args.device)
    open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)


def static_meshes(pool: int, batch: int) -> Iterator[Words]:
    for tp in (each for each in range(1, pool + 1) if pool % each == 0):
        for cp in (each for each in range(1, pool // tp + 1) if pool // tp % each == 0):
            dp = pool // tp // cp
            if batch % dp == 0:
                words = [f"mesh.tp={tp}", f"mesh.dp={dp}", f"mesh.cp={cp}", f"schedule.microbatches={batch // dp}"]
                yield words if dp * cp > 1 else [*words, "zero.stage=0"]  # there is nothing to shard


def expected_seconds(args: argparse.Namespace, words: Words) -> float | str:
    """Expected seconds of a step, or why there are none."""
    try:
        found = planned(load(args.config, [*words, "data.balance=documents"]), args.device)
    except PentadError as error:
        return str(error)
    if not found.fit.ok or found.balance is None:
        return found.fit.sentence if not found.fit.ok else found.data_error
    return found.step_seconds * found.balance.packed


def measured(ranks: Ranks, args: argparse.Namespace, words: Words) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found = planned(load(args.config, words), args.device)
        answers = ranks.run(found.plan)
    except PentadError as error:
        return {"error": str(error)}
    return {**figures(found, found.plan, answers, args), "wall_seconds": round(time.monotonic() - began, 1)}


def figures(found: PlannedRun, plan: Plan, answers: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    results, peaks, _, devices, _ = zip(*answers, strict=True)
    starts, ends = (
        [pick(getattr(span, at) for its in results for span in its[step].spans) for step in range(args.steps)]
        for pick, at in ((min, "start"), (max, "end"))
    )
    seconds = fmean(end - start for start, end in list(zip(starts, ends, strict=True))[args.warmup :])
    targets = fmean(sum(each.target_tokens for each in its.sources) for its in results[0][args.warmup :])
    waits = [max(its[step].data_wait_seconds for its in results) for step in range(args.warmup, args.steps)]
    return {
        "device": devices[0],
        "mesh": str(plan.mesh),
        "chosen": list(found.chosen),
        "step_seconds": round(seconds, 4),
        "target_tokens_per_second": round(targets / seconds, 1),
        "data_wait_seconds": round(fmean(waits), 4),
        "peak_gib": round(max(peaks) / 2**30, 2),
        "capacity": plan.batch.capacity,
        "balance": None if found.balance is None else found.balance._asdict(),
        "first_loss": round(sum({n: x for its in results for n, x in its[0].losses.items()}.values()), 3),
    }


if __name__ == "__main__":
    main()
