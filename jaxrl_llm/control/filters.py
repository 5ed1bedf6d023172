"""Rollout filters by name: `(accuracy [P, G], valid [P, G]) -> keep bool[P]`."""
from jaxrl_llm.control.dynamic_sampling import informative

FILTERS = {"dynamic_sampling": informative}
