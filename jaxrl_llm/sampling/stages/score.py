"""Reports what the trajectories of a batch earned, and which problems they solved."""
import numpy as np

from jaxrl_llm.control import Fact
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.sampling import by_task
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished, policy_tokens

FACTS = (
    Fact("tried", "i32[N] of the training problems, rollouts that were sampled in this step, also those that a filter drops"),
    Fact("right", "i32[N], those of them that solve their problem"),
)


def score() -> Stage:
    """Metrics and outcomes of all trajectories that the policy wrote alone, under the prompt; others do not count.

    Where nothing is the policy's alone, metrics are of all of them.
    """
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        forest, aided = batch.forest, batch.forest.aided
        own = forests.trim(forest, ~aided) if aided.any() else forest
        spent = {"completion/tokens": float(policy_tokens(forest) + batch.beside)}
        shown = own if len(own.ends) else forest
        metrics = forests.metrics(shown) | spent | by_task.metrics(shown, [part.label for part in source.task.parts])
        return batch.measured(metrics, outcome_counts(own, len(source.task.train)))

    return Stage("score", end=end)


def outcome_counts(forest: Forest, problems: int) -> dict[str, np.ndarray]:
    """The facts `tried` and `right` i32[N] of a forest, see `FACTS`; problems that a topology made are not counted."""
    ids = np.array([problem.id for problem in forest.problems], np.int64)[forest.prompt[forest.ends]]
    return {"tried": np.bincount(ids[ids >= 0], minlength=problems).astype(np.int32),
            "right": np.bincount(ids[(ids >= 0) & forest.solved[forest.ends]], minlength=problems).astype(np.int32)}
