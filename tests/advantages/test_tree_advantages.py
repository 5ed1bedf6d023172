"""Advantages of trees, ranked lists and paired rewards: worked examples and recursion in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.mars2_path_adv import shaped_rewards
from jaxrl_llm.advantages.rank_grpo import rank_rewards
from jaxrl_llm.control import branchgrpo_depthwise as pruning
from jaxrl_llm.control.lightningrl import has_signal
from jaxrl_llm.control.mars2_path_adv import undecided
from jaxrl_llm.data.rollouts import Rollouts, from_lists
from jaxrl_llm.maths import trees


def per_row(slug, rollouts, **hyper):
    values, _ = advantages.make(slug, **hyper).update(rollouts, ())
    return np.asarray(values)[..., 0]


def z(values, eps, ddof=1):
    values = np.asarray(values, np.float64)
    return (values - values.mean()) / ((values.std(ddof=ddof) if len(values) > ddof else 0) + eps)


def planted(seed, p=4, g=9):
    """A random tree per prompt with shuffled rows and node numbers and two rows of padding: (Rollouts, dicts)."""
    rng = np.random.default_rng(seed)
    names = np.stack([rng.permutation(100)[:g] for _ in range(p)])
    parent = np.stack([[-1] + [names[q, k] if k >= 0 else -1 for k in (rng.integers(-1, i) for i in range(1, g))]
                       for q in range(p)])
    order = np.stack([rng.permutation(g) for _ in range(p)])
    rewards, edge = rng.choice([0.0, 0.25, 0.6, 1.0], (p, g)), np.log(rng.uniform(0.1, 0.9, (p, g)))
    def shuffle(x):
        return np.take_along_axis(x, order, axis=1)
    fields = [shuffle(x) for x in (names, parent, rewards, edge)]
    def pad(x):
        return np.pad(x, ((0, 0), (0, 2)))
    node, parent, rewards, edge = (pad(x) for x in fields)
    rollouts = Rollouts(
        mask=jnp.ones((p, g + 2, 1), bool), valid=jnp.asarray(pad(np.ones((p, g), bool))),
        rewards=jnp.asarray(rewards, jnp.float32), old_logprobs=jnp.asarray(edge[..., None], jnp.float32),
        extras={"node": jnp.asarray(node, jnp.int32), "parent": jnp.asarray(parent, jnp.int32)})
    nodes = [{int(node[q, i]): dict(row=i, parent=int(parent[q, i]), r=rewards[q, i], edge=edge[q, i])
              for i in range(g)} for q in range(p)]
    return rollouts, nodes


def compare(slug, reference, **hyper):
    for seed in (0, 1):
        rollouts, prompts = planted(seed)
        expected = np.zeros(rollouts.valid.shape)
        for p, nodes in enumerate(prompts):
            for name, value in reference(nodes).items():
                expected[p, nodes[name]["row"]] = value
        np.testing.assert_allclose(per_row(slug, rollouts, **hyper), expected, rtol=2e-4, atol=2e-5)


def below(nodes, name):
    return [k for k, node in nodes.items() if node["parent"] == name]


def depth(nodes, name):
    return 0 if name == -1 else 1 + depth(nodes, nodes[name]["parent"])


# --- trees ---


def test_paths_of_a_chain_and_a_missing_parent():
    valid = jnp.array([[True, True, True, True, False]])
    node, parent = jnp.array([[4, 2, 9, 7, 1]]), jnp.array([[2, 9, -1, 1, 4]])
    reach = trees.descendants(trees.children(valid, node, parent), valid)
    np.testing.assert_array_equal(reach[0].astype(int), [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(trees.depth(reach), [[3, 2, 1, 1, 0]])


def test_long_chains_are_followed_to_the_end():
    size = 37
    valid = jnp.ones((1, size), bool)
    node = jnp.arange(size)[None]
    reach = trees.descendants(trees.children(valid, node, node - 1), valid)
    np.testing.assert_array_equal(trees.depth(reach), node + 1)


# --- BranchGRPO ---


def branches(old=None):
    ids = {"node": jnp.array([[1, 2, 3, 4, 5, 6]]), "parent": jnp.array([[-1, -1, 1, 1, 2, 2]])}
    old = jnp.zeros((1, 6, 1)) if old is None else jnp.asarray(old, jnp.float32)[None, :, None]
    return from_lists([[9, 9, 1, 0, 1, 1]], extras=ids, old_logprobs=old)


def test_branchgrpo_worked_example():
    root_half = np.sqrt(0.5)
    np.testing.assert_allclose(per_row("branchgrpo_depthwise", branches()),
                               [[-root_half, root_half, 0.5, -1.5, 0.5, 0.5]], rtol=1e-6)


def test_branchgrpo_prob_and_group():
    old = np.log([0.5, 0.5, 0.8, 0.2, 0.3, 0.3])
    values = per_row("branchgrpo_depthwise", branches(old), variant="prob")
    np.testing.assert_allclose(values[0, :2], [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-6)
    leaves = z([1, 0, 1, 1], 1e-8)
    np.testing.assert_allclose(per_row("branchgrpo_depthwise", branches(), variant="use_group"),
                               [[leaves[:2].mean(), leaves[2:].mean(), *leaves]], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mean", "prob"])
def test_branchgrpo_against_recursion(variant):
    def leaves(nodes, name):
        actual = [leaf for child in below(nodes, name) for leaf in leaves(nodes, child)]
        return actual or [nodes[name]["r"]]

    def value(nodes, name):
        children = below(nodes, name)
        if variant == "mean" or not children:
            return np.mean(leaves(nodes, name))
        weight = np.exp([nodes[c]["edge"] for c in children])
        return weight @ [value(nodes, c) for c in children] / weight.sum()

    def reference(nodes):
        result = {}
        for level in {depth(nodes, name) for name in nodes}:
            names = [name for name in nodes if depth(nodes, name) == level]
            values = np.array([value(nodes, name) for name in names])
            flat = len(names) == 1 or values.std(ddof=1) < 1e-6
            result |= dict(zip(names, np.zeros(len(names)) if flat else np.clip(z(values, 1e-8), -0.9, 0.9)))
        return result

    compare("branchgrpo_depthwise", reference, variant=variant, max_advantage=0.9)


def test_pruning():
    rollouts = branches()
    valid, parent = rollouts.valid, rollouts.extras["parent"]
    reach = trees.descendants(trees.children(valid, rollouts.extras["node"], parent), valid)
    window = dict(start=4, width=2, interval=10, stop_depth=1)
    levels = jnp.array([[1, 2, 3, 4, 5, 6]])
    for step, dropped in ((0, [4, 5]), (9, [4, 5]), (10, [3, 4]), (100, [1, 2])):
        keep = pruning.outside_window(levels, step, **window)
        np.testing.assert_array_equal(np.asarray(levels)[~np.asarray(keep)], dropped)
    value = jnp.array([[0.5, 1, 1, 0, 1, 1]])
    np.testing.assert_array_equal(pruning.best_child(value, parent, valid), [[False, True, True, False, True, False]])
    leaf = jnp.array([[False, False, True, True, True, True]])
    np.testing.assert_array_equal(pruning.extreme_paths(jnp.array([[9, -9, 0.5, 0, 1, 1]]), leaf, reach),
                                  [[True, True, False, True, True, False]])
    assert not np.any(pruning.extreme_paths(value, leaf & False, reach))


# --- MARS^2 ---

MARS = {"node": jnp.array([[0, 1, 2, 3]]), "parent": jnp.array([[-1, -1, 0, 0]])}


def test_mars2_worked_example():
    rollouts = from_lists([[0.4, 0.8, 1, 0.2]], extras=MARS)
    arrays = (rollouts.rewards, MARS["node"], MARS["parent"], rollouts.valid)
    np.testing.assert_allclose(shaped_rewards(*arrays), [[0.2, 1, 1.4, 0]], atol=1e-6)
    np.testing.assert_allclose(shaped_rewards(*arrays, parent_reward="raw")[0, 2:], [1.35, -0.05], atol=1e-6)
    np.testing.assert_allclose(per_row("mars2_path_adv", rollouts), [[-0.6809849, 0.5296549, 1.1349749, -0.9836449]],
                               rtol=1e-5)


def test_mars2_punishes_overlong_nodes():
    """Shaped rewards 0.2, 1, 1.4, 0 of 2, 3, 4, 5 tokens; beyond 2 of 5 each costs a third, 1 at most."""
    rollouts = from_lists([[0.4, 0.8, 1, 0.2]], lengths=[[2, 3, 4, 5]], extras=MARS)
    expected = z([0.2, 1 - 1 / 3, 1.4 - 2 / 3, -1.0], 1e-9)
    np.testing.assert_allclose(per_row("mars2_path_adv", rollouts, max_len=5, cache_len=3), [expected], rtol=1e-5)
    np.testing.assert_allclose(per_row("mars2_path_adv", rollouts), [[-0.6809849, 0.5296549, 1.1349749, -0.9836449]], rtol=1e-5)
    with pytest.raises(ValueError, match="cache=6, max_length=5"):
        advantages.make("mars2_path_adv", max_len=5, cache_len=6)


def test_mars2_equal_scores_and_filter():
    assert not np.any(per_row("mars2_path_adv", from_lists([[0.1] * 4], extras=MARS), mix=0.3))
    scores = jnp.array([[0, 0, 9], [1, 1, 9], [1, 0, 9], [0.5, 0.5, 9]])
    np.testing.assert_array_equal(undecided(scores, scores < 9), [False, False, True, True])


@pytest.mark.parametrize("parent_reward", ["shaped", "raw"])
def test_mars2_against_recursion(parent_reward):
    def shaped(nodes, name):
        node = nodes[name]
        others = [nodes[k]["r"] for k in below(nodes, node["parent"]) if k != name]
        parts = [(0.3, np.mean(others))] if others else []
        if node["parent"] != -1:
            score = shaped(nodes, node["parent"]) if parent_reward == "shaped" else nodes[node["parent"]]["r"]
            parts.append((0.7, score))
        if not parts:
            return node["r"]
        return node["r"] + 0.4 * (node["r"] - sum(w * x for w, x in parts) / sum(w for w, _ in parts))

    def reference(nodes):
        return dict(zip(nodes, z([shaped(nodes, name) for name in nodes], 1e-9)))

    compare("mars2_path_adv", reference, gamma=0.4, mix=0.3, parent_reward=parent_reward)


# --- PORTool ---


def tool_paths(paths, rewards, form=None, valid=None):
    """One token per step; `form` [G, S]."""
    path = jnp.asarray(paths)[None]
    g, s = path.shape[1:]
    steps = jnp.broadcast_to(jnp.arange(s), (1, g, s))
    form = jnp.zeros((1, g, s)) if form is None else jnp.asarray(form, jnp.float32)[None]
    return Rollouts(mask=path >= 0, valid=jnp.ones((1, g), bool) if valid is None else jnp.asarray(valid)[None],
                    rewards=jnp.asarray(rewards, jnp.float32)[None], step_ids=steps,
                    extras={"path": path, "format_rewards": form})


def test_portool_worked_example():
    rollouts = tool_paths([[0, 1], [0, 2], [3, -1]], [1, -1, 0])
    values, _ = advantages.make("portool").update(rollouts, ())
    expected = [[1.7071047, 1.7071053], [-0.2928933, -1.7071053], [-0.7071057, 0]]
    np.testing.assert_allclose(values[0], expected, rtol=1e-5)


def test_portool_spreads_a_step_over_its_tokens():
    rollouts = tool_paths([[0, 1], [0, 2], [3, -1]], [1, -1, 0])
    long = rollouts.replace(mask=jnp.ones((1, 3, 5), bool), step_ids=jnp.array([[[0, 0, 0, 1, 1]] * 3]),
                            extras={**rollouts.extras, "format_rewards": jnp.zeros((1, 3, 5))})
    values, _ = advantages.make("portool").update(long, ())
    np.testing.assert_allclose(values[0, 1], [-0.2928933] * 3 + [-1.7071053] * 2, rtol=1e-5)
    np.testing.assert_allclose(values[0, 2], [-0.7071057] * 3 + [0] * 2, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("agg", ["max", "mean"])
def test_portool_against_loops(agg):
    rng = np.random.default_rng(1)
    paths = np.array([[10, 11, 12], [10, 11, 13], [10, 14, -1], [20, 21, 22], [20, -1, -1], [30, 31, -1], [10, 11, 12]])
    rewards, form = rng.choice([-1.0, 0.0, 1.0], 7), rng.normal(size=(7, 3)) * 0.1
    valid = [True] * 6 + [False]
    for node in np.unique(paths):
        form[paths == node] = form[paths == node][0]
    steps = [[n for n in path if n >= 0] for path in paths[:6]]
    through, parents = {}, {}
    for k, path in enumerate(steps):
        for t, node in enumerate(path):
            through.setdefault(node, []).append(0.9 ** (len(path) - t - 1) * rewards[k] + form[k, t])
            parents[node] = path[t - 1] if t else -1
    score = {node: (max if agg == "max" else np.mean)(values) for node, values in through.items()}
    fork = {}
    for parent in set(parents.values()):
        names = [node for node in parents if parents[node] == parent]
        fork |= dict(zip(names, z([score[node] for node in names], 1e-6)))
    whole = z([rewards[k] + np.mean([form[k, t] for t in range(len(path))]) for k, path in enumerate(steps)], 1e-6)
    expected = np.zeros((7, 3))
    for k, path in enumerate(steps):
        for t, node in enumerate(path):
            expected[k, t] = 2 * whole[k] + 0.5 * fork[node]
    rollouts = tool_paths(paths, rewards, form, valid)
    values, _ = advantages.make("portool", gamma=0.9, traj_coef=2.0, fork_coef=0.5, agg=agg).update(rollouts, ())
    np.testing.assert_allclose(values[0], expected, rtol=1e-4, atol=1e-5)


# --- Rank-GRPO ---


def ranked(hits, ranks, eos):
    ranks = jnp.asarray(ranks)[None]
    return Rollouts(mask=jnp.ones(ranks.shape, bool), valid=jnp.ones(ranks.shape[:2], bool),
                    extras={"hits": jnp.asarray(hits)[None], "ranks": ranks, "eos": jnp.asarray(eos, bool)[None]})


def test_rank_grpo_worked_example():
    rollouts = ranked([[1, 0], [0, 1]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[0, 0, 0, 1]] * 2)
    a = 0.7070068
    values, _ = advantages.make("rank_grpo", variant="exp_inf").update(rollouts, ())
    np.testing.assert_allclose(values[0], [[a, a, -a, 0.1], [-a, a, a, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(rank_rewards(jnp.array([[[1.0, 0], [0, 1]]])), [[[1, 0], [0.6309298, 0.6309298]]],
                               rtol=1e-6)
    values, _ = advantages.make("rank_grpo").update(rollouts, ())
    np.testing.assert_allclose(values[0], [[0.7068359] * 2 + [-0.7069483, 0.1], [-0.7068359] + [0.7069483] * 2 + [0.1]],
                               rtol=1e-5)


def test_rank_grpo_too_few_too_many_and_cut_off():
    ranks = [[0, 0, -1, 0], [0, 1, 2, 3], [0, 1, -1, 1], [0, 1, 1, 1]]
    eos = [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    values, _ = advantages.make("rank_grpo").update(ranked(np.zeros((4, 2), int), ranks, eos), ())
    expected = [[0, 0, 0, -0.1], [0, 0, -0.1, -0.1], [0, 0, 0, 0.1], [0, 0, 0, 0]]
    np.testing.assert_allclose(values[0], expected, atol=1e-7)


def test_rank_grpo_rewards_only_what_is_still_to_come():
    hits = np.random.default_rng(0).integers(0, 2, (3, 4, 7)).astype(float)
    def to_come(row, k):
        return sum(row[j] / np.log2(j + 2) for j in range(k, 7))
    expected = [[[to_come(row, k) for k in range(7)] for row in group] for group in hits]
    np.testing.assert_allclose(rank_rewards(jnp.asarray(hits, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


def test_rank_grpo_refuses_more_ranks_than_tokens():
    with pytest.raises(ValueError, match="K=4 ranks"):
        advantages.make("rank_grpo").update(ranked(np.zeros((1, 4), int), [[0, 1, 2, 3]], [[0, 0, 0, 1]]), ())


# --- LightningRL ---

ACC, PERF = [[1, 1, 0, 0], [0, 0, 0, 0]], [[2, 4, 6, 8], [1, 2, 3, 4]]


def priced(acc=ACC, perf=PERF, truncated=None):
    truncated = np.zeros(np.shape(acc), bool) if truncated is None else np.asarray(truncated)
    extras = {"perf": jnp.asarray(perf, jnp.float32), "truncated": jnp.asarray(truncated)}
    return from_lists(acc, extras=extras)


def test_lightningrl_worked_example():
    expected = [[-0.643886, 1.041830, -1.041830, 0.643886], [0] * 4]
    np.testing.assert_allclose(per_row("lightningrl", priced()), expected, atol=1e-6)
    scaled = priced(perf=(np.array(PERF) * 100 - 3).tolist())
    np.testing.assert_allclose(per_row("lightningrl", scaled), expected, atol=1e-6)


def test_lightningrl_drops_prompts_without_signal():
    acc = jnp.array([[1.0, 0], [0, 0], [1, 1], [1, 0], [1, 1]])
    perf = jnp.array([[1.0, 2], [1, 2], [1, 2], [2, 2.005], [3, 9]])
    valid = jnp.ones((5, 2), bool).at[4, 1].set(False)
    np.testing.assert_array_equal(has_signal(acc, perf, valid), [True, False, True, False, False])
    overlong = priced(truncated=[[True, True, False, False], [False] * 4])
    assert not np.any(per_row("lightningrl", overlong))


def test_lightningrl_against_numpy():
    rng = np.random.default_rng(3)
    acc, perf = rng.integers(0, 2, (5, 6)).astype(float), rng.uniform(1, 8, (5, 6))
    truncated = rng.random((5, 6)) < 0.2
    acc[2] = 0
    right = np.where(truncated, 0, acc)
    def part(x):
        return (x - x.mean()) / x.std() if x.std() > 0 else 0 * x
    rewards = np.array([part(right[p]) + 0.5 * part(perf[p]) for p in range(5)])
    keep = right.any(axis=1)
    assert not keep[2] and keep.sum() > 2
    expected = np.where(keep[:, None], (rewards - rewards[keep].mean()) / rewards[keep].std(ddof=1), 0)
    values = per_row("lightningrl", priced(acc, perf, truncated), perf_coef=0.5)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_lightningrl_by_length():
    rollouts = from_lists([[1, 1]], lengths=[[1, 3]], extras={"truncated": jnp.zeros((1, 2), bool)})
    values = per_row("lightningrl", rollouts, perf="length")
    np.testing.assert_allclose(values, [[np.sqrt(0.5), -np.sqrt(0.5)]], rtol=1e-6)
