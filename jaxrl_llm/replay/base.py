"""The interface of a replay rule: pure functions of arrays on the host.

To add one, write a keyword-only factory under `@rule` into a file of this folder:

    @rule
    def failures(*, max_age: int = 4) -> Replay:
        return Replay(lambda rewards, valid: valid & (rewards <= 0), max_age=max_age,
                      groups=lambda born, version, prompts, rng: rng.permutation(len(born))[:1])
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax import Array

from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import Conflict


class Replay(NamedTuple):
    """A rule that decides which rollouts are stored, for how long, and which of them enter a later batch.

    Attributes:
      admit: `(rewards f32[P, G], valid bool[P, G]) -> bool[P, G]`, the rollouts of a step that are stored.
      gives_way: `(rewards, valid, rng) -> i32[P]`, the rollout of each sampled group that a stored rollout of the same problem
        replaces, if there is one; -1: none.  None: stored rollouts do not enter sampled groups.
      groups: `(born i32[B], version, prompts, rng) -> i32[R]`, the stored groups that replace R of the `prompts` of a batch,
        at least one of which is always sampled. `born` is the version of the weights that sampled each group, `version` the
        current version.  None: all prompts are sampled.
      updates: number of times that `groups` draws after the fresh rollouts of a step are stored. Each draw is learned from in
        further updates, behind those on the fresh batch, with `Method.replay_objective`.  0: stored groups enter the batch.
      capacity: rollouts of the buffer, in whole groups where `groups` replays them; per_prompt: the newest rollouts of each
        problem; max_age: steps. None: no limit.
      priority: `(rewards, valid) -> f32[P]`, above 0, of the stored groups of a step; `groups` takes the priorities of all
        stored groups as a fifth argument.  None: no priorities.
      renew: `(advantages f32[P, G, T], mask bool[P, G, T]) -> f32[P]`, priorities of groups that an update has learned from, by
        the advantages that it gave their trained tokens; the buffer has them before the next draw.  None: they stay.
      weights: `(priority f32[B]) -> f[B]`, weights of replayed groups in the loss, where fresh groups have 1.
      newest: only the last sampled group of each problem is kept, and none if that one is not admitted.
      restarts: the buffer is empty after a draw of some groups.
      critic_only: replayed batches of their own train the critic, and not the policy.
      as_sampled: `old_logprobs` of replayed rollouts are those of the policy that sampled them, else of the current policy.
    """

    admit: Callable[[np.ndarray, np.ndarray], np.ndarray]
    gives_way: Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray] | None = None
    groups: Callable[..., np.ndarray] | None = None
    capacity: int | None = None
    per_prompt: int | None = None
    max_age: int | None = None
    priority: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    renew: Callable[[Array, Array], Array] | None = None
    weights: Callable[[np.ndarray], np.ndarray] | None = None
    newest: bool = False
    updates: int = 0
    restarts: bool = False
    critic_only: bool = False
    as_sampled: bool = False

    @property
    def provides(self) -> tuple[str, ...]:
        """The fields of its batches beside those of all rollouts."""
        return ("replayed",) if self.weights is None else ("replayed", "replay_weights")

    def most(self, problems: int, per_step: int) -> int:
        """Maximum number of rollouts in the buffer, for a task of `problems` and steps that sample `per_step` rollouts.

        Raises ValueError for a rule without any limit.
        """
        limits = [self.capacity, self.per_prompt and self.per_prompt * problems, self.max_age and self.max_age * per_step]
        given = [limit for limit in limits if limit is not None]
        if not given or min(given) < 1:
            raise ValueError(f"a replay rule with capacity={self.capacity}, per_prompt={self.per_prompt} and max_age="
                             f"{self.max_age} stores no or endlessly many rollouts; give one of them, 1 or more")
        return min(given)


RULES = registry.PartTable("replay rule", Replay)
rule = RULES.enter


def _endless(replay: Replay) -> str:
    """Why the buffer of a rule would grow without bound or store nothing; "": it does neither."""
    try:
        replay.most(problems=1, per_step=1)
    except ValueError as error:
        return str(error)
    return ""


_NO_PRIOR = ("method {method!r} has a replay, whose rollouts have no reward predictions",
             "set budget.utility to nothing, or take a method without replay, for example grpo")
CONFLICTS = (
    Conflict(("replay",), _endless, "they are numbers of config.replay"),
    Conflict(("replay", "rehearsed.has_critic", "text.replay"),
             "the replay {2!r} trains a critic alone, and method {method!r} has none", "leave critic_only out",
             lambda replay, critic, text: replay.critic_only and not critic),
    Conflict(("text.replay_estimator", "text.replay_objective", "updates"),
             "method {method!r} has replay_estimator={0!r} and replay_objective={1!r}, and its replay has no updates of its "
             "own",
             "name a replay with updates, or set config.replay_estimator and config.replay_objective to none",
             lambda estimator, objective, updates: (estimator or objective) and not updates),
    Conflict(("replay", "config.budget.utility"), *_NO_PRIOR), Conflict(("replay", "needs.prior"), *_NO_PRIOR))
