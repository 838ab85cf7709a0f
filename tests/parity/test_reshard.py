"""A checkpoint read into another layout: weights and every field of the optimizer's state are the
same numbers, bit by bit, once gathered by HF name; and the next update is the same one.

What is compared is gathered twice: from the ranks' memory, through Megatron's groups, and from the
files, through the bridge's stores. Each case trains in its first layout and then goes from one to
the next, with the number of ranks before the colon.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.compare import compare, compare_replicas
from dapo_megatron.checkpoints.formats.moments import MOMENTS, open_state
from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.updates import save, update

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
    # 99 entries: padded by every even size.
    "tied": ("2:tp2 2:interleaved 2:cp2 2:dp", "float64"),
    "experts": ("2:ep2 2:tp2 sp 1:dp", "float64"),
    "bias": ("2:dp 2:tp2 2:pp2", "bfloat16"),
}
MORE_CASES = {
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
"""Of weights after another update, of about 1e-3. (Megatron takes the norm of the gradient, by
which it is clipped, in float32.) In bfloat16 too much depends on the order of sums."""
Station = tuple[int, str, str]
"""Number of ranks, layout, precision."""


def stations_of(route: str, precision: str) -> list[Station]:
    found = re.findall(r"(\d):([^:]+?)(?= \d:|$)", route)
    return [(int(ranks), layout, precision) for ranks, layout in found]


# ------------------------------------------------------------------------------- on the ranks


def build(exchange: Ranks, model: Path, layout: str, precision: str) -> Any:
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.build import planner

    keys = {"tensor_parallel": 1, **LAYOUTS[layout], "precision": precision}
    config = tiny_config(
        model__path=model,
        train__max_tokens_per_microbatch=128,
        **{f"policy__{key}": value for key, value in keys.items()},
    )
    return MegatronPolicy(config, exchange, planner(config.policy, config.train))


def gathered(policy: Any, exchange: Ranks) -> dict[str, dict[str, Tensor]]:
    """Weights and the optimizer's fields by HF name, whole: from memory, by Megatron's groups."""
    from dapo_megatron.policy.optimizer import state_tensors

    params = policy._named_parameters()
    state = state_tensors(policy._optimizer, params)
    found = {"weights": kept(policy.weights())}
    steps = {float(value) for key, value in state.items() if key.endswith("/step")}
    found["step"] = {"step": torch.tensor(sorted(steps))}
    has_main = any(key.endswith("/param") for key in state)
    for field in (*MOMENTS, *(["param"] if has_main else [])):
        wholes = {name: whole_field(state, name, field, param) for name, param in params.items()}
        by_id = {id(param): wholes[name] for name, param in params.items()}
        shards = policy._shards_of(policy._models(), lambda param, by_id=by_id: by_id[id(param)])
        from dapo_megatron.bridge.transfer import gather_whole

        found[field] = kept(gather_whole(shards, exchange, torch.device("cpu")))
    return found


def whole_field(state: dict[str, Tensor], name: str, field: str, param: Tensor) -> Tensor:
    """A field of a local parameter: each rank of its data-parallel group adds what it owns."""
    from megatron.core import parallel_state

    mine = {key: value for key, value in state.items() if key.startswith(f"optimizer/{name}[")}
    dtype = next(value.dtype for key, value in state.items() if key.endswith(f"/{field}"))
    flat = torch.zeros(param.numel(), dtype=dtype)
    for key, value in mine.items():
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
    """The largest moment of rows that pad the vocabulary; then those and their weights are set to
    a number that would be seen, if it were looked at."""
    from megatron.core import parallel_state

    from dapo_megatron.policy.optimizer import state_tensors

    largest, params = 0.0, policy._named_parameters()
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
"""Layout, precision, folder to load or None to train, folder to save in."""


def visit(rank: int, world_size: int, model: Path, jobs: list[Job]) -> list[dict[str, Any]]:
    """What each policy holds, then its weights and gradient norm after one more update."""
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
        found: dict[str, Any] = {"state": gathered(policy, exchange)}
        found["padding"] = max(exchange.all_gather(padding(policy), float))
        found["norm"] = update(policy, 2)
        found["after"] = kept(policy.weights())
        policy.close()
        done.append(found if rank == 0 else {})
    return done


# ------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_random_model(family, root / name, seed=1, **overrides)
    return root


def travel(model: Path, root: Path, stations: list[Station]) -> list[Any]:
    """Train at the first station, then go from one to the next; what was found at each. Stations
    in a row with as many ranks share their processes."""
    root.mkdir(exist_ok=True)
    folders: list[Path | None] = [None, *(root / f"{n}" for n in range(len(stations)))]
    found: list[Any] = []
    for ranks, group in groupby(enumerate(stations), key=lambda item: item[1][0]):
        jobs = [(one[1], one[2], folders[n], folders[n + 1]) for n, one in group]
        found += run_ranks(visit, ranks, ranks, model, jobs)[0]
    return found


@pytest.mark.parametrize(
    ("model", "route", "precision"),
    [(model, *case) for model, case in CASES.items()]
    + [pytest.param(model, *case, marks=pytest.mark.long) for model, case in MORE_CASES.items()],
)
def test_state_is_the_same_in_every_layout_and_the_run_goes_on(
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
    for (_, layout, _), found in zip(stations[1:], others, strict=True):
        assert found["state"].keys() == first["state"].keys(), layout
        for field, tensors in first["state"].items():
            assert equal(found["state"][field], tensors), (layout, field)
        assert found["padding"] == 0.0
        if precision in TOLERANCES:
            tolerance = TOLERANCES[precision]
            assert found["norm"] == pytest.approx(first["norm"], rel=1e-6 + tolerance), layout
            assert largest(found["after"], first["after"]) <= tolerance, layout
    for before, after in pairwise(tmp_path / f"{number}" for number in range(len(stations))):
        assert not differences(before, after)


def test_nothing_is_rounded_into_another_precision_and_back(models: Path, tmp_path: Path) -> None:
    stations = [(2, "dp", "float32"), (2, "tp2", "bfloat16"), (2, "pp2", "float32")]
    exact, short, back = travel(models / "bias", tmp_path, stations)
    for found in (short, back):
        for field in (*MOMENTS, "step"):
            assert equal(found["state"][field], exact["state"][field])
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


def differences(left: Path, right: Path) -> list[str]:
    """Of two checkpoints' weights and fields, and of copies within the second."""
    a, b = open_state(left), open_state(right)
    assert a.step == b.step
    pairs = [(a.weights, b.weights), *((a.fields[name], b.fields[name]) for name in a.fields)]
    found = []
    for one, other in pairs:
        found += [*compare(one, other, lambda _: None), *compare_replicas(other, lambda _: None)]
    return [f"{one.name}: {one.kind}: {one.text}" for one in found]


# ------------------------------------------------------------------------------- other optimizers


class GroupAdam(torch.optim.Optimizer):
    """AdamW that counts updates in its groups, as those of Transformer Engine and Apex do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            decay, (beta1, beta2) = 1 - group["lr"] * group["weight_decay"], group["betas"]
            bias1, bias2 = (1 - beta ** group["step"] for beta in (beta1, beta2))
            for param in filter(torch.Tensor.numel, group["params"]):
                state = self.state[param]
                for field in () if state else MOMENTS:
                    state[field] = torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(param.grad**2, 1 - beta2)
                root = (state["exp_avg_sq"] / bias2).sqrt() + group["eps"]
                param.mul_(decay).sub_(group["lr"] / bias1 * state["exp_avg"] / root)


def with_group_adam(policy: Any) -> Any:
    for one in policy._optimizer.chained_optimizers:
        adam = GroupAdam([torch.zeros(1)], {})
        adam.param_groups = one.optimizer.param_groups
        one.optimizer = adam
    return policy


def count_in_groups(rank: int, model: Path, folder: Path) -> list[Any]:
    exchange, args = Ranks(rank, 1, rank), (model, "dp", "float32")
    policy = with_group_adam(build(exchange, *args))
    for seed in range(3):
        update(policy, seed)
    save(policy, exchange, model, folder)
    update(policy, 3)
    went_on = kept(policy.weights())
    policy.close()
    policy = with_group_adam(build(exchange, *args))
    policy.load(folder)
    update(policy, 3)
    return [went_on, kept(policy.weights()), open_state(folder).step]


def test_updates_counted_in_groups_are_carried_over(models: Path, tmp_path: Path) -> None:
    [(went_on, resumed, step)] = run_ranks(count_in_groups, 1, models / "bias", tmp_path / "step")
    assert step == 3.0
    assert equal(resumed, went_on)
