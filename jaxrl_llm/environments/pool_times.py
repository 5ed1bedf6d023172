"""A simulation of when batches of the first M of N environments are ready (EnvPool, arXiv 2206.10558)."""
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Times(NamedTuple):
    """The result of a simulation.

    The environments of each batch in the order in which their steps ended, the seconds until the policy has answered the last
    batch, and the number of steps that it has read from each environment.
    """

    batches: list[list[int]]
    seconds: float
    steps: list[int]

    @property
    def rate(self) -> float:
        """Steps per second."""
        return sum(self.steps) / self.seconds


def pool_times(latency: Callable[[int, int], float], environments: int, *, batch: int, workers: int, policy: float,
               batches: int) -> Times:
    """Simulates N environments behind W workers; the policy answers the first M environments that are ready.

    `latency(i, k)` is the time of step k of environment i, `policy` the time of an answer to a batch, in seconds. All
    environments begin at 0; a worker takes the step that has waited longest; among steps that end together the lower number is
    first. Batches smaller than N answer quick environments more often, as `steps` shows. Raises ValueError for M outside 1 to N
    and for no worker.
    """
    if not 1 <= batch <= environments or workers < 1 or batches < 1:
        raise ValueError(f"batch={batch} of {environments} environments, workers={workers}, batches={batches}; allowed are "
                         "batches of 1 to all environments, one worker or more, one batch or more")
    free = [0.0] * workers
    steps, read, ended = [0] * environments, [0] * environments, []

    def begin(rows: Sequence[int], now: float) -> None:
        for row in rows:
            end = max(now, heapq.heappop(free)) + latency(row, steps[row])
            steps[row] += 1
            heapq.heappush(free, end)
            heapq.heappush(ended, (end, row))

    begin(range(environments), 0.0)
    now, ready = 0.0, []
    for _ in range(batches):
        first = [heapq.heappop(ended) for _ in range(batch)]
        now = max(now, first[-1][0]) + policy
        ready.append([row for _, row in first])
        for row in ready[-1]:
            read[row] += 1
        begin(ready[-1], now)
    return Times(ready, now, read)
