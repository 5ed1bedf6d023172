"""SwS's second run: more problems of the domains in which the first one failed (arXiv 2506.08989)."""
import jax.numpy as jnp

from jaxrl_llm.control import sws
from jaxrl_llm.control.base import Controller, controller


@controller
def sws_domains(*, threshold: float = 0.5) -> Controller:
    """`prompt_weights` f32[N]: equal in the first phase of a run, then each domain in proportion to its `weak` share.

    Domains are the levels of the task. The paper adds synthetic problems to the weak domains; here the existing problems of
    weak domains are drawn more often, with equal weights inside a domain. Without a weak problem all are drawn. Facts: `tried`,
    `right`, also of groups that a filter drops.
    """
    def propose(trends):
        return {"prompt_weights": jnp.where(trends.phase == 0, 1.0, domain_weights(trends, threshold))}

    def observe(trends, facts):
        tried, right = (jnp.where(trends.phase == 0, facts[name], 0) for name in ("tried", "right"))  # then the choice is fixed
        return sws.visited(trends, tried, right)

    def init(levels):
        none = jnp.zeros(len(levels))
        return sws.Trends(jnp.zeros(len(levels), jnp.int32), none, none, none, jnp.asarray(levels), jnp.int32(0))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("prompt_weights",),
                      begin=lambda trends: trends._replace(phase=trends.phase + 1))


def domain_weights(trends: sws.Trends, threshold: float = 0.5):
    """f32[N]: the weak share of a problem's domain divided by the domain's number of problems; all 0 if none is weak."""
    size = trends.domain.size
    number = jnp.zeros(size).at[trends.domain].add(1.0)
    failed = jnp.zeros(size).at[trends.domain].add(sws.weak(trends, threshold=threshold).astype(jnp.float32))
    return (failed / jnp.maximum(number, 1)**2)[trends.domain]
