"""Test that a checkpoint loads in another layout: weights and all fields of the optimizer state,
gathered by HF name, are bitwise the same, and the next update is the same.

Tensors are gathered from the ranks' memory through Megatron's groups. The tensors of all
checkpoints
are the same, too. Each case trains in its first layout, then loads in one layout after the other.
In a case, `2:tp2` means two ranks in the layout tp2.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.policies import named_parameters
from tests.helpers.ranks import run_ranks
from tests.helpers.training_state import state_tensors, stored_tensors
from tests.helpers.updates import save, update

MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp2 sp": {"tensor_parallel": 2, "sequence_parallel": "true"},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "uneven": {"pipeline_parallel": 2, "first_stage_layers": 1},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "dp": {},
    "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2},
    "ep4": {"expert_parallel": 4},
    "ep2 tp2": {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": "true"},
    "ep2 pp2": {"expert_parallel": 2, "pipeline_parallel": 2},
}
CASES = {
    # A vocabulary of 99 is padded with every even tensor-parallel size.
    "tied": ("2:tp2 2:interleaved 2:cp2 2:dp", "float64"),
    "experts": ("2:ep2 2:tp2 sp 1:dp", "float64"),
}
MORE_CASES = {
    "bias": ("2:dp 2:tp2 2:pp2", "bfloat16"),
    "tied": ("1:dp 4:tp2 pp2 4:dp 4:tp4 4:uneven 2:tp2 sp", "float64"),
    "untied": ("4:uneven 4:cp2 2:dp 2:pp2 2:tp2", "float64"),
    "experts": ("2:ep2 4:ep2 tp2 4:ep2 pp2 4:ep4 2:pp2", "float64"),
    "latent": ("2:tp2 sp 2:ep2 2:pp2", "float32"),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4, "vocab_size": 99}),
    "untied": ("llama", {"num_hidden_layers": 4, "vocab_size": 99}),
    "bias": ("qwen2", {"num_hidden_layers": 2}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "latent": ("deepseek_v3", {"num_hidden_layers": 2}),
}
TOLERANCES = {"float64": 1e-9, "float32": 2e-5}
"""Allowed difference of weights after another update, which moves them by about 1e-3. (Megatron
computes the gradient norm, by which it clips, in float32.) bfloat16 depends too much on the order
of sums."""
Station = tuple[int, str, str]
"""Number of ranks, layout, precision."""


def stations_of(route: str, precision: str) -> list[Station]:
    parts = re.findall(r"(\d):([^:]+?)(?= \d:|$)", route)
    return [(int(ranks), layout, precision) for ranks, layout in parts]


# ------------------------------------------------------------------------------- on the ranks


def build(exchange: Ranks, model: Path, layout: str, precision: str) -> Any:
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    keys = {"tensor_parallel": 1, **LAYOUTS[layout], "precision": precision}
    config = tiny_config(
        model__path=model,
        train__max_tokens_per_microbatch=128,
        **{f"policy__{key}": value for key, value in keys.items()},
    )
    return MegatronPolicy(config, exchange, planner(config.policy, config.train))


def gathered(policy: Any, exchange: Ranks) -> dict[str, dict[str, Tensor]]:
    """Gather full weights and optimizer fields by HF name from memory, with Megatron's groups."""
    params = named_parameters(policy)
    state = state_tensors(policy._optimizer, params)
    fields = {"weights": kept(policy.weights())}
    steps = {float(value) for key, value in state.items() if key.endswith("/step")}
    fields["step"] = {"step": torch.tensor(sorted(steps))}
    has_main = any(key.endswith("/param") for key in state)
    for field in (*MOMENTS, *(["param"] if has_main else [])):
        wholes = {name: whole_field(state, name, field, param) for name, param in params.items()}
        by_id = {id(param): wholes[name] for name, param in params.items()}
        shards = policy._shards_of(policy._models(), lambda param, by_id=by_id: by_id[id(param)])
        from dapo_megatron.bridge.transfer import gather_whole

        fields[field] = kept(gather_whole(shards, exchange, torch.device("cpu")))
    return fields


def whole_field(state: dict[str, Tensor], name: str, field: str, param: Tensor) -> Tensor:
    """Gather a field of a local parameter. Each rank of its data-parallel group adds its range."""
    from megatron.core import parallel_state

    own = {key: value for key, value in state.items() if key.startswith(f"optimizer/{name}[")}
    dtype = next(value.dtype for key, value in state.items() if key.endswith(f"/{field}"))
    flat = torch.zeros(param.numel(), dtype=dtype)
    for key, value in own.items():
        if key.endswith(f"/{field}"):
            start, stop = map(int, key[key.index("[") + 1 : key.index("]")].split(":"))
            flat[start:stop] = value
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if ".mlp.experts." in name:
        group = parallel_state.get_expert_data_parallel_group()
    torch.distributed.all_reduce(flat, group=group)
    return flat.view(param.shape)


def kept(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def padding(policy: Any) -> float:
    """Return the largest moment of rows that pad the vocabulary.

    Then set these rows of moments and weights to 7, so that using them would change results.
    """
    from megatron.core import parallel_state

    largest, params = 0.0, named_parameters(policy)
    state = state_tensors(policy._optimizer, params)
    for name, param in params.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            first = parallel_state.get_tensor_model_parallel_rank() * param.shape[0]
            real = max(0, policy.architecture.vocab_size - first) * param.shape[1]
            param.data.view(-1)[real:] = 7.0
            for key, value in state.items():
                if key.startswith(f"optimizer/{name}[") and value.dim():
                    start = int(key[key.index("[") + 1 : key.index(":")])
                    padded = value[max(0, real - start) :]
                    if padded.numel() and key.endswith(MOMENTS):
                        largest = max(largest, float(padded.abs().max()))
                    padded.fill_(7.0)
    return largest


Job = tuple[str, str, Path | None, Path]
"""Layout, precision, folder to load (None to train instead), folder to save to."""


def visit(rank: int, world_size: int, model: Path, jobs: list[Job]) -> list[dict[str, Any]]:
    """Return the state of each policy, and its weights and gradient norm after one more update."""
    exchange = Ranks(rank, world_size, rank)
    done = []
    for layout, precision, source, target in jobs:
        policy = build(exchange, model, layout, precision)
        if source is None:
            update(policy, 0)
            update(policy, 1)
        else:
            policy.load(source)
        save(policy, exchange, model, target)
        result: dict[str, Any] = {"state": gathered(policy, exchange)}
        result["padding"] = max(exchange.all_gather(padding(policy), float))
        result["norm"] = update(policy, 2)
        result["after"] = kept(policy.weights())
        policy.close()
        done.append(result if rank == 0 else {})
    return done


# ------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_random_model(family, root / name, seed=1, **overrides)
    return root


def travel(model: Path, root: Path, stations: list[Station]) -> list[Any]:
    """Train at the first station, then load at each next one. Return the result of each station.

    Consecutive stations with the same number of ranks share processes.
    """
    root.mkdir(exist_ok=True)
    folders: list[Path | None] = [None, *(root / f"{n}" for n in range(len(stations)))]
    results: list[Any] = []
    for ranks, group in groupby(enumerate(stations), key=lambda item: item[1][0]):
        jobs = [
            (layout, precision, folders[n], folders[n + 1]) for n, (_, layout, precision) in group
        ]
        results += run_ranks(visit, ranks, ranks, model, jobs)[0]
    return results


@pytest.mark.parametrize(
    ("model", "route", "precision"),
    [(model, *case) for model, case in CASES.items()]
    + [pytest.param(model, *case, marks=pytest.mark.long) for model, case in MORE_CASES.items()],
)
def test_state_and_next_update_are_the_same_in_every_layout(
    model: str, route: str, precision: str, models: Path, tmp_path: Path
) -> None:
    stations = stations_of(route, precision)
    first, *others = travel(models / model, tmp_path, stations)
    assert first["state"]["step"]["step"].tolist() == [2.0]
    assert first["padding"] == 0.0
    assert not any(
        torch.equal(first["after"][name], weight)
        for name, weight in first["state"]["weights"].items()
        if not name.endswith("e_score_correction_bias")  # not trained
    )
    for (_, layout, _), result in zip(stations[1:], others, strict=True):
        assert result["state"].keys() == first["state"].keys(), layout
        for field, tensors in first["state"].items():
            assert equal(result["state"][field], tensors), (layout, field)
        assert result["padding"] == 0.0
        if precision in TOLERANCES:
            tolerance = TOLERANCES[precision]
            assert result["norm"] == pytest.approx(first["norm"], rel=1e-6 + tolerance), layout
            assert largest(result["after"], first["after"]) <= tolerance, layout
    for before, after in pairwise(tmp_path / f"{number}" for number in range(len(stations))):
        stored, expected = stored_tensors(after), stored_tensors(before)
        assert equal(*({k: v for k, v in t.items() if "rng." not in k} for t in (stored, expected)))


def test_a_change_of_precision_and_back_rounds_nothing(models: Path, tmp_path: Path) -> None:
    stations = [(2, "dp", "float32"), (2, "tp2", "bfloat16"), (2, "pp2", "float32")]
    exact, short, back = travel(models / "bias", tmp_path, stations)
    for result in (short, back):
        for field in (*MOMENTS, "step"):
            assert equal(result["state"][field], exact["state"][field])
    weights = exact["state"]["weights"]
    assert equal(short["state"]["param"], weights)
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert equal(short["state"]["weights"], rounded)
    assert equal(back["state"]["weights"], weights)
    assert largest(back["after"], exact["after"]) <= TOLERANCES["float32"]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)
