"""Measure what router replay does to the mismatch between engine and policy.

    python tools/lab/router_mismatch.py [--sequences 2000] [--precision bfloat16]

For a Qwen3-MoE and a DeepSeek-V3 model (group-limited routing, biases) with random weights, an
engine samples sequences. The policy computes the log-probs of the same tokens with its own choice
of experts, and with the engine's. Prints a table and one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config

TOKENS = {"bos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        # vLLM's CPU kernel supports only this size of latent attention.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 64


def write_model(family: str, folder: Path) -> None:
    """Write a random model of a family, with the quickstart's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from dapo_megatron.doctor.shrink import randomize

    tokenizer = AutoTokenizer.from_pretrained("model_configs/tiny_qwen3")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = {**SIZES, **TOKENS, **ids, **MODELS[family], "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    randomize(model.float(), seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_config(folder: Path, precision: str) -> Config:
    """Return the config of engine and policy."""
    return load_config(
        Path("model_configs/tiny_moe.yaml"),
        [
            f"model.path={folder}",
            f"policy.precision={precision}",
            "policy.expert_parallel=1",
            "policy.router_replay=engine",
            "run.processes=1",
            f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollout.max_response_tokens={RESPONSE_TOKENS}",
            f"overlong.max_tokens={RESPONSE_TOKENS}",
        ],
    )


def sample(config: Config, num_sequences: int) -> list[tuple[Any, Any]]:
    """Return `num_sequences` (request, completion) of random prompts, from an engine in this
    process."""
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.types import Prompt, SampleRequest

    engine = VllmEngine(config)
    generator = np.random.default_rng(0)
    prompts = generator.integers(4, 60, (num_sequences, PROMPT_TOKENS)).tolist()
    engine.submit(
        [
            SampleRequest(
                ticket=number,
                sample=0,
                prompt=Prompt("random", number, tuple(tokens), "", ""),
                seed=number,
                max_tokens=RESPONSE_TOKENS,
                temperature=1.0,
                top_p=1.0,
            )
            for number, tokens in enumerate(prompts)
        ]
    )
    results: list[tuple[Any, Any]] = []
    while engine.requests:
        results += engine.step()
    engine.close()
    return sorted(results, key=lambda pair: pair[0].ticket)


def score(config: Config, results: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the mismatch of the policy without and with the engine's routes."""
    from dapo_megatron.cluster.ranks import Ranks
    from dapo_megatron.data.batch import assemble
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.loss import loss_function
    from dapo_megatron.run.models import planner
    from dapo_megatron.types import SequenceTokens, TrainingSequence

    sequences, tokens = [], {}
    for number, (request, completion) in enumerate(results):
        sequences.append(
            TrainingSequence(
                ticket=request.ticket,
                sample=0,
                prompt_tokens=PROMPT_TOKENS,
                response_tokens=completion.num_tokens,
                segments=completion.segments,
                advantage=0.0,
                in_loss=True,
                reward=0.0,
            )
        )
        tokens[number] = SequenceTokens(
            np.array(request.prompt.tokens, np.int32),
            np.asarray(completion.tokens),
            np.asarray(completion.logprobs),
            np.asarray(completion.routes),
        )
    batch = assemble(sequences, tokens, with_routes=True)
    policy = MegatronPolicy(config, Ranks(0, 1, 0), planner(config.policy, config.train))
    figures: dict[str, Any] = {"tokens": int(batch.loss_mask.sum())}
    for name, given in (("own", replace(batch, routes=None)), ("replayed", batch)):
        log_ratio = (policy.logprobs(given).logprobs - batch.engine_logprobs)[batch.loss_mask]
        figures[name] = mismatch(log_ratio.double())
    given = replace(batch, old_logprobs=batch.engine_logprobs)
    figures["changed"] = policy.update(given, loss_function(config.loss), 0.0).router["changed"]
    policy.close()
    return figures


def mismatch(log_ratio: Tensor) -> dict[str, float]:
    """Return mean and largest |log-ratio|, and the KL divergence (k3), of policy to engine."""
    kl = log_ratio.exp() - 1.0 - log_ratio
    return {
        "mean": float(log_ratio.abs().mean()),
        "max": float(log_ratio.abs().max()),
        "kl": float(kl.mean()),
    }


def main(
    sequences: Annotated[int, typer.Option(min=1)] = 2000,
    precision: Annotated[str, typer.Option()] = "bfloat16",
) -> None:
    """Print the mismatch with and without router replay."""
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], 1))
    from dapo_megatron.cluster.ranks import join

    os.environ.setdefault("OMP_NUM_THREADS", "2")
    join("gloo")
    table = Table(title=f"{precision}, {sequences} sequences")
    for column in ("model", "experts", "mean |log-ratio|", "max", "KL", "changed choices"):
        table.add_column(column)
    result: dict[str, Any] = {"precision": precision, "sequences": sequences}
    for family in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_model(family, Path(folder))
            config = run_config(Path(folder), precision)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
                results = executor.submit(sample, config, sequences).result()
            figures = score(config, results)
        result[family] = figures
        for name, label in (("own", "the policy's"), ("replayed", "the engine's")):
            row = figures[name]
            table.add_row(
                family,
                label,
                f"{row['mean']:.5f}",
                f"{row['max']:.3f}",
                f"{row['kl']:.2e}",
                f"{figures['changed']:.2%}" if name == "replayed" else "",
            )
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
