"""How the forests of a run become rollouts, in the few shapes that it compiles for."""
import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.data.shapes import Ladders, padded
from jaxrl_llm.sampling.beside import NONE, Beside
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.topologies import Topology


@dataclasses.dataclass(kw_only=True)
class Views:
    """What forests are planted from, and the rollouts that they become.

    Attributes:
      task: the task.  stream: grows trajectories.  topology: decides what is sampled.
      prompts: per batch.  max_tokens: maximum tokens of a completion, at most T.
      beside: given texts beside the prompts of a batch.
      sizes: the sizes that a batch may have, from the limits of S, T, G and groups of a prompt, and the maximum number of
        programs, see `data.shapes`.
    """

    task: Task
    stream: Stream
    topology: Topology
    prompts: int
    max_tokens: int
    sizes: Callable[..., Ladders] = padded
    beside: Beside = NONE

    def planted(self, rows: Sequence[tuple[Problem, list[int]]], draw: int) -> Forest:
        """The forest of these problems and their token ids, without samples."""
        return self.stream.partner.plant([problem for problem, _ in rows], [ids for _, ids in rows], draw)

    def view(self, forest: Forest, version: int, group: int | None = None) -> Rollouts:
        """The credited view: a rollout for each trajectory, or each of its contexts, in a shape that the run compiles for.

        `group`: maximum number of rollouts of a prompt; None: that of a complete batch.
        """
        sizes, view = self.ladders, forests.paths if self.stream.contexts == 1 else forests.contexts
        return view(
            forest, self.stream.turns, self.stream.facts, group=group or self.most,
            prompts=self.prompts + self.beside.count, version=version,
            tokens=functools.partial(smallest, sizes.tokens),
            prompt_tokens=functools.partial(smallest, sizes.prompt_tokens), of_problems=self.task.facts)

    @property
    def most(self) -> int:
        """Maximum number of rollouts of a prompt in a view: trajectories times their contexts."""
        return (self.topology.most or self.stream.group) * self.stream.contexts

    @property
    def ladders(self) -> Ladders:
        """The sizes that a batch may have."""
        group, (prompt, rest) = self.stream.group, self.beside.longest
        return self.sizes(max(self.stream.prompt_tokens, prompt), max(self.max_tokens, rest), group, -(-self.most // group))

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers by whose names knobs give shapes and ranges: N training problems, and the id of the last one."""
        problems = len(self.task.train)
        return {"N": problems, "last": problems - 1}
