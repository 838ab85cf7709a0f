"""Limits and CPUs of a process, which its children inherit."""

from __future__ import annotations

import os
import resource
import sys

import pytest

from dapo_megatron.cluster import processes
from dapo_megatron.cluster.processes import MAX_FILES, bind_near, raise_file_limit


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(1024, 4096, 4096), (1024, -1, MAX_FILES), (1024, 2**30, MAX_FILES), (2**20, 2**30, None)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resource.RLIM_INFINITY == -1
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    raise_file_limit()
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_process_is_bound_to_those_of_its_cpus_that_are_near_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM ships a copy of the package pynvml."""
    from vllm.third_party import pynvml

    masks = {"0": [0b0011, 0], "GPU-ab": [0, 0b1000]}
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", str)

    def affinity(handle: str, num_words: int) -> list[int]:
        if handle not in masks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return masks[handle][:num_words]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", affinity)
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.setattr(processes, "STARTED_ON", set(range(96)))
    bind_near(["0", "GPU-ab"])
    bind_near(["5"])  # in a virtual machine
    assert bound == [{0, 1, 67}]
    monkeypatch.setattr(processes, "STARTED_ON", {1, 2})  # of a job that shares the node
    bind_near(["0"])
    monkeypatch.setattr(processes, "STARTED_ON", {2, 3})
    bind_near(["0"])
    assert bound[1:] == [{1}]
