"""Megatron-core's own models, built as `run_config.yaml` says, compute what HF computes with the
weights that are written next to it. What they save is read bit by bit. No rope, router or gated
delta net of this project takes part."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.model import Delta
from tests.helpers.models import KIMI_YARN, ROPE, load_hf, make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_dist import to_torch_dist
from tools.converting.compare import compare

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                **ROPE["llama3"],
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "linear": ("llama", {"rope_parameters": ROPE["linear"]}),
    "mistral": ("mistral", {"head_dim": 64}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "yarn": ("qwen3", {"rope_parameters": ROPE["yarn"]}),
    "experts": ("qwen3_moe", {}),
    "presoftmax": ("qwen3_moe", {"norm_topk_prob": False}),
    "latent": ("deepseek_v3", {"num_experts_per_tok": 4}),
    "kimi": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "rope_parameters": KIMI_YARN},
    ),
    "glm": ("glm4_moe", {}),
    "flash": ("glm4_moe_lite", {"num_experts_per_tok": 4}),
    "delta": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "delta experts": ("qwen3_5_moe_text", {}),
}
if version("megatron-core") < "0.19":
    # Later versions have no queries without a latent, except with a norm that Moonlight lacks.
    groups = {"n_group": 1, "topk_group": 1}
    MODELS["moonlight"] = ("deepseek_v3", {**groups, "q_lora_rank": None, "rms_norm_eps": 1e-5})


def differences(_: int, folder: str) -> dict[str, float]:
    """Return the largest difference of logits between HF and Megatron, for each model."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 90, (2, 24))
    results = {}
    for name in MODELS:
        with torch.no_grad():
            wanted = load_hf(Path(folder) / name / "hf")(tokens).logits
            given = megatron_logits(Path(folder) / name / "written" / "release", tokens)
        results[name] = float((wanted - given).abs().max())
    return results


def megatron_logits(iteration: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of Megatron's own model, and save it in `saved`."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from dapo_megatron.policy.device import megatron_device

    model = yaml.safe_load((iteration / "run_config.yaml").read_text())["model"]
    make = MLATransformerConfig if "mla" in model["_target_"] else TransformerConfig
    known = {field.name for field in fields(make)}
    given = {name: value for name, value in model.items() if name in known}
    given |= {"activation_func": torch.nn.functional.silu, "params_dtype": torch.float32}
    arguments = {name: model[name] for name in ARGUMENTS if name in model and name not in known}
    # Megatron-core 0.16.1 uses this name although it is defined only with Transformer Engine.
    moe_utils.te_general_gemm = None
    with megatron_device():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        config = make(**given, use_cpu_initialization=True, bias_dropout_fusion=False)
        for name in model:
            if name.startswith("yarn_"):  # fields of Megatron-Bridge's configs
                setattr(config, name, model[name])
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if make is MLATransformerConfig:
            without_transformer_engine(spec)
        if delta := open_store(iteration).arch.delta:
            with_delta_nets(spec, delta)
        decoder = GPTModel(
            config,
            spec,
            vocab_size=model["vocab_size"],
            max_sequence_length=model["seq_length"],
            **arguments,
        ).eval()
        for parameter in decoder.parameters():
            parameter.fill_(torch.nan)
        metadata = dist_checkpointing.load_content_metadata(str(iteration))
        state = {"model": decoder.sharded_state_dict(metadata=metadata)}
        decoder.load_state_dict(dist_checkpointing.load(state, str(iteration))["model"])
        saved = iteration.parent.parent / "saved"
        saved.mkdir()
        dist_checkpointing.save({"model": decoder.sharded_state_dict()}, str(saved))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        logits = decoder(tokens, positions, mask)
        parallel_state.destroy_model_parallel()
    return logits


def without_transformer_engine(spec: Any) -> None:
    """Replace the two layers of latent attention that Megatron-core has only with Transformer
    Engine. Projections, norms, rotation, scale and router stay its own."""
    from dapo_megatron.policy.attention import CausalAttention, DownProjection

    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DownProjection


def with_delta_nets(spec: Any, sizes: Delta) -> None:
    """Replace attention by Megatron's gated delta nets, and the norms, of which Megatron-core has
    those that multiply by 1 + weight only with Transformer Engine."""
    from dapo_megatron.policy.specs import ZeroCenteredNorm
    from tests.helpers.delta import with_delta_net

    spec.layer_norm = ZeroCenteredNorm
    for number, layer in enumerate(spec.layer_specs):
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredNorm
        if (number + 1) % sizes.interval:
            spec.layer_specs[number] = with_delta_net(layer, sizes)
        else:
            norms = parts.self_attention.submodules
            norms.q_layernorm = norms.k_layernorm = ZeroCenteredNorm


ARGUMENTS = (
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
"""Fields of run_config.yaml that are arguments of Megatron's model, not of its config."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_dist_models")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, float]:
    for name, (family, overrides) in MODELS.items():
        hf = open_store(make_random_model(family, folder / name / "hf", **overrides))
        to_torch_dist(hf, folder / name / "written")
    [result] = run_ranks(differences, 1, str(folder))
    return dict(result)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_hf_and_what_is_saved_is_read(
    results: dict[str, float], folder: Path, name: str
) -> None:
    assert results[name] < 1e-5
    hf = folder / name / "hf"
    saved = open_store(folder / name / "saved", hf=hf)
    assert not list(compare(open_store(hf), saved, lambda _: None))
