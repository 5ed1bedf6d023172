"""Cases of value models on the policy's own states."""

from property_inputs import Case, D

ORDER = {"permutation_of_state": "rows lie in the order of arrival"}
TASKS = {"feature_size": D, "capacity": 24, "domains": 2, "first_fit": 1}


def task(rng, p, g, t):
    return {"extras": {"task": rng.integers(0, 2, p)}}


ESTIMATORS = {
    "poise": [
        Case({"feature_size": D, "capacity": 24}, exempt=ORDER),
        Case({"feature_size": D, "capacity": 24, "bootstrap": 0, "first_fit": 1, "alpha": 1.0}, exempt=ORDER),
        Case(TASKS, inputs=task, exempt=ORDER),
    ],
}
