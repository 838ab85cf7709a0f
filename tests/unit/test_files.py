"""Atomic text files, JSON from untrusted files, and lock files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.checkpoints.formats.tensor_file import TensorFile
from dapo_megatron.cluster.attempt import read_attempts
from dapo_megatron.files import (
    MAX_DEPTH,
    check_depth,
    open_lock,
    parse_json,
    read_file,
    read_json,
    sha256,
    try_lock,
    write_text,
)
from dapo_megatron.rollout.record import read_groups
from dapo_megatron.types import CheckpointError, ConfigError, DapoError


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes`, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_leaves_only_the_old_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old", durable=durable)
    with room_for(1000), pytest.raises(OSError):
        write_text(path, "x" * 100_000, durable=durable)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


BAD_JSON = {
    "nested 200,000 deep": (b"[" * 200_000 + b"]" * 200_000, "nested more than 64 deep"),
    "nested 65 deep": (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64 deep"),
    "a number of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
    "Latin-1": (b'{"a": "\xe9"}', "'utf-8' codec can't decode byte 0xe9"),
    "UTF-16": (json.dumps({"a": 1}).encode("utf-16"), "'utf-8' codec can't decode byte"),
    "cut off": (b'{"a": ', "Expecting value"),
    "empty": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_unreadable_json_is_rejected_with_its_path(tmp_path: Path, name: str) -> None:
    content, problem = BAD_JSON[name]
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        read_json(path)
    assert str(raised.value).startswith(f"{path}: cannot be read ({problem}")
    with pytest.raises(ConfigError):
        read_json(path, error=ConfigError)
    with pytest.raises(CheckpointError, match=r"cannot be read \(embedded null byte"):
        read_json(path.with_name("a\0b"))
    for no_object in ("[]", "1", "null", '"{}"'):
        path.write_text(no_object)
        with pytest.raises(CheckpointError, match=r"state.json: not a manifest$"):
            read_json(path, "not a manifest")


def link(path: Path, target: Path | str, owner: int) -> None:
    path.symlink_to(target)
    os.lchown(path, owner, owner)


def private_file(folder: Path) -> Path:
    secret = folder / "netrc"
    secret.write_text('{"password": "hunter2"}')
    return secret


def sparse(path: Path, num_bytes: int) -> None:
    path.touch()
    os.truncate(path, num_bytes)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, chdir(path.parent):
        server.bind(path.name)


OTHER = 65534
FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "Not a regular file"),
    "link to a FIFO": (
        lambda path: (os.mkfifo(path.with_name("f")), path.symlink_to("f")),
        "Not a regular file",
    ),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "Not a regular file"),
    "terminal": (lambda path: path.symlink_to("/dev/ptmx"), "Not a regular file"),
    "socket": (bind, "No such device or address"),
    "folder": (Path.mkdir, "Is a directory"),
    "link to a folder": (lambda path: path.symlink_to("/etc"), "Is a directory"),
    "link to itself": (lambda path: path.symlink_to(path), "Too many levels"),
    "link to nothing": (lambda path: path.symlink_to("none"), "No such file"),
    "300 MB": (lambda path: sparse(path, 300 * 10**6), "longer than 268,435,456 bytes"),
    "a terabyte": (lambda path: sparse(path, 10**12), "longer than 268,435,456 bytes"),
    "link of another user to a private file": (
        lambda path: link(path, private_file(path.parent), OTHER),
        f"A link of user {OTHER} to a file of user {os.geteuid()}",
    ),
    "link of another user to a link of this user": (
        lambda path: (
            link(path.with_name("l"), private_file(path.parent), os.geteuid()),
            link(path, "l", OTHER),
        ),
        f"A link of user {OTHER} to a file of user {os.geteuid()}",
    ),
    "link of another user to the environment": (
        lambda path: link(path, "/proc/self/environ", OTHER),
        f"A link of user {OTHER} to a file of user {os.geteuid()}",
    ),
}
READERS: dict[str, Callable[[Path], object]] = {
    "bytes": read_file,
    "JSON": read_json,
    "attempts": read_attempts,
    "header of weights": TensorFile,
    "checksum": sha256,
    "recorded rollouts": lambda path: next(read_groups(path)),
}
READS_PARTS = ("checksum", "header of weights", "recorded rollouts")


@pytest.mark.parametrize("kind", FOREIGN)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    make, problem = FOREIGN[kind]
    if "another user" in kind and os.geteuid() != 0:
        pytest.skip("needs root, to make a link of another user")
    path = tmp_path / "file"
    make(path)
    for reader, read in READERS.items():
        if problem.startswith("longer") and reader in READS_PARTS:
            continue
        if reader == "attempts" and not path.exists():
            continue  # a run without attempts
        with pytest.raises((OSError, DapoError)) as raised:
            read(path)
        assert problem in str(raised.value), reader
        assert "hunter2" not in str(raised.value), reader


def test_links_of_the_hugging_face_cache_are_read(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to(blob)
    if os.geteuid() == 0:  # a cache that another user has downloaded
        os.chown(blob, OTHER, OTHER)
        os.lchown(tmp_path / "config.json", OTHER, OTHER)
    assert read_json(tmp_path / "config.json") == {"a": 1}


def test_the_nesting_depth_is_limited() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) != []
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        check_depth(cyclic)
    wide: list[Any] = []
    for _ in range(40):
        wide = [wide, wide, wide]  # 3^40 paths through 41 lists
    check_depth(wide)


def test_duplicate_keys_are_rejected_on_request() -> None:
    text = '{"a": {"b": 1, "c": 2, "b": 3}}'
    assert parse_json(text) == {"a": {"b": 3, "c": 2}}
    with pytest.raises(ValueError, match="the key 'b' is given twice; remove one of them"):
        parse_json(text, unique_keys=True)


@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_any_bytes_give_json_or_a_value_error(content: bytes) -> None:
    try:
        parse_json(content, unique_keys=True)
    except ValueError as error:
        assert str(error)


def test_a_link_with_the_name_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (tmp_path / f".state.json.{os.getpid()}.partial").symlink_to(target)
    write_text(tmp_path / "state.json", "state")
    assert (tmp_path / "state.json").read_text() == "state"
    assert target.read_text() == "mine"


def test_a_lock_file_that_is_a_link_is_rejected_and_its_target_unchanged(tmp_path: Path) -> None:
    target, path = tmp_path / "bashrc", tmp_path / ".lock"
    target.write_text("mine")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=rf"^{path}: a link to {target}"):
        open_lock(path)
    assert target.read_text() == "mine"


def test_a_lock_file_keeps_its_content_and_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("who holds it")
    with open_lock(path) as first, open_lock(path) as second:
        assert try_lock(first, path)
        assert not try_lock(second, path)
    assert path.read_text() == "who holds it"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_reported_with_a_remedy(
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
