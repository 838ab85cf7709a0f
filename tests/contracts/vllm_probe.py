"""Observe a vLLM engine on a CPU in one rank, for test_vllm.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers import engines

STEPS = 3


def observe(rank: int, folder: str) -> dict[str, Any]:
    """Return all observations by name."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    set_num_threads = torch.set_num_threads
    engine = engines.start(folder, rank, 1, 1)
    observed: dict[str, Any] = {
        "threads_are_kept": torch.set_num_threads is set_num_threads,
        "seed_is_kept": bool(torch.equal(torch.rand(1), expected)),
        "steps": STEPS,
    }
    llm = engine._llm
    (inside,) = llm.apply_model(look_inside)
    return {**observed, **inside, **requests(engine), **ending(llm)}


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


def ending(llm: Any) -> dict[str, Any]:
    import gc

    from vllm.distributed.parallel_state import get_tp_group

    size = get_tp_group().cpu_group.size()
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    return {
        "cpu_group_size": size,
        "initialized_after_shutdown": torch.distributed.is_initialized(),
    }
