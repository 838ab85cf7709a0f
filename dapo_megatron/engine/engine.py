"""A vLLM engine in a server's process, driven step by step.

With several workers (tensor parallelism) vLLM runs each in its own process, with one it runs
it here. Their results are the same.

Log-probs are vLLM's `processed_logprobs`: at the request's temperature (at temperature 0, those at
temperature 1) and after top-p. At top-p 1, which the config requires for rollouts, they are those
of the whole distribution a token was drawn from. `raw_logprobs` are before both, so they would be
wrong at temperatures other than 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.cluster.secret import run_secret
from dapo_megatron.config import Config
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.engine import device, memory
from dapo_megatron.engine.continuation import (
    append_tokens,
    prompt_of,
    sampled_so_far,
    tokens_left,
)
from dapo_megatron.engine.routes import RouteReader
from dapo_megatron.model import read_architecture, stop_ids
from dapo_megatron.segments import turns
from dapo_megatron.types import (
    Completion,
    DapoError,
    Finish,
    SampleRequest,
    SyncError,
    TensorSlice,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm import LLM, RequestOutput, SamplingParams

    from dapo_megatron.bridge.group import Meeting
    from dapo_megatron.engine.slices import Offer

_EXTENSION = "dapo_megatron.engine.extension.WorkerExtension"
_SYNC_FAILED = "a weight sync failed midway, so it holds a mixture of old and new weights"
_NO_WEIGHTS = "it has no weights, or sleep() dropped them. Call load() first"
_NO_CACHE = "its KV cache is asleep. Call wake() first"


class VllmEngine:
    """An engine of one replica. Its public methods are those that a server calls (server.py), also
    by name for rank 0 (messages.CALLS).

    With `is_empty` it starts with random weights, and `load` must be called before the first
    request. The checkpoint, in any format, is then read only once, by the policy. `seed` is that of
    requests without one. A worker waits three times `silence_seconds` for the next weights.

    Asleep (engine.sleep), weights and KV cache have no memory on a GPU. On CPU vLLM cannot free
    memory. Otherwise sleep is the same there: weights count as lost, and nothing is sampled.
    """

    def __init__(self, config: Config, *, seed: int = 0, is_empty: bool = False) -> None:
        self.version = 0
        """Version of the current weights, recorded in the segments of completions."""
        self.max_sequences = config.engine.max_sequences
        """Number of requests that can run at the same time. Further requests are queued."""
        self._unusable = _NO_WEIGHTS if is_empty else ""
        self._requests: dict[str, SampleRequest] = {}
        self._sleeps = config.engine.sleep
        self._silence_seconds = config.engine.silence_seconds
        self._asleep: set[memory.MemoryTag] = set()
        self._ids: dict[str, str] = {}
        self._routes: RouteReader | None = None
        device.prepare_environment()
        if config.policy.router_replay == "engine":
            self._routes = RouteReader(read_architecture(config))
        self._llm = _start(config, "dummy" if is_empty else "auto", seed)
        if self._routes is not None:
            self._routes.follow(self._llm)
        folder = Path(config.model.path)
        self.tokenizer = load_tokenizer(folder, "model.path")
        self._llm.llm_engine.output_processor.tokenizer = self.tokenizer  # finds texts that stop
        self.stop_ids = stop_ids(folder, self.tokenizer.eos_token_id)
        """Tokens that end a turn."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests. No (ticket, sample) of them is in flight."""
        self._require_awake()
        for request in requests:
            name = _name(request)
            self._requests[name] = request
            self._ids[name] = self._llm.llm_engine.add_request(
                name, {"prompt_token_ids": prompt_of(request)}, self._sampling(request)
            )

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Advance by one engine step. Return the requests that finished in it, with their
        completions. A completion starts with the tokens of the request's `so_far`."""
        self._require_awake()
        outputs = self._llm.llm_engine.step()
        return [self._finished(output) for output in outputs if output.finished]

    @property
    def requests(self) -> Collection[SampleRequest]:
        """Requests that are queued or running, in the order in which they were submitted."""
        return self._requests.values()

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        """Drop all requests, running or queued. Return those with at least one token, each with its
        completion, unfinished and without text, in the order in which they were submitted."""
        sampled = sampled_so_far(self._llm)
        unfinished = []
        for name, request in self._requests.items():
            tokens, logprobs = sampled[name]
            if request.so_far is not None or tokens:
                routes = self._read_routes(request, len(tokens)) if tokens else None
                completion = append_tokens(request, tokens, logprobs, self.version, routes=routes)
                unfinished.append((request, completion))
        self._llm.llm_engine.abort_request(list(self._requests))
        if self._routes is not None:
            self._routes.forget()
        self._requests.clear()
        self._ids.clear()
        return unfinished

    def trace(self, offered: Offer) -> list[list[TensorSlice]]:
        """Return the slices that each worker needs of HF tensors, offered by name, shape and dtype.

        The engine does not change. Raises SyncError naming a tensor that is unknown, misshapen or
        partly unused, or a parameter of the engine that would not be written exactly once.
        """
        from dapo_megatron.engine.slices import check_used

        wanted: list[list[TensorSlice]] = self._on_workers("trace_slices", offered)
        check_used(offered, wanted)
        return wanted

    def connect(self, meeting: Meeting) -> None:
        """Join the group in which the trainer ranks send weights, if they are on other GPUs. Raises
        SyncError."""
        self._on_workers("join_group", meeting, run_secret(len(meeting.held)) or b"")

    def load(self, version: int, addresses: Sequence[str]) -> None:
        """Replace all weights by those that the trainer ranks at these addresses send, one for each
        worker, or without addresses in the group, and drop cached prefixes. New tokens are stamped
        with `version`.

        Raises SyncError naming a slice that is missing, extra or repeated. The engine
        then accepts no more requests until another `load`.
        """
        if self._requests:
            raise SyncError(f"weights offered with {len(self._requests)} requests in flight")
        if "weights" in self._asleep:
            raise SyncError('weights offered to an engine asleep. Call wake("weights") first')
        self._unusable = _SYNC_FAILED
        # Longer than a rank waits for a frozen worker, which delays the weights of all others.
        self._on_workers("receive_slices", list(addresses), 3 * self._silence_seconds)
        if not self._llm.reset_prefix_cache():
            raise SyncError("prefix cache: not dropped. Requests with old weights are in flight")
        self._unusable = ""
        self.version = version

    def fingerprints(self) -> list[list[tuple[int, int]]]:
        """Return the fingerprints (bridge/verify.py) of each worker's slices, as (index in `trace`,
        fingerprint). Slices that cannot be read back (readback.py) are left out."""
        self._require_usable()
        return self._llm.collective_rpc("fingerprint_slices")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob, in nats, of each token except the first of each sequence.

        Log-probs are at temperature 1, of the whole distribution, and use no cached prefix. A
        sequence must have at least two tokens, and fewer than the maximum of prompt and response
        together. Raises DapoError with requests in flight.
        """
        self._require_awake()
        if self._requests:
            raise DapoError(f"cannot score sequences with {len(self._requests)} requests in flight")
        engine, scoring = self._llm.llm_engine, _scoring()
        for index, tokens in enumerate(sequences):
            engine.add_request(str(index), {"prompt_token_ids": list(tokens)}, scoring)
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step()}
        if self._routes is not None:  # nobody reads the routes of these requests
            self._routes.forget()
        return [_prompt_logprobs(finished[str(index)]) for index in range(len(sequences))]

    def sleep(self) -> None:
        """Free the accelerator's memory for the policy. Weights and cached prefixes are lost. Does
        nothing if the engine is asleep, or with engine.sleep false."""
        if self._requests:
            raise DapoError(f"cannot sleep with {len(self._requests)} requests in flight")
        if not self._sleeps or "weights" in self._asleep:
            return
        self._llm.sleep(level=2)
        self._asleep = set(memory.MEMORY_TAGS)
        self._unusable = _NO_WEIGHTS

    def wake(self, part: memory.MemoryTag) -> None:
        """Allocate memory again for the weights, which `load` must fill, or for the KV cache, after
        the weights. Does nothing if the part is awake. Raises ConfigError if too little is free.
        """
        if part not in self._asleep:
            return
        if device.has_cuda():
            self._on_workers("check_room", part)
        self._llm.wake_up(tags=[part])
        self._asleep.remove(part)
        if part == "kv_cache" and device.has_cuda():
            self._llm.collective_rpc("clear_cache")

    def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers. Return the results. Raises the error of the first one that
        failed."""
        answers = self._llm.collective_rpc(method, args=arguments)
        for _, error in answers:
            if error is not None:
                raise error.error()
        return [result for result, _ in answers]

    def _require_usable(self) -> None:
        if self._unusable:
            raise SyncError(f"the engine cannot be used: {self._unusable}")

    def _require_awake(self) -> None:
        self._require_usable()
        if self._asleep:
            raise SyncError(f"the engine cannot be used: {_NO_CACHE}")

    def _sampling(self, request: SampleRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=min(tokens_left(request), request.max_new_tokens or request.max_tokens),
            stop_token_ids=self.stop_ids,
            stop=list(request.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _finished(self, output: RequestOutput) -> tuple[SampleRequest, Completion]:
        request = self._requests.pop(output.request_id)
        (sampled,) = output.outputs
        routes = self._read_routes(request, len(sampled.token_ids))
        del self._ids[output.request_id]
        stopped = sampled.token_ids[-1] in self.stop_ids
        completion = append_tokens(
            request,
            sampled.token_ids,
            sampled.logprobs.logprobs,
            self.version,
            Finish.STOP if stopped else Finish.LENGTH,
            routes,
        )
        return request, replace(completion, text=self.answer(completion))

    def answer(self, completion: Completion) -> str:
        """Return the text of the model's last turn."""
        *_, (_, start, end) = (turn for turn in turns(completion.segments) if not turn[0])
        return self.text(completion.tokens[start:end])

    def text(self, tokens: Sequence[int], *, is_raw: bool = False) -> str:
        """Return the text of tokens, without the token that ends it, and without special tokens
        unless it `is_raw`."""
        kept = list(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)
        return str(self.tokenizer.decode(kept, skip_special_tokens=not is_raw))

    def _read_routes(self, request: SampleRequest, num_new: int) -> NDArray[np.generic] | None:
        """Return the routes of a request with `num_new` sampled tokens, with router replay.
        The last token was sampled, but not yet computed."""
        if self._routes is None:
            return None
        num_tokens = len(prompt_of(request)) + num_new - 1
        return self._routes.read(self._ids[_name(request)], num_tokens)


def _name(request: SampleRequest) -> str:
    return f"{request.ticket}/{request.sample}"


def _start(config: Config, load_format: str, seed: int) -> LLM:
    num_workers = config.engine_tensor_parallel
    with device.construction():
        from vllm import LLM

        arch = read_architecture(config)
        device.check_config(config, arch)
        device.choose_kernels(config)
        return LLM(
            model=config.model.path,
            skip_tokenizer_init=True,  # it would be another one than the file's
            load_format=load_format,
            distributed_executor_backend="uni" if num_workers == 1 else "mp",
            tensor_parallel_size=num_workers,
            dtype=config.policy.precision,
            max_model_len=config.max_sequence_tokens,
            max_num_seqs=config.engine.max_sequences,
            enable_expert_parallel=config.engine.expert_parallel,
            worker_extension_cls=_EXTENSION,
            logprobs_mode="processed_logprobs",
            seed=seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **device.arguments(config, arch),
        )


def _scoring() -> SamplingParams:
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


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    """Return the log-prob of each token of a scored prompt except the first."""
    tokens, logprobs = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    return [by_token[token].logprob for token, by_token in zip(tokens, logprobs, strict=True)]
