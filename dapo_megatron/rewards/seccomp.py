"""Seccomp filter for `bwrap --seccomp`: the system calls that an untrusted program may make.

This is an allow-list: new calls of newer kernels are refused until they are added here. A refused
call fails with ENOSYS, as on a kernel without it, so that the C library falls back where it can. A
program gets files, memory, threads, time and signals within its namespaces. It gets no new
processes, no sockets except connected pairs, no file locks (the interpreter's files are shared with
the machine), no asynchronous I/O contexts and no inotify watches (limited per user or machine).
Pairs neither pass descriptors (sendmsg) nor get larger buffers (setsockopt), because both hold
kernel memory that no limit of the program counts.

libseccomp translates names to numbers for the architecture: seccomp_rule_add(3).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import termios
from functools import cache
from typing import Final, NamedTuple

_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.ENOSYS
_KILL_PROCESS: Final = 0x80000000
_ACTION_FOR_OTHER_ARCHITECTURES: Final = 2  # SCMP_FLTATR_ACT_BADARCH
_MASKED_EQUAL: Final = 7  # SCMP_CMP_MASKED_EQ

_CLONE_THREAD = 0x10000
_SOCKET_TYPE_MASK = 0xF
_F_GETPIPE_SZ = 1032
_PR_SET_KEEPCAPS, _PR_SET_NAME, _PR_GET_NAME, _PR_CAPBSET_READ = 8, 15, 16, 23
_PR_SET_VMA = 0x53564D41

ALLOWED = (
    # reading and writing
    *("read", "readv", "pread64", "preadv", "preadv2", "write", "writev", "pwrite64", "pwritev"),
    *("pwritev2", "lseek", "_llseek", "close", "close_range", "dup", "dup2", "dup3", "pipe"),
    *("pipe2", "poll", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1"),
    *("epoll_ctl", "epoll_wait", "epoll_pwait", "epoll_pwait2", "eventfd2", "sendfile"),
    *("copy_file_range", "fsync", "fdatasync", "truncate", "ftruncate", "fallocate", "fadvise64"),
    "readahead",
    # files by name
    *("open", "openat", "openat2", "creat", "stat", "fstat", "lstat", "newfstatat", "statx"),
    *("access", "faccessat", "faccessat2", "statfs", "fstatfs", "readlink", "readlinkat"),
    *("getdents", "getdents64", "getcwd", "chdir", "fchdir", "mkdir", "mkdirat", "rmdir"),
    *("unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat", "symlink"),
    *("symlinkat", "chmod", "fchmod", "fchmodat", "fchmodat2", "umask", "utime", "utimes"),
    *("utimensat", "futimesat", "getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr"),
    "flistxattr",
    # memory
    *("mmap", "munmap", "mremap", "mprotect", "brk", "madvise", "mincore", "msync", "membarrier"),
    # threads
    *("futex", "futex_waitv", "set_robust_list", "get_robust_list", "set_tid_address", "gettid"),
    *("rseq", "arch_prctl", "sched_yield", "sched_getaffinity", "sched_getparam"),
    *("sched_getscheduler", "sched_get_priority_max", "sched_get_priority_min", "getcpu"),
    "getpriority",
    # ends
    *("execve", "execveat", "exit", "exit_group", "wait4", "waitid", "restart_syscall"),
    # signals and timers
    *("kill", "tkill", "tgkill", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn"),
    *("rt_sigtimedwait", "rt_sigsuspend", "rt_sigpending", "sigaltstack", "signalfd4", "pause"),
    *("alarm", "setitimer", "getitimer", "timer_create", "timer_settime", "timer_gettime"),
    *("timer_getoverrun", "timer_delete", "timerfd_create", "timerfd_settime", "timerfd_gettime"),
    # clocks
    *("clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time"),
    *("times", "getrusage", "sysinfo", "uname", "getrandom", "getrlimit"),
    # identity
    *("getpid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid"),
    *("getgroups", "getpgrp", "getpgid", "getsid", "setsid", "setresuid", "setresgid"),
    *("setgroups", "capget", "capset"),
    # pairs of sockets
    *("sendto", "recvfrom", "recvmsg", "shutdown", "getsockname", "getpeername", "getsockopt"),
)
"""Calls that are allowed with any arguments.

`kill` reaches only the PID namespace, which contains the program and bwrap's init. `setresuid` and
similar calls are for setpriv(1), which then drops the capabilities that they need."""


_LOWER_HALF = 0xFFFFFFFF


class Condition(NamedTuple):
    """A call that is allowed if (argument & mask) == value. The default mask selects 32 bits,
    because the kernel ignores the upper half of arguments such as `cmd` and `option`."""

    call: str
    argument: int
    value: int
    mask: int = _LOWER_HALF


CONDITIONS = (
    Condition("clone", 0, _CLONE_THREAD, mask=_CLONE_THREAD),
    Condition("prlimit64", 0, 0),  # only its own limits; the hard limits are set already
    # Stream pairs only (asyncio needs them): a datagram socket could connect to another address.
    Condition("socketpair", 1, socket.SOCK_STREAM, mask=_SOCKET_TYPE_MASK),
    *(
        Condition("fcntl", 1, command)
        for command in (
            *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD),
            *(fcntl.F_GETFL, fcntl.F_SETFL, _F_GETPIPE_SZ),
        )
    ),
    *(
        Condition("ioctl", 1, request)
        for request in (
            *(termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD),
            *(termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO),
        )
    ),
    *(
        Condition("prctl", 0, option)
        for option in (
            *(_PR_SET_KEEPCAPS, _PR_SET_NAME, _PR_GET_NAME, _PR_CAPBSET_READ, _PR_SET_VMA),
        )
    ),
)


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@cache
def filter_program() -> bytes:
    """Return the filter as a BPF program. Raises OSError without libseccomp."""
    library = _library()
    context = library.seccomp_init(_REFUSE)
    try:
        _check(library.seccomp_attr_set(context, _ACTION_FOR_OTHER_ARCHITECTURES, _KILL_PROCESS))
        for name in ALLOWED:
            _allow(library, context, name)
        for call, argument, value, mask in CONDITIONS:
            comparison = _Comparison(argument, _MASKED_EQUAL, mask, value)
            _allow(library, context, call, comparison)
        with open(os.memfd_create("filter"), "r+b") as file:
            _check(library.seccomp_export_bpf(context, file.fileno()))
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _allow(
    library: ctypes.CDLL, context: int, name: str, comparison: _Comparison | None = None
) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # not on this architecture, or unknown to this version of the library
        return
    comparisons = [] if comparison is None else [comparison]
    array = (_Comparison * len(comparisons))(*comparisons)
    _check(library.seccomp_rule_add_array(context, _ALLOW, number, len(comparisons), array))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.c_void_p,
    )
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    return library


def _check(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
