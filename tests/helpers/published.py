"""Published models as tests take them: by name, parameters and the fields of config.json."""

from __future__ import annotations

from typing import Any

from dapo_megatron.model.published import published_models

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    name: (model.num_parameters, dict(model.hf)) for name, model in published_models().items()
}
"""By name without owner: parameters (a tied head counted once), and config.json."""
