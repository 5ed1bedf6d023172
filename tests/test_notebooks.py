"""The notebooks run from top to bottom with fewer steps, print what their texts claim, and have no stored outputs."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Runs the cells in one namespace, as a kernel does, then prints the value of an expression in it.
RUNNER = """
import json, sys
cells, asked = json.load(sys.stdin)
space = {"__name__": "__main__"}
for number, source in cells:
    exec(compile(source, f"cell {number}", "exec"), space)
print("\\nASKED", json.dumps(eval(asked, space)))
"""


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def run(name: str, tmp_path: Path, asked: str, folder: Path | None = None, **fewer) -> tuple[dict, str]:
    """Returns the value of `asked` after all cells, and their output. `fewer` has smaller values of settings, by name.

    The cells run in `folder`; None means an empty folder, as in Colab.
    """
    cells = [(number, "".join(cell["source"])) for number, cell in enumerate(read(ROOT / "notebooks" / name)["cells"])
             if cell["cell_type"] == "code"]
    cells = [(number, re.sub(r"^( *)%pip .*$", r"\1pass", source, flags=re.MULTILINE)) for number, source in cells]
    for setting, value in fewer.items():
        pattern = rf"^( *{re.escape(setting)} = ).*$"
        assert sum(len(re.findall(pattern, source, re.MULTILINE)) for _, source in cells) == 1, setting
        cells = [(number, re.sub(pattern, rf"\g<1>{value}", source, flags=re.MULTILINE)) for number, source in cells]
    elsewhere = folder or tmp_path / "empty"
    elsewhere.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps([cells, asked]), capture_output=True, text=True,
                          cwd=elsewhere, env=os.environ | {
                              "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    printed, _, answer = done.stdout.rpartition("ASKED ")
    return json.loads(answer), printed


def test_there_are_notebooks():
    assert [path.name[0] for path in NOTEBOOKS] == sorted(path.name[0] for path in NOTEBOOKS) and len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        parts = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            parts |= {"execution_count", "outputs"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert set(cell) == parts
    assert install_cell(path) == install_cell(NOTEBOOKS[0]) and "%pip install" in install_cell(path)


def install_cell(path: Path) -> str:
    """The first cell of code."""
    return "".join(next(cell for cell in read(path)["cells"] if cell["cell_type"] == "code")["source"])


@pytest.mark.parametrize("files, source, installed", [
    ((), "", None), ((), "git+https://host/jaxrl_llm", "git+https://host/jaxrl_llm"),
    (("jaxrl_llm-0.1.0-py3-none-any.whl",), "", "jaxrl_llm-0.1.0-py3-none-any.whl"),
    (("../setup.py", "jaxrl_llm-main.zip"), "", "..")], ids=("nothing", "address", "uploaded", "checkout"))
def test_the_first_cell_names_the_source_of_the_library(tmp_path, files, source, installed):
    """The cell runs in an empty folder outside the repository, with a Python that has no packages."""
    here = tmp_path / "notebooks"
    here.mkdir()
    for name in files:
        (here / name).touch()
    cell = re.sub('^SOURCE = ".*"$', f"SOURCE = {source!r}", install_cell(NOTEBOOKS[0]), flags=re.MULTILINE)
    cell = cell.replace('%pip install --quiet "$SOURCE"', "print('INSTALLS', SOURCE)")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", cell], cwd=here, capture_output=True, text=True)
    if installed is None:
        assert done.returncode and "set SOURCE in this cell" in done.stderr
    else:
        assert done.stdout == f"INSTALLS {installed}\n", done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path):
    for cell in read(path)["cells"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""):
            assert target.startswith("https://") or (path.parent / target.partition("#")[0]).is_file(), target


@pytest.mark.parametrize("host, badge", [("https://github.com/o/jaxrl_llm", True), ("https://example.org/o/jaxrl_llm", False)])
def test_links_of_a_project_with_an_address_are_absolute(host, badge, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    from links import linked
    for path in NOTEBOOKS:
        notebook = read(path)
        made = linked(notebook, path.name, host)
        assert made != notebook and linked(made, path.name, host) == made and len(made["cells"]) == len(notebook["cells"])
        text = "".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown")
        targets = re.findall(r"\]\(([^)\s]+)\)", text)
        assert all(target.startswith("https://") for target in targets)
        for target in targets:
            if target.startswith(f"{host}/blob/main/"):
                assert (ROOT / target.removeprefix(f"{host}/blob/main/").partition("#")[0]).is_file()
        assert (f"/github/o/jaxrl_llm/blob/main/notebooks/{path.name})" in text) == badge
        assert f'SOURCE = "git+{host}"' in "".join("".join(cell["source"]) for cell in made["cells"])


@pytest.mark.slow
def test_quickstart(tmp_path):
    facts, printed = run("1_quickstart.ipynb", tmp_path, "[sorted(evaluations), list(np.shape(answers)), str(workdir), "
                         "[int(x) for x in metrics['step']], len(pages)]",
                         **{"STEPS": 2, "config.warmup.steps, config.warmup.batch, config.warmup.learning_rate": "3, 8, 3e-3",
                            "config.prompts.per_step, config.sampling.group, config.sampling.max_tokens": "4, 4, 6",
                            "config.eval.every, config.eval.problems": "2, 4"})
    evaluations, shape, workdir, steps, pages = facts
    assert evaluations == ["after", "before"] and shape == [12] and steps == [0, 1, 2] and pages == 2
    assert (Path(workdir) / "page.html").stat().st_size > 20_000
    for text in ("123+321=", "442+113=", "700+77="):
        assert re.search(re.escape(text) + "   .*   .*   .*   ", printed, re.DOTALL)  # any bytes
    assert "curves.png" in printed and "held-out score, last" in printed and "prompt 1 of 4" in printed


@pytest.mark.slow
def test_anatomy_of_a_step(tmp_path):
    facts, printed = run("2_anatomy_of_a_step.ipynb", tmp_path, "[float(difference), float(np.abs(gap).max()), float(loss), "
                         "float(per_rollout.mean()), float(better.mean()), rewards.sum(1).tolist(), list(A.shape), losses, "
                         "[float(learned.metrics['grad_norm']), float(optax.tree.norm(gradient))], chances, "
                         "sampled.rollouts.valid.sum(1).tolist(), nothing_right(sampled.forest).tolist(), "
                         "sorted(forest.uid[forest.ends].tolist())]")
    difference, gap, loss, by_hand, better, right, shape, losses, norms, chances, asked, unsolved, uids = facts
    assert difference < 1e-5 and gap < 1e-4 and abs(loss - by_hand) < 1e-5 and shape == [4, 6, 4]
    assert losses[-1] < 0.5 * losses[0]
    assert 0 < sum(right) < 24  # else all advantages would be 0
    assert better > 0  # completions better than their group become more likely
    assert "largest mismatch in nats" in printed
    assert "so the same texts: True" in printed  # the source draws the same tokens as the cells by hand
    apart = float(re.search(r"advantages as above, up to (.*)", printed)[1])
    assert apart < 1e-5 and norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert "steps made 1" in printed and uids == list(range(24))
    assert len(chances) == 10 and chances[-1] > 2 * chances[0]  # the learner learns the rollouts written by hand
    assert set(asked) <= {6, 12, 18} and len(set(asked)) > 1 and all(n == 18 for n, no in zip(asked, unsolved) if no)


@pytest.mark.slow
def test_poise(tmp_path):
    facts, printed = run("3_poise.ipynb", tmp_path, "[cross, own, moved.tolist(), "
                         "float(value_metrics['value/variance_reduction']), sorted(metrics_of)]",
                         **{"STEPS, COMPLETIONS": "2, 16",
                            "c.warmup.steps, c.warmup.batch, c.warmup.learning_rate": "2, 8, 3e-3",
                            "c.eval.every, c.eval.problems": "1, 2"})
    cross, own, moved, reduction, methods = facts
    assert abs(cross - 0.21) < 1e-9 and abs(own - 0.105) < 1e-9
    assert "true 0.210   baseline from the other rollout 0.210   from the own one 0.105" in printed
    assert moved[0] < 1e-6 < 1e-3 < moved[1]  # only the other rollout's baseline reads the changed features
    assert reduction > 0.1 and methods == ["poise", "rloo"]


@pytest.mark.slow
def test_v0_budgets_and_routing(tmp_path):
    facts, printed = run("4_v0_budgets_and_routing.ipynb", tmp_path, "[mean_of_four, [risk.mse for risk in four], "
                         "[risk.draws for risk in more], {name: float(n.mean()) for name, n in used.items()}, "
                         "[x for _, x in losses], spent, shares, curves['oracle'].score.max(), alone.tolist(), "
                         "runs['moving_average']['v0_5/rollouts'].tolist()]",
                         **{"HEAD_STEPS, F, N, Q": "40, 4, 16, 8", "TASKS": "20", "STEPS, SOURCES": '2, ("moving_average",)',
                            "TRUTH, priors": "0.2, np.linspace(0, 1, 6)",
                            "c.warmup.steps, c.warmup.batch, c.warmup.learning_rate": "2, 8, 3e-3",
                            "c.eval.every, c.eval.problems": "1, 2"})
    alone_mse, four, more, used, losses, spent, shares, oracle, alone, completions = facts
    assert alone_mse == pytest.approx(0.2 * 0.8 / 4)
    assert four[1] < 0.4 * alone_mse and max(four) > 1.5 * alone_mse  # a right prior lowers the error, a wrong one raises it
    assert min(more) == more[1] < 6 < 11 < more[5] <= 16  # and needs more rollouts
    assert 4 < used["the truth"] < used["that of another prompt"] < 16
    assert losses and all(0 < x < 2 for x in losses)
    assert spent == [8 * 8]  # every split uses the total of uniform groups
    assert all(0 < share < 1 for share in shares.values())
    assert oracle >= max(alone) and len(completions) == 3
    assert all(4 <= n <= 16 for n in completions[1:])
    assert "outcomes of every context shuffled:" in printed


@pytest.mark.slow
def test_your_own_algorithm(tmp_path):
    facts, printed = run("5_your_own_algorithm.ipynb", tmp_path, "[A[:, 0, 0].tolist(), "
                         "{method: curve.shape for method, curve in curves.items()}, float(chance.value), source.next_uid, "
                         "[int(state.step), P, G, float(nats)]]",
                         **{"STEPS, SEEDS, METHODS": '2, (0,), ("grpo", "rare_success")',
                            "c.warmup.steps, c.warmup.loss, c.warmup.batch, c.warmup.learning_rate": "2, 0.0, 8, 3e-3",
                            "c.prompts.per_step, c.sampling.group, c.sampling.max_tokens": "4, 2, 6",
                            "c.eval.every, c.eval.problems": "1, 2"})
    right, curves, chance, sampled, (steps, P, G, nats) = facts
    assert right == pytest.approx([0.875 / 0.175, 0.75 / 0.3, 0.5 / 0.55, 0.0])
    assert curves == {"grpo": [1, 3], "rare_success": [1, 3]} and 0 <= chance <= 1
    assert "probability that a run of rare_success beats one of grpo" in printed
    assert steps == 3 and sampled == 3 * 3 * P * G and f"learned from in this step {P * G}" in printed and 0 < nats < 20


@pytest.mark.slow
def test_from_laptop_to_pod(tmp_path):
    facts, printed = run("6_from_laptop_to_pod.ipynb", tmp_path, "[same, float(max(apart)), held(one), held(eight), refusal, "
                         "fits.peak / 1e9, codes, two['step'].tolist(), compared, code, stopped, saved, resumed, "
                         "printed('log1')]", ROOT / "notebooks", STEPS=2, MANY=80)  # beside scripts/
    same, apart, on_one, on_eight, refusal, peak, codes, steps, compared, code, stopped, saved, resumed, by_other = facts
    assert same == [True, True, True] and apart < 1e-4 and 0.32 < on_eight / on_one < 0.35
    assert "sharded by the rules: True" in printed and "mesh data=-1 x fsdp=3 x tensor=1 does not fit 8 devices" in printed
    for size in (on_one, on_eight):
        planned = re.search(rf"planned ([\d,]+) bytes per device, held {size:,}\n", printed)
        assert abs(int(planned[1].replace(",", "")) - size) < 0.02 * size
    assert "It fits (58.2 GB) with learner.micro_batches=8" in refusal and round(peak, 1) == 58.2
    assert codes == [0, 0] and "step" not in by_other  # only the first process prints
    assert steps == [1, 2, 3, 4] and max(compared.values()) < 1e-3
    assert code == 75 and stopped == list(range(saved + 1)) and 5 <= saved < 80 and resumed == list(range(81))
    assert "SIGTERM: the run saves and stops after this step" in printed
    assert "--multihost" in printed and "#SBATCH --signal=TERM@300" in printed


@pytest.mark.slow
def test_train_an_agent(tmp_path):
    facts, printed = run("7_train_an_agent.ipynb", tmp_path, "[checks, [int(x) for x in metrics['step']], "
                         "metrics['environment/turns'][1:].tolist(), int(batch.mask.sum()), int(batch.present.sum())]",
                         **{"STEPS, WARMUP": "2, 3", "c.eval.every, c.eval.problems": "1, 4",
                            "c.prompts.per_step, c.sampling.group, c.prompts.max_tokens": "4, 4, 8"})
    checks, steps, turns, trained, present = facts
    assert all(state != "FAILS" for state, _ in checks.values()) and steps == [0, 1, 2] and all(1 <= n <= 4 for n in turns)
    assert 0 < trained <= present
    assert "oracle      mean return 1.00" in printed and "null        mean return 0.00" in printed
    assert "the policy: trained" in printed and "held-out score" in printed and "policy: " in printed


@pytest.mark.slow
def test_sft_then_rl(tmp_path):
    facts, printed = run("8_sft_then_rl.ipynb", tmp_path, "[len(rows), supervised['loss'].tolist(), "
                         "{name: len(values) for name, values in scores.items()}, c.model.path, "
                         "learned['SFT, then GRPO']['reward/mean'].tolist(), float(scores['GRPO alone'].max())]",
                         **{"DEMONSTRATIONS": "40", "SFT_STEPS, RL_STEPS": "30, 2", "c.eval.every, c.eval.problems": "15, 4",
                            "c.prompts.per_step, c.sampling.group": "4, 4",
                            "sft.prompts.per_step, sft.sampling.group": "16, 2"})
    demonstrations, losses, evaluations, path, rewards, alone = facts
    assert demonstrations == 40 and losses[-1] < 0.6 * losses[1] and path == "" and alone == 0
    assert evaluations == {"SFT": 3, "SFT, then GRPO": 2, "GRPO alone": 2} and len(rewards) == 3
    assert "'='       read\n'6'       trained" in printed and "'4'       trained\n'<|eos|>' trained" in printed
    assert "SFT, then GRPO  held-out score" in printed and "prompt 1 of 4" in printed
