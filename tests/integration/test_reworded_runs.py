"""Runs whose policy reads prompts in other words: with hints, with solved problems, with its earlier answers."""
import shutil

import chatter
import jax
import numpy as np
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning import schedules
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Settings of a row with a teacher: a checkpoint of new weights."""
    workdir = tmp_path_factory.mktemp("teacher")
    loop.train(tiny(method="grpo", steps=1, seed=5), workdir)
    return {"teacher.path": f"{workdir}/checkpoints/0"}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, **changes})
    return config


KEPO = {"method": "kepo", "topology": "adaptive=False"}


def steps_of(config, count=3):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    found = []
    for _, step in zip(range(count), schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(
            state.params))):
        found.append(step)
        assert np.isfinite([*step.learned.metrics.values()]).all()
    return run, found


def resumed_is_straight(folder, **changes):
    """A run of three steps, and one that ends after two and goes on: the same weights, log and position."""
    changes = {"checkpoint.every": 2, "eval.every": 3, "eval.problems": 2, "steps": 3, **changes}
    loop.train(tiny(**changes), folder / "straight")
    shutil.copytree(folder / "straight", folder / "resumed")
    shutil.rmtree(folder / "resumed/checkpoints/3")
    loop.train(tiny(**changes), folder / "resumed", resume=True)
    assert_same(*(run_files.saved(folder / name, tiny(**changes)) for name in ("resumed", "straight")))
    kept = [[repeatable(line) for line in lines(folder / name)] for name in ("resumed", "straight")]
    assert kept[0] == kept[1]
    return kept[0]


@pytest.mark.slow
def test_completions_under_hints_replace_rollouts(teacher):
    """Half of the completions of a new model are right: both of an attempt are soon, and replace one or two of four."""
    run, steps = steps_of(tiny(**KEPO, **teacher))
    for step in steps:
        rollouts, forest, metrics = jax.device_get(step.finished.rollouts), step.finished.forest, step.finished.metrics
        moved = (rollouts.role == Role.ELSEWHERE).any(-1)
        assert rollouts.valid.shape == (4, 4) and rollouts.valid.all() and rollouts.rewards[moved].all()
        assert (moved.sum(1) <= 2).all() and metrics["hint/prompts"] == 1 and metrics["hint/answer"] == 1
        assert metrics["hint/solved"] == np.mean(moved.any(1))
        assert metrics["completion/tokens"] > rollouts.mask.sum()  # those that were replaced, too
        for node in np.flatnonzero(forest.role == Role.ELSEWHERE):
            problem = forest.problems[forest.prompt[node]]
            assert bytes(forest.reads[node][1:]).decode() == (
                f"A hint, which the answer does not mention: {problem.answer}\n{problem.prompt}")
    assert any((step.finished.rollouts.role == Role.ELSEWHERE).any() for step in steps)


@pytest.mark.slow
def test_hints_over_a_resume(tmp_path, teacher):
    kept = resumed_is_straight(tmp_path, **KEPO, **teacher)
    assert max(line["hint/solved"] for line in kept if "hint/solved" in line) > 0


XRPO = {"method": "xrpo_allocation", "sampling.group": 2, "sampling.max_group": 8, "rewards": "format(pattern='(?s).*[a-f].*')"}
COG = {"method": "cog_rethinker", "sampling.group": 2, "topology": "retries=2",
       "rewards": "format(pattern='(?s).*[a-k].*')"}
SOPHIA = {"method": "sophia", "sampling.group": 2, "topology": "answers=2", "recorders": "old"}


@pytest.mark.slow
def test_unsolved_problems_are_sampled_behind_solved_ones():
    """The first batch has no solved problem; later ones show those of the batches before them."""
    run, steps = steps_of(tiny(**XRPO))
    shown = [step.finished.metrics.get("examples/prompts", 0) for step in steps]
    assert shown[0] == 0 < max(shown)
    assert steps[2].finished.metrics["examples/corpus"] == len(run.source.topology.memory["solved"])
    for step in steps[1:]:
        forest = step.finished.forest
        for node in np.flatnonzero(forest.role == Role.ELSEWHERE):
            asked, seen = forest.problems[forest.prompt[node]].prompt, bytes(forest.reads[node][1:]).decode(errors="replace")
            assert seen.endswith(f"\n\n{asked}") and seen.count("=") > 1 and not seen.startswith(asked)
        assert step.learned.metrics["max/mismatch"] < 1e-4  # of what was written under the prompt


@pytest.mark.slow
def test_unsolved_problems_are_decomposed_and_reflected_on():
    run, steps = steps_of(tiny(**COG))
    seen = []
    for step in steps:
        rollouts, forest, metrics = jax.device_get(step.finished.rollouts), step.finished.forest, step.finished.metrics
        own = ~(rollouts.role == Role.ELSEWHERE).any(-1) & rollouts.valid if rollouts.role is not None else rollouts.valid
        right = (rollouts.extras["correct"] & own).sum(1)
        assert metrics["decompose/prompts"] == np.mean(right == 0) and own.sum() == 8
        assert metrics["reward/mean"] == pytest.approx(rollouts.rewards[own].mean())  # under the prompt alone
        mixed = own & ((right > 0) & (right < 2))[:, None]
        moved = rollouts.valid & ~own & rollouts.extras["correct"]
        tokens = [(rollouts.mask & one[..., None]).sum() for one in (moved, mixed)]
        assert step.learned.metrics["moved_fraction"] == pytest.approx(tokens[0] / max(sum(tokens), 1))
        seen += [bytes(forest.reads[node][1:]).decode(errors="replace") for node in np.flatnonzero(
            forest.role == Role.ELSEWHERE)]
    assert sum(text.startswith("Split the problem") for text in seen) and sum("Find the mistakes" in text for text in seen)
    assert len(run.source.topology.memory["decomposed"]) > 1


@pytest.mark.slow
def test_the_shortest_right_answer_from_good_notes_is_learned():
    """One answer of each problem at most; the loss is minus the mean of the sums of its log-probs under the prompt."""
    run, steps = steps_of(tiny(**SOPHIA))
    for step in steps:
        forest, rollouts = step.finished.forest, jax.device_get(step.finished.rollouts)
        assert set(forest.role.tolist()) == {Role.PROMPT, Role.ELSEWHERE} and len(forest.ends) == 4 * 2 * 2
        chosen = rollouts.rewards > 0
        assert (chosen.sum(1) <= 1).all() and rollouts.extras["correct"][chosen].all()
        batch = jax.device_get(step.learned.rollouts)
        kept = batch.valid & (batch.rewards > 0)
        loss = -(np.where(batch.mask, batch.old_logprobs, 0).sum(-1) * kept).sum() / max(kept.sum(), 1)
        assert kept.sum() == chosen.sum()
        assert step.learned.metrics["loss"] == pytest.approx(loss, abs=1e-4)
        assert 0 < step.finished.metrics["notes/reward"] < 1
    assert any((step.finished.rollouts.rewards > 0).any() for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("changes", (
    XRPO, SOPHIA, {**COG, "learner.packed_rows": 2, "sampling.engine": "slots"}), ids=("xrpo", "sophia", "cog"))
def test_memories_over_a_resume(tmp_path, changes):
    kept = resumed_is_straight(tmp_path, **changes)
    told = "examples/corpus", "decompose/prompts", "notes/reward"
    assert any(line.get(name, 0) for line in kept for name in told)


def test_where_prompts_cannot_be_worded_anew():
    for name in ("hint_replaced", "solved_examples", "decompose_reflect"):
        with pytest.raises(ValueError, match=f"the topology {name!r} words prompts of tasks anew, and environment 'alphabet'"):
            setup.build(chatter.get_config(method="grpo", topology=name, environment="chatter:alphabet"))
    with pytest.raises(ValueError, match="replaces rollouts once a batch is complete, and the filter 'dynamic_sampling'"):
        setup.build(tiny(method="grpo", topology="hint_replaced", filters="dynamic_sampling"))
    with pytest.raises(ValueError, match="draws=0"):
        setup.build(tiny(method="grpo", topology="hint_replaced(draws=0)"))
