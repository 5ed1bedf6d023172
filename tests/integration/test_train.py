"""`train()` and the command line on a tiny model: files, resume bit for bit, every method, filters, references, refusals."""
import concurrent.futures
import dataclasses
import json
import os
import shutil
import string
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm import methods, rewards, tokenizers
from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.learning import learner
from jaxrl_llm.learning.policy import Capture
from jaxrl_llm.models import weights
from jaxrl_llm.runs import loop, trained
from jaxrl_llm.runs.warmup import imitate
from jaxrl_llm.sampling import prior
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stages import moments
from jaxrl_llm.setup import parts, setup, why
from jaxrl_llm.setup.first_state import known_of
from jaxrl_llm.setup.given import as_batches, with_texts
from jaxrl_llm.setup.judge import Judge
from jaxrl_llm.setup.learners import make_learner
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.selection import make_topology, with_topology
from jaxrl_llm.setup.streams import make_stream, stop_ids
from jaxrl_llm.setup.values import Around
from jaxrl_llm.tasks.loader import batches

ROOT = Path(__file__).parents[2]
CONFIG_FILE = Path(tiny_config.__file__)


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict(changes)
    return config


def run(workdir, resume=False, **changes):
    return loop.train(tiny(**changes), workdir, resume)


def saved(workdir, step=None, **changes):
    return run_files.saved(workdir, tiny(**changes), step)


def train_py(*arguments, cwd=ROOT, script="train.py"):
    """`python experiments/train.py ...` in a process of its own, which shares the session's compiled programs."""
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    return subprocess.run([sys.executable, str(ROOT / "experiments" / script), cache, *map(str, arguments)], cwd=cwd,
                          capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """A run of six steps without a break: its folder and what `train` returned."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, run(workdir)


@pytest.fixture(scope="session")
def broken(tmp_path_factory):
    """Three steps here, three more in a new process by the command line."""
    workdir = tmp_path_factory.mktemp("broken")
    run(workdir, steps=3)
    return workdir, train_py(f"--config={CONFIG_FILE}", f"--workdir={workdir}", "--resume")


def test_a_run_writes_what_it_promises(straight):
    workdir, evaluations = straight
    for name in ("config.json", "environment.json", "metrics.jsonl", "curves.png", "checkpoints/3", "checkpoints/6"):
        assert (workdir / name).exists(), name
    assert list((workdir / "tensorboard").glob("events*"))
    assert {f"step_{n:06d}.txt" for n in range(7)} <= {path.name for path in (workdir / "samples").iterdir()}
    assert (workdir / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert set(evaluations) == {"before", "after"}
    for result in evaluations.values():
        for rate in (result.score, result.solved):
            assert 0 <= rate.low <= rate.mean <= rate.high <= 1


def test_metrics_of_a_run(straight):
    result = lines(straight[0])
    assert [line["step"] for line in result] == list(range(7))
    assert {"eval/score", "eval/solved", "eval/pass_at_group"} <= result[0].keys() & result[3].keys() & result[6].keys()
    for line in result[1:]:
        assert {"reward/mean", "reward/format", "loss", "entropy", "grad_norm", "clip_fraction", "mismatch/kl", "max/mismatch",
                "learning_rate", "groups/all_equal", "time/rollout", "time/update", "time/step", "host/rss_gb"} <= line.keys()
        assert line["max/ratio"] == 1.0 and line["max/mismatch"] < 1e-4
        assert line["skipped_updates"] == 0 and line["grad_norm"] > 0
        assert 0 < line["completion/length"] <= 6 and line["entropy"] > 0
    assert [line["learning_rate"] for line in result[1:4]] == pytest.approx([1.5e-3, 3e-3, 3e-3])


def test_samples_can_be_read(straight):
    rows = [json.loads(line) for line in (straight[0] / "samples/step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {row["stop_reason"] for row in rows} <= {"stop", "length"}
    for row in rows:
        assert row["prompt"].startswith("<|bos|>") and row["prompt"].endswith("=")
        assert row["reward"] == float(any("a" <= c <= "z" for c in row["completion"]))


def test_resuming_in_a_new_process_changes_no_bit(straight, broken):
    workdir, done = broken
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(saved(workdir), saved(straight[0]))
    assert saved(workdir)[".step"] == 6
    assert [repeatable(line) for line in lines(workdir)] == [repeatable(line) for line in lines(straight[0])]
    for name in ("step_000003.txt", "step_000005.txt", "step_000006.jsonl"):
        assert (workdir / "samples" / name).read_text() == (straight[0] / "samples" / name).read_text()


def test_the_report_and_the_exported_model(broken):
    workdir, done = broken
    assert "Held-out problems" in done.stdout and "after training" in done.stdout and "curves.png" in done.stdout
    trained.export(workdir, workdir / "exported")
    _, params = weights.load(workdir / "exported")
    state = saved(workdir)
    np.testing.assert_array_equal(params["embed"], state[".params['embed']"])
    np.testing.assert_array_equal(params["layers"]["q"]["kernel"], state[".params['layers']['q']['kernel']"])
    text = "7+5= é<|eos|>"
    assert tokenizers.load(workdir / "exported").encode(text) == tokenizers.load("bytes").encode(text)
    assert train_py(f"--workdir={workdir}", f"--out={workdir / 'earlier'}", "--step=3", script="export.py").returncode == 0
    np.testing.assert_array_equal(weights.load(workdir / "earlier")[1]["embed"], saved(workdir, 3)[".params['embed']"])


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_continues_from_its_only_checkpoint(tmp_path):
    with pytest.raises(learner.TrainingDiverged, match="1 updates in a row .* Lower optimizer.learning_rate"):
        run(tmp_path, **{"optimizer.learning_rate": 1e38, "learner.max_skipped": 1, "steps": 4})
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()) == [0]
    with pytest.warns(RuntimeWarning, match="learning_rate"):
        evaluations = run(tmp_path, resume=True, **{"learner.max_skipped": 1, "steps": 4})
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
    assert set(evaluations) == {"before", "after"}


KEPT = {"objective": "+ kl(0.1)", "checkpoint.every": 2, "eval.every": 2, "optimizer.learning_rate": 3e-2}


@pytest.fixture(scope="module")
def with_reference(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("reference")
    run(workdir, **KEPT, steps=4)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("changes", ({}, {"learner.offload": "optimizer, reference"}), ids=("plain", "offloaded"))
def test_a_reference_is_kept_over_a_resume(with_reference, tmp_path, monkeypatch, changes):
    """Also with the reference and the moments on the host: the test reads them before each step, and no bit changes."""
    kinds, learn = [], learner.Learner.learn

    def watched(one, state, sampled, frozen, *rest):
        kinds.append([{x.sharding.memory_kind for x in jax.tree.leaves(tree)}
                      for tree in (state.opt_state, frozen, state.params)])
        return learn(one, state, sampled, frozen, *rest)

    monkeypatch.setattr(learner.Learner, "learn", watched)
    run(tmp_path, **KEPT | changes, steps=2)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        run(tmp_path, True, **KEPT | changes, steps=4)
    assert kinds == [[{"pinned_host" if changes else "device"}] * 2 + [{"device"}]] * 4
    result = lines(with_reference)
    assert abs(result[1]["kl"]) < 1e-9 and result[4]["kl"] > 1e-4
    assert [repeatable(line) for line in lines(tmp_path)] == [repeatable(line) for line in result]
    assert_same(saved(tmp_path, **KEPT, steps=4), saved(with_reference, **KEPT, steps=4))


@pytest.mark.slow
def test_adapters_with_a_reference_and_several_updates(tmp_path):
    options = {"lora.rank": 2, "objective": "+ kl(0.1)", "learner.epochs": 2, "optimizer.learning_rate": 3e-2}
    run(tmp_path, **options, steps=3)
    result, first = saved(tmp_path, **options), saved(tmp_path, 0, **options)
    assert all((result[name] == first[name]).all() for name in result if name.startswith(".params"))
    assert any((result[name] != first[name]).any() for name in result if name.startswith(".lora"))
    assert lines(tmp_path)[3]["kl"] > 1e-5


@pytest.mark.slow
def test_minibatches_and_epochs(tmp_path):
    options = {"learner.minibatches": 2, "learner.epochs": 2, "optimizer.warmup_updates": 8, "steps": 2}
    run(tmp_path, **options)
    assert saved(tmp_path, **options)[".opt_state[0].count"] == 2 * 2 * 2
    result = lines(tmp_path)
    assert [line["learning_rate"] for line in result[1:]] == pytest.approx([3e-3 * 4 / 8, 3e-3])
    assert result[2]["max/ratio"] > 1.0001  # later updates are off-policy
    assert result[2]["max/mismatch"] < 1e-4  # which is not a disagreement of sampler and learner


def test_metrics_of_several_updates():
    updates = [{"loss": 1.0, "max/ratio": 3.0, "skipped_updates": 4}, {"loss": 2.0, "max/ratio": 1.0, "skipped_updates": 5}]
    assert learner.mean_metrics(updates) == {"loss": 1.5, "max/ratio": 3.0, "skipped_updates": 5.0}
    assert learner.mean_metrics([]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", (1, 4))  # those of filling alone are left out
def test_dynamic_sampling_draws_until_groups_disagree(tmp_path, minibatches):
    run(tmp_path, method="dapo", steps=2, **{"learner.minibatches": minibatches})
    for line in lines(tmp_path)[1:]:
        assert 1 <= line["filter/draws"] <= 4 and 0 < line["filter/kept"] <= 1 and line["grad_norm"] > 0


@pytest.mark.slow
def test_batches_whose_groups_all_agree_change_nothing(tmp_path):
    """An untrained model never solves anything: after `max_draws` the run continues, without a learning signal."""
    options = {"method": "dapo", "steps": 2, "sampling.max_draws": 2, "rewards": "exact"}
    run(tmp_path, **options)
    for line in lines(tmp_path)[1:]:
        assert line["filter/draws"] == 2 and line["filter/kept"] == 0 and line["groups/all_equal"] == 1
        assert "loss" not in line
    first, last = saved(tmp_path, 0, **options), saved(tmp_path, 2, **options)
    assert first.pop(".step") == 0 and last.pop(".step") == 2
    assert first.pop(".opt_state[2].count") == 0 and last.pop(".opt_state[2].count") == 8  # the schedule's, of planned updates
    assert_same(last, first)


@pytest.mark.slow
def test_pages_compile_no_second_program_for_scores(tmp_path):
    """There is one length and so one shape: a page must use the same program as the updates."""
    run(tmp_path, **{"learner.minibatches": 2, "sampling.max_tokens": 1, "samples_every": 1, "steps": 2, "eval.every": 0})
    written = [json.loads(line) for line in (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert all(len(row["tokens"]) == len(row["ratios"]) == len(row["advantages"]) == row["length"] == 1 for row in written)


@pytest.mark.slow
def test_supervised_warm_up_teaches_the_answers(tmp_path):
    evaluations = run(tmp_path, rewards="exact", steps=1, **{
        "warmup.steps": 60, "warmup.batch": 16, "warmup.learning_rate": 1e-2, "sampling.temperature": 0.3,
        "eval.problems": 100})
    assert evaluations["before"].score.mean > 0.03  # an untrained model: below 1 in 10,000
    assert evaluations["before"].length < 4


@pytest.fixture(scope="module")
def shared():
    """One compiled sampler for all methods; voting methods take the whole completion as its answer."""
    run, params = setup.build(tiny())
    reward = dataclasses.replace(run.source.stream.partner.reward.rewards[0], extract=str.strip)
    stream = run.source.stream.apart(partner=run.source.stream.partner.scoring(rewards.combine([reward])))
    return dataclasses.replace(run, source=dataclasses.replace(run.source, stream=stream)), params


OWN_SETTING = {
    "qwenlong_l1": {"controllers": "limits=(1.0,)"},  # the paper's phases end at 20,000 and 60,000 tokens
    **dict.fromkeys(("spear", "spear_clip"), {"filters": "spear_clip"}),  # an untrained policy writes bytes that are no text
    **dict.fromkeys(("pass_at_k", "pass_at_k_bootstrap", "pass_at_k_full"), {"estimator": "k=2"})}  # of groups of four


@pytest.mark.slow
@pytest.mark.parametrize("slug", [slug for slug in methods.runnable() if not methods.get(slug).source])
def test_every_method_takes_three_steps(shared, slug):
    run, params = shared
    method, policy = methods.get(slug), run.learner.policy
    config = resolve(tiny(method=slug, **OWN_SETTING.get(slug, {})), method.defaults)
    config.learner.epochs = max(2, config.learner.epochs)  # so that the ratio to the old policy is not 1
    config.learner.minibatches, config.critic.pretrain_steps = 1, 0
    made = parts.make_parts(config, policy.model.config.hidden_size, run.source.task)
    why.check(config, made)
    asked = config.budget.utility or "prior" in made.needs
    ends = tuple(string.ascii_uppercase + string.digits)  # so that some completions end early
    task, whole = run.source.task, run.source.stream
    around = Around(task=task, encode=lambda problem: encode_problem(problem, whole.tokenizer))
    stream = make_stream(config, policy.model, whole.mesh, whole.tokenizer, None, (task.train, task.heldout),
                         Judge(task, whole.partner.reward), made.wanted,
                         reads=make_topology(config, made, 4, around).reads)
    stream = stream.apart(stop_strings=ends, partner=dataclasses.replace(stream.partner, stop_strings=ends))
    source = dataclasses.replace(run.source, stream=stream, data=batches(task.train, 4, seed=0))
    expected = prior.make(config, policy, len(task.train), stream.prompt_tokens, Capture(0)) if asked else None
    source = with_topology(config, made, source, policy, expected, around)
    source = with_texts(config, source, stream.tokenizer, Judge(task, whole.partner.reward)) if made.texts else source
    made = made.with_controllers(moments.controllers(source))
    learner, _ = make_learner(as_batches(config, source), made, policy, source.ladders, stream.tokenizer)
    known = known_of(dataclasses.replace(run, config=config, source=source, learner=learner), params)
    state = learner.init(jax.tree.map(lambda x: x + 0, params), None, jax.random.key(0), known)
    frozen = {name: jax.tree.map(lambda x: 1.01 * x, own) for name, own in learner.frozen(params).items()}
    for number in range(3):
        finished = source.next(learner.publish(state))
        rollouts = finished.rollouts
        order = np.arange(rollouts.rewards.size)  # some right, some wrong, one mixed group; all mixed where sizes differ
        marks = order > 0.4 * order[-1] if source.most == source.stream.group else order % 2
        rollouts = rollouts.replace(rewards=np.float32(marks).reshape(rollouts.rewards.shape))
        state, metrics, *_ = learner.learn(state, rollouts, frozen, facts=finished.facts)
        assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all(), metrics
        assert metrics["skipped_updates"] == 0
        assert metrics.get("max/ratio") != 1 or metrics["approx_kl"] > 0  # all ratios can be below that of the first update
    assert state.step == 3
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(params)))
    assert all(bool(jax.numpy.isfinite(x).all()) for x in jax.tree.leaves(state.params))


REFUSED = {
    "unknown_key": (["--config.learner.epoch=3"], "no key 'epoch' Did you mean \"epochs\""),
    "unknown_section": (["--config.optimiser.learning_rate=1e-3"], "no key 'optimiser' Did you mean \"optimizer\""),
    "wrong_type": (["--config.steps=many"], "many"),
    "unknown_method": (["--config.method=grop"], "Did you mean 'grpo'?"),
    "unknown_hyper": (["--config.objective=clip_hihg=0.3"], "Did you mean 'clip_high'?"),
    "unknown_task": (["--config.task=arithmetc(level=digit)"], "Did you mean 'arithmetic'?"),
    "unreadable_rewards": (["--config.rewards=0.2 * exact"], "write name, or name(option=value, option=value)"),
    "unknown_reward_error": (["--config.reward_errors=rise"], "Did you mean 'raise'?"),
    "bad_mesh": (["--config.mesh.data=3"], "mesh data=3 x fsdp=1 x tensor=1 does not fit 1 devices"),
    "bad_batch": (["--config.learner.minibatches=3"], "their product must be one of [1, 2, 4]"),
    "missing_model": (["--config.model.path=/nowhere/model"], "/nowhere/model"),
    "long_prompt": (["--config.prompts.max_tokens=3"], "the limit is prompts.max_tokens=3"),
    "unknown_variant": (["--config=configs/arithmetic.py:tniy"], "Did you mean 'tiny'?"),
    "unknown_module": (["--config.task=my_taks:sums"], "there is no module 'my_taks' on the path"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The command line's answers to each of the mistakes above, two processes at a time."""
    workdirs = {name: tmp_path_factory.mktemp(name) / "run" for name in REFUSED}
    def call(name):
        return train_py(f"--config={CONFIG_FILE}", f"--workdir={workdirs[name]}", *REFUSED[name][0])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSED, pool.map(call, REFUSED))), workdirs


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_on_the_command_line_are_explained(answers, name):
    done, workdirs = answers
    assert done[name].returncode != 0
    assert REFUSED[name][1] in done[name].stderr, done[name].stderr[-2000:]
    assert "Traceback" not in done[name].stderr, done[name].stderr[-2000:]
    assert not (workdirs[name] / "checkpoints/0").exists()  # nothing was trained


@pytest.mark.slow
def test_a_folder_of_another_run_is_left_alone(straight):
    workdir, before = straight[0], lines(straight[0])
    again = train_py(f"--config={CONFIG_FILE}", f"--workdir={workdir}")
    assert again.returncode != 0 and "continue with --resume" in again.stderr and "Traceback" not in again.stderr
    other = train_py(f"--config={CONFIG_FILE}", f"--workdir={workdir}", "--config.seed=5")
    assert other.returncode != 0 and "seed: 0 -> 5" in other.stderr and "another --workdir" in other.stderr
    assert lines(workdir) == before and (workdir / "checkpoints/6").exists()


@pytest.mark.slow
def test_resuming_nothing_is_refused(tmp_path):
    done = train_py(f"--config={CONFIG_FILE}", f"--workdir={tmp_path / 'empty'}", "--resume")
    assert done.returncode != 0 and "nothing to resume" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "empty").exists()


@pytest.mark.slow
def test_help_and_a_missing_workdir():
    written = train_py("--help")
    assert "--workdir" in written.stdout and "--resume" in written.stdout and "Traceback" not in written.stderr
    missing = train_py(f"--config={CONFIG_FILE}")
    assert missing.returncode != 0 and "--workdir" in missing.stderr + missing.stdout


@pytest.mark.slow
def test_a_run_that_breaks_keeps_its_last_step_and_continues_bit_for_bit(straight, tmp_path, monkeypatch):
    def fails_at_five(source, snapshot, *others):
        if snapshot.version == 4:
            raise ValueError("a reward without an answer")
        return collect(source, snapshot, *others)

    collect = Source.next
    monkeypatch.setattr(Source, "next", fails_at_five)
    with pytest.raises(ValueError, match="without an answer") as caught:
        run(tmp_path)
    assert "step 4 was saved" in caught.value.__notes__[0]
    assert (tmp_path / "curves.png").exists()
    monkeypatch.undo()
    run(tmp_path, resume=True)
    assert [line["step"] for line in lines(tmp_path)] == list(range(7))
    assert_same(saved(tmp_path, 6), saved(straight[0], 6))


@pytest.mark.slow
def test_a_run_whose_first_save_fails_ends_before_it_trains(tmp_path, monkeypatch):
    def full(manager):
        raise OSError("no space left")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
    with pytest.raises(OSError, match="checkpoint of step 0 was not written: OSError: no space left"):
        run(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [0]


@pytest.mark.slow
def test_a_failed_evaluation_is_repeated(straight, tmp_path, monkeypatch):
    def fails_at_six(one, params, lora, *, problems, key, timer=None):
        if (tmp_path / "metrics.jsonl").exists() and [line["step"] for line in lines(tmp_path)][-1:] == [5]:
            raise OSError("the disk is full")
        return evaluate(one, params, lora, problems=problems, key=key, timer=timer)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", fails_at_six)
    with pytest.raises(OSError, match="the disk is full"):
        run(tmp_path)
    monkeypatch.undo()
    assert lines(tmp_path)[-1]["step"] == 5
    assert run(tmp_path, resume=True)["after"].score == straight[1]["after"].score
    last = lines(tmp_path)[-1]
    assert last["step"] == 6 and last["eval/score"] == lines(straight[0])[-1]["eval/score"]


@pytest.mark.slow
def test_a_data_file_that_vanishes(tmp_path, monkeypatch):
    """A run that has read the file ends normally; a resumed run names the missing file, and continues once the file is back."""
    problems, workdir, collect = tmp_path / "problems.jsonl", tmp_path / "run", Source.next
    options = {"task": f"jsonl(path='{problems}')", "eval.every": 0, "samples_every": 0}
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def vanishing(one, snapshot, *others):
        if snapshot.version == 1:
            problems.rename(tmp_path / "elsewhere")
        return collect(one, snapshot, *others)

    monkeypatch.setattr(Source, "next", vanishing)
    run(workdir, **options, steps=3)
    assert [line["step"] for line in lines(workdir)] == [0, 1, 2, 3] and not problems.exists()
    with pytest.raises(FileNotFoundError, match="problems.jsonl"):
        run(workdir, True, **options, steps=4)
    assert json.loads((workdir / "config.json").read_text())["config"]["steps"] == 3
    (tmp_path / "elsewhere").rename(problems)
    with pytest.warns(RuntimeWarning, match="steps: 3 -> 4"):
        run(workdir, True, **options, steps=4)
    assert lines(workdir)[-1]["step"] == 4


@pytest.mark.slow
def test_a_failed_resume_leaves_the_folder_as_it_was(tmp_path):
    run(tmp_path, steps=3)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match="reference"):
        run(tmp_path, resume=True, objective="+ kl(0.1)")
    assert (tmp_path / "config.json").read_text() == before


def test_held_out_problems_are_a_fair_sample_of_a_sorted_source():
    source = setup.build(tiny(task="arithmetic(level=nocarry3)"))[0].source.task.heldout
    chosen = held_out(source, 128)
    def hundreds(problems):
        return {str(p.prompt)[:1] for p in problems}
    assert len({p.id for p in chosen}) == 128
    assert hundreds(chosen) == hundreds(source[i] for i in range(len(source)))


def test_truncated_sampling_is_refused_where_it_would_bias_the_weights():
    with pytest.raises(ValueError, match="top_p"):
        setup.build(tiny(method="tis_mis", **{"sampling.top_k": 5}))


@pytest.mark.slow
def test_reward_rises(tmp_path):
    run(tmp_path, steps=40, **{"eval.every": 40, "checkpoint.every": 40, "samples_every": 0})
    rewards = [line["reward/mean"] for line in lines(tmp_path)[1:]]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.15


@pytest.mark.slow
def test_evaluate_measures_a_run_and_refuses_two_sources(straight, tmp_path, monkeypatch):
    workdir = shutil.copytree(straight[0], tmp_path / "run")
    result = train_py(f"--workdir={workdir}", "--problems=4", script="evaluate.py")
    assert result.returncode == 0, result.stderr
    facts = json.loads((workdir / "evaluation_step6_temperature1_seed0/evaluation.json").read_text())
    assert facts["all"]["problems"] == 4 and facts["step"] == 6
    mean, low, high = facts["all"]["score"]
    assert low <= mean <= high
    workdir = workdir.rename(tmp_path / "moved")  # its measurement continues
    monkeypatch.setenv("HOME", str(tmp_path))  # bash leaves the ~ of --workdir=~/moved
    result = train_py("--workdir=~/moved/", "--problems=4", script="evaluate.py")
    assert result.returncode == 0, result.stderr
    assert json.loads((workdir / "evaluation_step6_temperature1_seed0/evaluation.json").read_text())["all"] == facts["all"]
    assert train_py("--workdir=~/moved", "--out=~/model", script="export.py").returncode == 0
    assert (tmp_path / "model/config.json").is_file() and not (ROOT / "~").exists()
    both = train_py(f"--workdir={workdir}", f"--config={CONFIG_FILE}", script="evaluate.py")
    assert both.returncode == 1 and "not both" in both.stderr and "Traceback" not in both.stderr
    new = train_py(f"--config={CONFIG_FILE}", "--best", "--step=0", script="evaluate.py")
    assert new.returncode == 1 and "no checkpoints, so --step, --best would have no effect; give --workdir" in new.stderr


@pytest.mark.slow
def test_short_prompts_are_sampled_and_learned_from_in_shorter_shapes(tmp_path):
    problems = [{"prompt": f"{n:020}" + "x" * (130 * (n % 2)), "answer": str(n)} for n in range(64)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    built, params = setup.build(tiny(task=f"jsonl(path={tmp_path / 'problems.jsonl'})", **{"prompts.per_step": 2}))
    assert built.source.stream.prompt_tokens == 152
    state, shapes = setup.initial_state(built, params), set()
    for length in (20, 150):
        rows = [p for p in built.source.task.train if len(p.prompt) == length]
        sampled = dataclasses.replace(built.source, data=run_files.Given(rows)).next(built.learner.publish(state)).rollouts
        shapes.add(sampled.prompt_mask.shape[1])
        state, metrics, *_ = built.learner.learn(state, sampled)
        assert np.isfinite(metrics["loss"])
    assert shapes == {64, 152}


@pytest.mark.slow
def test_a_stop_string_of_one_token_ends_rows_in_the_sampler():
    letters = string.ascii_letters
    built, params = setup.build(tiny(**{"sampling.stop_strings": (*letters, "12")}))
    assert stop_ids(built.source.stream.tokenizer, (*letters, "12")) == (
        *built.source.stream.tokenizer.stop_ids, *map(ord, letters))
    source = dataclasses.replace(built.source, data=run_files.Given(list(built.source.task.train)[:4]))
    rollouts, forest, *_ = source.next(built.learner.publish(setup.initial_state(built, params)))
    ends = [(row, int(np.argmax(np.isin(row, list(map(ord, letters)))))) for row in rollouts.tokens.reshape(16, -1)
            if np.isin(row, list(map(ord, letters))).any()]
    assert ends and all((row[place + 1:] == 0).all() for row, place in ends)
    assert not any(letter in text[:-1] for text in forest.texts for letter in letters)  # rewards read it through the string
    assert sum(text[-1:] in letters for text in forest.texts if text) == len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("steps", (1, 20))
def test_a_short_warm_up_runs(tmp_path, steps):
    run(tmp_path, steps=1, **{"warmup.steps": steps, "warmup.batch": 4, "eval.problems": 4})
    assert np.isfinite(lines(tmp_path)[1]["loss"])


@pytest.mark.slow
def test_a_warm_up_ends_at_its_loss():
    config = tiny(**{"warmup.steps": 40, "warmup.batch": 8, "warmup.learning_rate": 1e-2})
    built, params = setup.build(config)
    shown = []
    progress = types.SimpleNamespace(phase=lambda text, done, steps: shown.append(text))

    def losses(loss):
        w = {"steps": 40, "learning_rate": 1e-2, "prompt_tokens": 16, "max_tokens": 8, "overlong": "fail"}
        data = batches(built.source.task.train, 8, seed=0)
        own = jax.tree.map(np.copy, params)  # the warm-up donates what it starts from
        return imitate(built.learner.policy, own, data, built.source.stream.tokenizer, loss=loss, progress=progress, **w)[1]

    whole = losses(0.0)
    means = np.array([np.mean(whole[start:start + 10]) for start in range(31)])
    wanted = float(means[12])
    first = int(np.argmax(means <= wanted))  # losses fall on the whole, not at every step
    assert len(whole) == 40 and losses(wanted) == whole[:10 + first] and shown[-1].startswith("supervised warm-up")
