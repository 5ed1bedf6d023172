"""Metrics of writers that have names, on a forest that is written by hand."""
from jaxrl_llm.data.forest import grow, plant
from jaxrl_llm.sampling.stages.writers import metrics
from jaxrl_llm.tasks.base import Problem


def test_what_each_writer_earned():
    """One trajectory of the policy, one that two teachers begin, one that one of them wrote; an expert without a name."""
    forest = plant([Problem("?", "", 0)], [[1]], ["success"], answers=False)
    zeros, rewards = [0] * 12, [1.0, 0, 0, 4.0, 2.0, 5.0]
    forest = grow(forest, [0, 0, 2, 3, 0, 0], [0, 1, 1, 1, 2, 3], {
        "prompt": [0] * 6, "role": [1, 4, 4, 1, 4, 4], "length": [1, 2, 3, 1, 4, 1], "stopped": [True] * 6, "rewards": rewards,
        "components": [[x] for x in rewards], "texts": [""] * 6, "tokens": zeros, "logprobs": zeros, "entropies": zeros,
        "version": zeros, "writer": ["", "big one", "b", "", "b", ""]})
    assert metrics(forest) == {
        "writer/b/share": 0.5, "writer/b/reward": 3.0, "writer/b/tokens": 3.5, "writer/big_one/share": 0.25,
        "writer/big_one/reward": 4.0, "writer/big_one/tokens": 2.0}
