"""Observe a vLLM engine on a CPU, for test_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers import engines

STEPS = 3


def observe(folder: Path) -> dict[str, Any]:
    """Return all observations by name."""
    engine = engines.start(folder)
    (inside,) = engine._llm.apply_model(look_inside)
    observed = {"steps": STEPS, **inside, **requests(engine)}
    engine.close()
    return observed


def requests(engine: Any) -> dict[str, Any]:
    from dapo_megatron.engine.continuation import sampled_so_far

    llm = engine._llm
    engine.submit(engines.requests([7], temperature=1.0)[:2])
    for _ in range(STEPS):
        assert engine.step() == []
    so_far = {name: (list(a), list(b)) for name, (a, b) in sampled_so_far(llm).items()}
    engine.interrupt()
    left = len(llm.llm_engine.output_processor.request_states)
    reset = llm.reset_prefix_cache()
    return {"names": set(so_far), "so_far": so_far, "left_after_abort": left, "reset": reset}


def look_inside(model: Any) -> dict[str, Any]:
    from dapo_megatron.engine.loads import as_created

    gate_up, embedding = model.model.layers[0].mlp.gate_up_proj, model.model.embed_tokens
    packed = hasattr(gate_up, "cpu_linear") and gate_up.weight.numel() == 0
    padded = embedding.weight.shape[0]
    with as_created(model):
        created = gate_up.weight
        restored = (tuple(created.shape), created.device.type, hasattr(created, "weight_loader"))
    return {
        "packed": packed,
        "restored": restored,
        "rows": (embedding.shard_indices.num_org_elements, padded),
        "vocab": model.config.vocab_size,
    }


def names_of_the_extension() -> set[str]:
    from dapo_megatron.engine import device

    device.prepare_environment()
    from dapo_megatron.engine.extension import WorkerExtension

    return {name for name in dir(WorkerExtension) if not name.startswith("__")}
