"""Simulates how long a step on documents of unequal lengths takes on pools of ranks, by method.

PYTHONPATH=.typings python tests/bench/uneven.py RESULTS.json

Nothing is trained. Costs of documents are those of Llama 3.1 8B at the rates that `pentad calibrate` measured on an
H100 (results/calibration-h100.json): attention is half of the work at 32,300 tokens; each token received in a ring
costs 2.3 % of one that is computed, over a link that is assumed. A step has two microbatches of 32,768 tokens for
each rank. Sequences are as long as the longest document may be (the cap), and documents fill them as they are drawn,
cut at their ends. `fixed`: cp ranks share every sequence, as many as give each 32,768 tokens, and sequences are dealt
as they are drawn; `packed`: on the same mesh, dealt by cost; `best_static`: dealt by cost on the best mesh of as many
or more context ranks (fewer cannot hold a sequence); `dynamic`: ranks by document, each with room for 40,960 tokens
of a microbatch (the planner of data.balance: dynamic), with the waits of the ranks of a group for each other. Lengths
are those of two distributions, whose parameters the functions below state, and of real texts: a histogram
(results/lengths-real-texts.json, with its commands), uniform within its bins. Times are those of the last rank over
the lower bound of all groups, means of as many batches as stated; `speedup` is that of dynamic over fixed and over
best_static. There are no pipelines.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean

import numpy as np

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.layout import document_costs
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.search.batch_planner import balanced
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts

TOKENS, MICROBATCHES = 2**15, 2
CAPACITY = TOKENS * 5 // 4
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
TEXTS = json.loads((RESULTS / "lengths-real-texts.json").read_text())["lengths"]
POOLS = [(ranks, cap) for cap in (2**18, 2**21) for ranks in (64, 256, 512, 4096)]


def measured_costs() -> DocumentCosts:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as table:
        table.write(json.dumps(json.loads((RESULTS / "calibration-h100.json").read_text())["table"]))
        table.flush()
        one = ["mesh.tp=1", "schedule.microbatches=1", "batch.global_batch_size=1", f"batch.sequence_length={TOKENS}"]
        words = [*one, f"cluster.rates={table.name}", "cluster.gpu=NVIDIA H100 80GB HBM3"]
        return document_costs(make_plan(load(ROOT / "deploy" / "jobs" / "llama-8b.yaml", words), "cuda"))


COSTS = measured_costs()


def lognormal_pareto(random: np.random.Generator, count: int) -> np.ndarray:
    """Body exp(N(ln 1,200, 1.3)); values above 16,384 are replaced by a Pareto tail of index 1.1 from there."""
    body = random.lognormal(np.log(1200), 1.3, count)
    return np.where(body > 16_384, 16_384 * (1 + random.pareto(1.1, count)), body)


def bimodal(random: np.random.Generator, count: int) -> np.ndarray:
    """As in fine-tuning: 95 % near 1,024 tokens and 5 % near 65,536, each lognormal with sigma 0.25."""
    return np.where(random.random(count) < 0.95, 1024, 65_536) * random.lognormal(0, 0.25, count)


def real_texts(random: np.random.Generator, count: int) -> np.ndarray:
    """Essays, a dictionary, manuals and code: 95 % of documents have at most 512 tokens, and half of all tokens are in
    the 1 % longer than 8,192."""
    shares = np.array([each["documents"] for each in TEXTS])
    bins = random.choice(len(TEXTS), count, p=shares / shares.sum())
    shortest, longest = (np.array([each[key] for each in TEXTS])[bins] for key in ("shortest", "longest"))
    return random.integers(shortest, longest, endpoint=True)


MIXES = {
    "lognormal body, Pareto tail": lognormal_pareto,
    "bimodal, as in fine-tuning": bimodal,
    "real texts": real_texts,
}


def rows_of(mix: str, cap: int, count: int, seed: int) -> list[np.ndarray]:
    """Lengths of the documents in each of `count` sequences of `cap` tokens."""
    lengths = np.clip(MIXES[mix](np.random.default_rng(seed), cap * count // 200), 1, cap).astype(np.int64)
    ends = np.arange(1, count + 1) * cap
    cuts = np.union1d(ends, lengths.cumsum()[lengths.cumsum() < ends[-1]])
    return np.split(np.diff(cuts, prepend=0), np.searchsorted(cuts, ends[:-1], side="right"))


def simulated(mix: str, ranks: int, cap: int, seed: int) -> dict[str, float]:
    """The end of a step by method, relative to the lower bound of all groupings."""
    cp = cap // TOKENS
    rows = rows_of(mix, cap, ranks // cp * MICROBATCHES, seed)
    batch = BatchSpec(len(rows), cap, MICROBATCHES, ranks // cp, document_costs=COSTS, capacity=CAPACITY)
    _, pool = hybrid(rows, batch, cp)
    static = {width: _static(rows, cap, width) for width in takewhile(ranks.__ge__, _doubled(cp))}
    ends = {
        "fixed": float(static[cp].reshape(ranks // cp, -1).sum(1).max()),
        "packed": balanced(static[cp], 1, ranks // cp).balance.end,
        "best_static": min(balanced(work, 1, ranks // width).balance.end for width, work in static.items()),
        "dynamic": pool.end,
    }
    return {**{method: end / pool.bound for method, end in ends.items()}, "documents": sum(map(len, rows))}


def _static(rows: list[np.ndarray], cap: int, cp: int) -> np.ndarray:
    """[rows] seconds of each sequence on cp ranks."""
    costs = DocumentCosts(COSTS.quadratic / cp, (COSTS.linear + COSTS.ring * (cp - 1)) / cp)
    return costs.rows(rows, cap)


def _doubled(cp: int) -> Iterator[int]:
    return (cp * 2**power for power in count())


def main(out: Path) -> None:
    rows = []
    for mix in MIXES:
        for ranks, cap in POOLS:
            found = [simulated(mix, ranks, cap, seed) for seed in range(1 if ranks > 512 else 3)]
            means = {key: round(fmean(each[key] for each in found), 3) for key in found[0]}
            gains = {f"over_{key}": round(means[key] / means["dynamic"], 2) for key in ("fixed", "best_static")}
            sizes = {"ranks": ranks, "cap": cap, "cp": cap // TOKENS, "batches": len(found)}
            rows.append({"mix": mix, **sizes, **means, "speedup": gains})
            print(rows[-1], flush=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    command = f"PYTHONPATH=.typings python tests/bench/uneven.py {out}"
    facts = {"kind": "simulation", "command": command, "machine": machine}
    facts |= {"date": datetime.now(UTC).date().isoformat(), "about": __doc__}
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
