"""The example of docs/guides/method.md, a method in a configuration file, by the five commands of the page.

Its task and reward are functions of modules beside that file, which evaluations and exports find in another folder and without
the path of the training.
"""
import json
import os
import re
import shlex
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
    c.eval.every, c.eval.problems, c.checkpoint.every, c.lora.rank, c.warmup.steps = 1, 2, 1, 2, 2
"""
FEW = {"--config.steps=500": "--config.steps=2", "--budget=steps=100": "--budget=steps=1"}


@pytest.fixture
def mine(tmp_path_factory):
    """The configuration file of the guide, with a tiny model."""
    example = re.search(r"```python\n(from jaxrl_llm.maths import masked.*?)```", GUIDE, re.DOTALL)[1]
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(example.replace("    return c\n", SMALL.lstrip("\n") + "    return c\n"))
    (file.parent / "my_tasks.py").write_text(re.search(r"```python\n# my_tasks.py\n(.*?)```", DATA_GUIDE, re.DOTALL)[1])
    (file.parent / "my_rewards.py").write_text("def score(completion, answer, problem):\n    return 0.5\n")
    return file


def lines_of_the_page(places):
    """(script, arguments) of the commands below the example, with other files and folders: `{that of the page: the other}`."""
    block = re.search(r"```bash\n(python experiments/train.py --config=configs/mine.py.*?)```", GUIDE, re.DOTALL)[1]
    for name, place in places.items():
        block = block.replace(f"={name}", f"={place}")
    words = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    assert all(line[0] == "python" for line in words)
    return [(Path(line[1]).name, [FEW.get(word, word) for word in line[2:]]) for line in words]


def test_the_page_has_a_command_for_each_of_five_purposes():
    lines = lines_of_the_page({})
    assert [name for name, _ in lines] == ["train.py", "evaluate.py", "compare.py", "export.py", "train.py"]
    assert "--resume" in lines[-1][1] and {*FEW.values()} <= {word for _, given in lines for word in given}


def script(name, *arguments, cwd=ROOT, path=()):
    """A script of experiments in a process of its own; modules are found in the folders `path`, too."""
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, (ROOT, *path)))}
    done = subprocess.run([sys.executable, str(ROOT / "experiments" / name), cache, *map(str, arguments)], cwd=cwd,
                          capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_a_method_of_a_configuration_file_by_the_commands_of_the_page(mine, tmp_path):
    workdir = tmp_path / "mine"
    lines = lines_of_the_page({"configs/mine.py": mine, "runs/mine": workdir, "runs/compared": tmp_path / "compared",
                               "models/mine": tmp_path / "model"})
    (train, first), (evaluate, measured), compare, (export, written), (_, resumed) = lines
    script(train, *first, *OWN, path=[mine.parent])
    modules = [{"module": name, "file": str(mine.parent / f"{name}.py")} for name in ("my_rewards", "my_tasks")]
    assert json.loads((workdir / "environment.json").read_text())["starts"][0]["code"] == [str(mine), *modules]
    done = script(evaluate, *measured, "--problems=2", cwd=tmp_path)
    assert "rare_success" not in methods.METHODS and "UserWarning" not in done.stderr and "WARNING" not in done.stderr
    assert "cannot be imported" not in script(compare[0], *compare[1]).stderr
    run = tmp_path / "compared/runs/rare_success/seed0"
    assert "cannot be imported" not in script(evaluate, f"--workdir={run}", "--problems=2", cwd=tmp_path).stderr
    report = json.loads((tmp_path / "compared/report.json").read_text())
    assert list(report["methods"]) == ["grpo", "rare_success"]
    script(export, *written, cwd=tmp_path)
    assert (tmp_path / "model/config.json").is_file()
    script(train, *resumed, *OWN, path=[mine.parent])
    assert (workdir / "checkpoints/2").is_dir()
