"""The system calls that an untrusted program is refused, as a filter for the kernel: seccomp(2).

The filter is made here, outside, and installed by jail.py inside. It keeps a program from starting
processes, making sockets, and reaching other processes by signals, by their limits or by their
memory. It cannot see what lies behind a pointer, paths above all: /proc is guarded by the user
namespace, files by the mount namespace.

Pairs are numbers on (x86_64, aarch64), from the kernel's asm/unistd_64.h and asm-generic/unistd.h;
None where there is no such call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

Numbers = tuple[int | None, int | None]


class Condition(NamedTuple):
    """A call that is refused where (argument `test` operand) is `refused_if`."""

    numbers: Numbers
    argument: int
    test: int
    operand: int
    refused_if: bool


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x10000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_NOT_STREAM = 0xE  # bits of every socket type but SOCK_STREAM

REFUSED: tuple[Numbers, ...] = (
    *((57, None), (58, None)),  # fork, vfork
    *((62, 129), (200, 130), (234, 131)),  # kill, tkill, tgkill
    *((129, 138), (297, 240)),  # rt_sigqueueinfo, rt_tgsigqueueinfo
    *((424, 424), (434, 434), (438, 438)),  # pidfd_send_signal, pidfd_open, pidfd_getfd
    *((101, 117), (310, 270), (311, 271), (312, 272)),  # ptrace, process_vm_readv, _writev, kcmp
    *((141, 140), (251, 30), (203, 122)),  # setpriority, ioprio_set, sched_setaffinity: of others
    *((144, 119), (142, 118), (314, 274)),  # sched_setscheduler, _setparam, _setattr: likewise
    *((256, 238), (279, 239), (440, 440)),  # migrate_pages, move_pages, process_madvise: likewise
    *((41, 198), (425, 425)),  # socket, io_uring_setup
    *((319, 279), (447, 447)),  # memfd_create, memfd_secret: outside the limit of address space
    *((165, 40), (166, 39), (155, 41), (428, 428), (429, 429), (430, 430), (442, 442)),  # mounts
    *((272, 97), (308, 268)),  # unshare, setns
    *((29, 194), (64, 190), (68, 186), (240, 180)),  # shmget, semget, msgget, mq_open: they stay
    *((248, 217), (249, 218), (250, 219)),  # add_key, request_key, keyctl: likewise
    *((321, 280), (298, 241), (323, 282)),  # bpf, perf_event_open, userfaultfd
)
_FCNTL, _IOCTL = (72, 25), (16, 29)
CONDITIONS = (
    Condition((56, 220), 0, _ANY_BIT, _CLONE_THREAD, refused_if=False),  # clone: threads alone
    Condition((302, 261), 0, _EQUAL, 0, refused_if=False),  # prlimit64: its own limits alone
    *(Condition(_FCNTL, 1, _EQUAL, n, True) for n in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
    *(Condition(_IOCTL, 1, _EQUAL, n, True) for n in (_FIOSETOWN, _SIOCSPGRP)),
    # socketpair: a datagram socket could be turned to another address; asyncio needs streams
    Condition((53, 199), 1, _ANY_BIT, _NOT_STREAM, refused_if=True),
)
NOT_THERE: tuple[Numbers, ...] = ((435, 435),)
"""clone3: its flags lie in memory, out of a filter's sight. libc falls back to clone on ENOSYS."""


def assemble(
    machine: str,
    refused: tuple[Numbers, ...] = REFUSED,
    conditions: tuple[Condition, ...] = CONDITIONS,
) -> bytes:
    """The filter as an array of struct sock_filter; empty if there is no table for `machine`."""
    if machine not in _AUDIT_ARCH:
        return b""
    rules = _rules(machine, refused, conditions)
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)


def _rules(
    machine: str, refused: tuple[Numbers, ...], conditions: tuple[Condition, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """(operation, rules to skip if so, if not, operand). What _LOAD loaded is what is tested."""
    column = list(_AUDIT_ARCH).index(machine)
    yield _LOAD, 0, 0, _ARCH_AT
    yield _EQUAL, 1, 0, _AUDIT_ARCH[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    yield _AT_LEAST, 0, 1, _X32_BIT
    yield _RETURN, 0, 0, _KILL
    for calls, why in ((refused, _EPERM), (NOT_THERE, _ENOSYS)):
        for numbers in calls:
            if (number := numbers[column]) is not None:
                yield _EQUAL, 0, 1, number
                yield _RETURN, 0, 0, _REFUSE | why
    for numbers, argument, test, operand, refused_if in conditions:
        if (number := numbers[column]) is not None:
            yield _EQUAL, 0, 4, number
            yield _LOAD, 0, 0, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES
            yield (test, 0, 1, operand) if refused_if else (test, 1, 0, operand)
            yield _RETURN, 0, 0, _REFUSE | _EPERM
            yield _LOAD, 0, 0, _NUMBER_AT
    yield _RETURN, 0, 0, _ALLOW
