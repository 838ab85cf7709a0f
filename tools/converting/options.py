"""Output of tools/convert_checkpoint.py for users of Megatron-LM."""

from __future__ import annotations

import textwrap
from typing import Any

from dapo_megatron.checkpoints.formats.torch_dist.options import (
    fields_without_option,
    megatron_lm_options,
)
from dapo_megatron.model import Architecture


def print_options(arch: Architecture) -> dict[str, Any]:
    """Print the options of Megatron-LM for a model. Return them for --json."""
    options, missing = megatron_lm_options(arch), fields_without_option(arch)
    print("options of Megatron-LM for this model:")
    text = " ".join(option.replace(" ", "\0") for option in options)
    lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
    print(" \\\n".join("    " + line.replace("\0", " ") for line in lines))
    if missing:
        values = ", ".join(f"{name} = {value}" for name, value in missing.items())
        print(
            f"Megatron-LM has no option for {values}, or ignores it, and computes another model "
            "until you set this in its code. Megatron-Bridge reads it from run_config.yaml"
        )
    return {"megatron_lm_options": options, "megatron_lm_without_option": missing}
