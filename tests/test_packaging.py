"""What `pip install .` ships: every folder with code, and a wheel that works where no checkout is."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
# Run with the installed package alone; prints what was found.
USE = """
import json, sys
from importlib import metadata
from pathlib import Path

import jaxrl_llm
from jaxrl_llm.show.page import write_page
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.training.config import default_config
from jaxrl_llm.training.loop import train

c = default_config()
c.task, c.rewards = "arithmetic(level=digit)", "format(pattern='(?s).*[a-z].*')"
c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 16, 1, 2, 16
c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens, c.eval.problems = 1, 2, 2, 3, 2
after = train(c, "run")["after"]
write_page(read_runs(["run"]), Path("page.html"))
print()
print(json.dumps([jaxrl_llm.__file__, metadata.version("jaxrl_llm"), after.accuracy.mean]))
"""


def test_every_folder_with_code_is_a_package_that_is_installed():
    shipped = set(find_packages(str(ROOT), include=["jaxrl_llm", "jaxrl_llm.*"]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxrl_llm").rglob("*.py")}
    assert len(folders) > 10
    assert {".".join(folder.parts) for folder in folders} == shipped


@pytest.mark.slow
def test_a_wheel_works_where_no_checkout_is(tmp_path):
    """Built from a copy of what it needs; then nothing else of the project is on the path."""
    source, target, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    source.mkdir(), elsewhere.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "jaxrl_llm", source / "jaxrl_llm", ignore=shutil.ignore_patterns("__pycache__"))
    call("-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={source}", ".", cwd=source)
    [wheel] = source.glob("jaxrl_llm-*.whl")
    call("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", f"--target={target}", str(wheel), cwd=source)
    modules = {path.relative_to(ROOT) for path in (ROOT / "jaxrl_llm").rglob("*.py")}
    assert modules == {path.relative_to(target) for path in (target / "jaxrl_llm").rglob("*.py")}

    file, version, accuracy = json.loads(call("-c", USE, cwd=elsewhere, PYTHONPATH=str(target)).splitlines()[-1])
    assert Path(file) == target / "jaxrl_llm" / "__init__.py" and version == "0.1.0" and 0 <= accuracy <= 1
    assert [json.loads(line)["step"] for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    assert (elsewhere / "page.html").stat().st_size > 20_000

    command = str(target / "bin" / "jaxrl_llm_methods")
    assert " grpo  " in call(command, cwd=elsewhere, PYTHONPATH=str(target))
    call(command, "--write=methods.md", cwd=elsewhere, PYTHONPATH=str(target))
    assert (elsewhere / "methods.md").read_text() == (ROOT / "docs" / "methods.md").read_text()


def call(*arguments: str, cwd: Path, **environment: str) -> str:
    """What Python prints when it is called so in `cwd`; it must end well."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
