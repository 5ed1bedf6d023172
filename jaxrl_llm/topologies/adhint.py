"""A group without hints, then one with hints whose length follows the first group's difficulty (ADHint, arXiv 2512.13095)."""
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.control.hint_share import hint_ratio
from jaxrl_llm.data.forest import Forest, outcomes
from jaxrl_llm.tasks.traces import useful
from jaxrl_llm.tools.ranges import NOT_NEGATIVE, SHARE
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, asked, topology
from jaxrl_llm.topologies.experts import UNSOLVED, from_trace


@topology(plants=True, ranges={"low": SHARE, "high": SHARE, "noise": NOT_NEGATIVE}, conflicts=(UNSOLVED,))
def adhint(inner: Topology, *, group: int, low: float = 0.0, high: float = 0.8, noise: float = 0.05) -> Topology:
    """`inner`, then a last group of each prompt that begins with a share of its first trace, see `control.hint_ratio`.

    `noise`: standard deviation of the noise added to the share; the numbers are ours. The uids of a prompt's rollouts seed it,
    and nothing else in the batch. Raises ValueError: shares in the wrong order, or a hint that is all of a trace.
    """
    if not low <= high < 1:
        raise ValueError(f"hints from low={low} to high={high} of a solution; give 0 <= low <= high < 1")
    before = 0  # rollouts of this batch before its last groups; 0: those have not begun

    def plan(forest):
        nonlocal before
        known = asked(forest)
        before = before if len(known) else 0
        if before and known.sum() > before:
            return Plan()
        wanted = inner.plan(forest)
        if not (wanted.complete and len(forest.ends)):
            return wanted
        before = int(known.sum())
        return Plan(acts=tuple(Begin(row, group, from_trace(share, number) if number >= 0 else ()) for row, (share, number) in
                               enumerate(zip(shares_of(forest), [next(iter(useful(one)), -1) for one in forest.problems]))))

    def shares_of(forest: Forest) -> np.ndarray:
        uids, prompts_of = forest.uid[forest.ends], forest.prompt[forest.ends]
        normal = [np.random.default_rng(uids[prompts_of == row].tolist()).standard_normal()
                  for row in range(len(forest.problems))]
        rewards, valid = outcomes(forest, int(asked(forest).max()))
        return shares(rewards, valid, np.array(normal, np.float32), low=low, high=high, noise=noise)

    return inner._replace(plan=plan, most=(inner.most or group) + group)


def shares(rewards: np.ndarray, valid: np.ndarray, normal: np.ndarray, *, low: float, high: float, noise: float) -> np.ndarray:
    """f32[P], the share of each prompt's hint, from `rewards` f32[P, K] of its first group and a standard `normal` number."""
    known = map(jnp.asarray, (np.clip(rewards, 0, 1), valid, np.float32(noise) * normal))
    return np.asarray(hint_ratio(*known, low=low, high=high))
