"""What an interrupted engine has sampled so far, and how completions are put together of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dapo_megatron.types import Completion, DapoError, Finish, SampleRequest, Segment

if TYPE_CHECKING:
    from vllm import LLM


def tokens_left(request: SampleRequest) -> int:
    """How many tokens may still be sampled. Raises DapoError if none: vLLM would not say which
    request it was."""
    left = request.max_tokens - len(_tokens(request))
    if left < 1:
        raise DapoError(
            f"ticket {request.ticket}, sample {request.sample}: asked to continue "
            f"{len(_tokens(request))} tokens, but rollout.max_response_tokens is "
            f"{request.max_tokens}; it was more when they were sampled"
        )
    return left


def prompt_of(request: SampleRequest) -> list[int]:
    """What the engine is given to continue: the prompt and the response so far."""
    return [*request.prompt.tokens, *_tokens(request)]


def joined(
    request: SampleRequest,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    finish: Finish = Finish.UNFINISHED,
) -> Completion:
    """What `request` brought, then `tokens` that weights `version` sampled; text is left empty.

    With no new token it is what the request brought, itself. A request that brought nothing must
    have a new token. Raises ValueError if tokens and log-probs differ in number.
    """
    if len(tokens) != len(logprobs):
        raise ValueError(
            f"ticket {request.ticket}, sample {request.sample}: {len(logprobs)} log-probs for "
            f"{len(tokens)} new tokens"
        )
    so_far = request.so_far
    if not tokens and so_far is not None:
        return so_far
    return Completion(
        sample=request.sample,
        tokens=(*_tokens(request), *tokens),
        logprobs=(*(so_far.logprobs if so_far else ()), *logprobs),
        text="",
        finish=finish,
        segments=_appended(so_far.segments if so_far else (), Segment(version, len(tokens))),
    )


def sampled_so_far(llm: LLM) -> dict[str, tuple[list[int], list[float]]]:
    """(tokens, log-probs) that the engine has sampled for each request in it, by the request's
    name; both empty for a queued one.

    Internals of vLLM 0.32, which has no call for this: cumulative outputs would tell, but cost one
    object for each sequence and step. A final output is made of what is read here, so tokens and
    log-probs fit each other. With asynchronous scheduling (CUDA) the engine core is one step
    ahead: that step's tokens are lost, whatever they are, and vLLM passes over them once their
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


def _tokens(request: SampleRequest) -> tuple[int, ...]:
    return request.so_far.tokens if request.so_far else ()


def _appended(segments: tuple[Segment, ...], new: Segment) -> tuple[Segment, ...]:
    """`segments` and `new`, one segment for neighbours of one version."""
    if segments and segments[-1].version == new.version:
        last = Segment(new.version, segments[-1].num_tokens + new.num_tokens)
        return (*segments[:-1], last)
    return (*segments, new)
