"""Any per-completion reward function in killable processes."""

import numpy as np

from jaxrl_llm.rewards.base import BatchOutput
from jaxrl_llm.rewards.pool import WorkerPool

_ERRORS: dict[str, type[Exception]] = {"timeout": TimeoutError, "crash": ChildProcessError, "error": ValueError}


class Isolated:
    """Batch reward: `target` ("module:function", `(completion, answer, problem) -> float`) called in worker processes.

    A call that raises, crashes or is late is an error of that completion: raised, or scored 0 and counted.
    """

    def __init__(self, target: str, workers: int, deadline: float):
        self._pool = WorkerPool(target, workers, deadline)

    def __call__(self, completions, answers, problems) -> BatchOutput:
        outcomes = self._pool.map(list(zip(completions, answers, problems)))
        scores = np.full(len(outcomes), np.nan)
        errors: dict[int, Exception] = {}
        for row, outcome in enumerate(outcomes):
            if outcome.status == "ok" and isinstance(outcome.value, (bool, int, float)):
                scores[row] = outcome.value
            elif outcome.status == "ok":
                errors[row] = TypeError(f"returned {outcome.value!r}, which is not a number")
            else:
                errors[row] = _ERRORS[outcome.status](outcome.message)
        return BatchOutput(scores, {}, errors)

    def close(self) -> None:
        self._pool.close()
