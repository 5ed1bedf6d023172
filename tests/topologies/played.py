"""Plans played by hand: problems join a forest, and trajectories of one token have the rewards that a function says."""
import numpy as np

from jaxrl_llm.data.forest import grow, join, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.sampling.stages.made import at_rows
from jaxrl_llm.tasks.base import Problem


def play(topology, problems, reward, uid=0):
    """`(the plans, the forest at the end)`, where the trajectory `number` of an act earns `reward(problem, act, number)`.

    Where `reward` says None the trajectory is lost. `problems`: those that are drawn. The forest is not finished.
    """
    forest, plans, waiting = plant([], [], ("exact",), answers=False), [], list(problems)
    while not (plan := topology.plan(forest)).complete:
        assert len(plans) < 20
        plans.append(plan)
        drawn, waiting = waiting[:plan.draw], waiting[plan.draw:]
        new, plan = at_rows(plan, forest.problems)
        if joining := [*drawn, *new]:
            made = plant(joining, [[1]] * len(joining), ("exact",), answers=False,
                         draw=int(forest.draw.max(initial=-1)) + bool(drawn))
            forest = join([forest, made]) if forest.problems else made
        for act in plan.acts:
            earned = [reward(forest.problems[act.row], act, number) for number in range(act.count)]
            forest = grown(forest, act.row, [one for one in earned if one is not None], uid, act)
            lost = forest.lost.copy()
            lost[act.row] += sum(one is None for one in earned)
            forest, uid = forest.with_columns(lost=lost), uid + act.count
    return plans, forest


def grown(forest, row, earned, uid, act):
    """The forest with trajectories at a prompt, which have these rewards."""
    root, n = np.flatnonzero((forest.role == Role.PROMPT) & (forest.prompt == row))[0], len(earned)
    return grow(forest, [root] * n, [uid + i for i in range(n)], {
        "role": Role.ELSEWHERE if isinstance(act.reads, Problem) or len(act.reads) else Role.POLICY, "length": [1] * n,
        "stopped": [True] * n, "rewards": np.float32(earned), "components": np.float32(earned)[:, None], "texts": [""] * n,
        "answers": None, "tokens": [uid + i for i in range(n)], "logprobs": [0.0] * n, "entropies": [0.0] * n,
        "version": [0] * n, "reads": [None] * n})


def rewards_of(forest):
    """The rewards of each prompt's trajectories, by id of its problem."""
    owner = forest.prompt[forest.ends]
    return {problem.id: forest.rewards[forest.ends][owner == row].tolist() for row, problem in enumerate(forest.problems)}


def uids_of(forest):
    """The uids of each prompt's trajectories, by id of its problem."""
    owner = forest.prompt[forest.ends]
    return {problem.id: forest.uid[forest.ends][owner == row].tolist() for row, problem in enumerate(forest.problems)}
