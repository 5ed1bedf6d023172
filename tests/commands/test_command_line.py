"""Scripts restart once with jemalloc where it is installed and useful, and their own children do not."""
import ctypes.util
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.commands import command_line
from jaxrl_llm.setup import keys

SCRIPT = """
import os, sys
from jaxrl_llm.commands import command_line

def main():
    inherited = [name for name in ("LD_PRELOAD", "MALLOC_CONF") if name in os.environ]
    print("jemalloc" in open("/proc/self/maps").read(), os.getpid(), sys.argv[1:], inherited)

if __name__ == "__main__":
    command_line.run(main)
"""


class Started(Exception):
    """Instead of the program that execve would start."""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Linux machine with jemalloc and no accelerator; what is started is raised."""
    def start(path, arguments, environment):
        raise Started(path, arguments, environment)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("LD_PRELOAD", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_same_program_starts_again_with_jemalloc_once(machine):
    with pytest.raises(Started) as started:
        command_line.use_jemalloc()
    path, arguments, environment = started.value.args
    assert path == arguments[0] == sys.executable and arguments[1:] == sys.orig_argv[1:]
    assert environment["LD_PRELOAD"] == "libjemalloc.so.2"
    added = {name: environment[name] for name in environment.keys() - os.environ.keys()}
    for name, value in added.items():
        machine.setenv(name, value)
    command_line.use_jemalloc()
    assert not added.keys() & os.environ.keys()


def test_jemalloc_of_the_environment_is_used_where_the_system_has_none(machine, tmp_path):
    machine.setattr(ctypes.util, "find_library", lambda name: None)
    library = tmp_path / "lib" / "libjemalloc.so.2"
    library.parent.mkdir()
    library.touch()
    with pytest.raises(Started) as started:
        command_line.use_jemalloc()
    assert started.value.args[2]["LD_PRELOAD"] == str(library)


def test_settings_without_the_library_are_not_taken_for_a_second_start(machine):
    machine.setenv("MALLOC_CONF", command_line._ALLOCATOR_SETTINGS)
    with pytest.raises(Started):
        command_line.use_jemalloc()


@pytest.mark.parametrize("reason", ["preloaded", "off", "accelerator", "absent", "macos"])
def test_programs_are_left_alone(machine, reason):
    match reason:
        case "preloaded":
            machine.setenv("LD_PRELOAD", "libtcmalloc.so")
        case "off":
            machine.setenv("LD_PRELOAD", "")
        case "accelerator":
            machine.setattr(importlib.util, "find_spec", lambda name: name if name == "jax_plugins" else None)
        case "absent":
            machine.setattr(ctypes.util, "find_library", lambda name: None)
        case "macos":
            machine.setattr(sys, "platform", "darwin")
    before = dict(os.environ)
    command_line.use_jemalloc()
    assert dict(os.environ) == before


def test_jemalloc_is_fetched_into_virtual_environments_only(tmp_path):
    (tmp_path / "python").symlink_to(f"{sys.base_prefix}/bin/python3")
    script = Path(__file__).parents[2] / "scripts" / "get_jemalloc.sh"
    done = subprocess.run(["bash", str(script)], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "belongs to no virtual environment; activate one" in done.stderr, done.stderr


@pytest.mark.skipif(not command_line.jemalloc() or importlib.util.find_spec("jax_plugins") is not None,
                    reason="needs jemalloc and no accelerator")
def test_a_script_runs_under_jemalloc(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "MALLOC_CONF")}
    start = functools.partial(subprocess.Popen, [sys.executable, str(script), "--compilation_cache="], text=True,
                              stdout=subprocess.PIPE)
    job, plain = start(env=environment), start(env=environment | {"LD_PRELOAD": ""})
    assert job.communicate(timeout=120)[0] == f"True {job.pid} ['--compilation_cache='] []\n"
    assert plain.communicate(timeout=120)[0].startswith("False")


def test_keys_that_there_are_not_are_answered_with_the_nearest():
    near = keys.nearest_keys
    assert "optimizer.learning_rate" in near("lr") and near("temperature")[0] == "sampling.temperature"
    assert "sampling.group" in near("groups") and near("optimiser.learning_rate")[0] == "optimizer.learning_rate"
    assert near("sampling.group") == [] and near("zzzzzz") == []


@pytest.mark.slow
@pytest.mark.parametrize("config, message", (
    ("gsm8k:qwen2.5_7b-cpu", "ValueError: qwen2.5_7b does not fit cpu, even where adapters alone are trained"),
    ("gsm8k:qwen2.5_7b-h100-9", "ValueError: Unknown machine of a recipe 'h100-9'. Did you mean 'h100-8'?"),
))
def test_what_a_configuration_file_refuses_is_a_message_without_a_stack(config, message):
    plan = [sys.executable, "-m", "jaxrl_llm.experiments.plan", "--model=qwen3_0.6b", "--devices=h100-8", f"--config={config}"]
    done = subprocess.run(plan, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(message), done.stderr
    assert "Traceback" not in done.stderr and "whilst parsing" not in done.stderr


@pytest.mark.slow
def test_errors_in_the_code_of_a_configuration_file_keep_their_stack(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def get_config():\n    return 1 + 'a'  # here\n")
    plan = [sys.executable, "-m", "jaxrl_llm.experiments.plan", "--model=qwen3_0.6b", "--devices=h100-8", f"--config={file}"]
    done = subprocess.run(plan, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "return 1 + 'a'  # here" in done.stderr and "whilst parsing" not in done.stderr
