"""Small files are there whole or not at all; lock files are no links, and need a file system that
has locks."""

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dapo_megatron.files import open_lock, try_lock, write_text
from dapo_megatron.types import ConfigError


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


def test_a_link_in_the_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (tmp_path / f".state.json.{os.getpid()}.partial").symlink_to(target)
    write_text(tmp_path / "state.json", "state")
    assert (tmp_path / "state.json").read_text() == "state"
    assert target.read_text() == "mine"


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    target, path = tmp_path / "bashrc", tmp_path / ".lock"
    target.write_text("mine")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=rf"^{path}: a link to {target}"):
        open_lock(path)
    assert target.read_text() == "mine"


def test_a_lock_file_keeps_its_content_and_locks_once(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("who holds it")
    with open_lock(path) as first, open_lock(path) as second:
        assert try_lock(first, path)
        assert not try_lock(second, path)
    assert path.read_text() == "who holds it"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        open_lock(tmp_path / ".lock") as file,
        pytest.raises(ConfigError, match=rf"{tmp_path} has no flock .*-o flock.*run\.directory"),
    ):
        try_lock(file, tmp_path / ".lock")
