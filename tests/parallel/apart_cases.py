"""Runs `apart_runs` in one of two processes.

  python apart_cases.py FOLDER '{"NAME": {"KEY": VALUE}}' PORT PROCESS
"""
import json
import pickle
import sys
from pathlib import Path

import apart_runs

from jaxrl_llm.parallel import runtime

if __name__ == "__main__":
    folder, cases, port, process = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    apart_runs.register()
    with runtime.job(f"127.0.0.1:{port}", 2, process):
        for name, changes in cases.items():
            result = apart_runs.forests(name, **changes)
            (folder / f"{name}-{process}").write_bytes(pickle.dumps(result))
            print(name, flush=True)
        print(json.dumps(apart_runs.refusals(process)), flush=True)
