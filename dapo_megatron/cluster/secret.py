"""The secret of a run, and how ranks prove to each other that they know it.

Ports of a run can be reached by every user of its machines, and job ids tell which ports they are.
So whoever starts the ranks gives them a new secret (`launch`, slurm/*.sbatch, or a user's export),
and ranks exchange nothing before each has answered a challenge with it. The secret itself is never
sent. It is taken out of the environment when it is read, so that no child process inherits it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, MutableMapping
from functools import cache

from dapo_megatron.types import ConfigError, RankError

SECRET = "DAPO_MEGATRON_SECRET"
SECRET_FILE = "DAPO_MEGATRON_SECRET_FILE"
NUM_BYTES = 32
"""Of the secret, a nonce and an answer."""
_CONTEXT = b"dapo_megatron: a rank of this run\0"
_HOW = (
    f"The ranks of a run share a new secret at each start. Before torchrun or srun: "
    f"`export {SECRET}=$(openssl rand -hex {NUM_BYTES})`, the same on all nodes; or write it "
    f"into a file that only you can read (umask 077) and export its path as {SECRET_FILE}"
)


def secret_variable() -> dict[str, str]:
    """Return a new secret, for the environment of all ranks of one start."""
    return {SECRET: secrets.token_hex(NUM_BYTES)}


def run_secret(world_size: int) -> bytes | None:
    """Return the secret that this process was started with; None for a rank that has no others.

    Raises ConfigError if there are other ranks and no secret, or if it cannot be used.
    """
    secret = _taken()
    if secret is None and world_size > 1:
        raise ConfigError(f"{SECRET}: not set, and this is one of {world_size} ranks. {_HOW}")
    return secret


def prove(
    gather: Callable[[bytes], list[bytes]], rank: int, world_size: int, secret: bytes
) -> None:
    """Make every rank prove that it knows the secret. Collective.

    `gather` is an all-gather of NUM_BYTES bytes. Raises RankError naming the ranks whose answer to
    the challenge of all ranks is wrong.
    """
    nonces = gather(secrets.token_bytes(NUM_BYTES))
    answers = gather(answer(secret, rank, nonces))
    wrong = [
        str(other)
        for other in range(world_size)
        if not hmac.compare_digest(answers[other], answer(secret, other, nonces))
    ]
    if wrong:
        raise RankError(
            f"rank {', '.join(wrong)} did not prove that it knows this run's secret. Either it was "
            f"started with another {SECRET}, or a process that is not part of this run has taken "
            "its place. Start all ranks again; if it happens again, tell the administrators of "
            "the machine"
        )


def answer(secret: bytes, rank: int, nonces: list[bytes]) -> bytes:
    """Return a rank's answer to the nonces of all ranks, its own among them."""
    place = f"{rank}/{len(nonces)}\0".encode()
    return hmac.digest(secret, _CONTEXT + place + b"".join(nonces), "sha256")


@cache
def _taken() -> bytes | None:
    return take_secret(os.environ)


def take_secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Read the secret, and remove its variables from `environ`. Raises ConfigError."""
    text, path = environ.pop(SECRET, None), environ.pop(SECRET_FILE, None)
    name = SECRET
    if text is None and path is not None:
        name, text = SECRET_FILE, _read_private(path)
    if text is None:
        return None
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * NUM_BYTES}}}", text.strip()):
        # The message must not show it.
        raise ConfigError(f"{name}: not {2 * NUM_BYTES} hexadecimal digits. {_HOW}")
    return bytes.fromhex(text.strip())


def _read_private(path: str) -> str:
    """Read a file that belongs to this user and that only this user can read."""
    try:
        # Not blocking: the path may be a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = " (a link is refused)" if os.path.islink(path) else ""
        raise ConfigError(f"{SECRET_FILE}: {path}: {error.strerror}{hint}. {_HOW}") from None
    try:
        # Of what was opened: a path can be replaced after a look at it.
        status = os.fstat(handle)
        if fault := _fault(status):
            raise ConfigError(f"{SECRET_FILE}: {path} {fault}. {_HOW}")
        return os.read(handle, 1000).decode("ascii", "replace")
    finally:
        os.close(handle)


def _fault(status: os.stat_result) -> str:
    """Return why a file must not hold a secret, or nothing."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return f"can be read or written by others (mode {mode:o}; `chmod 600` it first)"
    return ""
