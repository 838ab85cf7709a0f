"""The secret of a run, and how ranks prove to each other that they know it.

Every user of a run's machines can connect to its ports, and the port numbers follow from the job
id. So each start gives its ranks a new secret (`launch`, slurm/*.sbatch, or a user's export). Ranks
exchange no data until each has answered a challenge with the secret. The secret itself is never
sent. It is removed from the environment when it is read, so that no child process inherits it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, MutableMapping
from functools import cache
from pathlib import Path

from dapo_megatron.files import open_regular
from dapo_megatron.types import ConfigError, RankError

SECRET = "DAPO_MEGATRON_SECRET"
SECRET_FILE = "DAPO_MEGATRON_SECRET_FILE"
NUM_BYTES = 32
"""Length of the secret, of a nonce and of an answer."""
_CONTEXT = b"dapo_megatron: a rank of this run\0"
_HOW = (
    f"The ranks of a run share a new secret at each start. Before torchrun or srun, run "
    f"`export {SECRET}=$(openssl rand -hex {NUM_BYTES})` with the same value on all nodes. Or "
    f"write it into a file that only you can read (umask 077) and export its path as {SECRET_FILE}"
)


def secret_variable() -> dict[str, str]:
    """Return a new secret, for the environment of all ranks of one start."""
    return {SECRET: secrets.token_hex(NUM_BYTES)}


def run_secret(world_size: int) -> bytes | None:
    """Return the secret that this process was started with. A single rank may have None.

    Raises ConfigError if there are other ranks and no secret, or if the secret is not valid.
    """
    secret = _process_secret()
    if secret is None and world_size > 1:
        raise ConfigError(f"{SECRET}: not set, and this is one of {world_size} ranks. {_HOW}")
    return secret


def prove(
    gather: Callable[[bytes], list[bytes]], rank: int, world_size: int, secret: bytes
) -> None:
    """Make every rank prove that it knows the secret. Collective.

    `gather` is an all-gather of NUM_BYTES bytes. Raises RankError naming the ranks with a wrong
    answer.
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
            "its place. Start all ranks again. If it happens again, report it to the "
            "administrators of the machine"
        )


def answer(secret: bytes, rank: int, nonces: list[bytes]) -> bytes:
    """Return a rank's answer to the nonces of all ranks, including its own."""
    place = f"{rank}/{len(nonces)}\0".encode()
    return hmac.digest(secret, _CONTEXT + place + b"".join(nonces), "sha256")


@cache
def _process_secret() -> bytes | None:
    return take_secret(os.environ)


def take_secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Return the secret, or None if there is none, and remove its variables from `environ`.

    Raises ConfigError if it is not valid or its file is not private.
    """
    text, path = environ.pop(SECRET, None), environ.pop(SECRET_FILE, None)
    name = SECRET
    if text is None and path is not None:
        name, text = SECRET_FILE, _read_private(path)
    if text is None:
        return None
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * NUM_BYTES}}}", text.strip()):
        # The message must not contain the secret.
        raise ConfigError(f"{name}: not {2 * NUM_BYTES} hexadecimal digits. {_HOW}")
    return bytes.fromhex(text.strip())


def _read_private(path: str) -> str:
    """Read a file that belongs to this user and that only this user can read."""
    try:
        with open_regular(Path(path)) as file:
            status, text = os.fstat(file.fileno()), file.read(1000).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE}: {path}: {error.strerror}. {_HOW}") from None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"{SECRET_FILE}: {path} has to belong to you alone, and belongs to user "
            f"{status.st_uid} with mode {mode:o}; `chmod 600` it, or make a new one. {_HOW}"
        )
    return text
