"""System calls that a program in the sandbox may not make, as a BPF filter for `bwrap --seccomp`.

Namespaces hide the machine. The filter is for what namespaces and limits leave open: new processes
(each would get the whole memory limit again), kernel memory that no limit counts, and interfaces in
which the kernel's holes were found. A refused call fails with ENOSYS, as on a kernel without it.
Like Flatpak's, it is a list of what is refused.
"""

from __future__ import annotations

import errno
import platform
import struct

# Call -> number on x86-64 and on AArch64 (linux/asm/unistd.h); None if it does not exist there.
REFUSED = {
    # new processes, except threads (`clone` with CLONE_THREAD)
    "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    # memory that is not in the address space
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "setsockopt": (54, 208), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "io_setup": (206, 0),
    # sockets, except pairs (asyncio needs them)
    "socket": (41, 198),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsmount": (432, 432), "move_mount": (429, 429), "mount_setattr": (442, 442),
    # other interfaces of the kernel
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "personality": (135, 92), "modify_ldt": (154, None),
    "kexec_load": (246, 104), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
    "flock": (73, 32),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine -> column of REFUSED, AUDIT_ARCH of its system calls, number of `clone`."""

_LOAD, _TEST_BITS, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x45, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x80000000
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
"""Bit of the numbers of another set of calls on x86-64, which would pass by the list."""


def filter_program() -> bytes:
    """Return the filter as an array of struct sock_filter. Raises KeyError on other machines."""
    column, architecture, clone = _MACHINES[platform.machine()]
    numbers = [number for call in REFUSED.values() if (number := call[column]) is not None]
    # Each instruction: code, jump if true, jump if false, operand.
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    program += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_TEST_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
