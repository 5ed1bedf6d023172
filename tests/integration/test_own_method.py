"""The example of docs/guides/method.md, a method in a configuration file: trained, evaluated, resumed, compared, exported."""
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
    return file


def script(name, *arguments):
    """A script of experiments in a process of its own."""
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    done = subprocess.run([sys.executable, str(ROOT / "experiments" / name), cache, *map(str, arguments)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def run(mine, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "mine"
    script("train.py", f"--config={mine}", f"--workdir={workdir}")
    return workdir


@pytest.mark.slow
def test_a_method_of_a_configuration_file_is_trained_evaluated_exported_and_resumed(mine, run):
    assert json.loads((run / "environment.json").read_text())["starts"][0]["code"] == [str(mine)]
    done = script("evaluate.py", f"--workdir={run}", "--problems=2")
    assert "best_of_group" not in methods.METHODS and "UserWarning" not in done.stderr and "WARNING" not in done.stderr
    script("export.py", f"--workdir={run}", "--step=1", f"--out={run / 'exported'}")
    script("train.py", f"--config={mine}", f"--workdir={run}", "--resume", "--config.steps=2")
    assert (run / "checkpoints/2").is_dir()


@pytest.mark.slow
def test_a_method_of_a_configuration_file_is_compared(mine, tmp_path):
    script("compare.py", f"--config={mine}", "--methods=best_of_group", "--seeds=0", "--budget=flops=1e3", f"--out={tmp_path}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["methods"]) == ["best_of_group"]
