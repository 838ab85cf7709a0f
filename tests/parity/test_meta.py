"""Compare `layout_of`, and the parameters that `plan` counts, with Megatron-core's modules at the
sizes and layouts of published models.

tests/gpu_stack/test_te_meta.py does the same with Transformer Engine's layers.
"""

from __future__ import annotations

from pathlib import Path

from dapo_megatron.config import PolicyConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import architecture
from dapo_megatron.plan.stage import Stage
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.meta import Case, differences, world_size
from tests.helpers.published import PUBLISHED
from tests.helpers.ranks import run_ranks

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "Qwen2.5-0.5B": {},
    "Qwen2.5-32B": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 4,
        "context_parallel": 2,
    },
    "Qwen3-8B": {"tensor_parallel": 4, "sequence_parallel": True},
    "Qwen3-30B-A3B": {
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "pipeline_parallel": 2,
        "expert_parallel": 8,
    },
    "Llama-3.1-8B-Instruct": {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2},
    "GLM-4.5": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 23,
        "expert_parallel": 32,
    },
    "DeepSeek-V3": {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "pipeline_parallel": 16,
        "first_stage_layers": 4,
        "last_stage_layers": 1,
        "expert_parallel": 64,
    },
}


def published_cases() -> dict[str, Case]:
    """Return the layouts above, and those of the files in model_configs with a published model."""
    cases = {
        model: (PUBLISHED[model][1], PolicyConfig(**layout, precision="bfloat16"))
        for model, layout in LAYOUTS.items()
    }
    for path in sorted((REPOSITORY / "model_configs").glob("*.yaml")):
        config = load_config(path)
        model = Path(config.model.path).name
        if model in PUBLISHED:
            cases[path.name] = (PUBLISHED[model][1], config.policy)
    assert len(cases) > len(LAYOUTS) + 4
    return cases


def test_names_shapes_and_counts_equal_those_of_megatron_at_published_sizes() -> None:
    cases = published_cases()
    local = {"kernels": "local", "fp8": None}
    changed = [(hf, policy.model_copy(update=local)) for hf, policy in cases.values()]
    [results] = run_ranks(differences, 1, changed, False)
    for name, by_rank in zip(cases, results, strict=True):
        hf, policy = cases[name]
        config = tiny_config().model_copy(update={"policy": policy})
        world = world_size(policy)
        for rank, (mismatches, num_parameters, num_elements) in by_rank.items():
            assert not mismatches, (name, rank, mismatches)
            assert num_parameters > 10
            number = rank * policy.pipeline_parallel // world
            stage = Stage(config, architecture(hf), "local", world, number, on_gpu=False)
            assert stage.num_parameters == num_elements, (name, rank)
