"""One row of the catalogue."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Part = tuple[str, Mapping[str, Any]]

# What `defaults` may name. The first four are what the trainer runs with when its configuration leaves them open; of the rest
# a run says at its start what it has otherwise, and takes what `training.config.PAPER` names with `setting="paper"`.
DEFAULTS = {
    "epochs": "passes over each batch of rollouts",
    "minibatches": "optimiser steps per pass",
    "pretrain_steps": "first steps, which train the critic alone",
    "budget": "utility by which rollouts are shared out among prompts",
    "prompts": "prompts per batch",
    "group_size": "rollouts per prompt",
    "max_group": "most rollouts of a prompt",
    "foreign_groups": "groups of other runs in each batch",
    "temperature": "of sampling",
    "turns": "of a trajectory in an environment",
    "observation_tokens": "of a message of an environment",
    "top_p": "of sampling",
    "entropy_coef": "weight of an entropy bonus in the loss",
    "expert_traces": "expert completions in each group",
    "max_staleness": "updates that a rollout may be old",
    "tool_reward_decay": "steps over which the reward for tool calls fades",
    "optimizer_reset": "when the optimiser's state is cleared",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A published method as a composition of parts.

    `arxiv`: paper ids. `estimator`, `objective`: (name, hyper-parameters that differ from the factory's defaults).
    `needs`: fields of `Rollouts`, or entries of its `extras`, that the run has to record beyond what the parts say.
    `filters`, `controllers`: parts of `jaxrl_llm.control` by name. `control`: numbers of the controllers that differ from their
    defaults, by keyword. `replay`: a rule of `jaxrl_llm.replay`, if rollouts of
    earlier steps are learned from. `allocation`: a rule of `jaxrl_llm.topologies`, if some prompts get further rollouts.
    `guidance`: a guide of it, if some completions begin with the task's solutions.
    `defaults`: what the paper sets outside the parts,
    by the names in `DEFAULTS`. `equation`: its idea in one line. `omits`: what the published method has beyond this
    row. Whether a row can run follows from its needs, see `jaxrl_llm.methods.provision`.
    """

    slug: str
    title: str
    equation: str
    arxiv: tuple[str, ...] = ()
    estimator: Part = ("grpo", {})
    objective: Part = ("ppo_clip", {})
    needs: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    control: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replay: Part | None = None
    allocation: Part | None = None
    guidance: Part | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    omits: str | None = None
