"""Load a complete Config in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config

TINY = Path(__file__).resolve().parents[2] / "model_configs" / "tiny_cpu.yaml"
REPOSITORY = TINY.parents[1]


def tiny_config(**overrides: Any) -> Config:
    """Load model_configs/tiny_cpu.yaml with `section__key=value` overrides."""
    texts = [f"model.path={REPOSITORY / 'model_configs' / 'tiny_qwen3'}"]
    texts += [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return load_config(TINY, texts)
