"""Runs a command as a user without rights, who can read the interpreter and this checkout in any place.

`python as_user.py COMMAND...`, as root. In a mount namespace of its own, empty folders cover the folders that only root may
enter; they contain only the needed files.
"""
import os
import pathlib
import subprocess
import sys

USER = 12345
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def closed_ancestor(path: pathlib.Path) -> pathlib.Path | None:
    """The topmost folder above the path that others may not enter."""
    return next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)


def open_up(paths: list[pathlib.Path]) -> None:
    hidden = {path: closed_ancestor(path) for path in paths}
    hidden = {path: ancestor for path, ancestor in hidden.items() if ancestor is not None}
    def mount(*words):
        return subprocess.run(["mount", *map(str, words)], check=True)
    mount("-t", "tmpfs", "none", "/mnt")
    for number, path in enumerate(hidden):
        (pathlib.Path("/mnt") / str(number)).mkdir()
        mount("--bind", path, f"/mnt/{number}")
    for ancestor in set(hidden.values()):
        mount("-t", "tmpfs", "-o", "mode=755", "none", ancestor)
    for number, path in enumerate(hidden):
        path.mkdir(parents=True, exist_ok=True)
        mount("--bind", f"/mnt/{number}", path)


if __name__ == "__main__":
    if os.environ.get("JAXRL_LLM_OPENED") != "yes":
        os.environ["JAXRL_LLM_OPENED"] = "yes"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    open_up([pathlib.Path(path).resolve() for path in (sys.base_prefix, sys.prefix, CHECKOUT)])
    os.environ["HOME"] = "/tmp"
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.chdir(CHECKOUT)
    os.execvp(sys.argv[1], sys.argv[1:])
