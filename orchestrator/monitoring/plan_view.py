"""A plan as text: what will run, where, with how much memory, and a simulated step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pentad.orchestrator.monitoring.run_state import RankView
from pentad.orchestrator.monitoring.tables import MOST_RANKS, fitted_table, with_rest
from pentad.orchestrator.monitoring.terminal_timeline import bars, is_coloured, legend
from pentad.orchestrator.planning.comm_volume import transports
from pentad.orchestrator.planning.estimate import ON_HOST, copy_slots_bytes, memories
from pentad.orchestrator.planning.formatting import counted, format_bytes, format_count, format_duration, format_percent
from pentad.orchestrator.planning.fp8_costs import why_not, why_not_shared
from pentad.orchestrator.planning.numerics import why_gathered_wide
from pentad.schedules.ir.errors import enumerated
from pentad.schedules.passes.offload_arena import arena
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.passes.recompute import config_text
from pentad.schedules.simulate.copy_slack import hidden_share
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Bubble
from pentad.schedules.spec.lora import trained_tensors
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange, num_parameters

Needs = Sequence[dict[str, int]]  # bytes of every rank, by kind


def print_plan(console: Console, plan: Plan, costs: Costs, ranks: Sequence[RankView] = ()) -> None:
    """Prints a plan with a step simulated with `costs`; `ranks` are the placed ranks, if any."""
    for part in plan_view(console, plan, costs, ranks):
        console.print(part)


def plan_view(console: Console, plan: Plan, costs: Costs, ranks: Sequence[RankView] = ()) -> Iterator[RenderableType]:
    """The parts that `print_plan` prints, made for this console."""
    coloured = is_coloured(console)
    timeline = simulate(plan.program, costs)
    axis = "pp" if plan.mesh.size > plan.mesh.pp else ""  # a row is one rank, or all ranks of a pipeline rank
    label = len(f"{axis}{plan.program.ranks - 1}") + 2
    rows = bars(timeline, max(20, console.width - label - 1), coloured=coloured)
    names = (f"{axis}{pp}".rjust(label - 1) for pp in range(plan.program.ranks))
    drawing = [Text.assemble((f"{name} ", "dim"), row, no_wrap=True) for name, row in zip(names, rows, strict=True)]
    figures = f"  {format_duration(timeline.makespan)} of compute  bubble {bubble_text(timeline.bubble())}"
    needs = memories(plan)
    table = ranks_table(plan, needs, ranks, console.width)
    yield from (facts_table(plan, costs), Text(), table, memory_line(plan, needs), Text())
    yield Text.assemble((" one step, simulated", "bold"), figures)
    yield from drawing
    yield Text.assemble(" " * label, legend(timeline, coloured=coloured))


def bubble_text(bubble: Bubble) -> str:
    return f"{format_percent(bubble.longest)} longest, {format_percent(bubble.makespan)} makespan"


STATE = ("parameters", "replicas")


def _transport_text(plan: Plan) -> str:
    """The transports, as in ', peer copies along pp and tp, NCCL for parameters'; '' without communication."""
    text, found = "", transports(plan)
    for kind, name in (("peer", "peer copies"), ("nccl", "NCCL"), ("gloo", "Gloo")):
        moved = [each for each, its in found.items() if its == kind]
        axes, others = ([each for each in moved if (each in STATE) is is_state] for is_state in (False, True))
        both = ("along", axes), ("for", others)
        uses = " and ".join(f"{word} {' and '.join(names)}" for word, names in both if names)
        text += f", {name} {uses}" if moved else ""
    return text


def _mesh_text(plan: Plan) -> str:
    device, size = "GPU" if plan.device == "cuda" else "CPU", plan.mesh.size
    ranks, where = (f": {size:,} ranks", f"{device}s") if size > 1 else ("", f"a {device}")
    graphs = ", CUDA graphs" if plan.cuda_graphs else ""
    return f"{plan.mesh}{ranks}, {plan.dtype} on {where}{_transport_text(plan)}{graphs}"


def facts_table(plan: Plan, costs: Costs) -> Table:
    model, batch, program = plan.model, plan.batch, plan.program
    custom = f"{model.custom.text}, " if model.custom is not None else ""
    size_of_model = f"{model.layers} layers of {model.hidden}, vocabulary of {model.vocab:,}"
    slices = f" in {program.slices} slices" if program.slices > 1 else ""
    microbatches = f"{counted(program.microbatches, 'microbatch', 'microbatches')} of {batch.micro_batch_size}{slices}"
    sequences = f"{batch.global_batch_size} sequences of {batch.sequence_length}"
    facts: dict[str, str | Text] = {
        "run": Text(plan.name, "bold"),
        "model": f"{custom}{format_count(num_parameters(model))} parameters: {size_of_model}",
        "batch": f"{sequences} = {batch.tokens:,} tokens a step",
        "mesh": _mesh_text(plan),
    }
    facts |= _kernel_facts(plan)
    if plan.expert_slots:
        sent = f"{plan.expert_slots:,} of a rank's {plan.slice_tokens:,} tokens"
        facts["slots"] = f"for {sent} to each other one's experts"
    if batch.rampup:
        smaller = [f"{stage.global_batch_size} sequences in {stage.steps} steps" for stage in batch.rampup]
        facts["rampup"] = f"{', then '.join(smaller)}; all figures are for the full batch"
    if plan.lora is not None:
        count = sum(math.prod(tensor.shape) for tensor in trained_tensors(model, plan.lora))
        adapters = f"rank {plan.lora.rank}, alpha {plan.lora.alpha:g}, of {', '.join(plan.lora.targets)}"
        facts["lora"] = f"{format_count(count)} trained parameters: {adapters}"
    if plan.fp8 is not None:
        first, end = plan.fp8.skip_first, model.layers - plan.fp8.skip_last
        layers = "all layers" if end - first == model.layers else f"layers {first} to {end - 1}"
        scales = {"tensor": "a scale per tensor", "row": "a scale per row", "block": "scales per 1 x 128 and 128 x 128"}
        layers += " and the head" * plan.fp8.head
        scale = scales[plan.fp8.scaling] + " by the step before" * plan.fp8.delayed
        scale += ", a power of two" * plan.fp8.power_of_two
        facts["matmul"] = f"FP8 in {layers}, {scale}, gradients {plan.fp8.gradients}"
        if model.experts is not None:
            tokens = batch.micro_batch_size * batch.sequence_length // plan.mesh.cp
            slower = why_not(model, plan.fp8.scaling, plan.mesh, tokens, plan.rates)
            reason = slower or "precision.fp8_experts is never"
            facts["experts"] = "FP8, W in the compute dtype" if plan.fp8.experts else f"{plan.dtype}: {reason}"
            if model.experts.shared_intermediate_size and not plan.fp8.shared_experts:
                facts["experts"] += f"; the shared expert {plan.dtype}: {why_not_shared(model, plan.mesh)}"
    if plan.zero:
        facts["zero"] = f"stage {plan.zero}, {_shards_text(plan)}{_gathered_text(plan)}"
    if plan.bf16_reduce:
        facts["reduce"] = "gradients in bfloat16, with sums in float32"
    facts["program"] = f"{program.name}, {microbatches}, hash {program.hash[:12]}"
    if batch.longer:
        facts["longer steps"] = f"{enumerated(batch.longer)} microbatches, a program each"
    if plan.recompute:
        found = {program.stage_of[unit] for unit, mode in enumerate(plan.recompute) if mode != "none"}
        where = "" if len(found) == program.stage_of[-1] + 1 else f" of stages {', '.join(map(str, sorted(found)))}"
        rows = "" if plan.recompute_fraction == 1 else f" of {format_percent(plan.recompute_fraction)} of the rows"
        facts["recompute"] = f"{config_text(plan.recomputation)}{rows}{where}"
    facts |= _offload_facts(plan, costs)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(f" {name}", fact)
    return table


OPERATIONS = {"grouped_gemm": "experts' products", "grouped_gemm_transposed": "those of experts in B"}


def _kernel_facts(plan: Plan) -> dict[str, str]:
    """Facts on the GPU kernels chosen by configuration or measurement, for the table of `pentad plan`; empty for the
    default ones."""
    name, measured, _ = plan.kernels
    if plan.device == "cpu" or (name == "auto" and not measured):
        return {}
    if name != "auto":
        words = {
            "torch": "torch's references of all operations, which are slow",
            "triton": "pentad's in Triton wherever there is one",
            "cudnn": "cuDNN's for attention",
        }
        return {"kernels": words[name]}
    texts = dict[str, list[str]]()
    for (op, *_), kernel in measured:
        phase = "attention's B" if "backward" in str(op) else "attention's F"
        texts.setdefault(OPERATIONS.get(str(op), phase), []).append(kernel)
    uses = ", ".join(f"{' and '.join(kernels)} for {what}" for what, kernels in texts.items())
    return {"kernels": f"{uses}, as measured"}


def _shards_text(plan: Plan) -> str:
    """The ZeRO shards, as in '8 shards of a pipeline stage, 2 replicas of each'."""
    shards = max(map(plan.num_zero_shards, plan.param_shards))
    replicas = max(plan.num_holders(each) // plan.num_zero_shards(each) for each in plan.param_shards)
    return f"{shards} shards of a pipeline stage" + (f", {replicas} replicas of each" if replicas > 1 else "")


def _gathered_text(plan: Plan) -> str:
    """The dtype in which ZeRO-3 gathers the weights of FP8 matmuls; '' without ZeRO-3 or FP8."""
    if plan.fp8 is None or plan.zero < 3:
        return ""
    if any(map(plan.size_in_8_bits, plan.param_shards)):
        return ", gathered in FP8 where layers multiply in it"
    host, twice = plan.host_optimizer, has_post_validation(plan.program)
    reason = why_gathered_wide(plan.fp8.scaling, plan.fp8.compare_every, host=host, twice=twice)
    return f", gathered in {plan.dtype}" + f": {reason}" * bool(reason)


def _offload_facts(plan: Plan, costs: Costs) -> dict[str, str]:
    """Facts on offloading for the table of `pentad plan`, by name; empty without offloading."""
    found = dict[str, str]()
    if any(plan.offload):
        shares = [max(plan.offload[unit] for unit in held) for held in plan.program.placement]
        hidden = _by_rank(hidden_share(plan.program, costs))
        arenas = [arena(plan.program, rank, plan.offload_slots) for rank in range(plan.program.ranks)]
        largest = max(arenas, key=lambda each: each.bytes)
        host, bound = (format_bytes(each[0]) for each in (largest.bytes, largest.bounds))
        lie = f"{host} of pinned host memory a rank, at least {bound} in any layout"
        units = "one unit" if plan.offload_prefetch == 1 else f"{plan.offload_prefetch} units"
        copies = f"copies beside {units} each, of which compute hides {hidden}"
        found["offload"] = f"{_by_rank(shares)} of saved activations, in {copies}; {lie}"
    if plan.host_optimizer:
        found["optimizer"] = "master weights and moments in host memory"
    return found


def _by_rank(shares: list[float]) -> str:
    """The shares by pipeline rank, as one percentage if all are the same."""
    texts = [format_percent(share) for share in shares]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def ranks_table(plan: Plan, needs: Needs, ranks: Sequence[RankView], width: int) -> Table:
    """A row per rank: its coordinates, layers, place and peak memory from `needs`. If there are many ranks and none is
    placed, neighbours in a pipeline rank that need the same amount share a row."""
    where = {at.rank: (at.node, f"GPU {at.gpu}" if at.gpu >= 0 else "CPU", str(at.pid)) for at in ranks}
    heads = ["rank>", "place", "layers", *(("node", "device", "pid>") if where else ()), "memory>"]
    rows = []
    groups = [[rank] for rank in range(plan.mesh.size)]
    if len(groups) > MOST_RANKS and not where:
        totals = [(plan.mesh.coordinates(rank).pp, format_bytes(needs[rank]["total"])) for rank in range(len(groups))]
        groups = [list(ranks) for _, ranks in groupby(range(len(groups)), totals.__getitem__)]
    for first, *others in groups[:MOST_RANKS]:
        at = plan.mesh.coordinates(first)
        name, place = (f"{first}-{others[-1]}", f"pp{at.pp}") if others else (str(first), str(at))
        cells = [name, place, layers_text(plan, *plan.stages_of(first))]
        rows.append([*cells, *where.get(first, ()), format_bytes(needs[first]["total"])])
    drop = ("pid", "device", "node") if where else ()
    return with_rest(fitted_table(heads, rows, width, drop=(*drop, "place"), wrapped=["layers"]), len(groups))


def memory_line(plan: Plan, needs: Needs) -> RenderableType:
    """What fills the memory of the rank that needs the most."""
    rank = max(range(plan.mesh.size), key=lambda rank: needs[rank]["total"])
    kinds = ((name, part) for name, part in needs[rank].items() if part and name not in ("total", *ON_HOST))
    copied = copy_slots_bytes(plan, rank)
    notes = {"slots": f" ({format_bytes(copied)} for peer copies)"} if copied > 0 else {}
    parts = [f"{name} {format_bytes(part)}{notes.get(name, '')}" for name, part in kinds]
    host, snapshot, optimizer, copies, compared = (max(need[kind] for need in needs) for kind in ON_HOST)
    state = f"; up to {format_bytes(optimizer)} of a rank's optimizer state are in host memory" if optimizer else ""
    offloaded = f"; up to {format_bytes(host)} of a rank's activations are offloaded" if host else ""
    saved = f"; a checkpoint takes up to {format_bytes(snapshot)} of host memory per rank" if snapshot else ""
    kept = f"; copies of state take up to {format_bytes(copies)} of host memory per rank" if copies else ""
    kept += f"; gradients to compare take up to {format_bytes(compared)} of host memory per rank" if compared else ""
    who = "each rank needs" if len(needs) > 1 else "rank 0 needs"
    if any(need != needs[rank] for need in needs):
        who = f"rank {rank} needs the most memory,"
    text = f"{who} {format_bytes(needs[rank]['total'])}: {', '.join(parts)}"
    return Padding(Text(f"{text}{offloaded}{state}{saved}{kept}", "dim"), (0, 1))


def layers_text(plan: Plan, *stages: int) -> str:
    """The layers of stages as ranges, merged for consecutive stages."""
    ranges: list[LayerRange] = []
    for layers in (plan.layers[stage] for stage in stages):
        if ranges and ranges[-1].end == layers.first:
            before = ranges.pop()
            layers = LayerRange(before.first, layers.end, before.has_embedding, layers.has_head)
        ranges.append(layers)
    return ", ".join(map(str, ranges))
