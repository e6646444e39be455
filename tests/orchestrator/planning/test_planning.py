"""Plans are pure functions of their configuration and made once per run; their estimates add up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.plan_view import facts_table
from pentad.orchestrator.planning import layout, planning
from pentad.orchestrator.planning.comm_volume import transports
from pentad.orchestrator.planning.estimate import (
    GRAPHS_BYTES,
    ON_HOST,
    costs_of,
    flops_per_token,
    memory,
    mfu,
    peak_flops,
)
from pentad.orchestrator.planning.fit import device_memory, fit_of
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import first_plan, make_plan
from pentad.orchestrator.recovery.placed_plans import on_hosts, plan_on, shrunk_plan
from pentad.schedules import compiler
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh, to_mesh_ranks
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import num_parameters
from pentad.schedules.verify.check import check

LLAMA_8B = ModelSpec(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)


def plan_of(*overrides: str, device: str = "cpu", hosts: tuple[int, ...] = ()) -> Plan:
    return make_plan(load(None, list(overrides)), device, hosts=hosts)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_schedule_has_a_verified_plan(name: str, device: str) -> None:
    plan = plan_of(f"schedule.name={name}", "mesh.dp=2", device=device)
    check(plan.program, replicas=2)
    assert plan == plan_of(f"schedule.name={name}", "mesh.dp=2", device=device)
    assert plan.mesh == Mesh(dp=2, pp=4)
    assert len(plan.layers) == plan.program.stages


def test_precision_and_transport_follow_the_device() -> None:
    assert (plan_of().dtype, plan_of().transport) == ("float32", "gloo")
    on_gpu = plan_of(device="cuda")
    assert (on_gpu.dtype, on_gpu.transport, on_gpu.deterministic) == ("bfloat16", "peer", True)
    assert plan_of("precision.compute=float64", device="cuda").dtype == "float64"
    assert plan_of("cluster.transport=nccl", device="cuda").transport == "nccl"


def test_only_nccl_receives_wait_for_preceding_compute() -> None:
    peer, nccl = plan_of(device="cuda"), plan_of("cluster.transport=nccl", device="cuda")
    assert peer.program.hash != nccl.program.hash


def test_peer_transport_needs_one_host_for_what_it_moves() -> None:
    words, hosts = ("cluster.transport=peer", "mesh.pp=2", "mesh.dp=2", "schedule.name=1f1b"), (0, 1, 0, 1)
    sentence = r"cluster.transport is peer, but ranks along mesh.dp are on several of 2 hosts: expected auto or nccl"
    with pytest.raises(PentadError, match=sentence):
        plan_of(*words, "zero.stage=1", device="cuda", hosts=hosts)
    assert plan_of(*words, device="cuda", hosts=hosts).transport_along("pp") == "peer"
    with pytest.raises(PentadError, match=r"ranks along mesh\.pp are on several"):
        plan_of(*words, device="cuda", hosts=(0, 0, 1, 1))


@pytest.mark.parametrize(
    ("device", "override", "reason"),
    [
        ("cpu", "data.packing=windows", "CPU ranks"),
        ("cuda", "memory.offload_fraction=0.5", "memory.offload_fraction, since what comes back lies elsewhere"),
        ("cuda", "data.document_mask=true", "data.document_mask, since every step has other documents"),
        ("cuda", "mesh.pp=2 mesh.tp=2 cluster.transport=nccl", "mesh.tp over NCCL"),
    ],
)
def test_graphs_need_steps_that_repeat_and_no_nccl_inside_layers(device: str, override: str, reason: str) -> None:
    with pytest.raises(PentadError, match=f"cluster.cuda_graphs is true: expected false with {reason}"):
        plan_of("cluster.cuda_graphs=true", *override.split(), device=device)
    assert plan_of("cluster.cuda_graphs=true", device="cuda").cuda_graphs
    assert not plan_of(*override.split(), device=device).cuda_graphs, "although a small model would gain by them"


def test_instructions_of_graphs_take_the_host_no_time() -> None:
    issued, launched = (
        costs_of(plan_of("mesh.pp=2", "mesh.tp=2", f"cluster.cuda_graphs={each}", device="cuda"))
        for each in ("false", "true")
    )
    assert issued.forward[0] > 2 * launched.forward[0], "the model of the quickstart is small"


def test_graphs_are_used_where_compute_would_wait_for_the_host() -> None:
    small, large = "model.hidden=512", "model.hidden=8192 model.ffn=28672 model.heads=64 batch.sequence_length=4096"
    assert plan_of(small, device="cuda").cuda_graphs
    assert not plan_of(*large.split(), device="cuda").cuda_graphs
    assert not plan_of(small, "cluster.cuda_graphs=false", device="cuda").cuda_graphs


def test_graphs_are_used_only_where_there_is_room_for_them() -> None:
    config, room = load(None, ["model.hidden=512"]), device_memory("cuda")
    needed = fit_of(make_plan(config, "cuda"), room).needed
    for size, uses_graphs in ((needed, True), (needed - 1, False)):
        plan = make_plan(config, "cuda", memory=replace(room, bytes=size))
        assert plan.cuda_graphs == uses_graphs
        assert fit_of(plan, room).needed == needed - GRAPHS_BYTES * (not uses_graphs)


def test_null_warmup_and_minimum_learning_rate_are_a_tenth() -> None:
    optimizer = plan_of("run.steps=50", "optimizer.learning_rate=1e-3").optimizer
    assert optimizer.learning_rate.warmup_steps == 5
    assert optimizer.learning_rate.minimum == pytest.approx(1e-4)
    given = plan_of("optimizer.warmup_steps=0", "optimizer.min_learning_rate=0").optimizer.learning_rate
    assert (given.warmup_steps, given.minimum) == (0, 0)


def test_flops_per_token_of_llama_8b() -> None:
    # 8.03e9 parameters minus 0.525e9 of the input embedding, with and without halving attention for the causal mask.
    assert flops_per_token(LLAMA_8B, 8192) == pytest.approx(51.47e9, rel=1e-3)
    assert flops_per_token(LLAMA_8B, 8192, causal=False) == pytest.approx(57.91e9, rel=1e-3)
    assert flops_per_token(LLAMA_8B, 131072) == pytest.approx(148.1e9, rel=1e-3)


def test_mfu_is_unknown_without_a_known_peak() -> None:
    plan = plan_of(device="cuda")
    ranks, flops = plan.mesh.size, flops_per_token(plan.model, plan.batch.sequence_length)
    assert mfu(ranks * 989e12 / flops, plan, "NVIDIA H200") == pytest.approx(1)
    assert mfu(1e4, plan_of(), "NVIDIA H200") is None
    assert mfu(1e4, plan, "cpu") is None
    assert peak_flops("NVIDIA H200", "float32") is None


def test_estimated_costs_grow_with_the_work() -> None:
    plan = plan_of("model.layers=9", "model.vocab=256")
    costs = costs_of(plan)
    sizes = [len(layers.numbers) for layers in plan.layers]
    heavier, lighter = sizes.index(3), sizes.index(2)
    assert costs.forward[heavier] > costs.forward[lighter]
    assert all(b > f for f, b in zip(costs.forward, costs.backward, strict=True))
    big_head = costs_of(plan_of("model.vocab=65536"))
    assert big_head.forward[-1] > 5 * big_head.forward[1]
    on_gpu = costs_of(plan_of(device="cuda"))
    assert all(gpu < cpu for gpu, cpu in zip(on_gpu.forward, costs_of(plan_of()).forward, strict=True))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_loss_reads_the_logits_and_writes_their_gradient(tp: int) -> None:
    plan = plan_of(f"mesh.tp={tp}", "mesh.pp=2", device="cuda")
    usual = replace(rates_of("cuda"), issue=0.0, peer_issue=0.0, layer_issue=(0.0, 0.0, 0.0))
    free, costs = costs_of(plan, replace(usual, memory=1e30)), costs_of(plan, usual)
    read = plan.slice_tokens * plan.model.vocab // tp * 2 / usual.memory
    assert costs.forward[-1] - free.forward[-1] == pytest.approx(read)
    assert costs.backward[-1] - free.backward[-1] == pytest.approx(2 * read)


def test_replicas_reduce_gradients() -> None:
    assert min(costs_of(plan_of("mesh.dp=2")).reduce) > max(costs_of(plan_of()).reduce)


@pytest.mark.parametrize("name", CATALOGUE)
def test_costs_measured_from_a_simulated_step_simulate_the_same_step(name: str) -> None:
    plan = plan_of(f"schedule.name={name}")
    timeline = simulate(plan.program, costs_of(plan))
    costs = read_costs(plan.program, timeline)
    assert costs is not None
    again = simulate(plan.program, costs)
    assert again.makespan == pytest.approx(timeline.makespan, rel=1e-2)  # half of a split BW has half the launch time
    assert again.bubble().longest == pytest.approx(timeline.bubble().longest, abs=1e-2)


def test_an_incomplete_step_gives_no_costs() -> None:
    plan = plan_of()
    timeline = simulate(plan.program, costs_of(plan))
    half = type(timeline)("measured", tuple(span for span in timeline.spans if span.stage != 2))
    assert read_costs(plan.program, half) is None


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_of_fused_backwards_are_multiples_of_a_microbatch(name: str) -> None:
    """F saves what BW frees: middle ranks need memory for their peak number of microbatches plus BW's workspace."""
    plan = plan_of(f"schedule.name={name}")
    tokens, model = plan.batch.micro_batch_size * plan.batch.sequence_length, plan.model
    # float32: two residual streams, q k v, attention out, gate and up; two scales, a log-sum-exp per head
    layer = 4 * (2 * 128 + 2 * 128 + 2 * 64 + 2 * 384) + 4 * (2 + model.heads)
    entry = 4 * 128  # the layer's input is in a receive slot
    peak = peak_activations(plan.program)[1]
    found = memory(plan, 1)["activations"]
    assert tokens * (2 * layer - entry) * peak <= found < tokens * (2 * layer - entry) * (peak + 1)


def test_slices_cost_equal_fractions_of_a_microbatch() -> None:
    full, sliced = (costs_of(plan_of("schedule.name=seq-1f1b", f"schedule.slices={k}")) for k in (1, 4))
    for op in ("forward", "backward", "weight"):
        assert getattr(sliced, op) == pytest.approx([seconds / 4 for seconds in getattr(full, op)])
    assert full.transfer / 4 < sliced.transfer < full.transfer  # every slice pays the latency


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_share_keys_and_values_of_full_sequences(slices: int) -> None:
    """When the second microbatch begins, a rank holds the activations that it would hold without slices, the keys and
    values of both microbatches, and the gradients of those of the first one, except for its last slice."""
    one_stage = ("mesh.pp=1", "model.layers=4")
    plan = plan_of("schedule.name=seq-1f1b", f"schedule.slices={slices}", *one_stage)
    full = memory(plan_of("schedule.name=1f1b", *one_stage), 0)["activations"]
    pairs = (
        4 * 2 * 64 * plan.batch.micro_batch_size * plan.batch.sequence_length * 4
    )  # layers, keys and values, width, tokens, float32
    shared = pairs * (2 + (slices - 1) / slices) if slices > 1 else 0
    assert 0.85 * full + shared < memory(plan, 0)["activations"] <= full + shared


def test_memory_adds_up_and_counts_master_weights_once() -> None:
    plan, on_gpu = plan_of(), plan_of(device="cuda")
    for rank in range(4):
        parts = memory(plan, rank)
        assert parts["total"] == sum(value for name, value in parts.items() if name not in ("total", *ON_HOST))
    full = sum(memory(plan, rank)["parameters"] for rank in range(4))
    assert full == 4 * num_parameters(plan.model)
    assert memory(plan, 0)["master"] == 0
    parts = memory(on_gpu, 0)
    assert (parts["master"], parts["gradients"], parts["optimizer"]) == tuple(
        k * parts["parameters"] for k in (1, 2, 4)
    )


def test_dualpipe_holds_two_copies_of_its_parameters() -> None:
    plan = plan_of("schedule.name=dualpipe")
    assert sum(memory(plan, rank)["parameters"] for rank in range(4)) == 2 * 4 * num_parameters(plan.model)


def test_memory_counts_every_receive_slot() -> None:
    plan = plan_of()
    tensor = plan.batch.micro_batch_size * plan.batch.sequence_length * plan.model.hidden * 4
    stream = plan.program.streams[0]
    slots = {(part.op, part.slot) for part in instructions_of(stream) if part.op in (Op.RECV_F, Op.RECV_B)}
    assert memory(plan, 0)["slots"] == len(slots) * tensor


def test_every_replica_gets_the_same_spans() -> None:
    mesh = Mesh(dp=2, pp=4)
    plan = plan_of("mesh.dp=2")
    timeline = simulate(plan.program, costs_of(plan))
    wide = to_mesh_ranks(timeline, mesh)
    assert wide.ranks == tuple(range(8))
    assert len(wide.spans) == 2 * len(timeline.spans)
    for rank in range(8):
        here = mesh.coordinates(rank)
        own = [span for span in wide.spans if span.rank == rank]
        model = [span for span in timeline.spans if span.rank == here.pp]
        assert [(s.name, s.start, s.end) for s in own] == [(s.name, s.start, s.end) for s in model]
        for span, of in zip(own, model, strict=True):
            assert (span.peer < 0) == (of.peer < 0)
            if span.peer >= 0:
                assert mesh.coordinates(span.peer) == here._replace(pp=of.peer)
    assert wide.bubble().makespan == pytest.approx(timeline.bubble().makespan)


@pytest.mark.parametrize("name", ["zb-h2", "zb-1p", "auto", "dualpipe"])
def test_train_plans_once(monkeypatch: pytest.MonkeyPatch, corpus: str, tmp_path: Path, name: str) -> None:
    """From the command line to the placed ranks, each program is compiled and checked once."""
    calls: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **more: object) -> Any:
            calls[function.__name__] += 1
            return function(*args, **more)

        return call

    compiled = "compile_program", "compile_forward_only"
    for module, function in ((layout, "choose"), *((planning, each) for each in compiled), (compiler, "check")):
        monkeypatch.setattr(module, function, counted(getattr(module, function)))
    placed = []

    def train(config: RunConfig, *, plan: Plan, **more: object) -> dict[str, Any]:
        placed.append(plan_on(config, "cpu", hosts=(), expected=plan))
        raise PentadError("enough")

    monkeypatch.setattr("pentad.orchestrator.run.train.train", train)
    overrides = f"run.folder={tmp_path}", f"data.path={corpus}", "cluster.device=cpu", f"schedule.name={name}"
    assert main(["train", *overrides]) == 1
    assert len(placed[0].data.sources[0].fingerprint) == 64
    assert calls == dict.fromkeys(compiled, 1) | {"check": 2} | ({"choose": 1} if name == "auto" else {})


def test_a_plan_is_remade_for_other_devices_or_hosts() -> None:
    config = load(None, [])
    expected, hosts = make_plan(config, "cuda"), (0, 1, 2, 3)
    assert expected.transport == "peer"
    assert plan_on(config, "cuda", hosts=(), expected=expected) is expected
    apart = plan_on(config, "cuda", hosts=hosts, expected=expected)
    assert (apart.transport, apart.hosts) == ("nccl", hosts) and apart == make_plan(config, "cuda", hosts=hosts)
    assert plan_on(config, "cpu", hosts=(), expected=expected) == make_plan(config, "cpu")


def test_ranks_that_move_keep_their_program_where_the_same_axes_are_on_one_host() -> None:
    config = load(None, ["mesh.dp=2", "mesh.pp=2", "schedule.name=1f1b", "elastic.min_ranks=2"])
    plan = make_plan(config, "cuda", hosts=(0, 1, 0, 1))
    moved = on_hosts(config, plan, (0, 1, 0, 2))  # the second replica now spans two hosts
    assert transports(plan) == {"pp": "peer", "parameters": "nccl"} and transports(moved)["pp"] == "nccl"
    assert moved == make_plan(config, "cuda", hosts=(0, 1, 0, 2)) and moved.program.hash != plan.program.hash
    assert on_hosts(config, moved, (0, 1, 1, 2)).program is moved.program
    smaller = shrunk_plan(config, plan, 2)
    assert smaller is not None
    apart = on_hosts(config, smaller, (0, 1))
    assert (apart.mesh, apart.transport, apart.batch) == (smaller.mesh, "nccl", smaller.batch)


def test_slots_of_peers_are_only_where_ranks_copy() -> None:
    words = ["mesh.tp=2", "mesh.dp=2", "mesh.pp=1", "schedule.name=1f1b", "zero.stage=1", "mesh.tp_across_nodes=true"]
    config = load(None, words)
    hosts = {"all": (), "tp": (0, 0, 1, 1), "dp": (0, 1, 0, 1), "none": (0, 1, 2, 3)}
    slots = {name: memory(make_plan(config, "cuda", hosts=each), 0)["slots"] for name, each in hosts.items()}
    assert slots["none"] == 0 < min(slots["tp"], slots["dp"]) and slots["all"] == slots["tp"] + slots["dp"]


def test_plans_say_which_axis_moves_by_what() -> None:
    plan = plan_of("mesh.tp=4", "mesh.pp=2", "mesh.dp=2", "schedule.name=1f1b", device="cuda")
    text = StringIO()
    Console(width=300, file=text).print(facts_table(plan, costs_of(plan)))
    assert transports(plan) == {"pp": "peer", "tp": "peer", "parameters": "nccl"}, "a replica on each of two hosts"
    assert "16 ranks, bfloat16 on GPUs, peer copies along pp and tp, NCCL for parameters" in text.getvalue()


def test_zero_with_nothing_to_shard_is_refused() -> None:
    with pytest.raises(
        PentadError, match=r"^zero.stage is 3, but .* is 1, .*: expected zero.stage 0, or more replicas$"
    ):
        first_plan(load(None, ["zero.stage=3", "cluster.device=cpu"]))
    for overrides in (["mesh.dp=2"], ["schedule.name=dualpipe"]):
        assert first_plan(load(None, ["zero.stage=3", "cluster.device=cpu", *overrides])).zero == 3


def test_a_smaller_mesh_may_have_nothing_to_shard() -> None:
    config = load(None, ["zero.stage=3", "mesh.dp=2", "elastic.min_ranks=4", "schedule.name=1f1b"])
    smaller = shrunk_plan(config, make_plan(config, "cpu"), 5)
    assert smaller is not None
    assert (smaller.mesh, smaller.zero, smaller.batch.microbatches) == (Mesh(pp=4), 0, 16)
    assert shrunk_plan(config, make_plan(config, "cpu"), 3) is None


def test_ranks_that_share_parameters_reduce_units_of_about_400_mib() -> None:
    """Units have at least one layer; the embedding and the head are units of their own. Smaller stages are not split,
    nor are those with a single holder. A smaller mesh with the same stages keeps units, so that ranks keep state."""
    sizes = ["model.hidden=1024", "model.heads=8", "model.ffn=4096", "model.layers=32", "mesh.pp=2"]
    words = [*sizes, "schedule.name=1f1b", "schedule.microbatches=2", "elastic.min_ranks=2"]
    config = load(None, [*words, "mesh.dp=2"])
    plan = make_plan(config, "cpu")
    assert plan.program.units == (4, 4)
    assert list(map(str, plan.layers)) == ["embed", "0-5", "6-10", "11-15", "16-21", "22-26", "27-31", "head"]
    for layers in plan.layers[1:-1]:
        assert 200 * 2**20 < 4 * num_parameters(plan.model, layers) <= 400 * 2**20
    smaller = shrunk_plan(config, plan, 2)
    assert smaller is not None and smaller.mesh == Mesh(pp=2) and smaller.layers == plan.layers
    for overrides in ([], ["mesh.dp=2", "model.layers=8"], ["mesh.dp=2", "memory.unit_layers=16"]):
        assert make_plan(load(None, [*words, *overrides]), "cpu").program.units == ()
    large = [*words, "mesh.dp=2", "model.ffn=65536"]
    assert make_plan(load(None, large), "cpu").program.units == (17, 17)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_the_optimizer_step(zero: int) -> None:
    """With two shards, STEP takes half as long; besides, only the norm and the collectives change."""
    words = ["mesh.dp=2", "schedule.name=1f1b", "schedule.microbatches=2"]
    full, sharded = (costs_of(make_plan(load(None, [*words, f"zero.stage={stage}"]), "cpu")) for stage in (0, zero))
    assert sharded.step == sharded.validate_step == pytest.approx(full.step / 2)
    assert sharded.norm < full.norm
    same = replace(sharded, step=full.step, validate_step=full.validate_step, norm=full.norm)
    assert replace(same, reduce=full.reduce, gather=full.gather) == full
