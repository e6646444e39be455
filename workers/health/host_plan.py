"""Plans of small models for `host_rates`; `pentad calibrate` has the planner count their exchanges."""

from __future__ import annotations

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.schedules.spec.plan import Plan, split_layers

LAYERS = (1, 5)  # layers of two models, whose difference in time is due to layers alone
TOKENS, HIDDEN, HEADS, VOCAB = {"cuda": 128, "cpu": 16}, {"cuda": 1024, "cpu": 32}, {"cuda": 16, "cpu": 2}, 256


def host_plan(device: str, layers: int, tp: int, *, peer: bool = False) -> Plan:
    """A plan with one microbatch of so few tokens that the GPU takes less time than the host."""
    hidden, program = HIDDEN[device], compile_program("1f1b", 1, 1)
    return Plan(
        name="host",
        mesh=Mesh(tp=tp),
        program=program,
        layers=split_layers(layers, program.placement),
        model=ModelSpec(layers, hidden, HEADS[device], HEADS[device], 2 * hidden, VOCAB),
        batch=BatchSpec(1, TOKENS[device], 1, 1),
        optimizer=OptimizerSpec(LearningRate(1e-3, 1e-3, 1, 1), 0.9, 0.95, 1e-8, 0.1, clip_norm=None),
        data=DataSpec((SourceSpec("none", ""),)),
        seed=0,
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        transport="gloo" if device == "cpu" else "peer" if peer else "nccl",
    )
