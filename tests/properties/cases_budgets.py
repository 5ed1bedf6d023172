"""Cases of the estimators that know more about a prompt than its group."""

import numpy as np
from property_inputs import Case


def prior(rng, p, g, t):
    return {"extras": {"prior": rng.uniform(size=p)}}


def sure_prior(rng, p, g, t):
    return {"extras": {"prior": np.full(p, 0.3)}}


ESTIMATORS = {
    "v0_5": [Case(hyper, prior, sure_prior) for hyper in ({}, {"leave_one_out": True}, {"norm_std": True})],
    "reinforce_ada": [Case(hyper) for hyper in ({}, {"norm_std": True})],
}
