"""Requests that verify an engine: score given tokens, or decode the most likely ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def scoring() -> SamplingParams:
    """Return the parameters of a request that scores its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # With prompt_logprobs vLLM does not use cached prefixes.
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def greedy(num_tokens: int) -> SamplingParams:
    """Return the parameters of a request that decodes `num_tokens` most likely tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """Return the log-prob of each token of a scored prompt except the first."""
    tokens, logprobs = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    return [by_token[token].logprob for token, by_token in zip(tokens, logprobs, strict=True)]
