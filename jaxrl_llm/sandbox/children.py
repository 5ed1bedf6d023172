"""The children of a single-threaded process, as the kernel lists them."""
import os


def children(pid: int) -> list[int]:
    """The process ids of the children of a single-threaded process; none once it has ended, or without /proc."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # it is over, or a kernel without this file
        others = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
        return [other for other in others if _parent(other) == pid]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it is over
        return None
