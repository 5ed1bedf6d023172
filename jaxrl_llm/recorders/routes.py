"""The experts that the policy before its updates routes tokens to."""
import dataclasses

from jaxrl_llm.data.rollouts import OWN_ROUTES
from jaxrl_llm.engines.measures import DENSE
from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


@recorder("routes", provides=(OWN_ROUTES,), passes=1, conflicts=(DENSE,))
def of_run(context: Context) -> Recorder:
    """`own_routes` i16[P, G, T, L, k], for objectives whose updates keep them (arXiv 2512.01374, R2); for mixtures alone."""
    policy = dataclasses.replace(context.policy, replays="")
    routes = context.guarded("routes", context.jitted(type(policy).routes, policy, context.pieces))
    return Recorder("routes", (OWN_ROUTES,),
                    lambda own, params, lora, rollouts: {OWN_ROUTES: routes(params, lora, texts_of(rollouts))})
