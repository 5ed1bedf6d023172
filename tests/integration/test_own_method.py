"""The example of docs/guides/method.md, a method in a configuration file: trained, evaluated, resumed, compared, exported.

Its task and reward are functions of modules beside that file, which evaluations and exports find in another folder and without
the path of the training.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import methods

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/method.md").read_text()
DATA_GUIDE = (ROOT / "docs/guides/data.md").read_text()
OWN = ("--config.task=my_tasks:sums(top=10)", "--config.rewards=isolated(target='my_rewards:score', workers=1)")
SMALL = """
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 16, 1, 2, 24
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 1, 2, 2, 4
    c.eval.every, c.eval.problems, c.checkpoint.every, c.lora.rank = 1, 2, 1, 2
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The configuration file of the guide, with a tiny model."""
    example = re.search(r"```python\n(from jaxrl_llm import masked.*?)```", GUIDE, re.DOTALL)[1]
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(example.replace("    return c\n", SMALL.lstrip("\n") + "    return c\n"))
    (file.parent / "my_tasks.py").write_text(re.search(r"```python\n# my_tasks.py\n(.*?)```", DATA_GUIDE, re.DOTALL)[1])
    (file.parent / "my_rewards.py").write_text("def score(completion, answer, problem):\n    return 0.5\n")
    return file


def script(name, *arguments, cwd=ROOT, path=()):
    """A script of experiments in a process of its own; modules are found in the folders `path`, too."""
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, (ROOT, *path)))}
    done = subprocess.run([sys.executable, str(ROOT / "experiments" / name), cache, *map(str, arguments)], cwd=cwd,
                          capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def run(mine, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "mine"
    script("train.py", f"--config={mine}", f"--workdir={workdir}", *OWN, path=[mine.parent])
    return workdir


@pytest.mark.slow
def test_a_method_of_a_configuration_file_is_trained_evaluated_exported_and_resumed(mine, run, tmp_path):
    modules = [{"module": name, "file": str(mine.parent / f"{name}.py")} for name in ("my_rewards", "my_tasks")]
    assert json.loads((run / "environment.json").read_text())["starts"][0]["code"] == [str(mine), *modules]
    done = script("evaluate.py", f"--workdir={run}", "--problems=2", cwd=tmp_path)
    assert "best_of_group" not in methods.METHODS and "UserWarning" not in done.stderr and "WARNING" not in done.stderr
    script("export.py", f"--workdir={run}", "--step=1", f"--out={run / 'exported'}", cwd=tmp_path)
    script("train.py", f"--config={mine}", f"--workdir={run}", "--resume", "--config.steps=2", *OWN, path=[mine.parent])
    assert (run / "checkpoints/2").is_dir()


@pytest.mark.slow
def test_a_method_of_a_configuration_file_is_compared(mine, tmp_path):
    script("compare.py", f"--config={mine}", "--methods=best_of_group", "--seeds=0", "--budget=flops=1e3", f"--out={tmp_path}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["methods"]) == ["best_of_group"]
