"""Published models by name, in the form that tests use."""

from __future__ import annotations

from typing import Any

from dapo_megatron.model.published import published_models

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    name: (model.num_parameters, dict(model.hf)) for name, model in published_models().items()
}
"""Name without owner -> (number of parameters, a tied head counted once; config.json)."""
