"""The inside of a code run: limits first, then the untrusted program. Started as a script, one process for each test.

This bounds time, memory and output; it is no security boundary: the program can read files and open connections as the
user that runs it. Where completions are not trusted, run the training job in a container without network.
"""

import json
import resource
import sys
from typing import Any

COMPILE_ERROR = 90  # exit code


def limit(seconds: int, memory_mb: int) -> None:
    """CPU seconds, address space, 4 MiB a file, 64 open files, no core dumps, no new processes (unless run by root)."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def main(job_path: str) -> None:
    """Run the program of the job; with a function named, call it and write its value as JSON to the result file."""
    with open(job_path) as file:
        job = json.load(file)
    limit(job["seconds"], job["memory_mb"])
    try:
        compiled = compile(job["program"], "<completion>", "exec")
    except (SyntaxError, ValueError):
        sys.exit(COMPILE_ERROR)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compiled, names)
    if job["function"]:
        value = names[job["function"]](*job["args"])
        with open("result.json", "w") as file:
            json.dump(value, file)


if __name__ == "__main__":
    main(sys.argv[1])
