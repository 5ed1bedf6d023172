"""Any per-completion reward function in killable processes."""
from collections import Counter

import numpy as np

from jaxrl_llm.rewards.base import BatchOutput, ReportedError, number
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.tools.registry import split_target

_ERRORS: dict[str, type[Exception]] = {"timeout": TimeoutError, "crash": ChildProcessError, "error": ReportedError}


class Isolated:
    """Batch reward: `target` ("module:function", `(completion, answer, problem) -> float`) called in worker processes.

    A function with the arguments of verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` gets these.

    A call that raises, crashes or is late is an error of that completion: raised, or scored 0 and counted. With `failed` it is
    no error, but scores that number and is counted. Rows missing at `until` score 0 and are counted as late. With `fail_fast`
    the first error ends the rest.
    """

    def __init__(self, target: str, workers: int | None, deadline: float, failed: float | None = None):
        split_target("reward", target)  # the module is imported by the processes alone
        self._failed = failed
        self._pool = WorkerPool(target, workers, deadline, scores=True)

    def __call__(self, completions, answers, problems, until: float | None = None, fail_fast: bool = False) -> BatchOutput:
        outcomes = self._pool.map(list(zip(completions, answers, problems)), until,
                                  (lambda outcome: outcome.status != "ok") if fail_fast and self._failed is None else None)
        scores, counts, errors = np.zeros(len(outcomes), object), Counter[str](), {}
        for row, outcome in enumerate(outcomes):
            if outcome.status == "ok":
                scores[row] = None if outcome.value is None else number(outcome.value)
            elif outcome.status == "late" or self._failed is not None:
                scores[row] = 0 if outcome.status == "late" else self._failed
                counts[outcome.status] += 1
            else:
                scores[row], errors[row] = np.nan, _ERRORS[outcome.status](outcome.message)
        return BatchOutput(scores, dict(counts), errors)

    def close(self) -> None:
        self._pool.close()
