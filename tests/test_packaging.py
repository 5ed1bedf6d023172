"""The contents of `pip install .`: every folder with code, and a wheel that works without a checkout."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
# Runs with the installed package alone and prints its results.
USE = """
import json, sys
from importlib import metadata
from pathlib import Path

import jaxrl_llm
from jaxrl_llm.compare.launch import TRAIN
from jaxrl_llm.show.page import write_page
from jaxrl_llm.show.runs import read_runs

write_page(read_runs(["run"]), Path("page.html"))
assert TRAIN.is_file()
print()
print(json.dumps([jaxrl_llm.__file__, metadata.version("jaxrl_llm")]))
"""
SMALL = {"task": "arithmetic(level=digit)", "rewards": "format(pattern='(?s).*[a-z].*')", "model.hidden_size": 16,
         "model.num_layers": 1, "model.num_heads": 2, "model.mlp_size": 16, "steps": 1, "warmup.steps": 0,
         "prompts.per_step": 2, "sampling.group": 2, "sampling.max_tokens": 3, "eval.problems": 2}
LINKS = ("experiments", "configs")  # of jaxrl_llm, to folders beside it
BUILT_FROM = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def test_every_folder_with_code_is_a_package_that_is_installed():
    shipped = set(find_packages(str(ROOT), include=["jaxrl_llm", "jaxrl_llm.*"]))
    folders = {path.parent for path in modules()}
    assert len(folders) > 10 and Path("jaxrl_llm/experiments/value_parts") in folders
    assert {".".join(folder.parts) for folder in folders} == shipped


def test_an_archive_without_links_has_the_same_packages(tmp_path):
    """pip unpacks a link of a .zip archive as a file that holds its target."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "jaxrl_llm", source / "jaxrl_llm", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "jaxrl_llm" / name).unlink()
        (source / "jaxrl_llm" / name).write_text(f"../{name}")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    call("setup.py", "-q", "build", "-b", str(tmp_path / "build"), cwd=source)
    assert modules() == {path.relative_to(tmp_path / "build/lib") for path in (tmp_path / "build/lib").rglob("*.py")}


def modules() -> set[Path]:
    """Files of the installed package, relative to where it is installed: all but those that run beside other libraries."""
    linked = {Path("jaxrl_llm") / path.relative_to(ROOT) for name in LINKS for path in (ROOT / name).rglob("*.py")
              if "peers" not in path.parts}
    return linked | {path.relative_to(ROOT) for path in (ROOT / "jaxrl_llm").rglob("*.py")}


def test_links_of_the_description_lead_to_the_project_once_it_has_an_address(monkeypatch):
    text = (ROOT / "setup.py").read_text()
    made = text[text.index("def readme"):text.index("setup(\n")]
    monkeypatch.chdir(ROOT)
    for url in ("", "https://host/o/jaxrl_llm"):
        space = {"URL": url, "re": re}
        exec(made, space)
        described, read = space["readme"](), (ROOT / "README.md").read_text()
        if not url:
            assert described == read
            continue
        targets, plain = (re.findall(r"\]\(([^)\s]+)\)", page) for page in (described, read))
        assert len(targets) == len(plain) > 20 and all(re.match(r"https?://|#", target) for target in targets)
        assert f"![curves of a quickstart run]({url}/raw/main/docs/figures/quickstart.png)" in described
        assert f"({url}/blob/main/docs/README.md)" in described


@pytest.mark.slow
def test_a_wheel_works_where_no_checkout_is(tmp_path):
    """Built from a copy of what it needs; then nothing else of the project is on the path."""
    source, target, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    source.mkdir(), elsewhere.mkdir()
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    for name in ("jaxrl_llm", *LINKS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    call("-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={source}", ".", cwd=source)
    [wheel] = source.glob("jaxrl_llm-*.whl")
    call("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", f"--target={target}", str(wheel), cwd=source)
    assert modules() == {path.relative_to(target) for path in (target / "jaxrl_llm").rglob("*.py")}

    def jaxrl_llm(*arguments: str) -> str:
        return call(str(target / "bin" / "jaxrl_llm"), *arguments, cwd=elsewhere, PYTHONPATH=str(target))

    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    settings = [f"--config.{key}={value}" for key, value in SMALL.items()]
    assert "after training" in jaxrl_llm("train", cache, "--config=arithmetic", "--workdir=run", *settings)
    file, version = json.loads(call("-c", USE, cwd=elsewhere, PYTHONPATH=str(target)).splitlines()[-1])
    assert Path(file) == target / "jaxrl_llm" / "__init__.py" and version == "0.1.0"
    assert [json.loads(line)["step"] for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    assert (elsewhere / "page.html").stat().st_size > 20_000

    assert "step 1, temperature 1" in jaxrl_llm("evaluate", cache, "--workdir=run", "--problems=2")
    jaxrl_llm("export", cache, "--workdir=run", "--out=model")
    assert json.loads((elsewhere / "model" / "config.json").read_text())["hidden_size"] == 16
    assert "/run/page.html\n" in jaxrl_llm("show", "run") and (elsewhere / "run" / "page.html").stat().st_size > 20_000
    assert "aepo_clip" in jaxrl_llm("search", "entropy")
    plan = jaxrl_llm("plan", "--model=smollm2_135m", "--devices=h100-1", "--config.learner.micro_batches=8", cache)
    assert "64 prompts of 512" in plan
    jaxrl_llm("methods", "--write=methods.md")
    assert (elsewhere / "methods.md").read_text() == (ROOT / "docs" / "methods.md").read_text()


def call(*arguments: str, cwd: Path, **environment: str) -> str:
    """The output of Python with these arguments in `cwd`; it must succeed."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
