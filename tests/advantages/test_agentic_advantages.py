"""Advantages of turns, agents and games: worked examples and loops in float64 over shuffled rows with padding."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods
from jaxrl_llm.advantages.salt import edges
from jaxrl_llm.control.ui_s1 import diverse_start, semi_online_return
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.maths import segments

FLOATS = ("step_rewards", "perf", "format_rewards")


def make_rollouts(rewards, **ids):
    extras = {k: jnp.asarray(v, jnp.float32 if k in FLOATS else jnp.int32) for k, v in ids.items()}
    return from_lists(rewards, extras=extras)


def per_row(slug, rollouts, **hyper):
    values, _ = advantages.make(slug, **hyper).update(rollouts, advantages.make(slug, **hyper).init())
    return np.asarray(values)[..., 0]


def random_turns(seed, p=3, g=9):
    """Valid and invalid turns of three trajectories in shuffled order, as Rollouts and as float64 dicts per task."""
    rng = np.random.default_rng(seed)
    ids = {"traj": rng.integers(0, 3, (p, g)), "step": rng.permuted(np.tile(np.arange(g), (p, 1)), axis=1)}
    for name in ("obs", "act", "next_obs", "agent"):
        ids[name] = rng.integers(0, 2, (p, g))
    ids["match"] = rng.random((p, g)) < 0.7
    ids["step_rewards"] = rng.choice([0.0, 0.5, 1.0], (p, g))
    rewards = np.take_along_axis(rng.choice([0.0, 0.5, 1.0], (p, 3)), ids["traj"], axis=1)
    valid = rng.random((p, g)) < 0.8
    extras = {k: jnp.asarray(v, jnp.float32 if k in FLOATS else jnp.int32) for k, v in ids.items()}
    rollouts = Rollouts(mask=jnp.ones((p, g, 1), bool), valid=jnp.asarray(valid),
                        rewards=jnp.asarray(rewards, jnp.float32), extras=extras)
    tasks = [[{"row": i, "reward": rewards[q, i]} | {k: v[q, i] for k, v in ids.items()}
              for i in range(g) if valid[q, i]] for q in range(p)]
    return rollouts, tasks


def by(rows, key):
    groups = collections.defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def z(values, ddof, eps):
    """Function x -> z-score; None with fewer than two values."""
    values = np.asarray(values, np.float64)
    return None if len(values) < 2 else lambda x: (x - values.mean()) / (values.std(ddof=ddof) + eps)


def add_returns(rows, gamma, gate=lambda row: True, name="ret"):
    for traj in by(rows, lambda row: row["traj"]).values():
        run = 0.0
        for row in sorted(traj, key=lambda row: -row["step"]):
            if gate(row):
                row[name] = run = row["step_rewards"] + gamma * run
            else:
                row[name], run = row["step_rewards"], 0.0


def check(slug, reference, seeds=(0, 1, 2), **hyper):
    for seed in seeds:
        rollouts, tasks = random_turns(seed)
        expected = np.zeros(rollouts.valid.shape)
        for p, rows in enumerate(tasks):
            for row, value in zip(rows, reference(rows)):
                expected[p, row["row"]] = value
        np.testing.assert_allclose(per_row(slug, rollouts, **hyper), expected, rtol=2e-4, atol=2e-5)


# --- groups of rows ---


def test_first_counts_every_group_once_and_padding_never():
    valid = jnp.array([[True, True, False, True, True]])
    group = segments.same(valid, jnp.array([[7, 3, 3, 7, 3]]))
    np.testing.assert_array_equal(segments.first(group), [[True, True, False, False, False]])
    np.testing.assert_array_equal(segments.count(group), [[2, 2, 0, 2, 2]])


def test_previous_follows_the_steps_of_one_trajectory_whatever_the_row_order():
    valid = jnp.array([[True, True, True, False, True]])
    traj, step = jnp.array([[0, 1, 0, 0, 0]]), jnp.array([[5, 0, 2, 3, 9]])
    index, exists = segments.previous(valid, traj, step)
    np.testing.assert_array_equal(exists, [[True, False, False, False, True]])
    assert index[0, 0] == 2 and index[0, 4] == 0


def test_equal_rows_get_exactly_zero():
    x = jnp.full((1, 7), 0.1)
    assert not np.any(segments.relative(x, segments.same(jnp.ones((1, 7), bool)), eps=1e-9))


# --- GiGPO and HGPO ---

TWO = dict(rewards=[[10, 10, 10, 0, 0, 0]], traj=[[0, 0, 0, 1, 1, 1]], step=[[0, 1, 2] * 2], obs=[[0, 1, 2, 0, 3, 2]],
           step_rewards=[[0, 0, 10, 0, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("mode, expected", [
    ("mean_norm", [9.5125, 5, 10, -9.5125, -5, -10]),
    ("mean_std_norm", [1.4142134, 0.7071067, 1.4142134, -1.4142134, -0.7071067, -1.4142134])])
def test_gigpo_worked_example(mode, expected):
    np.testing.assert_allclose(per_row("gigpo", make_rollouts(**TWO), mode=mode)[0], expected, rtol=1e-6)


def test_gigpo_does_not_depend_on_the_order_of_the_rows():
    order = [4, 2, 5, 0, 3, 1]
    shuffled = {name: [[values[0][i] for i in order]] for name, values in TWO.items()}
    expected = np.array([9.5125, 5, 10, -9.5125, -5, -10])[order]
    np.testing.assert_allclose(per_row("gigpo", make_rollouts(**shuffled))[0], expected, rtol=1e-6)


@pytest.mark.slow
def test_gigpo_lone_trajectory_and_cross_steps():
    alone = make_rollouts([[10.0, 10.0]], traj=[[0, 0]], step=[[0, 1]], obs=[[0, 1]], step_rewards=[[0, 10]])
    np.testing.assert_allclose(per_row("gigpo", alone), [[10, 10]])
    assert not np.any(per_row("gigpo", alone, singleton="zero"))
    long = make_rollouts([[1, 1, 1, 0]], traj=[[0, 0, 0, 1]], step=[[0, 1, 2, 0]], obs=[[0, 1, 2, 3]],
                         step_rewards=[[0, 0, 0, 0]])
    np.testing.assert_allclose(per_row("gigpo", long), [[0.5, 0.5, 0.5, -0.5]])
    np.testing.assert_allclose(per_row("gigpo", long, cross_steps=True), [[0.25, 0.25, 0.25, -0.75]])


@pytest.mark.slow
def test_gigpo_against_loops():
    def reference(rows):
        add_returns(rows, 0.9)
        scores = [group[0]["reward"] for group in by(rows, lambda row: row["traj"]).values()]
        score = z(scores, 1, 1e-6) or (lambda x: x / (1 + 1e-6))
        states = by(rows, lambda row: row["obs"])
        for row in rows:
            step = z([other["ret"] for other in states[row["obs"]]], 1, 1e-6) or (lambda x: 0)
            yield score(row["reward"]) + 0.5 * step(row["ret"])

    check("gigpo", reference, gamma=0.9, step_coef=0.5, mode="mean_std_norm")


THREE = dict(rewards=[[0.0] * 9], traj=[[0] * 3 + [1] * 3 + [2] * 3], step=[[0, 1, 2] * 3],
             obs=[[0, 1, 2, 0, 1, 2, 0, 3, 2]], step_rewards=[[0, 0, 10, 0, 0, 0, 0, 0, 10]])


@pytest.mark.slow
def test_hgpo_worked_example():
    expected = [0.7071059, 0.9999995, 0.9511841, -1.4142118, -0.9999995, -1.0690352, 0.7071059, 0, 0.7071059]
    np.testing.assert_allclose(per_row("hgpo", make_rollouts(**THREE))[0], expected, rtol=1e-6)
    # published numbering: weights 2, 3, 4 instead of 1, 2, 3
    shifted = per_row("hgpo", make_rollouts(**THREE), weight_offset=2)[0, 2]
    np.testing.assert_allclose(shifted, (2 * 0.7071066 + 7 * 0.9999998) / (9 + 1e-6), rtol=1e-6)


@pytest.mark.parametrize("base", [False, True])
def test_hgpo_against_loops(base):
    def reference(rows):
        add_returns(rows, 0.95)
        past = {}
        for traj in by(rows, lambda row: row["traj"]).values():
            traj = sorted(traj, key=lambda row: row["step"])
            for i, row in enumerate(traj):
                past[row["row"]] = [other["obs"] for other in traj[: i + 1]]
        scores = [group[0]["reward"] for group in by(rows, lambda row: row["traj"]).values()]
        score = z(scores, 1, 1e-6) or (lambda x: x / (1 + 1e-6))
        for row in rows:
            items = [(1.0, score(row["reward"]))] if base else []
            for k in range(3):
                mine = past[row["row"]][-k - 1 :]
                partners = [r["ret"] for r in rows if past[r["row"]][-k - 1 :] == mine and len(past[r["row"]]) > k]
                if len(mine) > k and len(partners) > 1:
                    items.append(((k + 1) ** 0.5, z(partners, 0, 1e-6)(row["ret"])))
            items = [(w, a) for w, a in items if abs(a) > 1e-6]
            yield sum(w * a for w, a in items) / (sum(w for w, _ in items) + 1e-6)

    check("hgpo", reference, alpha=0.5, base_group=base)


# --- SALT ---

FORK = dict(traj=[[0, 0, 0, 1, 1, 1]], step=[[0, 1, 2] * 2], obs=[[0, 1, 2, 0, 1, 3]], act=[[5, 6, 7, 5, 8, 7]],
            next_obs=[[1, 2, -1, 1, 3, -1]])


def test_salt_worked_example():
    ids = [jnp.array(FORK[name]) for name in ("traj", "step", "obs", "act", "next_obs")]
    merged = edges(jnp.ones((1, 6), bool), *ids, history=1)
    trajectory = jnp.array([[1, 1, 1, -0.5, -0.5, -0.5]])
    np.testing.assert_allclose(segments.mean(trajectory, merged), [[0.25, 1, 1, 0.25, -0.5, -0.5]])
    loo = per_row("salt", make_rollouts([[2, 2, 2, 0.5, 0.5, 0.5]], **FORK), base="rloo")
    np.testing.assert_allclose(loo, [[0, 1.5, 1.5, 0, -1.5, -1.5]])


def test_salt_history_distinguishes_equal_steps_with_different_pasts():
    ids = dict(traj=[[0, 0, 1, 1]], step=[[0, 1, 0, 1]], obs=[[0, 1, 2, 1]], act=[[5, 6, 5, 6]],
               next_obs=[[1, 3, 1, 3]])
    rollouts = make_rollouts([[1, 1, 0, 0]], **ids)
    np.testing.assert_allclose(per_row("salt", rollouts, base="rloo"), [[1, 1, -1, -1]])
    np.testing.assert_allclose(per_row("salt", rollouts, base="rloo", history=0), [[1, 0, -1, 0]])


@pytest.mark.parametrize("history", [0, 1, 2])
def test_salt_against_loops(history):
    def reference(rows):
        past = {}
        for traj in by(rows, lambda row: row["traj"]).values():
            traj = sorted(traj, key=lambda row: row["step"])
            for i, row in enumerate(traj):
                past[row["row"]] = tuple((o["obs"], o["act"]) for o in traj[max(0, i - history) : i])
        scores = [group[0]["reward"] for group in by(rows, lambda row: row["traj"]).values()]
        score = z(scores, 1, 1e-6) or (lambda x: 0)
        def key(row):
            return (row["obs"], row["act"], row["next_obs"], past[row["row"]])
        groups = by(rows, key)
        for row in rows:
            yield np.mean([score(other["reward"]) for other in groups[key(row)]])

    check("salt", reference, history=history)


# --- UI-S1 ---

STEPS = dict(traj=[[0, 0, 0, 1, 1]], step=[[0, 1, 2, 0, 1]], match=[[1, 1, 1, 1, 0]], step_rewards=[[1, 1, 1, 1, 0.2]])


@pytest.mark.slow
def test_ui_s1_worked_example():
    rollouts = make_rollouts([[0.0] * 5], **STEPS)
    expected = [1.1543178, 1.1543184, 0.4472123, -0.2598931, -2.4959554]
    np.testing.assert_allclose(per_row("ui_s1", rollouts)[0], expected, rtol=1e-6)
    extras = rollouts.extras
    ids = (rollouts.valid, extras["traj"], extras["step"])
    returns = semi_online_return(extras["step_rewards"], extras["match"], *ids)
    np.testing.assert_allclose(returns, [[1.75, 1.5, 1, 1, 0.2]], rtol=1e-6)
    assert diverse_start(returns, extras["step"], rollouts.valid)
    assert not diverse_start(returns, extras["step"], rollouts.valid, min_std=0.38)
    assert diverse_start(returns, extras["step"], jnp.array([[True, True, True, False, False]]))


def test_ui_s1_sums_of_trajectories():
    values = per_row("ui_s1", make_rollouts([[0.0] * 5], **STEPS), episode_source="traj_return", step_coef=0.0,
                     mode="mean_norm")
    np.testing.assert_allclose(values, [[0.9, 0.9, 0.9, -0.9, -0.9]], rtol=1e-6)


def test_ui_s1_against_loops():
    def reference(rows):
        add_returns(rows, 0.5, gate=lambda row: row["match"])
        score = z([row["step_rewards"] for row in rows], 1, 1e-6) or (lambda x: x / (1 + 1e-6))
        steps = by(rows, lambda row: row["step"])
        for row in rows:
            step = z([other["ret"] for other in steps[row["step"]]], 1, 1e-6) or (lambda x: 0)
            yield score(row["step_rewards"]) + step(row["ret"])

    check("ui_s1", reference)


# --- Dr. MAS and multi-context GRPO ---

CALLS = dict(traj=[[0, 0, 0, 1, 1]], agent=[[0, 1, 1, 0, 1]])


def test_dr_mas_worked_example():
    rollouts = make_rollouts([[1, 1, 0.9, 0, 0]], **CALLS)
    expected = [0.7071058, 0.6657491, 0.4841811, -0.7071058, -1.1499302]
    np.testing.assert_allclose(per_row("dr_mas", rollouts)[0], expected, rtol=1e-6)
    vanilla = per_row("dr_mas", rollouts, variant="vanilla")[0]
    np.testing.assert_allclose(vanilla, [0.7071057] * 3 + [-0.7071057] * 2, rtol=1e-6)


def test_dr_mas_mixed_variants():
    rewards, score = np.array([1, 1, 0.9, 0, 0]), np.array([2.9 / 3, 0])
    agent = np.array([0, 1, 1, 0, 1])
    mean = np.array([rewards[agent == k].mean() for k in (0, 1)])[agent]
    std = np.array([rewards[agent == k].std(ddof=1) for k in (0, 1)])[agent]
    rollouts = make_rollouts([rewards], **CALLS)
    centred = {"agent_mean": (rewards - mean) / score.std(ddof=1), "agent_std": (rewards - score.mean()) / std}
    for variant, expected in centred.items():
        np.testing.assert_allclose(per_row("dr_mas", rollouts, variant=variant)[0], expected, rtol=1e-5)


def test_vanilla_second_moment_is_what_the_docstring_says():
    """Two agents with equally many calls, one with an offset: E[A^2] per agent, with statistics over calls of all agents."""
    rng = np.random.default_rng(0)
    rewards = np.stack([rng.normal(size=40), 3 + 0.2 * rng.normal(size=40)])
    mean, std = rewards.mean(), rewards.std()
    moment = np.mean(((rewards - mean) / std) ** 2, axis=1)
    np.testing.assert_allclose(moment, (rewards.std(axis=1) ** 2 + (rewards.mean(axis=1) - mean) ** 2) / std**2)
    rollouts = make_rollouts([rewards.ravel()], agent=[[0] * 40 + [1] * 40])
    values = per_row("dr_mas", rollouts).reshape(2, 40)
    np.testing.assert_allclose(np.mean(values**2, axis=1), 39 / 40, rtol=1e-4)


def test_groups_of_one():
    lone = make_rollouts([[0.6, 0.6, 0.2]], agent=[[0, 0, 1]], traj=[[0, 0, 0]])
    np.testing.assert_allclose(per_row("dr_mas", lone), [[0, 0, 0.2]], rtol=1e-5)
    assert not np.any(per_row("dr_mas", lone, singleton="zero"))
    assert not np.any(per_row("multi_context_grpo", lone))
    raw = per_row("multi_context_grpo", lone, singleton="raw")
    np.testing.assert_allclose(raw, [[1.4 / 3] * 3], rtol=1e-5)


def test_multi_context_worked_example():
    values = per_row("multi_context_grpo", make_rollouts([[1, 1, 0]], traj=[[0, 0, 1]]))
    np.testing.assert_allclose(values, [[0.7071058, 0.7071058, -0.7071058]], rtol=1e-6)


def test_dr_mas_and_multi_context_against_loops():
    def agents(rows):
        groups = by(rows, lambda row: row["agent"])
        for row in rows:
            yield (z([r["reward"] for r in groups[row["agent"]]], 1, 1e-6) or (lambda x: x / (1 + 1e-6)))(row["reward"])

    def trajectories(rows):
        score = z([group[0]["reward"] for group in by(rows, lambda row: row["traj"]).values()], 1, 1e-6)
        for row in rows:
            yield score(row["reward"]) if score else 0

    check("dr_mas", agents)
    check("dr_mas", trajectories, variant="vanilla", singleton="zero")
    check("multi_context_grpo", trajectories)


# --- SPIRAL ---


def play(rewards, role, step, game=(0, 0), valid=None, state=None, **hyper):
    rollouts = make_rollouts(rewards, agent=role, step=step, game=game)
    rollouts.extras["settled"] = jnp.ones(len(rewards), bool)
    if valid is not None:
        rollouts = rollouts.replace(valid=jnp.asarray(valid))
    estimator = advantages.make("spiral_rae", **hyper)
    values, state = estimator.update(rollouts, estimator.init() if state is None else state)
    return np.asarray(values)[..., 0], np.asarray(state)


def test_spiral_worked_example():
    values, state = play([[1, -1, 1], [-1, 1, 1]], role=[[0, 1, 0], [0, 1, 1]], step=[[0, 1, 2], [0, 1, 3]], gamma=0.9)
    np.testing.assert_allclose(values, [[0.9, -1, 1], [-1.05, 0.945, 1.05]], rtol=1e-6)
    np.testing.assert_allclose(state, [[-0.0025, 0.0025]], atol=1e-8)


def test_spiral_update_first_and_state_over_batches():
    first, state = play([[1, -1]], role=[[0, 1]], step=[[0, 1]], game=(0,), update_first=True)
    np.testing.assert_allclose(first, [[0.95, -0.95]], rtol=1e-6)
    again, _ = play([[1, -1]], role=[[0, 1]], step=[[0, 1]], game=(0,), state=jnp.asarray(state))
    np.testing.assert_allclose(again, [[0.95, -0.95]], rtol=1e-6)


def test_spiral_silent_role_padding_and_other_games():
    _, state = play([[-1.0, 5.0], [1.0, 5.0]], role=[[0, 0], [1, 0]], step=[[0, 0], [0, 0]], game=(1, 0), games=3,
                    valid=[[True, False], [False, False]])
    np.testing.assert_allclose(state, [[0, 0], [-0.05, 0.05], [0, 0]], atol=1e-8)


def test_spiral_drops_exact_zeros_from_the_token_mean():
    values, _ = play([[0, 0, 1], [1, -1, -1]], role=[[0, 1, 0], [0, 1, 1]], step=[[0, 1, 2], [0, 1, 3]],
                     valid=[[True, True, False], [True, True, False]])
    np.testing.assert_allclose(values, [[0, 0, 0], [2, -2, 0]])
    kept, _ = play([[0, 0], [1, -1]], role=[[0, 1], [0, 1]], step=[[0, 1], [0, 1]], filter_zero=False)
    np.testing.assert_allclose(kept, [[0, 0], [1, -1]])


def test_spiral_against_loops():
    rng = np.random.default_rng(4)
    p, g = 12, 5
    role, game = rng.integers(0, 2, (p, g)), rng.integers(0, 3, p)
    step = rng.permuted(np.tile(np.arange(g), (p, 1)), axis=1)
    result = rng.choice([-1.0, 0.0, 1.0], p)
    rewards = np.where(role == 0, result[:, None], -result[:, None])
    baseline, expected = np.zeros((3, 2)), np.zeros((p, g))
    for i in range(p):
        for r in (0, 1):
            outcome = result[i] if r == 0 else -result[i]
            mine = sorted((step[i, j], j) for j in range(g) if role[i, j] == r)
            for n, (_, j) in enumerate(mine):
                expected[i, j] = 0.8 ** (len(mine) - 1 - n) * (outcome - baseline[game[i], r])
            baseline[game[i], r] = 0.95 * baseline[game[i], r] + 0.05 * outcome
    values, state = play(rewards, role, step, game, games=3, gamma=0.8, filter_zero=False)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, baseline, rtol=1e-5, atol=1e-7)


def test_wrong_names_are_refused():
    for slug, hyper in (("gigpo", {"mode": "mean"}), ("hgpo", {"mode": "z"}), ("salt", {"base": "ppo"}),
                        ("ui_s1", {"episode_source": "steps"}), ("dr_mas", {"variant": "agents"}),
                        ("multi_context_grpo", {"singleton": "row"})):
        with pytest.raises(ValueError, match="Allowed"):
            advantages.make(slug, **hyper)
    with pytest.raises(ValueError, match=r"extras\['obs'\]"):
        per_row("gigpo", make_rollouts([[1.0]], traj=[[0]], step=[[0]], step_rewards=[[1]]))


def test_worked_example_of_table_gpt_r1():
    """Two answered calls against an unknown one: the advantages, and a loss with one ratio for each rollout."""
    estimator, objective = methods.build("table_gpt_r1")
    counts = {"tool_calls": [[2, 1]], "tool_errors": [[0, 1]], "tool_failed": [[0, 0]], "tool_unknown": [[0, 1]]}
    rollouts = from_lists([[1.0, -0.1]], lengths=[[2, 1]], old_logprobs=np.log(np.full((1, 2, 2), 0.5, np.float32)),
                          extras={name: jnp.asarray(x) for name, x in counts.items()} |
                          {"current_entropies": jnp.full((1, 2, 2), 0.5)})
    A, _ = estimator.update(rollouts, ())
    np.testing.assert_allclose(A[0, :, 0], [0.707106, -0.707106], atol=2e-6)
    loss, _ = objective.update(jnp.log(jnp.array([[[0.6, 0.5], [0.5, 0.5]]])), rollouts, A, objective.init())
    assert float(loss) + 1e-3 * -0.5 == pytest.approx(-0.034245, abs=3e-6)  # the published loss has 0.001 of an entropy of 0.5
    counts |= {"tool_calls": [[4, 4]], "tool_errors": [[1, 4]], "tool_failed": [[1, 2]], "tool_unknown": [[0, 1]]}
    same = from_lists([[0.0, 1.5]], extras={name: jnp.asarray(x) for name, x in counts.items()})
    actual, _ = advantages.make("table_gpt_r1", progress=0.25, failed=-0.25, unknown=-0.5).update(same, ())
    np.testing.assert_array_equal(actual, 0)  # 0.75 - 0.25 against 1.5 - 0.5 - 0.5


# DART


def steps_of(rewards, lengths, entropies=None):
    """A group of trajectories with these numbers of steps of one token."""
    ids = pad_lists([[list(range(count)) for count in row] for row in lengths], fill=0).astype(np.int32)
    fields = {} if entropies is None else {"entropies": pad_lists([entropies])}
    return from_lists(rewards, lengths=lengths, step_ids=ids, **fields)


@pytest.mark.parametrize("rewards, lengths, expected", [
    ([1, 0, 0], [2, 6, 4], [2.236068, -0.447214, -0.447214]), ([0, 1, 0], [4, 6, 5], [-0.816497, 1.224745, -0.816497]),
    ([1, 1], [2, 3], [0, 0]), ([0.3] * 5, [1, 2, 3, 4, 5], [0] * 5)])
def test_dart_normalises_over_the_steps_of_a_group(rewards, lengths, expected):
    values, _ = advantages.make("dart", quantile=0.0).update(steps_of([rewards], [lengths]), ())
    np.testing.assert_allclose(values[0, :, 0], expected, atol=1e-6)
    assert all((row[:n] == row[0]).all() and not row[n:].any() for row, n in zip(np.asarray(values[0]), lengths))


def test_dart_leaves_out_steps_of_low_entropy():
    """Of five steps with entropies 1 to 5 the first is below the quantile 1.8; without step_ids a rollout is one step."""
    rollouts = steps_of([[1, 0]], [[2, 3]], [[1.0, 2.0], [3.0, 4.0, 5.0]])
    (one,), _ = advantages.make("dart").update(rollouts, ())
    z = np.sqrt(3 / 2)
    np.testing.assert_allclose(one, [[0, z, 0], [-1 / z] * 3], atol=1e-6)
    (whole,), _ = advantages.make("dart").update(rollouts.replace(step_ids=None), ())
    np.testing.assert_allclose(whole, [[0, 0, 0], [-1] * 3], atol=1e-6)  # mean entropies 1.5 and 4
    with pytest.raises(ValueError, match=r"quantile=1.0 of the entropies"):
        advantages.make("dart", quantile=1.0)
