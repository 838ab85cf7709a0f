"""Checkpoints of Megatron-core, written and read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Reading
from dapo_megatron.checkpoints.formats.torch_dist.model_config import megatron_fields
from dapo_megatron.model import architecture
from dapo_megatron.model.published import find_published
from dapo_megatron.types import CheckpointError, ConfigError
from tests.helpers.checkpoints import (
    MODELS,
    config_of,
    differences,
    edit_json,
    edit_tensors,
    invoke,
    make_checkpoint,
    to_hf,
    training_checkpoint,
    write_random,
)
from tests.helpers.torch_dist import (
    NORM,
    add_tensor,
    archive,
    edit_arguments,
    edit_metadata,
    edit_yaml,
    replace_record,
    set_rows,
    to_torch_dist,
)
from tools.converting.options import (
    fields_without_option,
    megatron_lm_options,
)

# ------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    """From HF to Megatron, to a training's checkpoint and back. HF files are the same, byte for
    byte."""
    config = {**MODELS[name], "vocab_size": 101}
    source = open_store(write_random(tmp_path / "hf", config, max_file_bytes=50_000))
    folder = to_torch_dist(source, tmp_path / "torch_dist")
    written = open_store(folder)
    assert not differences(source, written)
    trained = open_store(training_checkpoint(written, tmp_path / "step", 3))
    assert not differences(source, trained)
    restored = to_hf(trained, tmp_path / "again", 50_000)
    assert not differences(source, restored)
    for path in source.folder.iterdir():
        assert (restored.folder / path.name).read_bytes() == path.read_bytes()
    edit_arguments(folder)  # without run_config.yaml: the arguments are of the same model, too
    open_store(folder)


def test_the_norm_of_a_gated_delta_nets_output_is_stored_minus_one(tmp_path: Path) -> None:
    """Megatron multiplies by 1 + weight, HF by the weight. So does a run, whose checkpoints have
    HF's values."""
    hf = write_random(tmp_path / "hf", config_of("qwen3_5", num_hidden_layers=4))
    source, folder = open_store(hf), tmp_path / "saved"
    release = to_torch_dist(source, folder) / "release"
    name, key = (
        "model.layers.1.linear_attn.norm.weight",
        "decoder.layers.1.self_attention.out_norm.weight",
    )
    stored = torch.zeros(source.info(name).shape, dtype=torch.bfloat16)
    Reading(release, [Box(key, (0,), tuple(stored.shape), stored)]).run()
    assert torch.equal(stored + 1, source.read(name)) and stored.abs().max() < 0.1
    run = training_checkpoint(source, tmp_path / "run")
    for each, has_options in ((folder, True), (run, False)):
        code, output = invoke("inspect", each)
        assert code == 0 and ("options of Megatron-LM" in output) is has_options
    # Megatron trains numbers that have no sum with 1 in bfloat16, and computes it in float32.
    trained = stored * 0.01
    replace_record(folder, key, archive(trained))
    assert invoke("megatron-to-hf", folder, tmp_path / "again")[0] == 0
    again = open_store(tmp_path / "again")
    assert torch.equal(again.read(name), 1 + trained.float())
    assert [line.split(": ")[:2] for line in differences(source, again)] == [[name, "dtype"]]


def test_norms_that_megatron_would_round_are_refused(tmp_path: Path) -> None:
    hf = write_random(tmp_path / "hf", config_of("qwen3_5", num_hidden_layers=4))
    name = "model.layers.2.linear_attn.norm.weight"
    edit_tensors(hf / "model.safetensors", lambda values: values[name][:2].fill_(0.1))
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and f"{name}: Megatron stores weight - 1 of this norm, which" in output
    assert "would round in 2 of 6 elements; use --dtype float32" in output
    assert not (tmp_path / "m").exists()
    assert invoke("hf-to-megatron", hf, tmp_path / "m", "--dtype", "float32")[0] == 0
    edit_yaml(tmp_path / "m", experimental_attention_variant="gdn")
    open_store(tmp_path / "m")
    edit_yaml(tmp_path / "m", layernorm_zero_centered_gamma=False, linear_attention_freq=2)
    with pytest.raises(
        CheckpointError, match=r"zero_centered_gamma is False there, True.*\n.* is 2 there, 4 by"
    ):
        open_store(tmp_path / "m")


def test_optimizer_states_are_ignored_and_the_tracker_names_the_iteration(
    source: Path, tmp_path: Path
) -> None:
    folder = copied(source, tmp_path)
    (folder / "release").rename(folder / "iter_0000100")
    (folder / "latest_checkpointed_iteration.txt").write_text("100\n")
    path = folder / "iter_0000100" / ".metadata"
    content = pickle.loads(path.read_bytes())
    entry = content.state_dict_metadata[NORM]
    content.state_dict_metadata["optimizer.state.exp_avg." + NORM] = entry
    path.write_bytes(pickle.dumps(content))
    assert not differences(open_store(source.parent / "hf"), open_store(folder))
    (folder / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(CheckpointError, match=r"iter_0000200: missing, though latest_check"):
        open_store(folder)


def test_a_folder_without_config_json_needs_the_hf_model(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path)
    for path in filter(Path.is_file, folder.iterdir()):
        path.unlink()
    code, output = invoke("inspect", folder / "release")
    assert code == 2 and "no config.json" in output and "--hf-config" in output
    hf = source.parent / "hf"
    assert invoke("verify", folder / "release", hf, "--hf-config", hf)[0] == 0
    code, output = invoke("megatron-to-hf", folder / "release", tmp_path / "x", "--hf-config", hf)
    assert code == 0, output
    (tmp_path / "x" / "metadata.json").write_text("{}")  # does not make it one of Megatron
    assert open_store(tmp_path / "x").format == "hf"
    (tmp_path / "x" / "metadata.json").unlink()
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {path.name for path in hf.iterdir()}


def remove_mark(release: Path) -> None:
    (release / "dapo_megatron.json").unlink()


def change_metadata(release: Path) -> None:
    with (release / ".metadata").open("ab") as file:
        file.write(b"saved by another program")


def change_mark(release: Path) -> None:
    (release / "dapo_megatron.json").write_text('{"written_by": "dapo_megatron"}')


def add_legacy(release: Path) -> None:
    (release / "mp_rank_00").mkdir()


def only_tracker(release: Path) -> None:
    shutil.rmtree(release)


def other_iteration(release: Path) -> None:
    (release.parent / "iter_0000007").mkdir()


@pytest.mark.parametrize("has_tracker", [True, False])
@pytest.mark.parametrize(
    "change", [remove_mark, change_metadata, change_mark, add_legacy, only_tracker, other_iteration]
)
def test_what_was_not_written_here_is_never_overwritten(
    source: Path, tmp_path: Path, change: Callable[[Path], None], has_tracker: bool
) -> None:
    """Converters of Megatron-LM write `release` and its tracker file, too."""
    target = copied(source, tmp_path)
    change(target / "release")
    if not has_tracker and change is not only_tracker:
        (target / "latest_checkpointed_iteration.txt").unlink()
    before = sorted(target.rglob("*"))
    for command in ("hf-to-megatron", "megatron-to-hf"):
        code, output = invoke(command, source.parent / "hf", target, "--overwrite")
        assert code == 2 and ": a checkpoint of Megatron, which --overwrite never" in output
    assert sorted(target.rglob("*")) == before


def test_only_files_of_the_model_are_copied_from_a_folder_of_training(
    source: Path, tmp_path: Path
) -> None:
    folder = copied(source, tmp_path)
    model = {
        *("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"),
        *("tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.json", "LICENSE"),
    }
    others = (
        *("events.out.tfevents.1700000000.node", "samples_000010.jsonl", "train.log", "job.sh"),
        *("optim_states_0.bin", "mp_rank_00.pt", "model.safetensors.index.json", "state.json"),
        *("tokenizer.py", "tokenization_x.py", "progress.txt", "tokenizer.json.partial"),
    )
    for name in (*model - {"config.json"}, *others):
        (folder / name).write_text("{}")
    (folder / "wandb").mkdir()
    code, output = invoke("megatron-to-hf", folder, tmp_path / "hf")
    assert code == 0, output
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {*model, "model.safetensors"}


def test_layers_of_different_dtypes_are_not_stacked(source: Path, tmp_path: Path) -> None:
    hf = shutil.copytree(source.parent / "hf", tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    edit_tensors(
        hf / "model.safetensors", lambda values: values.update({name: values[name].float()})
    )
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "decoder.layers.mlp.linear_fc2.weight: Megatron has one tensor" in output
    assert "decoder.layers.0.mlp.linear_fc2.weight (bfloat16)" in output
    assert "decoder.layers.1.mlp.linear_fc2.weight (float32)" in output and "--dtype" in output
    assert not (tmp_path / "m").exists()
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", "--dtype", "float32")
    assert code == 0, output


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_a_model_is_an_option_or_reported(name: str) -> None:
    arch = architecture(MODELS[name])
    options = " ".join(megatron_lm_options(arch))
    assert not fields_without_option(arch)
    known = {
        "gated_linear_unit": "--swiglu",
        "layernorm_epsilon": "--norm-epsilon",
        "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
        "num_moe_experts": "--num-experts",
        "add_bias_linear": "--disable-bias-linear",
        "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    }
    inverted = ("add_bias_linear", "share_embeddings_and_output_weights")
    for field, value in megatron_fields(arch).items():
        option = known.get(field, "--" + field.replace("_", "-"))
        is_on = value is not None and bool(value) is not (field in inverted)
        # Without it, there is one group per head.
        if field != "num_query_groups" or value != arch.num_heads:
            assert (f"{option} " in f"{options} ") is is_on, (field, value)


def test_options_of_megatron_lm() -> None:
    """Version 0.16.1 of Megatron-LM reads these, and makes the model's config of them."""
    moonlight = architecture(find_published("Moonlight-16B-A3B").hf)
    assert " ".join(megatron_lm_options(moonlight)) == (
        "--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --normalization RMSNorm "
        "--norm-epsilon 1e-05 --swiglu --disable-bias-linear --qk-layernorm --rotary-base 50000 "
        "--rotary-percent 1.0 "
        "--ffn-hidden-size 11264 --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 64 --moe-router-topk 6 "
        "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 "
        '--moe-layer-freq "([0]*1+[1]*26)" --moe-router-score-function sigmoid '
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.446 "
        "--position-embedding-type rope --rope-type rope --rotary-scaling-factor 1.0 "
        "--max-position-embeddings 8192 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--untie-embeddings-and-output-weights --no-rope-fusion"
    )
    kimi = architecture(find_published("Kimi-K2-Instruct").hf)
    assert fields_without_option(kimi) == {"beta_fast": 1.0}
    assert "--rope-type yarn" in " ".join(megatron_lm_options(kimi))
    plain = {name: value for name, value in config_of("qwen3").items() if name != "rope_theta"}
    rope: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10_000.5, "factor": 4.0}
    linear = architecture({**plain, "rope_parameters": rope})
    assert fields_without_option(linear) == {
        "rotary_seq_len_interpolation_factor": 4.0,
        "rotary_base": 10_000.5,
    }
    assert "--rotary-seq-len-interpolation-factor 4 " in " ".join(megatron_lm_options(linear))
    rope |= {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    yarn = architecture({**plain, "rope_parameters": rope})
    assert fields_without_option(yarn)["yarn_rotary_scaling_factor"] == 4.0
    assert "yarn" not in " ".join(megatron_lm_options(yarn))


# ------------------------------------------------------------------------------- other models


@pytest.mark.parametrize("edit", [edit_yaml, edit_arguments])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rotary_base": 1_000_000}, r"rotary_base is 1000000 there, 10000.0 by config.json"),
        ({"num_query_groups": 9}, r"num_query_groups is 9 there, 3 by config.json"),
        ({"add_qkv_bias": False}, r"add_qkv_bias is False there, True by config.json"),
        ({"vocab_size": 38}, r"vocab_size is 38 there, 37 by config.json"),
        ({"window_size": [8, 0]}, r"window_size is \[8, 0\] there, None by config.json"),
        ({"activation_func_clamp_value": 7.0}, r"activation_func_clamp_value is 7.0 there, None"),
        (
            {"activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False}},
            r"activation_func is 'gelu' there, 'silu' by config.json",
        ),
        ({"num_layers": 3, "hidden_size": 8}, r"num_layers is 3[^\n]+\n  hidden_size is 8 there"),
    ],
)
def test_a_configuration_of_another_model_is_refused_with_both_values(
    source: Path,
    tmp_path: Path,
    edit: Callable[..., None],
    fields: dict[str, Any],
    expected: str,
) -> None:
    folder = copied(source, tmp_path)
    edit(folder, **fields)
    with pytest.raises(CheckpointError, match=expected):
        open_store(folder)


def test_groups_of_experts_that_megatron_ranks_differently_are_refused(tmp_path: Path) -> None:
    """In Megatron the score of a group is the sum of its best num_experts_per_tok // topk_group
    experts, in HF and vLLM always of its best two."""
    groups = {"n_group": 2, "topk_group": 1}
    source = open_store(write_random(tmp_path / "hf", config_of("deepseek_v3", **groups)))
    folder = to_torch_dist(source, tmp_path / "saved")  # 2 // 1 = 2
    edit_json(folder / "config.json", lambda config: config.update(num_experts_per_tok=3))
    with pytest.raises(CheckpointError, match=r"topk_group = 1: Megatron ranks .* best 3 experts"):
        open_store(folder)
    for changes in ({"num_experts_per_tok": 3}, {"topk_group": 2, "num_experts_per_tok": 3}):
        arch = architecture(config_of("deepseek_v3", **groups | changes))
        if changes.get("topk_group") == 2:  # all groups are chosen
            assert megatron_fields(arch)["moe_router_group_topk"] == 2
        else:
            with pytest.raises(ConfigError, match="HF and vLLM always by their best 2"):
                megatron_fields(arch)


@pytest.mark.parametrize("edit", [edit_yaml, edit_arguments])
def test_padding_is_that_of_the_saved_arguments(
    source: Path, tmp_path: Path, edit: Callable[..., None]
) -> None:
    """37 tokens are padded to 40 by multiples of 4 on two tensor-parallel ranks."""
    folder = copied(source, tmp_path)
    edit(folder, make_vocab_size_divisible_by=4, tensor_model_parallel_size=2)
    for rows, is_right in ((37, True), (40, True), (48, False), (41, False)):
        edit_metadata(folder, lambda content, rows=rows: set_rows(content, rows))
        if is_right:
            open_store(folder)
        else:
            with pytest.raises(CheckpointError, match=f"has {rows} rows.* padded to 40 by make_vo"):
                open_store(folder)


def test_layers_for_multi_token_prediction_are_dropped_by_consent(tmp_path: Path) -> None:
    config = config_of("deepseek_v3", num_nextn_predict_layers=1)
    source = open_store(write_random(tmp_path / "hf", config))
    folder = to_torch_dist(source, tmp_path / "saved")
    added = [f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm")]
    edit_metadata(folder, lambda content: [add_tensor(content, key) for key in added])
    with pytest.raises(CheckpointError, match=rf"{added[0]} and 1 more .* model\.drop_mtp=true"):
        open_store(folder)
    store = open_store(folder, drop_mtp=True)
    assert store.dropped == added and store.config["num_nextn_predict_layers"] == 0
    code, output = invoke("megatron-to-hf", folder, tmp_path / "x")
    assert code == 2 and "Use --drop-mtp to leave them out" in output
    code, output = invoke("megatron-to-hf", folder, tmp_path / "again", "--drop-mtp")
    assert code == 0 and f"left out: {added[0]} and 1 more tensors" in output
    again = open_store(tmp_path / "again")
    assert differences(source, again) == differences(source, store)  # config.json only
    assert {line.partition(":")[0] for line in differences(source, again)} == {
        "config.num_nextn_predict_layers"
    }


def test_one_group_of_experts_is_the_same_as_none(tmp_path: Path) -> None:
    config = config_of("deepseek_v3", n_group=1, topk_group=1)
    source = open_store(write_random(tmp_path / "hf", config))
    folder = to_torch_dist(source, tmp_path / "saved")
    edit_yaml(folder, moe_router_num_groups=1, moe_router_group_topk=1)
    open_store(folder)
    for number in (2, None):
        config = source.config if number else config_of("deepseek_v3")
        (folder / "config.json").write_text(json.dumps(config))
        edit_yaml(folder, moe_router_num_groups=number)
        with pytest.raises(CheckpointError, match=f"moe_router_num_groups is {number} there"):
            open_store(folder)


def test_the_number_of_query_groups_counts_only_with_grouped_attention(tmp_path: Path) -> None:
    """Megatron-LM saves its default, 1, for a model without grouped attention."""
    config = {
        **config_of("llama"),
        "num_key_value_heads": config_of("llama")["num_attention_heads"],
    }
    source = open_store(write_random(tmp_path / "hf", config))
    ungrouped, grouped = (to_torch_dist(source, tmp_path / name) for name in ("a", "b"))
    edit_arguments(ungrouped, group_query_attention=False, num_query_groups=1)
    open_store(ungrouped)
    edit_arguments(grouped, group_query_attention=True, num_query_groups=1)
    with pytest.raises(CheckpointError, match="num_query_groups is 1 there"):
        open_store(grouped)


def test_a_tied_head_and_a_scaled_rope_are_compared_by_megatrons_names(
    source: Path, tmp_path: Path
) -> None:
    folder = copied(source, tmp_path)
    edit_arguments(
        folder, untie_embeddings_and_output_weights=False, rotary_seq_len_interpolation_factor=4
    )
    with pytest.raises(CheckpointError) as caught:
        open_store(folder)
    assert "untie_embeddings_and_output_weights is False there, True by" in str(caught.value)
    assert "rotary_seq_len_interpolation_factor is 4 there, None by config" in str(caught.value)


def test_a_rope_that_megatron_does_not_have_is_not_written(tmp_path: Path) -> None:
    published = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 5.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**config_of("llama"), "rope_parameters": published}
    fields = megatron_fields(architecture(config))
    assert fields["rope_scaling"] and fields["rope_scaling_factor"] == 5.0
    config["rope_parameters"] = published | {"high_freq_factor": 6.0}
    source = open_store(write_random(tmp_path / "hf", config))
    with pytest.raises(ConfigError, match="low_freq_factor 1, high_freq_factor 4"):
        to_torch_dist(source, tmp_path / "m")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Megatron of the model in `hf` next to it."""
    return make_checkpoint(tmp_path_factory.mktemp("torch_dist"))


def copied(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "saved")
