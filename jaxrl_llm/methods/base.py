"""One row of the catalogue."""
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.methods import texts
from jaxrl_llm.methods.texts import Named

# Names allowed in `defaults`. A run uses the first four when its configuration leaves them open. For the others a run
# prints at its start where it differs from them, and with `setting="paper"` it takes those that `setup.resolve.PAPER` names.
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
    "environment": "options of an environment, which a run in the environment of that name takes",
    "observation_tokens": "of a message of an environment",
    "top_p": "of sampling",
    "expert_traces": "expert completions in each group",
    "prior": "what expects the rewards of prompts before they are sampled",
    "text_share": "given texts among the rollouts and texts of a batch",
    "schedule": "of sampling and learning, by how many steps rollouts are old",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A published method as a composition of parts, which texts name: `name`, or `name(value, number=value)`, see `texts`.

    `arxiv`: paper ids. `estimator`, `objective`: how rollouts are credited and learned from. `needs`: fields of `Rollouts`, or
    entries of its `extras`, that the run must record beyond the needs of the parts. `filters`, `controllers`: parts of
    `jaxrl_llm.control`, separated by commas. `replay`: a rule of `jaxrl_llm.replay`, if the method trains on rollouts of
    earlier steps. `replay_estimator`, `replay_objective`: how rollouts are credited and learned from that the rule replays in
    updates of their own; empty: as fresh ones. `allocation`: a rule of `jaxrl_llm.topologies`, if some prompts get further
    rollouts. `guidance`: a topology that wraps the run's, if some completions begin with traces of problems. `topology`:
    who is sampled, by a name of `jaxrl_llm.topologies`; empty: as the other parts imply, else one group per prompt.
    `recorders`: measurements of `jaxrl_llm.recorders` beyond those that the needs ask for. `source`: "given", if batches are
    texts of `config.texts` and nothing is sampled; empty: completions of the policy. Every part may be your own, as
    "module:function". `phases`: stages of a run, see `setup.phases`. `defaults`: the paper's settings outside the parts, by the
    names in `DEFAULTS`. `equation`: the method's idea in one line. `omits`: parts of the published method that this row lacks.
    `known_as`: the names by which other code bases know the row, `"verl loss_mode=geo_mean"`, see `known_as`.
    Whether a row can run follows from its needs, see `jaxrl_llm.methods.provision`.
    """

    slug: str
    title: str
    equation: str
    arxiv: tuple[str, ...] = ()
    estimator: str = "grpo"
    objective: str = "ppo_clip"
    needs: tuple[str, ...] = ()
    filters: str = ""
    controllers: str = ""
    replay: str = ""
    replay_estimator: str = ""
    replay_objective: str = ""
    allocation: str = ""
    guidance: str = ""
    topology: str = ""
    recorders: str = ""
    source: str = ""
    phases: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    omits: str | None = None
    known_as: tuple[str, ...] = ()

    def parts(self, key: str) -> tuple[Named, ...]:
        """The parts that the text under `key`, an entry of `texts.SLOTS`, names."""
        return texts.parts(key, getattr(self, key))

    def part(self, key: str) -> Named | None:
        """The first of the parts under `key`; None without one."""
        return next(iter(self.parts(key)), None)
