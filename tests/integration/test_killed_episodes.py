"""Runs that are killed in the middle of an episode, after some of its turns, and resumed: the same run, bit for bit."""
import os
import subprocess
import sys
from pathlib import Path

import chatter
import pytest
import run_files

from jaxrl_llm.runs import loop

ROOT = Path(__file__).parents[2]
CHANGES = {"steps": 4, "eval.every": 4, "samples_every": 2}
KINDS = {"threads": "replayable=False", "processes": "replayable=True"}


def start(workdir: Path, environment: str) -> subprocess.CompletedProcess:
    changes = {**CHANGES, "environment": environment}
    return subprocess.run(
        [sys.executable, ROOT / "experiments" / "train.py", f"--config={chatter.__file__}", f"--workdir={workdir}",
         *(f"--config.{key}={value}" for key, value in changes.items()),
         f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{Path(chatter.__file__).parent}"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_two_turns_a_resumed_run_is_the_same(kind, tmp_path):
    run, whole, mark = tmp_path / "killed", tmp_path / "whole", tmp_path / "killed_at"
    mortal_one = f"mortal:letters(mark='{mark}', {KINDS[kind]})"
    killed = start(run, mortal_one)
    assert killed.returncode == -9 and mark.read_text() == "2", killed.stderr[-3000:]  # after two of three turns
    before = [line["step"] for line in run_files.lines(run)]
    assert before == [0, 1]  # it died in its second step
    config = chatter.get_config(**CHANGES, environment=mortal_one)
    loop.train(config, run, resume=True)  # the mark is there, so the run is not killed again
    loop.train(config, whole)
    run_files.assert_same(run_files.saved(run, config), run_files.saved(whole, config))
    lines = [[run_files.repeatable(line) for line in run_files.lines(folder)] for folder in (run, whole)]
    assert lines[0] == lines[1] and len(lines[0]) == CHANGES["steps"] + 1
    samples = [sorted(folder.glob("samples/*.jsonl")) for folder in (run, whole)]
    assert [one.read_text() for one in samples[0]] == [one.read_text() for one in samples[1]]
