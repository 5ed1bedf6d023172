"""Any per-completion reward function in killable processes."""

import numpy as np

from jaxrl_llm.registry import split_target
from jaxrl_llm.rewards.base import BatchOutput, ReportedError, number
from jaxrl_llm.rewards.pool import WorkerPool

_ERRORS: dict[str, type[Exception]] = {"timeout": TimeoutError, "crash": ChildProcessError, "error": ReportedError}


class Isolated:
    """Batch reward: `target` ("module:function", `(completion, answer, problem) -> float`) called in worker processes.

    A call that raises, crashes or is late is an error of that completion: raised, or scored 0 and counted. Rows missing at
    `until` score 0 and are counted as late. With `fail_fast` the first error ends the rest.
    """

    def __init__(self, target: str, workers: int | None, deadline: float):
        split_target("reward", target)  # the module is imported by the processes alone
        self._pool = WorkerPool(target, workers, deadline, scores=True)

    def __call__(self, completions, answers, problems, until: float | None = None, fail_fast: bool = False) -> BatchOutput:
        outcomes = self._pool.map(list(zip(completions, answers, problems)), until,
                                  (lambda outcome: outcome.status != "ok") if fail_fast else None)
        scores, errors = np.zeros(len(outcomes)), {}
        for row, outcome in enumerate(outcomes):
            if outcome.status == "ok":
                scores[row] = number(outcome.value)
            elif outcome.status != "late":
                scores[row], errors[row] = np.nan, _ERRORS[outcome.status](outcome.message)
        return BatchOutput(scores, {"late": sum(outcome.status == "late" for outcome in outcomes)}, errors)

    def close(self) -> None:
        self._pool.close()
