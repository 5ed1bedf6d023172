"""The table of `experiments/benchmark_engine.py`."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_table_says_what_each_sampler_compiles():
    options = ("--hidden=64", "--layers=1", "--slots=8", "--requests=16", "--limit=8", "--prompt=4", "--repeats=1")
    command = [sys.executable, "experiments/benchmark_engine.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    head, line, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in done.stdout.strip().splitlines())
    assert head[-2:] == ["scan compiles", "engine compiles"] and set(line) == {"---"} and len(rows) == 3
    for row in rows:
        assert len(row) == len(head) == len(line) and float(row[4]) > 0
    counts = [[int(re.fullmatch(r"(\d+) in \d+\.\d s", cell)[1]) for cell in row[-2:]] for row in rows]
    assert min(counts[0]) > 0 and all(sum(later) < sum(counts[0]) for later in counts[1:])
