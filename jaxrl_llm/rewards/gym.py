"""Problems of reasoning-gym (arXiv 2505.24760) scored by their data set's own `score_answer`, in killable processes."""
from jaxrl_llm.rewards import needs
from jaxrl_llm.rewards.base import BatchOutput
from jaxrl_llm.rewards.pool import WorkerPool

_OPEN, _CLOSE = "<answer>", "</answer>"


def tagged_answer(completion: str) -> str:
    """The text in the last `<answer>` tags, or the whole completion without tags; stripped."""
    answer, position = completion, 0
    while (start := completion.find(_OPEN, position)) >= 0 and (end := completion.find(_CLOSE, start)) >= 0:
        answer, position = completion[start + len(_OPEN):end], end + len(_CLOSE)
    return answer.strip()


class Gym:
    """Batch reward: the scorer's value of each tagged answer.

    Time-outs, crashes, errors and rows that are missing at `until` score 0 and are counted.

    Raises ValueError for problems that are not of the reasoning_gym task.
    """

    def __init__(self, workers: int | None, deadline: float):
        self._pool = WorkerPool("jaxrl_llm.rewards.gym_scorer:score", workers, deadline, restricted=True, scores=True)

    def __call__(self, completions, answers, problems, until: float | None = None) -> BatchOutput:
        for problem in problems:
            needs.gym(problem)
        outcomes = self._pool.map([(tagged_answer(completion), problem.extra["entry"], *problem.extra["gym"])
                                   for completion, problem in zip(completions, problems)], until)
        statuses = [outcome.status for outcome in outcomes]
        return BatchOutput([outcome.value if outcome.status == "ok" else 0.0 for outcome in outcomes],
                           {status: statuses.count(status) for status in ("timeout", "crash", "error", "late")})

    def close(self) -> None:
        self._pool.close()
