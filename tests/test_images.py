"""The Dockerfile and the launch files beside it, checked without Docker, a cloud or a cluster."""
import ast
import fnmatch
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import test_packaging
import yaml

ROOT = Path(__file__).parents[1]
SKY, KUBERAY = ROOT / "scripts/sky.yaml", ROOT / "scripts/kuberay.yaml"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line and line[0] != "#"]


def of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def extras() -> set[str]:
    """Those of setup.py."""
    call = ast.parse((ROOT / "setup.py").read_text()).body[-1].value
    given = next(keyword.value for keyword in call.keywords if keyword.arg == "extras_require")
    return {key.value for key in given.keys}


def asked_for(text: str) -> set[str]:
    """The extras that a text names: EXTRAS=..., setup.sh ..."""
    return {one for result in re.findall(r"(?:EXTRAS=|setup\.sh )([\w,]+)", text) for one in result.split(",")}


def test_what_is_copied_is_there_and_is_all_that_is_installed():
    """`test_a_wheel_works_where_no_checkout_is` builds from the same files alone."""
    sources = [source for arguments in of("COPY") for source in arguments.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source
    assert {*sources} == {*test_packaging.BUILT_FROM, *test_packaging.LINKS, "jaxrl_llm", "scripts"}
    for name in test_packaging.LINKS:  # a link stays one in an image, and leads to where its folder is copied
        assert (ROOT / "jaxrl_llm" / name).readlink() == Path("..") / name and f"{name} {name}" in of("COPY")
    assert {".git", ".venv", "models", "runs"} <= {*ignored}


def test_the_install_line_takes_extras_that_there_are():
    installs = [line for line in of("RUN") if "pip install" in line]
    assert installs == ['pip install --no-cache-dir -e ".[${EXTRAS}]" ${PACKAGES}']
    arguments = dict(line.split("=", 1) for line in of("ARG"))
    assert arguments.keys() == {"BASE", "EXTRAS", "PACKAGES"} and of("FROM") == ["${BASE}"]
    named = asked_for((ROOT / "Dockerfile").read_text() + SKY.read_text() + KUBERAY.read_text())
    assert {*arguments["EXTRAS"].split(","), "gpu"} <= named <= extras()
    assert "jaxrl_llm train" in (ROOT / "Dockerfile").read_text() and of("CMD") == ['["jaxrl_llm", "--help"]']


def test_arguments_are_declared_before_they_are_used_and_in_their_stage():
    seen, stages = set(), 0
    for instruction, arguments in instructions():
        used = set(re.findall(r"\$\{(\w+)\}", arguments))
        assert used <= seen, (instruction, arguments)
        if instruction == "ARG":
            seen.add(arguments.partition("=")[0])
        if instruction == "FROM":
            seen, stages = set(), stages + 1  # those before the stage are gone in it
    assert stages == 1 and seen == {"EXTRAS", "PACKAGES"}


@pytest.mark.parametrize("script", [*of("RUN"), *(yaml.safe_load(SKY.read_text())[name] for name in ("setup", "run"))],
                         ids=lambda script: script.split()[0] + str(len(script)))
def test_shell_lines_parse(script):
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def training(command: str, tmp_path: Path) -> list[str]:
    """The command of `keep_training.sh`, with a local folder in the place of the mounted one."""
    command = command.replace("/jaxrl_llm/scripts", "scripts").replace("/mnt/runs", str(tmp_path)).replace("--mounted", "")
    done = subprocess.run(["bash", "-c", command.replace("keep_training.sh", "keep_training.sh --dry-run")], cwd=ROOT,
                          capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "PYTHON": "py"})
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def check_training(words: list[str], machine: str) -> None:
    """The command trains a recipe for this machine."""
    assert words[:2] == ["py", "experiments/train.py"]
    config = next(word.partition("=")[2] for word in words if word.startswith("--config="))
    file, variant = config.split(":")
    assert variant.endswith(f"-{machine}") and any(word.startswith("--workdir=") for word in words)
    importlib.import_module(file.removesuffix(".py").replace("/", ".")).get_config(variant)


def test_the_file_for_skypilot(tmp_path):
    job = yaml.safe_load(SKY.read_text())
    assert job["resources"]["accelerators"] == "H100:8" and job["workdir"] == "."
    (mount, storage), = job["file_mounts"].items()
    assert mount == "/mnt/runs" and storage == {"source": "${BUCKET}", "mode": "MOUNT_CACHED"}
    environment = "".join(f"{name}={shlex.quote(value)}; " for name, value in job["envs"].items())
    lines = [line for line in job["run"].splitlines() if not line.startswith("source ")]
    assert lines[0].startswith("exec bash scripts/keep_training.sh --mounted ") and len(lines) == 1
    words = training(environment + lines[0], tmp_path)
    check_training(words, "h100-8")
    assert f"--workdir={tmp_path}/gsm8k" in words
    # Every variable that the shell and the mount read has a value, and the header names no other.
    read = set(re.findall(r"\$\{?([A-Z]+)", job["run"] + job["setup"] + storage["source"]))
    assert read == job["envs"].keys() == set(re.findall(r"--env (\w+)=", SKY.read_text()))
    folder = job["envs"]["MODEL"].partition("/")[2]
    recipe = importlib.import_module("configs.gsm8k").get_config(job["envs"]["CONFIG"].partition(":")[2])
    assert recipe.model.path == f"models/{folder}"


def test_skypilot_downloads_the_model_and_the_teacher_of_a_recipe(tmp_path):
    """The setup of the job, with a `hf` that prints its arguments and a folder without the package."""
    job, (model, teacher) = yaml.safe_load(SKY.read_text()), ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    assert f"TEACHER={teacher}" in SKY.read_text() and job["envs"]["MODEL"] == model and not job["envs"]["TEACHER"]
    recipe = importlib.import_module("configs.distill").get_config("qwen2.5_1.5b-h100-8")
    for name, text in (("scripts/setup.sh", ""), (".venv/bin/activate", 'hf() { echo "$*"; }')):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    for given, paths in (("", [recipe.model.path]), (teacher, [recipe.model.path, recipe.teacher.path])):
        done = subprocess.run(["bash", "-ec", job["setup"]], cwd=tmp_path, capture_output=True, text=True, check=True,
                              env={"PATH": "/usr/bin:/bin", "MODEL": model, "TEACHER": given})
        wanted = [f"download {name} --local-dir {path}" for name, path in zip((model, teacher), paths)]
        assert done.stdout.splitlines() == wanted


def test_the_file_for_kuberay(tmp_path):
    job = yaml.safe_load(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    container, = pod["containers"]
    assert container["workingDir"] == of("WORKDIR")[0] == "/jaxrl_llm"
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["entrypointNumGpus"] == 8
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    words = training(job["spec"]["entrypoint"], tmp_path)
    check_training(words, "h100-8")
    assert f"--workdir={tmp_path}/gsm8k" in words and "/mnt/runs" in {one["mountPath"] for one in container["volumeMounts"]}
