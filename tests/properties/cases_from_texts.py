"""Cases of the objectives that learn from given texts."""
import numpy as np
from property_inputs import Case


def weights(rng, p, g, t):
    return {"extras": {"weight": rng.choice([0.0, 0.5, 2.0], (p, g))}}


def pairs(rng, p, g, t):
    """Two texts of each prompt are there, the first or the second of them is the chosen one."""
    order = np.argsort(rng.random((p, g)), axis=1)
    chosen = order == rng.integers(0, 2, (p, 1))
    return {"valid": order < 2, "extras": {"chosen": chosen, "weight": rng.choice([0.5, 1.0], (p, g))}}


def of_positions(rng, p, g, t):
    values = {"position": rng.normal(size=(p, g, t)), "token_seeds": rng.integers(0, 2**31, (p, g, t))}
    return {"extras": {**weights(rng, p, g, t)["extras"], **values}}


def middles(rng, p, g, t):
    return {"extras": {"middle": rng.integers(0, 2, p).astype(float)}}


OBJECTIVES = {
    "sft": [Case(inputs=weights), Case(), Case({"aggregation": "seq_mean_token_mean"}, inputs=weights)],
    "otr": [
        Case(inputs=of_positions),
        Case({"samples": 0, "aggregation": "seq_mean_token_mean"}, inputs=of_positions),
    ],
    "rlpt": [Case(inputs=middles), Case({"middle_coef": 0.5, "clip_high": 0.3}, inputs=middles)],
    "dpo": [
        Case(inputs=pairs),
        Case({"beta": 0.3, "smoothing": 0.1}, inputs=pairs),
        Case({"kind": "ipo"}, inputs=pairs),
    ],
}
