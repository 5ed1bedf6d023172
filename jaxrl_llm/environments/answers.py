"""Steps of environments beside a sampler, which goes on with the trajectories that do not wait."""
from collections.abc import Mapping

from jaxrl_llm.environments import base
from jaxrl_llm.environments.runner import Runner


class Answers:
    """What `runner` answers to messages; steps are under way beside the caller where its environment `waits`.

    Other environments answer within `ask`, so that what is sampled together does not depend on how long they take.
    """

    def __init__(self, runner: Runner):
        self._runner, self._asked = runner, set[int]()
        self._turns: dict[int, base.Turn] = {}

    def ask(self, said: Mapping[int, base.Message]) -> None:
        """Steps of these trajectories, by uid."""
        self._asked |= said.keys()
        if self._runner.environment.waits:
            self._runner.send(said)
        else:
            self._turns |= self._runner.step(said)

    def ready(self, wait: bool) -> dict[int, base.Turn | None]:
        """The turns that are there and were not returned before; with `wait` one at least, if one is under way.

        None for a trajectory that the environment lost. Raises what `Runner.step` raises.
        """
        turns, self._turns = self._turns, {}
        if self._runner.environment.waits:
            turns |= self._runner.recv(int(wait))
        lost = self._asked & self._runner.invalid.keys()
        self._asked -= turns.keys() | lost
        return dict.fromkeys(lost) | turns
