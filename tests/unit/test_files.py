"""Small files are there whole or not at all."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dapo_megatron.files import write_text


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond `num_bytes`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_leaves_the_old_text_and_nothing_else(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old", durable=durable)
    with room_for(1000), pytest.raises(OSError):
        write_text(path, "x" * 100_000, durable=durable)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
