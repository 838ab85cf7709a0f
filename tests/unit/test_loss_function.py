"""`loss.function`: a user-defined loss."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dapo_megatron.config import LossConfig
from dapo_megatron.run.loss import loss_function
from dapo_megatron.types import ConfigError, MicroTokens
from tests.helpers.configs import tiny_config

TOKENS = MicroTokens(
    old_logprobs=torch.tensor([-1.0, -2.0, -9.0]),
    advantages=torch.tensor([1.0, -1.0, 1.0]),
    weights=torch.ones(3),
    engine_logprobs=torch.zeros(3),
    mask=torch.tensor([True, True, False]),
)


def loss_config(name: str | None, **numbers: float) -> LossConfig:
    loss = tiny_config(**{f"loss__{key}": value for key, value in numbers.items()}).loss
    return loss.model_copy(update={"function": name})


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Write an importable module, and return its name."""
    name = f"losses_{abs(hash(code))}"
    (folder / f"{name}.py").write_text(textwrap.dedent(code), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_the_default_loss_uses_the_numbers_of_the_config() -> None:
    logprobs = torch.tensor([-0.5, -2.0, 0.0])  # ratios e^0.5 and 1

    def total(**numbers: float) -> float:
        unweighted = {"tis_cap": 1e9, **numbers}
        tokens = replace(TOKENS, engine_logprobs=TOKENS.old_logprobs)
        return float(loss_function(loss_config(None, **unweighted))(logprobs, tokens).total)

    assert total(clip_high=0.9) == pytest.approx(1 - math.exp(0.5))
    assert total(clip_high=0.1) == pytest.approx(1 - 1.1)
    assert total(clip_high=0.9, log_ratio_limit=0.25) == pytest.approx(1 - math.exp(0.25))


def test_a_loss_may_use_entropy_and_the_log_probs_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        from dapo_megatron.types import LossOutput

        def loss(logprobs, tokens, **numbers):
            reference = tokens.reference_logprobs
            moved = logprobs if reference is None else logprobs - reference
            return LossOutput(total=moved.sum(), sums={"bonus": tokens.entropy.sum()})
    """
    name = f"{write_module(tmp_path, monkeypatch, code)}:loss"
    loss_function(loss_config(name))
    with_kl = tiny_config(loss__kl="{coefficient: 0.1}").loss
    loss_function(with_kl.model_copy(update={"function": name}))


def code_returning(arguments: str) -> str:
    """Return the code of a loss function that returns LossOutput(`arguments`)."""
    return (
        "from dapo_megatron.types import LossOutput\n"
        f"def loss(logprobs, tokens, **numbers): return LossOutput({arguments})"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def loss(logprobs): ...", "raised TypeError"),
        (
            "def loss(logprobs, tokens, **numbers): return logprobs.sum()",
            "it must return a dapo_megatron.types.LossOutput",
        ),
        (code_returning("logprobs.detach().sum(), {}"), "must require a gradient"),
        (code_returning("1.0, {}"), "total is 1.0, not a finite scalar tensor"),
        (code_returning("logprobs.sum() * float('nan'), {}"), "total is"),
        (code_returning("logprobs.sum(), {'x': 1.0}"), "x is 1.0"),
        (code_returning("logprobs.sum(), {'x': logprobs.sum()}"), "its x: total must require"),
        (
            code_returning("logprobs.sum(), {'loss': logprobs.detach().sum()}"),
            "sums: loss would hide",
        ),
        ("loss = 1", "has no function 'loss'"),
    ],
)
def test_an_invalid_loss_function_is_rejected_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    name = write_module(tmp_path, monkeypatch, code)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        loss_function(loss_config(f"{name}:loss"))
    assert str(raised.value).startswith(f"loss.function: {name}:loss: ")
