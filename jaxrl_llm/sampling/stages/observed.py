"""Shows what an environment wrote to terms that learn from it."""
import numpy as np

from jaxrl_llm.data.rollouts import APART, Role, Rollouts
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, stage, with_extras


@stage(provides=("observed",))
def observed() -> Stage:
    """`observed` bool[P, G, T], tokens of the environment in rollouts that exist; they stand `apart`."""
    def view(rollouts: Rollouts, batch: Unfinished, source: Origin) -> Rollouts:
        tokens = np.zeros(rollouts.mask.shape, bool)
        if rollouts.role is not None:
            tokens = (rollouts.role == Role.ENVIRONMENT) & rollouts.valid[..., None]
        return with_extras(rollouts, observed=tokens, **{APART: tokens})

    return Stage("observed", view=view, provides=("observed",))
