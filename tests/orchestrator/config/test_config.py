"""Configurations are complete and strictly checked, and every error is one sentence."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.config.errors import sections_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.plan import split_layers, split_layers_into_units


def text(**changes: str | None) -> str:
    """The quickstart's YAML with these sections replaced, removed (None) or added."""
    lines = {name: json.dumps(section) for name, section in load(None, []).model_dump().items()} | changes
    return "".join(f"{name}: {value}\n" for name, value in lines.items() if value is not None)


def refusals(path: Path | None, *overrides: str) -> list[str]:
    """The message of each error found before a run starts."""
    with pytest.raises(PentadError) as caught:
        make_plan(load(path, list(overrides)), "cpu")
    return caught.value.sentences


def refusal(path: Path | None, *overrides: str) -> str:
    (sentence,) = refusals(path, *overrides)
    return sentence


EXPERTS = ("num_experts=4", "top_k=2", "intermediate_size=64", "bias_update_rate=0.01")
MIXTRAL = ("model.family=mixtral", *(f"model.experts.{each}" for each in EXPERTS))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_quickstart() -> None:
    config = load(None, [])
    assert (config.run.name, config.run.seed, config.run.steps) == ("quickstart", 0, 60)
    assert (config.model.layers, config.model.hidden, config.model.heads, config.model.kv_heads) == (8, 128, 8, 4)
    assert (config.model.ffn, config.model.vocab, config.mesh.dp, config.mesh.pp) == (384, 4096, 1, 4)
    assert (config.schedule.name, config.schedule.microbatches) == ("zb-h2", 8)
    assert (config.batch.global_batch_size, config.batch.sequence_length) == (16, 128)
    assert config.data.path == "builtin:pydoc"


def test_every_field_has_a_description() -> None:
    fields = [
        field for path, schema in sections_of(RunConfig).items() if path for field in schema["properties"].values()
    ]
    assert len(fields) > 80
    assert all(len(field["description"]) > 10 for field in fields)


def test_every_whole_number_has_a_largest_value() -> None:
    keys = json.dumps([schema["properties"] for schema in sections_of(RunConfig).values()])
    found = [json.loads(each) for each in re.findall(r'{[^{}]*"type": "integer"[^{}]*}', keys)]
    assert len(found) > 60 and all("maximum" in each for each in found)


@pytest.mark.parametrize(
    ("recompute", "stages", "modes"),
    [
        ("none", "null", ()),
        ("full", "null", ("full",) * 4),
        ("selective", "[3, 1]", ("none", "selective", "none", "selective")),
        ("[core_attn, mlp]", "[0]", ("mlp,core_attn", "none", "none", "none")),
    ],
)
def test_every_stage_has_a_recompute_mode(recompute: str, stages: str, modes: tuple[str, ...]) -> None:
    config = load(None, [f"memory.recompute={recompute}", f"memory.recompute_stages={stages}"])
    layers = split_layers(8, [[stage] for stage in range(4)])
    assert config.memory.modes((1,) * 4, layers) == modes
    ends = (("none",), ("none",)) if modes else ((), ())
    units = split_layers_into_units(layers, (3, 2, 2, 3))
    by_unit = tuple(mode for mode in modes for _ in range(2))
    assert config.memory.modes((3, 2, 2, 3), units) == (*ends[0], *by_unit, *ends[1])
    recomputing = {stage for stage, mode in enumerate(modes) if mode != "none"}
    assert config.memory.options((1,) * 4, layers).recompute == recomputing
    if recompute == "full":
        first = load(None, ["memory.recompute=full", "memory.recompute_layers=1"]).memory.modes((3, 2, 2, 3), units)
        assert first == ("none", *("full", "none") * 4, "none")
    section = load(None, ["memory.max_resident_microbatches=5"]).memory
    assert section.options((1,) * 4, layers).max_resident == 5


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["recompute=some"], "memory.recompute is 'some': expected one of none, selective, attention, full or auto"),
        (["recompute=[mlp, cor_attn]"], "or attn_proj (did you mean core_attn?)"),
        (["recompute=[]"], "memory.recompute is []: expected different names of mlp, moe, core_attn, qkv_linear,"),
        (["recompute=[mlp, mlp]"], "memory.recompute is ['mlp', 'mlp']: expected different names of mlp, moe,"),
        (["recompute=core_attn"], "or a list such as [mlp, core_attn] (did you mean [core_attn]?)"),
        (["recompute=[layernorm]"], "expected no layernorm, because results of norms are never saved"),
        (["recompute=[moe_act]"], "expected no moe_act, because gated products are never saved"),
        (["recompute=[moe]"], "memory.recompute is ['moe']: expected no moe for this model: it has no experts"),
        (["recompute=[mla_up_proj]"], "expected no mla_up_proj for this model: it has no multi-head latent attention"),
        (["recompute_stages=[0]"], "memory.recompute_stages is [0], but memory.recompute is none: expected selective"),
        (["recompute=full", "recompute_stages=[]"], "memory.recompute_stages is []: expected at least one stage"),
        (["recompute=full", "recompute_stages=[4]"], "memory.recompute_stages is [4]: expected stages 0 to 3"),
        (["recompute=full", "recompute_stages=2"], "memory.recompute_stages is 2: expected a list, such as [a, b]"),
        (["recompute=full", "recompute_stages=[-1]"], "memory.recompute_stages[0] is -1: expected at least 0"),
        (["max_resident_microbatches=0"], "memory.max_resident_microbatches is 0: expected more than 0"),
        (
            ["max_resident_microbatches=0.5"],
            "memory.max_resident_microbatches is 0.5: expected at least 2, which rank 0 saves at once",
        ),
        (
            ["max_resident_microbatches=9", "recompute=selective"],
            "memory.max_resident_microbatches is 9, but memory.recompute is selective",
        ),
        (["offload_fraction=1.1"], "memory.offload_fraction is 1.1: expected 0 to 1, or auto"),
        (["offload_fraction=-0.1"], "memory.offload_fraction is -0.1: expected 0 to 1, or auto"),
        (
            ["offload_fraction=0.5", "max_resident_microbatches=9"],
            "memory.offload_fraction is 0.5, but memory.max_resident_microbatches is 9: expected 0, or",
        ),
        (["optimizer=disk"], "memory.optimizer is 'disk': expected one of device or host"),
    ],
)
def test_a_bad_memory_option_is_reported_in_one_sentence(overrides: list[str], sentence: str) -> None:
    assert sentence in refusal(None, *(f"memory.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer.name=muon", "optimizer.name = muon, whose matrices are updated whole"),
        ("schedule.post_validation=true", "schedule.post_validation = true, which updates weights twice"),
    ],
)
def test_only_adamw_after_a_norm_can_have_its_state_on_the_host(override: str, reason: str) -> None:
    found = refusal(None, "memory.optimizer=host", override)
    assert f"memory.optimizer is host: expected device for {reason}" in found


def test_recompute_stages_cannot_be_given_with_schedule_auto() -> None:
    chosen = ["schedule.name=auto", "memory.recompute=full"]
    assert load(None, chosen).memory.recompute == "full"
    sentence = refusal(None, *chosen, "memory.recompute_stages=[1]")
    assert sentence == "memory.recompute_stages is [1], but schedule.name auto places them: expected null"


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=3",
        "memory.max_resident_microbatches=5.5",
        "run.name='1e3'",
        "run.name=on",
        "optimizer.eps=1e-12",
        "data.path='a: b'",
    ],
)
def test_dump_and_load_are_inverse(file: Callable[[str | bytes], Path], override: str) -> None:
    config = load(None, [override])
    assert load(file(dump(config)), []) == config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.warmup_steps=null", None),
        ("cluster.dashboard=false", False),
        ("run.name=no", "no"),
        ("run.name=2024-01-01", "2024-01-01"),
        ("data.path=a=b", "a=b"),
        ("run.steps=1_000", 1000),
    ],
)
def test_override_values_are_yaml_scalars(override: str, value: object) -> None:
    section, _, name = override.partition("=")[0].partition(".")
    assert getattr(getattr(load(None, [override]), section), name) == value


def test_overrides_replace_the_file_and_earlier_overrides(file: Callable[[str | bytes], Path]) -> None:
    assert load(file(text()), ["run.steps=3", "run.steps=5"]).run.steps == 5


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimiser.learning_rat=1", "optimiser.learning_rat is unknown; did you mean optimizer.learning_rate?"),
        ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate?"),
        ("model.learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("zero.bucket_mib=25", "zero.bucket_mib is unknown"),
        ("optimizer.lr=1", "optimizer.lr is unknown; did you mean optimizer.learning_rate?"),
        ("optimizer.name=adam", "optimizer.name is 'adam': expected one of adamw or muon (did you mean adamw?)"),
        ("model.num_layers=8", "model.num_layers is unknown; did you mean model.layers?"),
        ("model.hidden_size=8", "model.hidden_size is unknown; did you mean model.hidden?"),
        ("model.head=8", "model.head is unknown; did you mean model.heads?"),
        ("batch.microbatches=8", "batch.microbatches is unknown; did you mean schedule.microbatches?"),
        ("parallel.tp=2", "parallel.tp is unknown; did you mean mesh.tp?"),
        ("model.experts.count=8", "model.experts.count is unknown: expected one of model.experts.{num_experts, top_k,"),
        ("precision.compute=bf16", "one of auto, bfloat16, float32 or float64 (did you mean bfloat16?)"),
        ("mesh.cp_method=gather", "expected one of ring, all_gather or ulysses (did you mean all_gather?)"),
        ("run.seed=!!int x", "override run.seed=!!int x line 1, column 1: 'x' is no number: expected valid YAML"),
        ("run.seed=" + 5000 * "9", "'99999999999999999...' is no number: expected valid YAML"),
        ("run.seed=99999999999999999999", "run.seed is 99999999999999999999: expected at most 9223372036854775807"),
        ("run.seed=1_", "run.seed is '1_': expected a whole number"),
        ("run.seed=0x10", "run.seed is '0x10': expected a whole number"),
        ("run.bananas=1", "run.bananas is unknown: expected one of run.{name, seed, steps, folder, init_from,"),
        ("tokens.count=1", "tokens.count is unknown: expected a key in one of the sections run, model"),
        ("mesh=2", "mesh=2 sets a whole section: expected a single key such as mesh.dp=VALUE"),
        ("run.name={a: 1}", "run.name is {'a': 1}: expected a single value"),
        ("optimizer.groups={pattern: x}", "is {'pattern': 'x'}: expected a list of mappings, in brackets"),
        ("model.rope_scaling={factor: 2}", "expected a single key such as model.rope_scaling.rope_type=VALUE"),
        ("run.name=[", "override run.name=[ line 1, column 2:"),
        ("run.name=../x", "run.name is '../x': expected letters, digits"),
        ("run.name=.hidden", "run.name is '.hidden': expected letters"),
        ("run.name=", "run.name is null: expected text"),
        ("run.name=7", "run.name is 7: expected text (in quotes"),
        ("run.steps=0", "run.steps is 0: expected at least 1"),
        ("run.steps=2.5", "run.steps is 2.5: expected a whole number"),
        ("run.steps=true", "run.steps is true: expected a whole number"),
        ("run.name=" + 101 * "a", "aaa...: expected at most 100 characters"),
        ("=5", "'' is unknown: expected a key in one of the sections"),
        ("run.seed=-1", "run.seed is -1: expected at least 0"),
        ("model.layers=eight", "model.layers is 'eight': expected a whole number"),
        ("model.family=gpt", "model.family is 'gpt': expected one of llama"),
        ("model.vocab=1", "model.vocab is 1: expected at least 2"),
        ("schedule.slices=4", "schedule.slices is 4: expected 1 for schedule zb-h2"),
        ("schedule.slices=0", "schedule.slices is 0: expected at least 1"),
        ("model.hidden=100", "model.hidden is 100: expected a multiple of model.heads = 8"),
        ("model.kv_heads=3", "model.heads is 8: expected a multiple of model.kv_heads = 3"),
        ("model.hidden=24", "model.hidden / model.heads is 24 / 8 = 3: expected an even head size"),
        ("model.layers=3", "model.layers is 3: expected at least one for each of 4 pipeline stages (mesh.pp)"),
        ("mesh.cp=3", "batch.sequence_length is 128: expected a multiple of 2 x mesh.cp = 6"),
        ("mesh.tp=3", "model.heads is 8: expected a multiple of mesh.tp = 3"),
        ("mesh.ep=2", "mesh.ep is 2: expected 1 for a model without experts"),
        ("mesh.pp=0", "mesh.pp is 0: expected at least 1"),
        ("schedule.name=zbh2", "schedule.name is 'zbh2': expected one of gpipe"),
        ("schedule.microbatches=0", "schedule.microbatches is 0: expected at least 1"),
        (
            "batch.global_batch_size=12",
            "batch.global_batch_size is 12: expected a multiple of mesh.dp x schedule.microbatches = 1 x 8 = 8",
        ),
        (
            "mesh.dp=3",
            "batch.global_batch_size is 16: expected a multiple of mesh.dp x schedule.microbatches = 3 x 8 = 24",
        ),
        ("optimizer.learning_rate=0", "optimizer.learning_rate is 0: expected more than 0"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf: expected a finite number"),
        ("optimizer.beta2=1", "optimizer.beta2 is 1: expected less than 1"),
        ("optimizer.warmup_steps=61", "optimizer.warmup_steps is 61: expected at most run.steps = 60"),
        (
            "optimizer.min_learning_rate=1",
            "optimizer.min_learning_rate is 1: expected at most optimizer.learning_rate = 0.003",
        ),
        ("precision.compute=fp8", "precision.compute is 'fp8': expected one of auto, bfloat16, float32 or float64"),
        ("checkpoint.keep=0", "checkpoint.keep is 0: expected at least 1"),
        ("cluster.dashboard=1", "cluster.dashboard is 1: expected true or false"),
        ("cluster.dashboard_port=70000", "cluster.dashboard_port is 70000: expected at most 65535"),
        ("cluster.device=tpu", "cluster.device is 'tpu': expected one of auto, cpu or cuda"),
        ("metrics.profile_steps=[60]", "metrics.profile_steps is [60]: expected steps below run.steps = 60"),
        ("metrics.profile_steps=[-1]", "metrics.profile_steps[0] is -1: expected at least 0"),
        (f"metrics.profile_steps={[*range(17)]}", "16]: expected at most 16 items"),
        ("cluster.auth=none", "cluster.auth is 'none': expected one of token or disabled"),
    ],
)  # fmt: skip
def test_a_bad_override_is_reported_with_its_key_value_and_what_is_expected(override: str, sentence: str) -> None:
    assert sentence in refusal(None, override)


def test_sizes_that_a_schedule_does_not_support_are_refused() -> None:
    assert "expected an even number" in refusal(None, "schedule.name=dualpipe", "mesh.pp=3")
    assert "at least 2 x ranks (mesh.pp) = 8" in refusal(None, "schedule.name=dualpipe", "schedule.microbatches=4")


def test_the_number_of_slices_divides_the_sequence_length() -> None:
    sliced = "schedule.name=seq-1f1b"
    expected = "schedule.slices is 3: expected a divisor of batch.sequence_length = 128"
    assert expected in refusal(None, sliced, "schedule.slices=3")
    assert load(None, [sliced, "schedule.slices=2"]).options.slices == 2
    for length, slices in ((128, 4), (126, 3), (122, 2), (127, 1)):  # the schedule's preferred number, or fewer
        assert load(None, [sliced, f"batch.sequence_length={length}"]).options.slices == slices
    assert load(None, []).options.slices is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds nothing: expected a mapping of sections such as run, model"),
        ("quickstart", "holds 'quickstart': expected a mapping"),
        ("- run", "holds ['run']: expected a mapping"),
        ("run: [", "run.yaml line 1, column 7: "),
        ("run: {name: a}\nmodel: {}\nrun: {}", "run.yaml line 3, column 1: key 'run' appears twice"),
        ("run: {name: a, name: b}", "line 1, column 16: key 'name' appears twice"),
        ("run:\n\t- a", "line 2, column 1: "),
        ("a: \x00", "special characters are not allowed"),
        ("[" * 500, "recursion"),
        ("run: !!python/object:os.system x", "could not determine a constructor"),
        (b"run: \xff", "is not UTF-8 text (byte 5)"),
        (text(run="3"), "run is 3: expected a mapping with keys such as run.name"),
        (text(run="{name: a}"), "run.steps is missing: expected a value: optimizer steps"),
        (text(run=None), "section run is missing: expected one with keys such as run.name"),
        (
            text(optimiser="{learning_rat: 1}"),
            "optimiser.learning_rat is unknown; did you mean optimizer.learning_rate?",
        ),
        (text(optimiser="{beta1: 0, beta2: 0}"), "optimiser is unknown; did you mean optimizer?"),
        (text(bananas="{}"), "bananas is unknown: expected a key in one of the sections"),
        (text(optimizer=""), "optimizer is null: expected a mapping"),
        (text() + "5: 6\n", "5 is unknown: expected a key in one of the sections"),
        (text() + "'': 6\n", "'' is unknown: expected a key in one of the sections"),
    ],
)
def test_a_bad_file_is_reported_in_one_sentence(
    file: Callable[[str | bytes], Path], content: str | bytes, sentence: str
) -> None:
    assert sentence in refusal(file(content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert re.search(r"CONFIG is '.*none.yaml', which cannot be read \(No such file", refusal(tmp_path / "none.yaml"))
    assert "Is a directory" in refusal(tmp_path)


def test_every_error_is_reported_unknown_keys_first(file: Callable[[str | bytes], Path]) -> None:
    assert refusals(file(text(run="{name: a, step: 3}"))) == [
        "run.step is unknown; did you mean run.steps?",
        "run.steps is missing: expected a value: optimizer steps of the run, counted over all resumes",
    ]
    assert refusals(None, "run.bananas=1", "run.seed=-1", "model.kv_heads=3") == [
        "run.bananas is unknown: expected one of run.{name, seed, steps, folder, init_from, init_optimizer, init_step}",
        "run.seed is -1: expected at least 0",
        "model.heads is 8: expected a multiple of model.kv_heads = 3",
    ]
    assert refusals(None, "mesh.tp=3", "mesh.dp=3", "optimizer.warmup_steps=61") == [
        "batch.global_batch_size is 16: expected a multiple of mesh.dp x schedule.microbatches = 3 x 8 = 24",
        "optimizer.warmup_steps is 61: expected at most run.steps = 60",
        "model.heads is 8: expected a multiple of mesh.tp = 3",
    ]


@pytest.mark.parametrize("name", ["zb-h2", "auto", "dualpipe", "my.py:schedule"])
def test_loading_compiles_no_program(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Program, "__init__", None)
    assert load(None, [f"schedule.name={name}", "zero.stage=3", "mesh.dp=2"]).schedule.name == name


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None, []).run.steps = 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("data.document_mask=true", "schedule.name=seq-1f1b"), "expected 1 for data.document_mask = true"),
        (
            ("model.tie_word_embeddings=true", "schedule.post_validation=true"),
            "expected false for model.tie_word_embeddings = true",
        ),
        ((*MIXTRAL, "schedule.post_validation=true"), "expected false for model.experts.bias_update_rate > 0"),
    ],
)  # fmt: skip
def test_options_that_a_schedule_cannot_honour_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(None, *overrides)


RAMPS = {
    "3, steps: 1}]": "batch.rampup[0].global_batch_size is 3: expected a multiple of mesh.dp x sequences of a "
    "microbatch = 1 x 2 = 2",
    "8, steps: 1}, {global_batch_size: 8, steps: 1}]": "batch.rampup[0].global_batch_size is 8: expected less than 8",
    "16, steps: 1}]": "batch.rampup[0].global_batch_size is 16: expected less than 16",
    "6, steps: 1}]": "batch.rampup[0].global_batch_size is 6, so schedule.microbatches is 3: expected at least",
}


@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_that_the_schedule_or_the_mesh_cannot_divide_is_refused(ramp: str) -> None:
    overrides = "schedule.name=dualpipev", f"batch.rampup=[{{global_batch_size: {ramp}"
    assert refusal(None, *overrides).startswith(RAMPS[ramp])


def test_every_stage_of_a_ramp_has_a_program() -> None:
    ramp = "batch.rampup=[{global_batch_size: 4, steps: 2}, {global_batch_size: 8, steps: 3}]"
    plan = make_plan(load(None, [ramp]), "cpu")
    assert [program.microbatches for program in (plan.program, *plan.rampup_programs)] == [8, 2, 4]
    assert [plan.program_of(batch) for batch in range(7)] == [1, 1, 2, 2, 2, 0, 0]
    small = plan.with_program(1)
    assert (small.batch.global_batch_size, small.batch.micro_batch_size) == (4, 2)
    assert (small.program, small.rampup_programs, small.eval) == (plan.programs[1], (), plan.eval)
