"""A seccomp filter as bytes: system calls that a program which only computes never needs fail with "not permitted".

Namespaces and Landlock limit what a program can reach; this list closes the remaining gaps: other programs' memory, sockets of
families without a namespace, kernel keys, nested namespaces, new processes.
"""
import platform
import struct

# System call -> (number on x86-64, number on arm64); None: the machine does not have it.
_NEVER = {
    # other processes, and the kernel's own interfaces
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60),
    "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "personality": (135, 92), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vhangup": (153, 58),
    # namespaces and mounts
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsmount": (432, 432), "fsconfig": (431, 431),
    "fspick": (433, 433), "unshare": (272, 97), "setns": (308, 268), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # connections; a pair of sockets, which event loops need, could send to those of others
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # messages and memory of all processes of the user
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    # memory that no limit of a process counts: pinned by pipes, held by sockets, attributes, rules and filters
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    "setsockopt": (54, 208), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # resources of which all processes of the machine or of the user share a number
    "io_setup": (206, 0), "timer_create": (222, 107), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "sync": (162, 81), "syncfs": (306, 267),
    # scheduling of others
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
}
# Where other processes of the same user can be seen (no process namespace): signals, and what Landlock does not rule.
_WITHOUT_NAMESPACES = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "getpgid": (121, 155), "getsid": (124, 156),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45), "flock": (73, 32),
}
# Refused with some values of an argument: (numbers, which argument, bits that are compared, values).
_WITH_VALUES = {
    "prctl": ((157, 167), 0, 0xFFFFFFFF, (1, 22)),  # PR_SET_PDEATHSIG, PR_SET_SECCOMP
    "fcntl": ((72, 25), 1, 0xFFFFFFFF, (8, 10, 15, 1024, 1026, 1031)),  # owners of signals, leases, notices, size of a pipe
    "ioctl": ((16, 29), 1, 0xFF00, (0x6600, 0x5800, 0x8900)),  # attributes of files, owners of signals
    "socketpair": ((53, 199), 1, 0xF, (2, 3, 5)),  # all but streams, whose two ends stay together
}
_FORK = {"fork": (57, None), "vfork": (58, None)}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_NEWER = 450  # first number that this list does not know; such calls do not exist for the program
_CLONE_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020080
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def supported() -> bool:
    """Whether the list has the system call numbers of this machine."""
    return platform.machine() in _MACHINES


def filter_of(processes: int, namespaces: bool) -> bytes:
    """The classic BPF program for `prctl(PR_SET_SECCOMP)`: an array of `struct sock_filter`.

    processes: 1 forbids new processes (threads are allowed). namespaces: whether the program sees only its own processes.
    Raises OSError on a machine whose system call numbers are not listed.
    """
    if not supported():
        raise OSError(f"no list of system calls for {platform.machine()}; there is one for {', '.join(_MACHINES)}")
    column, architecture = _MACHINES[platform.machine()]
    refused = _NEVER | ({} if namespaces else _WITHOUT_NAMESPACES) | (_FORK if processes == 1 else {})
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in sorted(numbers[column] for numbers in refused.values() if numbers[column] is not None):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for numbers, argument, bits, values in _WITH_VALUES.values():
        checks = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _EPERM))]
        program += [(_EQUAL, 0, len(checks) + 3, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument),
                    (_AND, 0, 0, bits), *checks, (_LOAD, 0, 0, _NUMBER)]
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)]  # its flags lie in memory; libc then uses clone
    program += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ENOSYS)]  # and so do the numbers of the x32 interface
    program += [(_EQUAL, 0, 3, _PRLIMIT[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM),
                (_LOAD, 0, 0, _NUMBER), (_EQUAL, 1, 0, _CLONE[column]), (_RETURN, 0, 0, _ALLOW),
                (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _EPERM)]
    if processes == 1:
        program += [(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _EPERM)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
