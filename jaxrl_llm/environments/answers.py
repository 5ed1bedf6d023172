"""Steps of environments beside a sampler, which continues the trajectories that do not wait."""
from collections.abc import Mapping

from jaxrl_llm.environments import base
from jaxrl_llm.environments.runner import Runner


class Answers:
    """The answers of `runner` to messages; if its environment `waits`, steps run beside the caller.

    Other environments answer within `ask`, so that the composition of batches does not depend on their speed.
    """

    def __init__(self, runner: Runner):
        self._runner, self._asked = runner, set[int]()
        self._turns: dict[int, base.Turn] = {}

    def ask(self, said: Mapping[int, base.Message]) -> None:
        """Starts the steps of these trajectories, by uid."""
        self._asked |= said.keys()
        if self._runner.environment.waits:
            self._runner.send(said)
        else:
            self._turns |= self._runner.step(said)

    def ready(self, wait: bool) -> dict[int, base.Turn | None]:
        """The finished turns that were not returned before; with `wait` at least one, if a step is running.

        A trajectory that the environment lost has None. Raises the errors of `Runner.step`.
        """
        turns, self._turns = self._turns, {}
        if self._runner.environment.waits:
            turns |= self._runner.recv(int(wait))
        lost = self._asked & self._runner.invalid.keys()
        self._asked -= turns.keys() | lost
        return dict.fromkeys(lost) | turns
