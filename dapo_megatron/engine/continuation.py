"""Requests that continue an interrupted completion, or one after which its environment wrote."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dapo_megatron.segments import BRANCH, ENVIRONMENT, Segment
from dapo_megatron.types import Completion, Finish, SampleRequest, packed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm import LLM


def tokens_left(request: SampleRequest) -> int:
    """Return how many tokens may still be sampled."""
    return request.max_tokens - len(_tokens(request))


def prompt_of(request: SampleRequest) -> list[int]:
    """Return the tokens to continue from: the prompt and the response so far."""
    return [*request.prompt.tokens, *_tokens(request)]


def append_tokens(
    request: SampleRequest,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    finish: Finish = Finish.UNFINISHED,
    routes: NDArray[np.generic] | None = None,
) -> Completion:
    """Append `tokens`, sampled by weights `version`, to the completion so far. Text is left empty.

    `routes` are those that the engine computed for all tokens up to now, except the last one. Of
    the completion so far its earlier routes are kept.

    Without new tokens, the completion so far is returned unchanged. A request without a completion
    so far must have a new token.
    """
    so_far = request.so_far
    if not tokens and so_far is not None:
        return so_far
    new_tokens, new_logprobs = array("i", tokens), array("f", logprobs)
    new_routes = None if routes is None else packed(routes)
    if so_far is not None and new_routes is not None:
        known = so_far.routes or new_routes[:0]
        new_routes = known + new_routes[len(known) :]
    return Completion(
        sample=request.sample,
        tokens=so_far.tokens + new_tokens if so_far else new_tokens,
        logprobs=so_far.logprobs + new_logprobs if so_far else new_logprobs,
        text="",
        finish=finish,
        segments=_appended(so_far.segments if so_far else (), Segment(version, len(tokens))),
        routes=new_routes,
    )


def observe(
    completion: Completion | None,
    tokens: Sequence[int],
    sample: int,
    version: int,
    *,
    is_branch: bool = False,
) -> Completion:
    """Append tokens that an environment wrote after a turn of the model, or, without a completion,
    after the prompt of completion `sample`; `version` is the engine's. With `is_branch` they follow
    the prompt, too. The completion is then unfinished, and continues in a request like an
    interrupted one."""
    new_tokens, no_logprobs = array("i", tokens), array("f", bytes(4 * len(tokens)))
    if completion is None:
        segments = (Segment(version, len(tokens), ENVIRONMENT),)
        return Completion(sample, new_tokens, no_logprobs, "", Finish.UNFINISHED, segments)
    engine = BRANCH if is_branch else ENVIRONMENT
    segment = Segment(completion.segments[-1].version, len(tokens), engine)
    return replace(
        completion,
        tokens=completion.tokens + new_tokens,
        logprobs=completion.logprobs + no_logprobs,
        text="",
        finish=Finish.UNFINISHED,
        segments=_appended(completion.segments, segment),
    )


def cut_off(completion: Completion, num_tokens: int) -> Completion:
    """Return the first tokens of a completion."""
    segments, left = [], num_tokens
    for segment in completion.segments:
        if left > 0:
            segments.append(replace(segment, num_tokens=min(left, segment.num_tokens)))
        left -= segment.num_tokens
    return replace(
        completion,
        tokens=completion.tokens[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        segments=tuple(segments),
    )


def sampled_so_far(llm: LLM) -> dict[str, tuple[list[int], list[float]]]:
    """Return the (tokens, log-probs) that the engine has sampled so far, by request id.

    Both are empty for a queued request. This reads internals of vLLM 0.32, which has no API for
    it. Cumulative outputs would create an object for each sequence and step. vLLM makes final
    outputs from the same lists, so tokens and log-probs match. With asynchronous scheduling (CUDA)
    the engine core is one step ahead. The tokens of that step are lost: vLLM skips them once their
    requests are aborted.
    """
    states = llm.llm_engine.output_processor.request_states.values()
    return {
        state.external_req_id: (
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs.logprobs,
        )
        for state in states
    }


def _tokens(request: SampleRequest) -> Sequence[int]:
    """Return the tokens after the prompt: of the last branch."""
    return request.so_far.tokens[request.so_far.start :] if request.so_far else ()


def _appended(segments: tuple[Segment, ...], new: Segment) -> tuple[Segment, ...]:
    """Append `new`, merging it with the last segment if that has the same version and kind."""
    last = segments[-1] if segments else None
    is_same = last and (last.version, last.is_observed) == (new.version, new.is_observed)
    if last and is_same and new.engine != BRANCH:
        return (*segments[:-1], replace(new, num_tokens=last.num_tokens + new.num_tokens))
    return (*segments, new)
