"""The configuration: which values are accepted, and that every error names the dotted key."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dapo_megatron.config import (
    Config,
    FileSource,
    num_processes,
    source_file_name,
)
from dapo_megatron.config.file import REMOVED, dump_config, load_config, parse_config
from dapo_megatron.config.running import WatchdogConfig
from dapo_megatron.model import read_architecture
from dapo_megatron.types import ConfigError, Phase
from tests.helpers.configs import tiny_config

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "model_configs").glob("*.yaml"))
TINY = REPOSITORY / "model_configs" / "tiny_cpu.yaml"

# Values that the cases below assume, whatever the file says.
NUMBERS = (
    "rollout.prompts_per_step=32",
    "rollout.samples_per_prompt=16",
    "rollout.max_prompt_tokens=96",
    "rollout.max_response_tokens=16",
    "overlong.max_tokens=16",
    "overlong.buffer_tokens=8",
    "train.updates_per_step=4",
    "train.max_tokens_per_microbatch=16384",
    "policy.tensor_parallel=2",
    "engine.tensor_parallel=null",
)


def tiny_values() -> dict[str, Any]:
    """Return a complete configuration as plain values."""
    return dict(yaml.safe_load(TINY.read_text(encoding="utf-8")))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(TINY, [*NUMBERS, *overrides])
    return str(raised.value)


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_survives_a_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(resolved) == config
    # The config saved with a run has every key, including defaults.
    assert set(yaml.safe_load(dump_config(config))["rollout"]) == set(
        type(config.rollout).model_fields
    )


# ---------------------------------------------------------------------------- overrides


def test_overrides_reach_every_depth() -> None:
    config = load_config(
        TINY,
        [
            "seed=3",
            "loss.dual_clip=null",
            "optimizer.lr=1e-6",
            "data.train.0.size=17",
            "data.train.0.options.min_terms=3",
            "evaluation.sets=[]",
            "tracking.mlflow=false",  # a section that the YAML does not have
            "resume=runs/a=b/checkpoints/step_000001",  # only the first "=" separates key and value
            "seed=4",  # the last one wins
        ],
    )
    assert config.seed == 4
    assert config.loss.dual_clip is None
    assert config.optimizer.lr == 1e-6
    source = config.data.train[0]
    assert source.kind == "reasoning_gym"
    assert (source.size, source.options["min_terms"]) == (17, 3)
    assert config.evaluation.sets == ()
    assert config.tracking.mlflow is False
    assert config.resume == "runs/a=b/checkpoints/step_000001"


def test_an_override_fills_an_empty_section(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**tiny_values(), "tracking": None}), encoding="utf-8")
    assert load_config(path, ["tracking.mlflow=false"]).tracking.mlflow is False


# ---------------------------------------------------------------------------- overlays


def overlay(folder: Path, text: str, name: str = "overlay.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_overlay_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    first = overlay(
        tmp_path,
        "loss: {clip_high: 0.5, aggregation: prompt}\n"
        "tracking: {mlflow: false}\n"  # a section that the YAML does not have
        "data:\n  train:\n    - {kind: jsonl, name: a, path: b, grader: dapo_math}\n",
        "first.yaml",
    )
    second = overlay(tmp_path, "loss: {aggregation: sequence}\nseed: 5\n", "second.yaml")
    base, config = load_config(TINY), load_config(TINY, ["loss.clip_low=1e-1"], [first, second])
    assert (config.loss.clip_low, config.loss.clip_high) == (0.1, 0.5)
    assert config.loss.aggregation == "sequence"  # the later overlay wins
    assert config.loss.advantage_eps == base.loss.advantage_eps
    assert config.seed == 5
    assert config.tracking.mlflow is False
    assert [source.name for source in config.data.train] == ["a"]
    assert config.data.shuffle == base.data.shuffle
    assert load_config(TINY, ["seed=6"], [second]).seed == 6  # an override wins over an overlay
    # The config saved with a run is complete: it loads without the overlays.
    resolved = overlay(tmp_path, dump_config(config), "config.yaml")
    assert load_config(resolved) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polciy: {precision: float32}", "polciy: unknown key; did you mean 'policy'? (in {file})"),
        (
            "data: {train: [{kind: jsonl, nam: a, name: a, path: b, grader: c}]}",
            "data.train.0.nam: unknown key; did you mean 'name'? (in {file})",
        ),
        ("loss: 3", "loss: must be a mapping of keys (given: 3) (in {file})"),
        ("seed: 1\nseed: 2", "{file}, line 2: seed is given twice"),
    ],
)
def test_an_error_in_an_overlay_names_its_file(tmp_path: Path, text: str, expected: str) -> None:
    path = overlay(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(TINY, overlays=[overlay(tmp_path, "seed: 1", "fine.yaml"), path])
    assert str(raised.value) == expected.replace("{file}", str(path))


def test_an_error_from_an_override_does_not_name_the_overlay(tmp_path: Path) -> None:
    path = overlay(tmp_path, "seed: one\nloss: {clip_high: 0.5}")
    assert load_config(TINY, ["seed=1"], [path]).seed == 1
    with pytest.raises(ConfigError) as raised:
        load_config(TINY, ["loss.clip_high=x", "seed=1", "loss.clip_hihg=1"], [path])
    assert str(path) not in str(raised.value)


# ---------------------------------------------------------------------------- keys and types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loss.clip_hihg=0.3", "loss.clip_hihg: unknown key; did you mean 'clip_high'?"),
        ("data.train.0.datset=x", "data.train.0.datset: unknown key; did you mean 'dataset'?"),
        ("evaluation.sets.0.sed=1", "evaluation.sets.0.sed: unknown key; did you mean 'seed'?"),
        (
            "sync.speed=3",
            "sync.speed: unknown key; valid keys: max_gap, max_mean_gap, fingerprint_every",
        ),
        # Keys of other kinds of sources are not suggested.
        (
            "data.train.0={kind: jsonl, name: a, path: b, grader: c, datasett: d}",
            "data.train.0.datasett: unknown key; valid keys: kind, name, path, grader, "
            "environment, limit, columns",
        ),
        ("seed=true", "seed: Input should be a valid integer (given: True)"),
        ("seed=1.0", "seed: Input should be a valid integer (given: 1.0)"),
        ("optimizer.lr='1e-6'", "optimizer.lr: Input should be a valid number (given: '1e-6')"),
        ("run.name=7", "run.name: must be text; quote it if YAML reads it as another type"),
        ("run.name=..", "run.name: String should match pattern"),
        ("engine=null", "engine: must be a mapping of keys (given: None)"),
        ("data.train=3", "data.train: must be a list (given: 3)"),
        ("data.train.0.options=x", "data.train.0.options: must be a mapping of keys (given: 'x')"),
        ("optimizer.lr=0", "optimizer.lr: Input should be greater than 0 (given: 0)"),
        ("optimizer.lr=.nan", "optimizer.lr: Input should be a finite number (given: nan)"),
        ("optimizer.beta2=1.0", "optimizer.beta2: Input should be less than 1 (given: 1.0)"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt: Input should be greater"),
        ("policy.precision=fp32", "policy.precision: Input should be 'float32', 'bfloat16'"),
        ("policy.virtual_pipeline_parallel=1", "policy.virtual_pipeline_parallel: Input should be"),
        (
            "data.train.0.kind=csv",
            "data.train.0.kind: must be one of reasoning_gym, jsonl, parquet",
        ),
        ("data.train.0={name: a}", "data.train.0.kind: must be one of reasoning_gym"),
        (
            "loss.correction.worst_token=[2, 0.5]",
            "loss.correction.worst_token: must be [low, high]",
        ),
        ("loss.correction.worst_token=[0.5]", "loss.correction.worst_token"),
        ("loss.correction.worst_token=[0, 2]", "loss.correction.worst_token"),
        ("loss.function=my_losses.loss", "loss.function: must be module:function"),
    ],
)
def test_an_error_names_its_key_and_the_remedy_once(override: str, expected: str) -> None:
    message = refusal(override)
    assert message.startswith(expected)
    assert len({line.partition(":")[0] for line in message.splitlines()}) == 1


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_is_refused_with_what_to_write_instead(key: str) -> None:
    assert refusal(f"{key}=1") == f"{key}: {REMOVED[key]}"


def test_all_errors_are_reported_at_once() -> None:
    lines = refusal("loss.clip_hihg=0.3", "seed=x", "optimizer.lr=-1").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "seed",
        "loss.clip_hihg",
        "optimizer.lr",
    ]


@pytest.mark.parametrize("dotted", ["loss", "model.path", "loss.dual_clip"])
def test_a_missing_field_is_reported(dotted: str) -> None:
    values = tiny_values()
    node = values
    *parents, last = dotted.split(".")
    for parent in parents:
        node = node[parent]
    del node[last]
    with pytest.raises(ConfigError) as raised:
        parse_config(values)
    assert str(raised.value) == f"{dotted}: missing; every config must set it"


# Defaults of the sections that define the algorithm, and why a YAML may omit them.
OBJECTIVE_DEFAULTS = {
    "loss.log_ratio_limit": "prevents overflow of exp; older configs without this key still run",
    "loss.function": "null is the loss of the paper, with the numbers in the YAML",
    "loss.objective": "dapo, the loss of the paper",
    "loss.old_logprobs": "policy, as in the paper",
    "loss.correction": "off; the paper has none",
    "loss.kl": "the same",
    "loss.distill": "the same",
    "loss.entropy_coefficient": "the same",
    "loss.advantage_std": "true, as in the paper; older configs without this key still run",
    "loss.tau_pos": "acts only with objective sapo",
    "loss.tau_neg": "the same",
    "train.packing": "how rows are filled; the loss of a token is the same",
    "data.columns": "which columns of a file are read; missing ones are rejected",
    "data.chat_template_kwargs": "none: the template's own defaults, as of the paper's model",
    "rollout.expected_keep_rate": "a first guess of how many prompts to issue",
    "rollout.lookahead": "acts only with on_policy false, which the YAML must set",
    "rollout.max_overtake": "the same",
    "rollout.max_age": "the same",
    "rollout.max_staleness": "the same",
    "rollout.max_prompts_per_step": "a bound that a healthy run never reaches",
    "rollout.at_bound": "what to do at that bound",
    "rollout.deterministic": "bitwise repeatability; the objective is the same",
    "rollout.turns": "limits of completions with an environment, which is off by default",
    "optimizer.kernels": "which AdamW implementation; all compute the same",
    "optimizer.moments": "rounding of optimizer state, off by default",
    "optimizer.cpu_offload": "where optimizer state is stored",
}


def test_no_hidden_default_changes_the_algorithm() -> None:
    defaults = {
        f"{section}.{name}"
        for section in ("rollout", "overlong", "loss", "optimizer", "train", "data")
        for name, field in Config.model_fields[section].annotation.model_fields.items()  # type: ignore[union-attr]
        if not field.is_required()
    }
    assert defaults == set(OBJECTIVE_DEFAULTS)
    for section in ("seed", "rollout", "overlong", "loss", "optimizer", "train", "data"):
        assert Config.model_fields[section].is_required(), section


# ---------------------------------------------------------------------------- contradictions


GSPO = "loss.objective=gspo loss.aggregation=sequence loss.tis_cap=null"
CISPO = "loss.objective=cispo loss.dual_clip=null"
OLD_OF_ENGINE = "loss.old_logprobs=engine loss.tis_cap=null"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("overlong.buffer_tokens=16", "overlong.buffer_tokens"),
        ("overlong.max_tokens=17", "overlong.max_tokens"),
        ("overlong.filtered_in_mean=true", "overlong.filtered_in_mean"),
        ("rollout.max_age=8", "rollout.max_age"),
        ("rollout.max_staleness=17", "rollout.max_staleness"),
        ("rollout.max_staleness=1 rollout.on_policy=true", "rollout.max_staleness"),
        ("rollout.max_prompts_per_step=31", "rollout.max_prompts_per_step"),
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("engine.colocated=false engine.replicas=null", "engine.replicas"),
        ("engine.min_replicas=2", "engine.min_replicas"),
        ("train.updates_per_step=5", "train.updates_per_step"),
        ("loss.clip_low=1.0", "loss.clip_low"),
        (f"loss.clip_low=1.1 {CISPO}", "loss.clip_low"),
        ("loss.objective=grpo", "loss.aggregation"),
        ("loss.objective=dr_grpo loss.aggregation=constant", "loss.advantage_std"),
        ("loss.objective=gspo loss.aggregation=sequence", "loss.tis_cap"),
        (f"{GSPO} loss.correction.token_band=[0.5,2]", "loss.correction.token_band"),
        ("loss.objective=cispo", "loss.dual_clip"),
        ("loss.objective=sapo loss.dual_clip=null", "loss.aggregation"),
        (f"{GSPO} loss.function=my_losses:loss", "loss.function"),
        ("loss.objective=none loss.kl.coefficient=1", "loss.tis_cap"),
        ("loss.correction.token_band=[0.5,2]", "loss.tis_cap, loss.correction.token_band"),
        ("loss.correction.outside_band=truncate", "loss.correction.outside_band"),
        ("loss.correction.sequence_mean=[1.01,2]", "loss.correction.sequence_mean"),
        ("loss.kl.place=reward", "loss.kl.place"),
        ("loss.kl={estimator:\tk1,reference:\tx}", "loss.kl.estimator, loss.kl.reference"),
        ("loss.old_logprobs=engine", "loss.tis_cap"),
        (f"{OLD_OF_ENGINE} loss.correction.measure=true", "loss.correction.measure"),
        (f"{OLD_OF_ENGINE} loss.correction.worst_token=[0.1,9]", "loss.correction.worst_token"),
        (f"{OLD_OF_ENGINE} loss.kl.coefficient=1 loss.kl.place=reward", "loss.kl.place"),
        (f"{OLD_OF_ENGINE} policy.router_replay=policy", "policy.router_replay"),
        ("tracking.record_routes=true", "tracking.record_routes"),
        ("data.train=[]", "data.train"),
        ("evaluation.sets.0.name=chain_sum", "data.train / evaluation.sets"),
        ("data.train.0.name=a/b evaluation.sets.0.name=a--b", "data.train / evaluation.sets"),
        # Values at the edge of a rule are accepted.
        ("rollout.max_age=1 rollout.max_overtake=0", None),
        ("rollout.max_staleness=0", None),
        ("rollout.prompts_per_step=31", None),  # 31 x 16 is divisible by 4
        ("engine.colocated=false engine.replicas=2 engine.min_replicas=2", None),
        (f"loss.clip_low=1.0 {CISPO}", None),
        (f"{GSPO} loss.correction.sequence_mean=[0.99,1.01]", None),
        (f"{GSPO} loss.correction.sequence_tis_cap=2", None),
        ("loss.kl.coefficient=0.1 loss.kl.place=reward loss.kl.reference=x", None),
        ("loss.correction.worst_token=[1e-4,100]", None),  # a mask with any objective
        (OLD_OF_ENGINE, None),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_key(
    overrides: str, key: str | None
) -> None:
    words = [word.replace("\t", " ") for word in overrides.split(" ")]
    if key is None:
        load_config(TINY, [*NUMBERS, *words])
    else:
        message = refusal(*words)
        assert message.startswith(f"{key}: ") and "\n" not in message


BAD_NAMES = ("../../../escaped", "/absolute", "a/../b", "a/b/c", "a/", ".hidden", "", "x" * 129)


def test_a_source_name_may_include_an_owner_and_is_otherwise_a_file_name() -> None:
    for name in ("AIME 2024 (I+II)", "BytedTsinghua-SIA/DAPO-Math-17k", "x" * 128):
        assert load_config(TINY, [f"data.train.0.name={name}"]).data.train[0].name == name
    for name in (*BAD_NAMES, "a\\nb"):
        message = refusal(f'data.train.0.name="{name}"')
        assert message.startswith("data.train.0.name: must be NAME or OWNER/NAME"), message


@given(st.text(max_size=140))
def test_a_file_named_for_a_source_stays_in_its_folder(name: str) -> None:
    with suppress(ValidationError):
        source = FileSource(kind="jsonl", name=name, path="x", grader="dapo_math")
        path = Path("/data") / f"{source_file_name(source.name)}.report.json"
        assert path.parent == Path("/data") and ".." not in path.parts
        assert len(path.name.encode()) <= 255 and path.name.isprintable()


# ---------------------------------------------------------------------------- the model


def test_an_unreadable_model_config_is_rejected_with_its_path(tmp_path: Path) -> None:
    """tests/unit/test_files.py has all kinds of unreadable JSON."""
    path = tmp_path / "config.json"
    config = load_config(TINY, [f"model.path={tmp_path}"])
    for content, expected in (
        (None, "cannot be read (No such file or directory)"),
        (b"{", "cannot be read (Expecting property name"),
        (b"[]", "not a JSON object"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            read_architecture(config)
        message = str(raised.value)
        assert message.startswith(f"model.path: {path}: {expected}")
        assert "; set it to a folder with an HF checkpoint, or download one: `hf down" in message


def test_the_number_of_processes_comes_from_the_launcher_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(TINY, ["run.processes=2"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes(config) == 2
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert num_processes(config) == 16


def test_the_engine_uses_the_policys_tensor_parallel_size_by_default() -> None:
    unset = "engine.tensor_parallel=null"
    assert load_config(TINY, ["policy.tensor_parallel=2", unset]).engine_tensor_parallel == 2
    assert load_config(TINY, ["engine.tensor_parallel=1"]).engine_tensor_parallel == 1


def test_by_default_there_are_as_many_engines_as_the_policys_ranks_have_room_for() -> None:
    config = tiny_config(engine__tensor_parallel=4, engine__replicas="null")
    assert [config.num_replicas(ranks) for ranks in (3, 4, 11)] == [0, 1, 2]
    assert config.separate_gpus == 0
    assert tiny_config(engine__replicas=2).num_replicas(8) == 2


def test_engines_on_other_gpus_take_no_turns_with_the_policy() -> None:
    config = tiny_config(
        engine__colocated=False, engine__replicas=3, engine__tensor_parallel=2,
        policy__offload="[weights]",
    )  # fmt: skip
    assert (config.num_replicas(8), config.separate_gpus) == (3, 6)
    assert not config.engine.sleep and not config.policy.offload


def test_evaluation_responses_may_be_longer_than_rollouts() -> None:
    assert tiny_config().max_sequence_tokens == 96 + 16
    assert tiny_config(evaluation__max_response_tokens=40).max_sequence_tokens == 96 + 40
    assert tiny_config(evaluation__max_response_tokens=4).max_sequence_tokens == 96 + 16


def test_the_watchdog_has_a_timeout_for_every_phase() -> None:
    assert set(WatchdogConfig.model_fields) == set(Phase)
