"""Steps of environments beside a sampler, which goes on with the trajectories that do not wait."""
import queue
import threading
from collections.abc import Mapping

from jaxrl_llm.environments import base
from jaxrl_llm.environments.runner import Runner


class Answers:
    """What `runner` answers to messages; several batches of them are under way at once where its environment `waits`.

    Other environments answer within `ask`, so that what is sampled together does not depend on how long they take.
    """

    def __init__(self, runner: Runner):
        self._runner, self._pending = runner, 0
        self._done: queue.SimpleQueue[dict[int, base.Turn | None] | BaseException] = queue.SimpleQueue()

    def ask(self, said: Mapping[int, base.Message]) -> None:
        """Steps of these trajectories, by uid."""
        self._pending += 1
        if self._runner.environment.waits:
            threading.Thread(target=self._step, args=(said,), name="answers", daemon=True).start()
        else:
            self._step(said)

    def ready(self, wait: bool) -> dict[int, base.Turn | None]:
        """The turns that are there and were not returned before; with `wait` one batch at least, if one is under way.

        None for a trajectory that the environment lost. Raises what `Runner.step` raised.
        """
        turns: dict[int, base.Turn | None] = {}
        while self._pending and (wait or not self._done.empty()):
            found = self._done.get()
            self._pending, wait = self._pending - 1, False
            if isinstance(found, BaseException):
                raise found
            turns |= found
        return turns

    def _step(self, said: Mapping[int, base.Message]) -> None:
        try:
            self._done.put(dict.fromkeys(said) | self._runner.step(said))
        except BaseException as error:
            self._done.put(error)
