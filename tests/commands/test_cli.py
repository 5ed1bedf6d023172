"""The command `jaxrl_llm`: its commands exist, options and exit codes are those of the scripts, configurations go by name."""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import methods
from jaxrl_llm.commands import cli, command_line, search
from jaxrl_llm.setup.config import default_config

ROOT = Path(__file__).parents[2]


def jaxrl_llm(*arguments, cwd):
    return subprocess.run([sys.executable, "-m", "jaxrl_llm.commands.cli", *arguments], cwd=cwd, capture_output=True, text=True,
                          timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_every_command_has_its_module():
    assert list(cli.COMMANDS) == "train evaluate compare export serve show diagnose plan methods search audit replay".split()
    for module, what in cli.COMMANDS.values():
        assert importlib.util.find_spec(module) and f"{what}\n" in cli.usage() + "\n"


def test_help_says_what_can_be_set(tmp_path):
    shown = jaxrl_llm("train", "--help", cwd=tmp_path)
    assert shown.returncode == 0 and not shown.stderr and shown.stdout.startswith("Trains a language model")
    for flag in ("--workdir", "--[no]resume", "--compilation_cache"):
        assert f"  {flag}: " in shown.stdout
    config = default_config()
    for name in config:
        names = [f"{name}.{key}" for key in config[name]] if hasattr(config[name], "keys") else [name]
        assert all(f"    {key} (" in shown.stdout for key in names), names
    assert re.search(r"^ *jaxrl_llm train --config=", shown.stdout, re.MULTILINE) and "python experiments/" not in shown.stdout
    assert "keys of --config" not in jaxrl_llm("show", "--help", cwd=tmp_path).stdout  # has no configuration


def test_usage_and_an_unknown_command(tmp_path):
    assert jaxrl_llm(cwd=tmp_path).stdout == jaxrl_llm("--help", cwd=tmp_path).stdout == cli.usage() + "\n"
    wrong = jaxrl_llm("trian", "--workdir=x", cwd=tmp_path)
    assert wrong.returncode == 2 and not wrong.stdout and "Did you mean 'train'?" in wrong.stderr
    of_others = jaxrl_llm("show", "--workdir=x", cwd=tmp_path)  # which takes folders without a flag
    assert of_others.returncode == 1 and "\n  jaxrl_llm show runs/first [runs/second ...]" in of_others.stderr


@pytest.mark.slow
def test_arguments_that_are_no_flags_are_refused(tmp_path):
    """A value without quotes is cut at its first space, and a switch takes no word; `show` and `diagnose` take words."""
    cut = jaxrl_llm("plan", "--model=qwen3_0.6b", "--devices=h100", "--config.objective=clip_high=0.28,", "dual_clip=3",
                    cwd=tmp_path)
    assert cut.returncode == 1 and not cut.stdout and "Traceback" not in cut.stderr
    assert "not a flag: 'dual_clip=3'; this command takes flags alone" in cut.stderr and "in quotes" in cut.stderr
    switch = jaxrl_llm("evaluate", "--workdir=x", "--best", "false", cwd=tmp_path)
    assert switch.returncode == 1 and "not a flag: 'false'" in switch.stderr
    for command in ("show", "diagnose"):
        taken = jaxrl_llm(command, "nowhere", "elsewhere", cwd=tmp_path)
        assert taken.returncode == 1 and "nowhere" in taken.stderr and "not a flag" not in taken.stderr


@pytest.mark.slow
def test_search_finds_what_has_a_name_by_words(tmp_path):
    result = search.matching(["entropy"])
    assert {"aepo_clip", "t1"} <= {entry.name for entry in result if entry.kind == "methods"}
    paper, one = methods.get("grpo").arxiv[0], search.matching(["learning", "peak"])
    assert "grpo" in {entry.name for entry in search.matching([paper])}
    assert one[0][:3] == ("keys", "optimizer.learning_rate", "--config.optimizer.learning_rate=0.0001")
    everything = list(search.entries())
    kinds = "methods numbers keys recipes tasks rewards environments optimizers"
    assert {entry.kind for entry in everything} == {*kinds.split()}
    assert all(entry.about for entry in everything if entry.kind != "keys")
    assert [entry.name for entry in search.matching(["GSM8K"])][:2] == ["gsm8k", "distill"]  # the name comes first
    nothing = jaxrl_llm("search", "gropo", cwd=tmp_path)
    assert nothing.returncode == 1 and "nothing has 'gropo'; near: " in nothing.stderr and "grpo" in nothing.stderr


def test_help_lists_a_config_file_without_a_docstring(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    pass\n")  # as in the guide of methods
    (tmp_path / "other.py").write_text('"""A title.\n\nMore."""\n')
    assert command_line.recipe_titles(tmp_path) == {"mine": "", "other": "A title."}


@pytest.mark.slow
def test_errors_and_exit_codes_are_those_of_the_script(tmp_path):
    missing = jaxrl_llm("show", "nowhere", cwd=tmp_path)
    assert missing.returncode == 1 and "nowhere" in missing.stderr and "Traceback" not in missing.stderr
    assert jaxrl_llm("audit", cwd=tmp_path).returncode == 2  # argparse: no environment is named


def test_configurations_go_by_name():
    path = command_line.shipped_config("--config=arithmetic:smollm2")
    assert path.endswith("configs/arithmetic.py:smollm2") and Path(path[9:].partition(":")[0]).is_file()
    assert command_line.shipped_config("--config=plan").endswith("configs/plan.py")
    for argument in ("--config=configs/arithmetic.py", "--config=mine.py:a", "--config.method=grpo", "arithmetic"):
        assert command_line.shipped_config(argument) == argument
    with pytest.raises(ValueError, match="Unknown config file 'arithmetics'. Did you mean 'arithmetic'"):
        command_line.shipped_config("--config=arithmetics")
