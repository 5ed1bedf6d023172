"""Problems of reasoning-gym (arXiv 2505.24760) scored by their data set's own `score_answer`, in killable processes."""

import re

from jaxrl_llm.rewards.base import BatchOutput
from jaxrl_llm.rewards.pool import WorkerPool

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged_answer(completion: str) -> str:
    """The text in the last `<answer>` tags, or the whole completion without tags; stripped."""
    tagged = _TAGS.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


class Gym:
    """Batch reward: the scorer's value of each tagged answer; time-outs, crashes and errors score 0 and are counted.

    Raises ValueError for problems that are not of the reasoning_gym task.
    """

    def __init__(self, workers: int, deadline: float):
        self._pool = WorkerPool("jaxrl_llm.rewards.gym_scorer:score", workers, deadline, restricted=True)

    def __call__(self, completions, answers, problems) -> BatchOutput:
        if any(problem is None or "gym" not in problem.extra for problem in problems):
            raise ValueError("the reasoning_gym reward needs problems of the reasoning_gym task: they name the scorer")
        outcomes = self._pool.map([(tagged_answer(completion), problem.extra["entry"], *problem.extra["gym"])
                                   for completion, problem in zip(completions, problems)])
        statuses = [outcome.status for outcome in outcomes]
        return BatchOutput([outcome.value if outcome.status == "ok" else 0.0 for outcome in outcomes],
                           {status: statuses.count(status) for status in ("timeout", "crash", "error")})

    def close(self) -> None:
        self._pool.close()
