"""The scorers of reasoning-gym. Imported by worker processes only: some of them evaluate what the policy wrote."""

import functools

import reasoning_gym


@functools.cache
def _generator(dataset: str, config: tuple):
    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **dict(config))


def score(given: str, entry: dict, dataset: str, config: tuple) -> float:
    """The data set's own `score_answer` of a stripped answer, in [0, 1]."""
    return float(_generator(dataset, config).score_answer(given, entry))
