"""Budgets in the training loop: each prompt's rollouts, resume bit for bit, every source of expected rewards, refusals."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm import methods
from jaxrl_llm.learning.policy import Capture
from jaxrl_llm.rewards import Scores
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling import prior, stages
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.topologies import budgets, oracle
from jaxrl_llm.values import v0

ROWS, G, MOST, PROMPTS = 6, 2, 8, 3


def config(**changes):
    c = tiny_config.get_config()
    c.method, c.prompts.per_step, c.sampling.group, c.sampling.max_group = "knapsack_rl", ROWS, G, MOST
    c.budget.prompts = PROMPTS
    c.samples_every, c.eval.every, c.checkpoint.every, c.steps = 1, 4, 2, 4
    c.update_from_flattened_dict(changes)
    return c


def sizes(workdir, step):
    rows = [json.loads(line) for line in (workdir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
    return np.bincount([row["prompt_index"] for row in rows])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("budget")
    loop.train(config(), workdir)
    return workdir


@pytest.mark.parametrize("source", ["moving_average", "v0"])
def test_the_head_of_v0_says_what_predicts_rewards(monkeypatch, capsys, source):
    """Where it is another model than the paper's, a row says that too."""
    monkeypatch.setattr(prior, "of_v0", lambda weights, encoder: prior.of_averages(82))
    run, params = setup.build(config(method="v0", **{"prior.source": source}))
    loop._print_head(run, params)
    lines = capsys.readouterr().out.splitlines()
    row, = (line for line in lines if line.startswith("expected rewards"))
    assert row.split(" ", 2)[2].strip() == f"prior.source={source}"
    papers = [line.split("the paper")[1].strip() for line in lines if line.startswith("prior of the paper")]
    assert papers == ["v0, yours: moving_average (prior.source)"] * (source != "v0")


def test_the_setting_of_the_paper_of_v0_expects_rewards_by_its_model():
    for method in ("v0", "v0_5"):
        assert resolve(config(method=method, setting="paper"), methods.get(method).defaults).prior.source == "v0"
        assert resolve(config(method=method), methods.get(method).defaults).prior.source == "moving_average"


def test_budgets_expect_successes_and_no_other_part_of_the_reward():
    """A bonus for the format is no success: a prompt that never solves its problem has nothing to expect."""
    run, _ = setup.build(config())
    assert "solved" in run.learner.controls.by_name["prior"].facts
    for one, expected in ((prior.of_averages(4), 0.2), (prior.of_successes(prior.of_averages(4)), 0.0)):
        facts = {"prompt_ids": np.array([2]), "rewards": np.full((1, 4), 0.2, np.float32), "valid": np.ones((1, 4), bool),
                 "solved": np.zeros((1, 4), bool)}
        state = one.controller.observe(one.controller.init(), {name: facts[name] for name in one.controller.facts})
        np.testing.assert_allclose(one.predict(state, {"prompt_ids": np.array([2])}), [expected], atol=1e-6)


def test_a_mean_over_prompts_is_refused_where_their_rollouts_are_cut_into_rows():
    for changes in ({"method": "cispo", "budget.utility": "per_rollout"}, {"objective": "aggregation=prompt_mean"},
                    {"method": "v0_5", "budget.utility": "", "objective": "aggregation=prompt_mean"}):
        with pytest.raises(ValueError, match="would weigh each row like a prompt"):
            setup.build(config(**changes))
    setup.build(config(objective="aggregation=seq_mean_token_mean"))


def test_the_completions_of_a_step_are_shared_out(straight):
    for line in run_files.lines(straight)[1:]:
        if line["step"] < 4:  # the last page has held-out problems
            result = sizes(straight, line["step"])
            assert len(result) == PROMPTS and result.sum() == ROWS * G and 2 <= result.min() <= result.max() <= MOST
            assert line["groups/largest"] == result.max()
        assert line["skipped_updates"] == 0 and np.isfinite(line["loss"]) and abs(line["max/ratio"] - 1) < 1e-4


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    loop.train(config(steps=2), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(config(), tmp_path, resume=True)
    run_files.assert_same(*(run_files.saved(workdir, config()) for workdir in (tmp_path, straight)))


@pytest.fixture(scope="module")
def built():
    return setup.build(config(**{"budget.prompts": 8, "budget.utility": "per_rollout"}))


@pytest.mark.slow
def test_of_more_prompts_than_rows_those_with_the_largest_gain_are_sampled(built):
    run, params = built
    state = setup.initial_state(run, jax.tree.map(lambda x: x + 0, params))
    expected = np.full(len(run.source.task.train), 0.5, np.float32)
    expected[[3, 4, 5, 6, 7]] = 0, 1, 0, 1, 1  # nothing to learn from
    known = state.control["prior"]._replace(average=jnp.asarray(expected), weight=jnp.ones(len(expected)))
    state = state.replace(control={"prior": known})
    problems = [run.source.task.train[i] for i in range(8)]
    sampled, forest, *_ = dataclasses.replace(run.source, data=run_files.Given(problems)).next(run.learner.publish(state))
    assert [problem.id for problem in forest.problems] == [0, 1, 2]
    assert sampled.valid.sum(1)[:3].tolist() == [4, 4, 4] and sampled.valid.shape == (max(3, ROWS), MOST)
    np.testing.assert_array_equal(forest.facts["expected"], np.float32(0.5))
    state, metrics, batch, advantages = run.learner.learn(state, sampled)
    rewards, valid = sampled.rewards[:3], sampled.valid[:3]
    A = np.where(valid, rewards - np.mean(rewards, 1, where=valid)[:, None], 0)
    assert batch.mask.shape[:2] == (ROWS, G) and advantages.shape[0] == ROWS
    assert A.any() and (np.abs(advantages).max(-1) > 0).sum() == (A != 0).sum()  # of groups of four, not of the rows of two


@pytest.mark.slow
@pytest.mark.parametrize("source", ["probe", "shuffled", "oracle"])
def test_other_sources_of_expected_rewards_resume_too(tmp_path, source):
    changes = {"prior.source": source, "budget.utility": "per_rollout", "method": "grpo"}
    loop.train(config(**changes), tmp_path / "straight")
    loop.train(config(steps=2, **changes), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(config(**changes), tmp_path / "resumed", resume=True)
    result, wanted = (run_files.saved(tmp_path / name, config(**changes)) for name in ("resumed", "straight"))
    run_files.assert_same(result, wanted)
    if source == "probe":
        window = {name: leaf for name, leaf in wanted.items() if "prior" in name}
        assert any(np.any(leaf) for name, leaf in window.items() if "probe" in name), sorted(window)


def test_the_oracle_asks_the_policy(built):
    """Two prompts are always solved, whatever their reward; the oracle expects exactly this, and trains on no completion."""
    run, params = built
    asked, tokens = [], 0

    def answer(texts, answers, problems, lengths, spent):
        nonlocal tokens
        asked.append(len(problems))
        tokens += int(np.sum(lengths))
        total = np.array([problem.id / 100 for problem in problems], np.float32)
        solved = np.array([problem.id in (2, 9) for problem in problems], np.float32)
        return Scores(total, solved[:, None], ("exact",), {})

    c = config(**{"budget.prompts": 4, "budget.utility": "per_rollout", "prior.source": "oracle"})
    unknown = prior.make(c, run.learner.policy, len(run.source.task.train), run.source.stream.prompt_tokens, Capture(0))
    reward = run_files.called(run.source.stream.partner.reward, answer)
    problems = run_files.Given([run.source.task.train[i] for i in (5, 9, 2, 7)])
    topology = oracle(budgets(4, prompts=ROWS, group=G, most=MOST, utility="per_rollout"), prompts=ROWS, group=G, draws=3)
    source = dataclasses.replace(run.source, data=problems, topology=topology,
                                 stages=stages.replaced(run.source.stages, stages.expect(unknown)),
                                 stream=run.source.stream.apart(partner=run.source.stream.partner.scoring(reward)))
    state = setup.initial_state(run, jax.tree.map(lambda x: x + 0, params))
    sampled, forest, facts, *_ = source.next(run.learner.publish(state))
    np.testing.assert_allclose(forest.facts["expected"], [0, 1, 1, 0])
    assert sampled.valid.sum(1)[:4].tolist() == [3] * 4  # nothing gains: the rest beyond two each is spread evenly
    assert asked == [ROWS * G] * 3 + [9, 3] and source.next_uid == 3 * ROWS * G + 4 * 2 * G  # blocks of two of each prompt
    assert facts["completion/tokens"] == tokens > 2 * sampled.mask[sampled.valid].sum()  # also those of the oracle


@pytest.mark.slow
def test_v0_judges_prompts_and_learns_its_context(monkeypatch, tmp_path):
    """V0.5 with V0 as its prior: an untrained V0 on an encoder of one number per character."""
    from jaxrl_llm.values import encoder
    model = v0.V0(v0.Head(features=12, width=16, layers=1, heads=2),
                  v0.QueryAdapter(queries=4, size=3, heads=1, hidden=8), states=5)
    path = v0.save(tmp_path / "v0.npz", model, model.init(jax.random.key(0)))
    asked = []

    def encode(texts):
        asked.extend(texts)
        mask = np.arange(16) < np.array([len(text) for text in texts])[:, None]
        codes = np.array([[*text.encode().ljust(16)] for text in texts])
        return np.sin(codes[..., None] * np.arange(1, 6)).astype(np.float32), mask

    monkeypatch.setattr(encoder, "load", lambda path: encoder.Encoder(encode, 5))
    changes = {"method": "v0_5", "prior.source": "v0", "prior.weights": str(path), "prior.encoder": "somewhere"}
    c = config(**changes)
    loop.train(c, tmp_path / "run")
    saved = run_files.saved(tmp_path / "run", c)
    prompts = next(leaf for name, leaf in saved.items() if "prior" in name and "prompt" in name)
    outcomes = next(leaf for name, leaf in saved.items() if "prior" in name and "outcome" in name)
    assert (outcomes >= 0).all() and (outcomes <= 1).all() and len(set(prompts.tolist())) > 1
    assert len(asked) == len(set(asked)) * (1 + len(asked) // (len(set(asked)) + 1))  # each prompt once in a built run


@pytest.mark.slow
def test_few_are_learned_from_where_prompts_get_no_second_group():
    """Reinforce-Ada with groups of 8: A is over all draws, and the update keeps the first two right and two wrong ones."""
    run, params = setup.build(config(method="reinforce_ada", **{"sampling.group": 8, "sampling.max_group": 8}))
    state = setup.initial_state(run, params)
    rollouts = run.source.next(run.learner.publish(state)).rollouts
    rewards = np.tile(np.float32([1, 1, 1, 0, 0, 0, 0, 0]), (ROWS, 1))
    _, metrics, batch, advantages = run.learner.learn(state, rollouts.replace(rewards=rewards))
    assert np.asarray(batch.valid).astype(int).tolist() == [[1, 1, 0, 1, 1, 0, 0, 0]] * ROWS
    assert metrics["reinforce_ada/rollouts"] == 8
    np.testing.assert_allclose(advantages, np.where(rollouts.token_mask, (rewards - 3 / 8)[..., None], 0), rtol=1e-6)


@pytest.mark.parametrize(("changes", "reason"), (
    ({"budget.utility": "most"}, "config.budget.utility"),
    ({"budget.prompts": 1, "sampling.max_group": 8}, "budget.prompts=1 of at most sampling.max_group=8 .* take 8 of"),
    ({"budget.prompts": 3, "sampling.max_group": 4}, "take 12 of the 6 x 2 of a step, which leaves nothing to allocate"),
    ({"method": "dapo", "budget.utility": "paper"}, "does not go together with the filter"),
    ({"method": "v0_5", "budget.utility": "paper"}, "an estimator that asks for more rollouts itself"),
    ({"method": "poise", "budget.utility": "paper"}, "a baseline from hidden states"),
    ({"method": "ppo", "budget.utility": "paper"}, "a critic of method 'ppo'"),
    ({"prior.source": "v0"}, "needs config.prior.weights"),
    ({"prior.source": "stars"}, "config.prior.source"),
))
def test_impossible_settings_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        setup.build(config(**changes))
