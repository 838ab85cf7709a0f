"""Completions of several turns, token by token, with real engines and environments: observed tokens
are those of the chat template, and log-probs after them are those of the whole conversation.

Random models do not call tools. So each completion goes on after two turns that are calls, written
by the chat template of a family.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.continuation import append_tokens, observe
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.engine.turns import Ended, Turns
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.segments import turns
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest
from tests.helpers.configs import tiny_config
from tests.helpers.engines import GAP, close, hf_model, run_alone, segment_gap, start, sync
from tests.helpers.models import make_random_model, randomize
from tests.helpers.templates import FAMILIES, family_conversation, sampled_turn

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama3": ("llama", {}),
    "glm45": ("glm4_moe", {}),
}
"""Family of templates -> family of models, and its settings."""
ENVIRONMENT = "dapo_megatron.environments.calculator:Calculator"
ROUNDS = (
    (["3 * 4", "7 / 2"], ["12", "3.5"]),
    (["1 + x", "(5)"], ["error: only numbers, + - * / and parentheses", "5"]),
)
"""Expressions that each turn has calculated, and the answers."""
MAX_TOKENS, MAX_TURN_TOKENS, NUM_SAMPLES = 1200, 24, 4
QUESTION: Message = {"role": "user", "content": "How much is it?"}
Observations = dict[str, Any]


def make_model(family: str, folder: Path) -> Path:
    """Write a random model with a family's tokens and chat template."""
    tokenizer = family_conversation(family).tokenizer
    stops = tokenizer.convert_tokens_to_ids(FAMILIES[family].stops)
    kind, settings = MODELS[family]
    make_random_model(
        kind,
        folder,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=stops,
        pad_token_id=None,
        **settings,
    )
    tokenizer.eos_token = FAMILIES[family].stops[0]
    tokenizer.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------ inside the process


class Talks:
    """Completions of an engine, with and without thinking."""

    def __init__(self, family: str, folder: Path, engine: Any, pool: EnvironmentPool) -> None:
        self.family, self.folder, self.engine, self.pool = family, folder, engine, pool
        self.models = {engine.version: hf_model(folder)}

    def observe(self, thinks: bool) -> Observations:
        kwargs = {"enable_thinking": thinks} if FAMILIES[self.family].thinks else {}
        config = tiny_config(
            model__path=self.folder,
            data__chat_template_kwargs=str(kwargs),
            rollout__turns__max_turn_tokens=MAX_TURN_TOKENS,
        )
        talking = Turns(config, self.engine, self.pool)
        tools = [self.pool.described[ENVIRONMENT].descriptions[0]]
        talk = family_conversation(self.family, kwargs, tools)
        requests, whole = self.begun(talk, thinks)
        return {
            "one version": self.result(talking, requests, whole, is_pushed=False),
            "two versions": self.result(talking, requests, whole, is_pushed=True),
        }

    def begun(self, talk: Conversation, thinks: bool) -> tuple[list[SampleRequest], list[int]]:
        """Return requests whose completions so far are two turns with calls, the second one not
        answered, and the tokens of the conversation with both answers."""
        text = talk.render([QUESTION], starts_turn=True)
        tokens = tuple(talk.encode(text))
        prompt = Prompt("sums", 0, tokens, text, "", {}, ENVIRONMENT)
        request = SampleRequest(0, 0, prompt, None, MAX_TOKENS, 1.0, 1.0)
        history, answers = [QUESTION], []
        for expressions, results in ROUNDS:
            if answers:
                last = request.so_far.tokens[-1]
                so_far = observe(request.so_far, talk.between(last, answers), 0, 0)
                request = replace(request, so_far=so_far)
            number = 2 if FAMILIES[self.family].is_parallel else 1
            answers = [{"role": "tool", "content": result} for result in results[:number]]
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [_call(each) for each in expressions[:number]],
            }
            if thinks and FAMILIES[self.family].thinks:
                turn["reasoning_content"] = "hm"
            sampled = sampled_turn(talk, history, turn, answers)
            so_far = append_tokens(request, sampled, [0.0] * len(sampled), self.engine.version)
            request = replace(request, so_far=so_far)
            history += [turn, *answers]
        whole = talk.render(history, starts_turn=True)
        if self.family == "qwen3" and not thinks:  # the template drops it from earlier turns
            empty = "<think>\n\n</think>\n\n"
            whole = whole.replace("assistant\n<tool_call>", f"assistant\n{empty}<tool_call>")
        requests = [
            replace(request, sample=sample, seed=sample, so_far=replace(so_far, sample=sample))
            for sample in range(NUM_SAMPLES)
        ]
        return requests, talk.encode(whole)

    def result(
        self, talking: Turns, requests: list[SampleRequest], whole: list[int], is_pushed: bool
    ) -> Observations:
        """Sample what follows the calls. With `is_pushed` all completions are interrupted, and go
        on with other weights."""
        version = self.engine.version
        requests = [self.scored(request) for request in requests]
        talking.set_sampling(Sampling("training", MAX_TOKENS, 1.0, 1.0, True))
        ended = self.sample(talking, requests, num_steps=5 if is_pushed else None)
        if is_pushed:
            unfinished, just_ended = talking.interrupt(self.engine.interrupt())
            model = copy.deepcopy(self.models[version])
            randomize(model, seed=100 + version)
            sync(self.engine, model, version + 1)
            self.models[version + 1] = model
            rest = [replace(request, so_far=so_far) for request, so_far in unfinished]
            ended += [*just_ended, *self.sample(talking, rest)]
        results = {(0, each.completion.sample): each.completion for each in ended}
        prompt, completions = requests[0].prompt.tokens, list(results.values())
        first_model = self.models[version]
        return {
            "gap": segment_gap(self.models, requests, results),
            "gap under one version": segment_gap({}, requests, results, other=first_model),
            "gap of scores": self.gap_of_scores(prompt, completions),
            "ended": sorted((each.completion.sample, each.cause) for each in ended),
            "finishes": {each.finish for each in completions},
            "begins": [[*prompt, *each.tokens][: len(whole)] == whole for each in completions],
            "turns": [[turn[0] for turn in turns(each.segments)][:5] for each in completions],
            "versions": {
                tuple(sorted({segment.version - version for segment in each.segments}))
                for each in completions
            },
        }

    def sample(
        self, talking: Turns, requests: Sequence[SampleRequest], num_steps: int | None = None
    ) -> list[Ended]:
        """Go on with completions, until all have ended, or for `num_steps` steps of the engine
        after the answers to all."""
        for request in requests:
            talking.begin(request)
        done: list[Ended] = []
        while len(done) < len(requests) and num_steps != 0:
            to_sample, ended = talking.collect()
            done += ended
            self.engine.submit(to_sample)
            if talking.num_waiting:
                time.sleep(0.01)
            elif self.engine.requests:
                num_steps = None if num_steps is None else num_steps - 1
                for request, completion in self.engine.step():
                    talking.take(request, completion)
        return done

    def scored(self, request: SampleRequest) -> SampleRequest:
        """Return a request whose completion so far has the log-probs of the engine's weights."""
        assert request.so_far is not None
        tokens = request.so_far.tokens
        logprobs = self.engine.score([[*request.prompt.tokens, *tokens]])[0][-len(tokens) :]
        for is_observed, first, end in turns(request.so_far.segments):
            if is_observed:
                logprobs[first:end] = [0.0] * (end - first)
        segments = tuple(
            segment if segment.is_observed else replace(segment, version=self.engine.version)
            for segment in request.so_far.segments
        )
        so_far = replace(request.so_far, logprobs=logprobs, segments=segments)
        return replace(request, so_far=so_far)

    def gap_of_scores(self, prompt: Sequence[int], completions: Sequence[Completion]) -> float:
        """Return the largest difference between the log-probs of tokens that the current weights
        have sampled, and those that the engine gives to them as a prompt."""
        gaps = []
        for completion in completions:
            tokens = list(completion.tokens)
            scored = self.engine.score([[*prompt, *tokens]])[0][-len(tokens) :]
            is_current = [
                not segment.is_observed and segment.version == self.engine.version
                for segment in completion.segments
                for _ in range(segment.num_tokens)
            ]
            gap = np.abs(np.array(scored) - np.array(completion.logprobs))[is_current]
            gaps.append(gap.max(initial=0.0))
        return float(max(gaps))


def _call(expression: str) -> dict[str, Any]:
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return {"id": "1", "type": "function", "function": function}


def _observe(family: str, folder: Path) -> dict[bool, Observations]:
    engine = start(
        folder,
        rollout__max_prompt_tokens=1500,
        rollout__max_response_tokens=MAX_TOKENS,
        overlong__max_tokens=MAX_TOKENS,
    )
    with EnvironmentPool({ENVIRONMENT}, 20.0, 1024) as pool:
        talks = Talks(family, folder, engine, pool)
        thinking = (True, False) if FAMILIES[family].thinks else (True,)
        observed = {thinks: talks.observe(thinks) for thinks in thinking}
    close(engine)
    return observed


# ------------------------------------------------------------------ the tests


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_after_calls_have_the_log_probs_of_the_whole_conversation(
    family: str, tmp_path: Path
) -> None:
    """Also if they were interrupted and went on with other weights, with and without thinking."""
    observed = run_alone(_observe, family, make_model(family, tmp_path))
    for cases in observed.values():
        for case, seen in cases.items():
            assert seen["ended"] == [(sample, "") for sample in range(NUM_SAMPLES)]
            assert seen["finishes"] <= {Finish.STOP, Finish.TURN_LENGTH}
            assert all(seen["begins"])
            # Calls, answers, calls, answers, and what the engine sampled.
            assert seen["turns"] == [[False, True, False, True, False]] * NUM_SAMPLES
            assert seen["gap"] < GAP
            assert seen["gap of scores"] < GAP
            is_pushed = case == "two versions"
            assert ((0, 1) if is_pushed else (0,)) in seen["versions"]
            assert (seen["gap under one version"] > 100 * GAP) == is_pushed
