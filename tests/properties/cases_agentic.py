"""Cases of the agentic and tree methods: rows with ids."""

import numpy as np
from property_inputs import Case


def turns(rng, p, g, t):
    """Rows are the turns of up to three trajectories, in any order; rewards belong to the trajectory."""
    traj = rng.integers(0, 3, (p, g))
    extras = {name: rng.integers(0, 2, (p, g)) for name in ("obs", "act", "next_obs", "agent")}
    return {
        "rewards": np.take_along_axis(rng.choice([-1.0, 0.0, 0.5, 1.0], (p, 3)), traj, axis=1),
        "extras": extras | {
            "traj": traj,
            "step": rng.permuted(np.tile(np.arange(g), (p, 1)), axis=1),
            "step_rewards": rng.choice([0.0, 0.5, 1.0], (p, g)),
            "match": rng.random((p, g)) < 0.7,
        },
    }


def expert_steps(rng, p, g, t):
    """As `turns`, with few step numbers, so that trajectories meet at the same step."""
    fields = turns(rng, p, g, t)
    fields["extras"] |= {"traj": np.tile(np.arange(g) // 2, (p, 1)), "step": np.tile(np.arange(g) % 2, (p, 1))}
    return fields


def even_turns(rng, p, g, t):
    """Two trajectories without step rewards, one agent: equal rewards are equal in every comparison."""
    traj, none = np.tile(np.arange(g) % 2, (p, 1)), np.zeros((p, g), int)
    return {"valid": np.ones((p, g), bool),  # a trajectory that is alone keeps its reward
            "extras": {"traj": traj, "agent": none, "step_rewards": none.astype(float)}}


def even_steps(rng, p, g, t):
    return {"extras": {"step_rewards": np.zeros((p, g)), "match": np.ones((p, g), bool)}}


def calls(rng, p, g, t):
    """Agent calls with terms of their own in the reward."""
    return turns(rng, p, g, t) | {"rewards": rng.normal(size=(p, g))}


def plays(rng, p, g, t):
    extras = {"game": rng.integers(0, 2, p), "agent": rng.integers(0, 2, (p, g)), "settled": rng.random(p) < 0.7,
              "step": rng.permuted(np.tile(np.arange(g), (p, 1)), axis=1)}
    outcome = rng.choice([-1.0, 0.0, 1.0], (p, 1))
    return {"rewards": np.where(extras["agent"] == 0, outcome, -outcome), "extras": extras}


def tree(rng, p, g, t):
    """Nodes in order of creation, each below an earlier one or the prompt."""
    parent = np.stack([rng.integers(-1, k, p) for k in range(g)], axis=1)
    return {"extras": {"node": np.tile(np.arange(g), (p, 1)), "parent": parent}}


def paths(rng, p, g, t):
    """Paths of up to 3 steps through a binary tree, numbered as in a heap."""
    turn = rng.integers(0, 2, (p, g, 3))
    node = np.stack([turn[..., 0], 2 + 2 * turn[..., 0] + turn[..., 1]], axis=-1)
    node = np.concatenate([node, (6 + 2 * (node[..., 1] - 2) + turn[..., 2])[..., None]], axis=-1)
    path = np.where(np.arange(3) < rng.integers(0, 4, (p, g, 1)), node, -1)
    return {"rewards": rng.choice([-1.0, 0.0, 1.0], (p, g)),
            "extras": {"path": path, "format_rewards": 0.1 * rng.normal(size=(p, g, t))}}


def tool_calls(rng, p, g, t):
    kinds = rng.integers(0, 3, (4, p, g))  # answered, failed, unknown, not to be read
    return {"extras": {"tool_calls": kinds.sum(0), "tool_errors": kinds[1:].sum(0), "tool_failed": kinds[1],
                       "tool_unknown": kinds[2]}}


def no_calls(rng, p, g, t):
    none = np.zeros((p, g), int)
    return {"extras": dict.fromkeys(("tool_calls", "tool_errors", "tool_failed", "tool_unknown"), none)}


def lists(rng, p, g, t):
    """Lists of items from a budget of 3 ranks, separators, items too many, and stop tokens."""
    ranks = np.cumsum(rng.random((p, g, t)) < 0.5, axis=-1)
    ranks = np.where(rng.random((p, g, t)) < 0.2, -1, ranks)
    eos = np.zeros((p, g, t), bool)
    eos[..., -1] = True
    return {"extras": {"hits": rng.integers(0, 2, (p, g, 3)), "ranks": ranks, "eos": eos}}


def priced(rng, p, g, t):
    return {"rewards": rng.integers(0, 2, (p, g)).astype(float),
            "extras": {"truncated": rng.random((p, g)) < 0.2, "perf": rng.uniform(1, 8, (p, g))}}


def siblings(rng, p, g, t):
    return {"rewards": rng.uniform(-1, 1, (p, g)), "extras": {"final": np.arange(p) % 2 == 0}}


def valued(rng, p, g, t):
    """Turns with the twin values of a critic."""
    fields = turns(rng, p, g, t)
    fields["extras"] |= {name: rng.normal(size=(p, g, 2)) for name in ("turn_q", "turn_v")}
    return fields


def based(rng, p, g, t):
    fields = valued(rng, p, g, t)
    fields["extras"]["values"] = rng.normal(size=(p, g, t))
    return fields


def programs(rng, p, g, t):
    """Log-probs of the most likely tokens, of a frozen model's choices, and the number behind a value."""
    most = -rng.random((p, g, t))
    return {"extras": {"values": rng.normal(size=(p, g, t)), "max_logprobs": most,
                       "greedy_logprobs": most - rng.random((p, g, t))}}


def with_references(rng, p, g, t):
    fields = programs(rng, p, g, t)
    fields["extras"]["expert"] = rng.random((p, g)) < 0.4
    return fields


ARRIVAL = {"permutation": "the baseline moves from game to game in order of arrival",
           "equal": "the baseline is that of earlier games"}
FORMAT = {"equal": "the reward for the form of a step is its own, and shorter paths are discounted less"}
STOPS = {"equal": "stop tokens and items too many have advantages of their own"}
LONG = {"equal": "long nodes are punished"}
ALONE = {"equal": "a task with one trajectory keeps its reward"}

BELLMAN = {"equal": "a target is compared with the policy's own log-prob, not with other rollouts"}
VALUES = {"equal": "a critic compares a turn with what it expects, not with other turns"}

ESTIMATORS = {
    "archer": [Case(inputs=valued, exempt=VALUES), Case({"baseline": True}, inputs=based, exempt=VALUES)],
    "gigpo": [
        Case(inputs=turns, equal=even_turns),
        Case({"mode": "mean_std_norm", "singleton": "zero"}, inputs=turns, equal=even_turns),
        Case({"cross_steps": True}, inputs=turns, equal=even_turns),
    ],
    "hgpo": [
        Case(inputs=turns, equal=even_turns),
        Case({"mode": "mean_norm", "weight_offset": 2, "base_group": True, "alpha": 0.0}, inputs=turns,
             equal=even_turns),
    ],
    "salt": [Case(inputs=turns), Case({"base": "rloo", "history": 2, "use_next": False}, inputs=turns)],
    "ui_s1": [
        Case(inputs=expert_steps, equal=even_steps),
        Case({"episode_source": "traj_return", "mode": "mean_norm"}, inputs=expert_steps, equal=even_steps),
    ],
    "dr_mas": [
        Case({"variant": variant}, inputs=calls, equal=even_turns)
        for variant in ("agent", "vanilla", "agent_mean", "agent_std")
    ],
    "multi_context_grpo": [Case(inputs=turns), Case({"singleton": "raw"}, inputs=turns, exempt=ALONE)],
    "spiral_rae": [
        Case({"games": 2}, inputs=plays, exempt=ARRIVAL),
        Case({"games": 2, "gamma": 0.9, "update_first": True, "filter_zero": False}, inputs=plays, exempt=ARRIVAL),
    ],
    "portool": [
        Case(inputs=paths, exempt=FORMAT), Case({"agg": "mean", "fork_coef": 0.5}, inputs=paths, exempt=FORMAT)
    ],
    "branchgrpo_depthwise": [Case({"variant": name}, inputs=tree) for name in ("mean", "prob", "use_group")],
    "mars2_path_adv": [Case(inputs=tree), Case({"parent_reward": "raw", "mix": 0.3}, inputs=tree),
                       Case({"max_len": 6}, inputs=tree, exempt=LONG)],
    "table_gpt_r1": [Case(inputs=tool_calls, equal=no_calls)],
    "rank_grpo": [Case(inputs=lists, exempt=STOPS), Case({"variant": "exp_inf"}, inputs=lists, exempt=STOPS)],
    "b_coder": [Case(inputs=programs, exempt=BELLMAN), Case({"alpha": 0.5, "gamma": 0.9}, inputs=programs, exempt=BELLMAN)],
    "lightningrl": [Case(inputs=priced), Case({"perf": "length", "perf_coef": 0.5}, inputs=priced)],
}

OBJECTIVES = {
    "multi_context_grpo": [Case(inputs=turns), Case({"aggregation": "trajectory_mean"}, inputs=turns)],
    "mars2_path_adv": [Case(), Case({"clip_low": 0.1, "clip_high": 0.15, "max_ratio": 1.2})],
    "rank_grpo": [Case(inputs=lists), Case({"aggregation": "rank_mean"}, inputs=lists)],
    "step_apo": [Case(inputs=siblings), Case({"alpha": 0.0, "label_smoothing": 0.1}, inputs=siblings)],
    "b_coder": [Case(inputs=programs), Case({"alpha": 0.5}, inputs=with_references)],
    "lightningrl": [Case(inputs=priced), Case({"perf": "length"}, inputs=priced)],
}
