"""Runs in two processes with two devices each: folders apart, checkpoints damaged where only one of them reads, barriers.

  python restore_cases.py FOLDER PORT PROCESS
"""
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import parallel
from jaxrl_llm.parallel import runtime
from jaxrl_llm.store import lock
from jaxrl_llm.store.checkpoints import Checkpoints


def state_of(mesh, step: int):
    """A tensor in four pieces, of which each process has two, and one that all have whole."""
    pieces = np.random.default_rng(step).standard_normal((64, 32)).astype(np.float32)
    return {"pieces": parallel.put(pieces, NamedSharding(mesh, PartitionSpec("fsdp"))),
            "whole": parallel.put(np.float32(step), NamedSharding(mesh, PartitionSpec()))}


def cut_short(folder: Path, writer: int) -> None:
    """Halves the data files that one process wrote, which hold the pieces that it will read."""
    files = [path for path in (folder / "state" / f"ocdbt.process_{writer}" / "d").iterdir() if path.stat().st_size > 1000]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def damaged(folder: Path, mesh) -> dict:
    """Step 3 is cut short where process 1 reads, step 2 where process 0 does: both must go back to step 1, together."""
    with Checkpoints(folder, keep=5) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(mesh, step), host=f"of {step}")
    if parallel.is_primary():
        cut_short(folder / "3", 1)
        cut_short(folder / "2", 0)
    parallel.barrier("damaged")
    wanted = state_of(mesh, 1)
    with Checkpoints(folder, keep=5) as checkpoints:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = checkpoints.restore(state_of(mesh, 0))
        same = [bool((np.asarray(a.data) == np.asarray(b.data)).all()) for name in wanted
                for a, b in zip(value.state[name].addressable_shards, wanted[name].addressable_shards)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save(2, state_of(mesh, 2), host="again")  # the run continues
        again = checkpoints.restore(state_of(mesh, 0))
        parallel.barrier("read")
        if parallel.is_primary():
            for step in (1, 2):
                cut_short(folder / str(step), 1)
        parallel.barrier("all damaged")
        try:
            checkpoints.restore(state_of(mesh, 0))
            refusal = ""
        except OSError as error:
            refusal = str(error)
    return {"step": value.step, "host": value.host, "skipped": value.skipped, "same": same, "again": [again.step, again.host],
            "warnings": [str(one.message) for one in caught if "restored step" in str(one.message)], "refusal": refusal}


def apart(folder: Path, process: int) -> str:
    """The error of a process with another run folder, as when each host has its own disk."""
    lock.PATIENCE = 0.3
    with lock.locked(folder):
        parallel.barrier("both are in")
    try:
        with lock.locked(folder.with_name(f"own{process}")):
            return ""
    except ValueError as error:
        return str(error)


def main():
    folder, port, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with runtime.job(f"127.0.0.1:{port}", 2, process):
        mesh = parallel.make_mesh(fsdp=4)
        value = {"apart": apart(folder.with_name("run"), process)} | damaged(folder, mesh)
        print(json.dumps(value), flush=True)
        runtime.BARRIER_SECONDS = 2
        parallel.barrier("all are here")
        parallel.barrier("all are here")  # the same name again
        if process == 1:  # hangs, alive and with a heart that beats
            time.sleep(60)
        began = time.monotonic()
        try:
            parallel.barrier("the end of the world")
        finally:
            print(f"waited {time.monotonic() - began < 30}", flush=True)


if __name__ == "__main__":
    main()
