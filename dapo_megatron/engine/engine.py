"""A vLLM engine in this process, one shard per rank, driven step by step.

The world is divided into groups of `tensor_parallel` ranks (model/placement.py). Each group is a
separate engine, a replica. The ranks of a group schedule and sample independently. They agree
because they get the same requests, in the same order, between the same steps, and draw the same
random numbers.

Log-probs are vLLM's `processed_logprobs`: at the request's temperature (at temperature 0, those at
temperature 1) and after top-p. At top-p 1, which the config requires for rollouts, they are those
of the whole distribution a token was drawn from. `raw_logprobs` are before both, so they would be
wrong at temperatures other than 1.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_megatron.cluster import collectives
from dapo_megatron.config import Config
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.engine import device, memory
from dapo_megatron.engine.continuation import (
    append_tokens,
    prompt_of,
    sampled_so_far,
    tokens_left,
)
from dapo_megatron.engine.fixed_requests import greedy, prompt_logprobs, scoring
from dapo_megatron.engine.generators import EngineGenerators
from dapo_megatron.engine.groups import vllm_groups
from dapo_megatron.engine.routes import RouteCapture
from dapo_megatron.engine.shutdown import shut_down
from dapo_megatron.model import engine_groups, read_architecture
from dapo_megatron.types import (
    Completion,
    ConfigError,
    DapoError,
    Finish,
    RankError,
    SampleRequest,
    SyncError,
    TensorSlice,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from vllm import LLM, RequestOutput, SamplingParams

    from dapo_megatron.engine.slices import Offer
    from dapo_megatron.protocols import ReceivedTensor

_EXTENSION = "dapo_megatron.engine.extension.WorkerExtension"
_SYNC_FAILED = "a weight sync failed midway, so it holds a mixture of old and new weights"
_SYNC_INTERRUPTED = "a rank was lost in a weight sync. Call receive() again"
_NO_WEIGHTS = "it has no weights. Call receive() first"
_WEIGHTS_DROPPED = "sleep() dropped its weights. Call receive() first"
_CLOSED = "it is closed"
_NO_CACHE = "its KV cache is asleep. Call wake_cache() first"


class VllmEngine:
    """Implements `protocols.RolloutEngine`. Construction is collective over all ranks, with
    torch.distributed initialized.

    `groups` has the ranks of each replica. `ranks_per_node` None: all ranks are on one node.

    With `is_empty` it starts with random weights, and `receive` must be called before the first
    request. The checkpoint, in any format, is then read only once, by the policy.

    Asleep (engine.sleep), weights and KV cache have no memory on a GPU. On CPU vLLM cannot free
    memory. Otherwise sleep is the same there: weights count as lost, and nothing is sampled.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        ranks_per_node: int | None = None,
        is_empty: bool = False,
    ) -> None:
        ranks = config.engine_tensor_parallel
        if world_size % ranks:
            raise ConfigError(f"engine.tensor_parallel: {ranks} does not divide {world_size} ranks")
        arch = read_architecture(config)
        self.groups = engine_groups(config, arch, world_size, ranks_per_node or world_size)
        self.replica = next(index for index, group in enumerate(self.groups) if rank in group)
        self.num_replicas = len(self.groups)
        self.is_leader = rank == self.groups[self.replica][0]
        self.version = 0
        self.max_sequences = config.engine.max_sequences
        self._unusable = _NO_WEIGHTS if is_empty else ""
        self._requests: dict[str, SampleRequest] = {}
        self._sleeps = config.engine.sleep
        self._asleep: set[memory.MemoryTag] = set()
        self._seed = config.seed
        self._generators: EngineGenerators | None = None
        self._ids: dict[str, str] = {}
        self._routes: RouteCapture | None = None
        device.prepare_environment(rank, local_rank)
        if config.policy.router_replay == "engine" and self.is_leader:
            self._routes = RouteCapture(arch)
        binding = nullcontext() if self._routes is None else self._routes.binding()
        with vllm_groups(self.groups), binding:
            self._llm = _start(config, "dummy" if is_empty else "auto")
        if self._routes is not None:
            self._routes.follow(self._llm)
        self._tokenizer = load_tokenizer(Path(config.model.path), "model.path")
        self._stop_ids = _stop_ids(self._llm, self._tokenizer.eos_token_id)
        self._knows_slices = False

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests. Raises DapoError for a (ticket, sample) that is already in flight, or
        whose completion so far has reached its limit."""
        self._require_awake()
        for request in requests:
            name = _name(request)
            if name in self._requests:
                raise DapoError(
                    f"ticket {request.ticket}, sample {request.sample}: already in flight"
                )
            sampling = self._sampling(request)
            self._requests[name] = request
            self._ids[name] = self._llm.llm_engine.add_request(
                name, {"prompt_token_ids": prompt_of(request)}, sampling
            )

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Advance by one engine step. Return the requests that finished, with their completions."""
        self._require_awake()
        outputs = self._step()
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

    def needed_slices(self, offered: Offer) -> list[TensorSlice]:
        """Return the slices that this rank needs of HF tensors, offered by name, shape and dtype.

        Collective over the ranks of the engine. The engine does not change. Raises SyncError naming
        a tensor that is unknown, misshapen or partly unused, or a parameter of the engine that
        would not be written exactly once.
        """
        from vllm.distributed.parallel_state import get_tp_group

        from dapo_megatron.engine.slices import check_used

        (own,) = self._llm.collective_rpc("trace_slices", args=(offered,))
        group = get_tp_group()
        gathered = collectives.all_gather(
            own, tuple[list[TensorSlice], str], group.cpu_group, group.ranks
        )
        for _, error in gathered:
            if error:
                raise SyncError(error)
        check_used(offered, [tensor_slices for tensor_slices, _ in gathered])
        self._knows_slices = True
        return own[0]

    def receive(self, weights: Iterable[ReceivedTensor], version: int) -> None:
        """Replace all weights and drop cached prefixes. New tokens are stamped with `version`.

        The memory of a tensor in `weights` may be reused when the next one is fetched. Raises
        SyncError naming a wanted slice that is missing, repeated or misshapen. The engine then
        accepts no more requests.
        """
        if self._unusable == _SYNC_FAILED:
            self._require_usable()
        if self._requests:
            raise SyncError(f"weights offered with {len(self._requests)} requests in flight")
        if "weights" in self._asleep:
            raise SyncError("weights offered to an engine asleep. Call wake_weights() first")
        self._require_slices()
        self._unusable = _SYNC_FAILED
        try:
            self._llm.collective_rpc("load_slices", args=(weights,))
        except RankError:  # the next sync brings all weights again
            self._unusable = _SYNC_INTERRUPTED
            raise
        if not self._llm.reset_prefix_cache():
            raise SyncError("prefix cache: not dropped. Requests with old weights are in flight")
        self._unusable = ""
        self.version = version

    def read_back(
        self, names: Container[str] | None = None
    ) -> Iterator[tuple[TensorSlice, Tensor | None]]:
        """Yield each wanted slice, or those of the tensors in `names`, and its current value in the
        engine's dtype.

        The value is None if its layout is unknown (readback.py). Zeros may lose their sign. Not
        collective.
        """
        self._require_usable()
        self._require_slices()
        (values,) = self._llm.collective_rpc("read_slices", args=(names,))
        yield from values

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob, in nats, of each token except the first of each sequence.

        Log-probs are at temperature 1, of the whole distribution, and use no cached prefix. A
        sequence must have at least two tokens, and fewer than the maximum of prompt and response
        together. Raises DapoError with requests in flight.
        """
        return [prompt_logprobs(output) for output in self._run_alone(sequences, scoring())]

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return the `num_tokens` most likely tokens after each prompt, decoded one at a time, and
        their log-probs, in nats, at temperature 1. End-of-sequence tokens do not end a sequence.
        Raises DapoError with requests in flight."""
        outputs = self._run_alone(prompts, greedy(num_tokens))
        sampled = [output.outputs[0] for output in outputs]
        return [(list(each.token_ids), list(each.logprobs.logprobs)) for each in sampled]

    def _run_alone(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[RequestOutput]:
        """Run one request per prompt, with no others, and return their outputs in order."""
        self._require_awake()
        if self._requests:
            raise DapoError(f"cannot score sequences with {len(self._requests)} requests in flight")
        engine = self._llm.llm_engine
        for index, tokens in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": list(tokens)}, sampling)
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in self._step()}
        if self._routes is not None:  # nobody reads the routes of these requests
            self._routes.forget()
        return [finished[str(index)] for index in range(len(prompts))]

    def _step(self) -> list[RequestOutput]:
        """Run one step of vLLM with the engine's own random numbers.

        Replicas draw different numbers, and so does a resumed run if its first weights have another
        version.
        """
        if self._generators is None:
            self._generators = EngineGenerators(self._seed, self.replica, self.version)
        with self._generators.in_use():
            return self._llm.llm_engine.step()

    def sleep(self) -> None:
        """Free the accelerator's memory for the policy. Weights and cached prefixes are lost. Does
        nothing if the engine is asleep, or with engine.sleep false."""
        if self._requests:
            raise DapoError(f"cannot sleep with {len(self._requests)} requests in flight")
        if not self._sleeps or "weights" in self._asleep:
            return
        self._llm.sleep(level=2)
        self._asleep = set(memory.MEMORY_TAGS)
        if self._unusable != _SYNC_FAILED:
            self._unusable = _WEIGHTS_DROPPED

    def wake_weights(self) -> None:
        """Allocate memory for weights, which `receive` must fill. Raises ConfigError if too little
        is free."""
        self._wake("weights")

    def wake_cache(self) -> None:
        """Allocate memory for the KV cache. Call after `wake_weights`. Raises ConfigError if too
        little is free."""
        assert "weights" not in self._asleep
        if self._wake("kv_cache") and device.has_cuda():
            self._llm.collective_rpc("clear_cache")

    def close(self) -> None:
        """Shut the engine down. Free its memory, threads and process groups. Idempotent, and
        collective over all ranks.

        An engine asleep wakes first: on a GPU vLLM (0.32) would otherwise release memory that is
        not there. If there is too little room to wake, the memory is freed with the process.
        """
        if self._unusable == _CLOSED:
            return
        self._unusable = _CLOSED
        self._requests.clear()
        try:
            for part in memory.MEMORY_TAGS:
                self._wake(part)
        except ConfigError:
            return
        shut_down(self._llm)
        del self._llm, self._tokenizer
        memory.release()

    def _wake(self, part: memory.MemoryTag) -> bool:
        """Wake a part. Return whether it was asleep."""
        if part not in self._asleep:
            return False
        if device.has_cuda():
            memory.check_room(part)
        self._llm.wake_up(tags=[part])
        self._asleep.remove(part)
        return True

    def _require_slices(self) -> None:
        if not self._knows_slices:
            raise SyncError("the engine was not asked for its slices. Call needed_slices() first")

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
            max_tokens=tokens_left(request),
            stop_token_ids=self._stop_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _finished(self, output: RequestOutput) -> tuple[SampleRequest, Completion]:
        request = self._requests.pop(output.request_id)
        (sampled,) = output.outputs
        routes = self._read_routes(request, len(sampled.token_ids))
        del self._ids[output.request_id]
        stopped = sampled.token_ids[-1] in self._stop_ids
        completion = append_tokens(
            request,
            sampled.token_ids,
            sampled.logprobs.logprobs,
            self.version,
            Finish.STOP if stopped else Finish.LENGTH,
            routes,
        )
        tokens = completion.tokens[:-1] if stopped else completion.tokens
        text = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return request, replace(completion, text=text)

    def _read_routes(self, request: SampleRequest, num_new: int) -> NDArray[np.generic] | None:
        """Return the routes of a request with `num_new` sampled tokens, if this rank captures them.
        The last token was sampled, but not yet computed."""
        if self._routes is None:
            return None
        num_tokens = len(prompt_of(request)) + num_new - 1
        return self._routes.read(self._ids[_name(request)], num_tokens)


def _name(request: SampleRequest) -> str:
    return f"{request.ticket}/{request.sample}"


def _start(config: Config, load_format: str) -> LLM:
    with device.construction():
        from vllm import LLM

        device.check_config(config, read_architecture(config))
        device.choose_model_runner(config.engine)
        return LLM(
            model=config.model.path,
            skip_tokenizer_init=True,  # it would be another one than the file's
            load_format=load_format,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=config.engine_tensor_parallel,
            dtype=config.policy.precision,
            max_model_len=config.max_sequence_tokens,
            max_num_seqs=config.engine.max_sequences,
            enable_expert_parallel=config.engine.expert_parallel,
            worker_extension_cls=_EXTENSION,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            seed=config.seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **device.arguments(config),
        )


def _stop_ids(llm: LLM, eos_token_id: int | None) -> list[int]:
    """Return the end-of-sequence ids of tokenizer, model config and generation config."""
    model = llm.llm_engine.model_config
    sources = (
        eos_token_id,
        getattr(model.hf_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    )
    ids: set[int] = set()
    for source in sources:
        ids |= {source} if isinstance(source, int) else set(source or ())
    return sorted(ids)
