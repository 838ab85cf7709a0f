"""Weights through shared buckets: another process gets every bit, and no side waits for one that is
gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.bridge import buckets
from dapo_megatron.bridge.buckets import BucketSender, received
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import Region, SyncError, TensorSlice
from tests.helpers.processes import PATIENCE_SECONDS
from tests.helpers.warm import warm_context

CPU = torch.device("cpu")
SILENCE_SECONDS = {"hang": 3.0}
"""Time after which each side gives up, by what the worker does."""
BUCKET_BYTES = 1024


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def worker(pipe: Connection) -> None:
    """Receive weights, one sync after the other, as each task says."""
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        kind, address = task
        weights: Any = received(address, SILENCE_SECONDS.get(kind, PATIENCE_SECONDS))
        answer: Any = []
        try:
            for number, (name, parts) in enumerate(weights):
                answer += [(name, region, str(part.dtype), bits(part)) for region, part in parts]
                if kind == "die" and number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "raise" and number == 1:
                    weights.throw(SyncError("layer 3 has another shape"))
                if kind == "leave" and number == 1:
                    weights.close()
                if kind == "hang" and number == 1:
                    time.sleep(2.5 * SILENCE_SECONDS[kind])
        except SyncError as error:
            answer = str(error)
        pipe.send(answer)


class Worker:
    """The process that receives."""

    def __init__(self) -> None:
        context = warm_context()
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=worker, args=(other,), daemon=True)
        self.process.start()
        other.close()
        assert self.pipe.recv() == "ready"

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join()


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", BUCKET_BYTES)


DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]
SHAPES = st.lists(st.integers(0, 5), max_size=3) | st.just([BUCKET_BYTES // 8 + 9, 3])
PARTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3)


def tensors_of(parts: list[list[tuple[list[int], torch.dtype]]], seed: int) -> list[ReceivedTensor]:
    """Return tensors of these parts with random bits, also those of NaN."""
    generator = torch.Generator().manual_seed(seed)
    made: list[ReceivedTensor] = []
    for number, shapes in enumerate(parts):
        slices = []
        for shape, dtype in shapes:
            region = Region((number,) * len(shape), tuple(shape))
            raw = torch.randint(
                0, 256, (region.numel * dtype.itemsize,), dtype=torch.uint8, generator=generator
            )
            slices.append((region, raw.view(dtype).view(shape)))
        made.append((f"tensor {number}", slices))
    return made


def expect(sender: BucketSender, tensors: list[ReceivedTensor]) -> None:
    sender.expect(
        TensorSlice(name, region.shape, value.dtype, region)
        for name, parts in tensors
        for region, value in parts
    )


def start(sender: BucketSender, receiver: Worker, kind: str = "load") -> None:
    receiver.pipe.send((kind, sender.open()))


@pytest.mark.usefixtures("small_buckets")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARTS, max_size=12), st.lists(PARTS, max_size=12), st.integers(0, 10**6))
def test_every_bit_arrives(
    shared_worker: Worker, tmp_path: Path, first: Any, second: Any, seed: int
) -> None:
    """Any tensors: empty, without dimensions, larger than a bucket, or none at all. Buckets are
    used again, and replaced when other tensors need larger ones."""
    sender = BucketSender(tmp_path, CPU, PATIENCE_SECONDS)
    for parts in (first, first, second):
        tensors = tensors_of(parts, seed)
        expect(sender, tensors)
        start(sender, shared_worker)
        # The tensors of a transfer do not outlive their turn.
        copies = ((name, [(region, v.clone()) for region, v in each]) for name, each in tensors)
        assert sender.send(copies) == ""

        assert shared_worker.pipe.recv() == [
            (name, region, str(value.dtype), bits(value))
            for name, each in tensors
            for region, value in each
        ]
    assert list(tmp_path.iterdir()) == []


MANY = [[([20, 10], torch.float32)]] * 40
"""Far more than two buckets."""


def wait_for_the_end(sender: BucketSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker's last messages arrive after a poll of the socket, together with its end."""
    poll, polled = sender._socket.poll, []

    def late(timeout: int, event: int = zmq.POLLIN) -> int:
        if event == zmq.POLLIN and not polled:
            polled.append(sender._monitor.poll())
            return 0
        return poll(timeout, event)

    monkeypatch.setattr(sender._socket, "poll", late)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("die", "its worker ended while it loaded weights"),
        ("raise", "layer 3 has another shape"),
        ("leave", "the worker refused the weights"),
        ("hang", "its worker loaded nothing for 3 s"),
    ],
)
def test_a_rank_learns_soon_why_its_worker_does_not_load(
    kind: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Worker()
    sender = BucketSender(tmp_path, CPU, SILENCE_SECONDS.get(kind, PATIENCE_SECONDS))
    tensors = tensors_of(MANY, 1)
    expect(sender, tensors)
    start(sender, receiver, kind)
    if kind in ("raise", "leave"):
        wait_for_the_end(sender, monkeypatch)
    started = time.monotonic()
    assert sender.send(iter(tensors)) == error
    assert time.monotonic() - started < PATIENCE_SECONDS / 4
    assert list(tmp_path.iterdir()) == []
    if kind == "hang":
        assert "no weights arrived for 3 s" in receiver.pipe.recv()
    if kind == "die":
        receiver.process.join()
        receiver = Worker()
    # The next sync succeeds.
    receiver.pipe.send(("load", sender.open()))
    assert sender.send(iter(tensors)) == ""
    answers = receiver.pipe.recv()
    if kind in ("raise", "leave"):
        answers = receiver.pipe.recv()
    assert len(answers) == len(MANY)
    receiver.close()


def test_a_worker_that_ends_right_after_it_has_loaded_everything_is_no_error(
    shared_worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, tensors = BucketSender(tmp_path, CPU, PATIENCE_SECONDS), tensors_of(MANY[:1], 1)
    expect(sender, tensors)
    start(sender, shared_worker)
    wait_for_the_end(sender, monkeypatch)
    assert sender.send(iter(tensors)) == ""
    assert len(shared_worker.pipe.recv()) == 1


def test_neither_side_waits_for_one_that_never_comes(tmp_path: Path) -> None:
    sender = BucketSender(tmp_path, CPU, 1.0)
    tensors = tensors_of([[([3], torch.float32)]], 1)
    expect(sender, tensors)
    address = sender.open()
    assert sender.send(iter(tensors)) == "its worker loaded nothing for 1 s"
    with pytest.raises(SyncError, match="no weights arrived for"):
        list(received(address, 0.5))


def test_a_bucket_on_a_gpu_is_in_no_expandable_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker could not open it: that needs the right to trace the rank's process."""
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **keys: calls.append(keys["device"].type))
    buckets._Bucket(64, torch.device("cuda", 0))
    assert calls == ["expandable_segments:False", "cuda", "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")  # the user's wins
    buckets._Bucket(64, torch.device("cuda", 0))
    assert calls[3:] == ["cuda"]
