"""The source of given texts: batches of what others wrote, in a shuffled order, without any sampling."""
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data import reading
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.data.shapes import Ladders
from jaxrl_llm.data.text_forest import TEXTS, planted
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import registry, written
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.tools.timer import PhaseTimer

ROW = 1024  # slots of a packed row, which longer texts exceed and small batches do not fill
_READ = ("prompt/length", "completion/length", "completion/tokens", "completion/present")  # 0 tokens are drawn
_SAMPLED = {  # parts of runs that sample
    "text.replay": "a replay", "text.allocation": "an allocation rule", "text.guidance": "a guide",
    "text.topology": "a topology", "filters.refills": "a filter that draws further prompts",
    "config.budget.utility": "a budget", "config.pool.path": "a pool",
    "config.stages": "stages of sampling"}
CONFLICTS = (
    *(Conflict(("source", name), f"method {{method!r}} learns from given texts and samples none, and {name}={{1!r}} is {what}",
               "leave it out, or take a method that samples") for name, what in _SAMPLED.items()),
    Conflict(("texts", "updates"), "{1} batches of stored rollouts follow each batch, and method {method!r} learns "
             "from given texts beside its prompts", "set texts.share=0, or take a method without such a replay"),
    Conflict(("texts", "objective"), "given texts stand beside the prompts, and the loss of method {method!r} learns from none",
             "add a term, objective='+ nll(0.1, on=given)', take the method chord, or set texts.share=0",
             lambda texts, objective: texts and not (objective.reads_apart or "given" in objective.needs)),
    Conflict(("texts", "source", "config.environment", "config.texts.path"), "method {method!r} learns from given texts, and "
             "problems of an environment have no solutions as texts", "set texts.path to a file of texts",
             lambda texts, source, environment, path: (texts or source) and environment and not path),
    Conflict(("source", "schedule"), "method {method!r} learns from given texts, which do not wait for weights",
             "set schedule='sync'", lambda source, schedule: source and schedule.lag))


def keys(c: ConfigDict) -> None:
    """Texts of methods that learn from given ones, such as sft and dpo."""
    c.texts = ConfigDict()
    c.texts.path = ""                  # file, data set or module:function of rows; empty: the solutions of the task's problems
    c.texts.options = ""               # of data.reading.read: "split='train', turns='last', chat=False"
    c.texts.share = 0.0                # share of texts in a batch of rollouts, of methods that sample; 0: the method's
    c.texts.heldout = 64               # texts, or pairs, that are held out for eval/loss, at most half of a file; 0: none
    c.texts.max_tokens = 0             # longest text in tokens; longer ones are left out and counted; 0: no limit
    c.texts.pack = True                # packing: texts share rows, and do not see each other; False: learner.packed_rows says


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value of `config.texts` that cannot work."""
    for name in ("heldout", "max_tokens"):
        if (value := config.texts[name]) < 0:
            yield f"config.texts.{name} is {value}; give 0 or more"
    if not 0 <= (value := config.texts.share) < 1:
        yield f"config.texts.share is {value}; give a share from 0 to less than 1 of the rollouts and texts of a batch"
    try:
        options_of(config)
    except ValueError as error:
        yield f"config.texts.options={config.texts.options!r}: {error}"


def options_of(config: ConfigDict) -> dict[str, Any]:
    """The options of `data.reading.read` that a configuration sets; ValueError for unknown ones and wrong truth values."""
    given, parameters = written.keywords(config.texts.options), inspect.signature(reading.read).parameters
    for name, value in given.items():
        registry.one_of("option of texts", name, {*parameters} - {"path", "tokenizer", "longest"})
        if isinstance(parameters[name].default, bool) and not isinstance(value, bool):
            raise ValueError(f"option of texts {name}={value!r}; give True or False")
    return given


@dataclasses.dataclass(kw_only=True)
class TextSource(Source):
    """A source whose batches are texts: `data` are problems with their texts, a group of them each, in an endless order.

    Every epoch has each text once, in a new order; a position continues it exactly. With several processes each reads a part of
    a batch, and all get the whole. `stream` and `task` serve evaluations alone: without them no sampler is made.

    Attributes:
      heldout: problems with the texts whose loss evaluations measure.  group: texts of a problem, 2 for pairs.
      longest: (S, T), the most tokens of a prompt and behind it.
      row: slots of a packed row; 0: texts are not packed.
      left_out: number of texts that are not learned from, by reason.
    """

    heldout: Sequence[Problem] = ()
    group: int = 1
    longest: tuple[int, int]
    row: int = 0
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def next(self, snapshot: Snapshot, timer: PhaseTimer | None = None) -> Finished:
        """The next texts, as if the weights of the snapshot had written them."""
        with (timer or PhaseTimer())("texts"):
            draw, state = self.data.number, self.data.get_state()
            problems = self._dealt(self.data.take(self.prompts))
            forest = self._forest(problems, snapshot.version, draw)
            self.next_uid += len(problems) * self.group
            view = self.view(forest, snapshot.version)
        facts = {"tokens": float(forest.length.sum()), "trained": float(view.token_mask.sum()),
                 "epoch": (state["next_problem"] + len(problems)) / state["problems"]}
        read = {name: value for name, value in forests.metrics(forest).items() if name in _READ}
        return Finished(view, forest, read | {f"texts/{name}": value for name, value in facts.items()})

    def _dealt(self, mine: list[Problem]) -> list[Problem]:
        """The problems of a batch in their order, of which each process has read its share."""
        if self.readers == 1:
            return mine
        return in_turns(parallel.gather_objects(mine)[:self.readers])

    def _forest(self, problems: Sequence[Problem], version: int, draw: int = 0) -> Forest:
        spell = functools.partial(self.stream.tokenizer.decode_batch, skip_special=False)
        return planted(problems, [problem.extra[TEXTS] for problem in problems], spell, first_uid=self.next_uid,
                       version=version, draw=draw)

    def held_out_texts(self, version: int) -> list[Rollouts]:
        """Batches of all held-out texts, in the shapes of those that are learned from."""
        parts = [self.heldout[first:first + self.prompts] for first in range(0, len(self.heldout), self.prompts)]
        return [self.view(self._forest(part, version), version) for part in parts]

    def view(self, forest: Forest, version: int, group: int | None = None) -> Rollouts:
        """A rollout for each text."""
        sizes = self.ladders
        return forests.paths(forest, group=group or self.group, prompts=self.prompts, version=version,
                             tokens=functools.partial(smallest, sizes.tokens),
                             prompt_tokens=functools.partial(smallest, sizes.prompt_tokens))

    @property
    def most(self) -> int:
        """Number of texts of a problem."""
        return self.group

    @property
    def ladders(self) -> Ladders:
        """The sizes that a batch may have."""
        return self.sizes(*self.longest, self.group, 1)._replace(rows=(self.row,) if self.row else ())

    @property
    def of_texts(self) -> dict[str, int]:
        """The keys of a configuration that texts change in its batches, with their values."""
        (S, T), group = self.longest, self.group
        return {"sampling.group": group, "sampling.max_group": group, "prompts.max_tokens": S, "sampling.max_tokens": T}

    @property
    def told(self) -> list[tuple[str, str]]:
        """Rows for the head of a run."""
        what, (prompt, rest) = "pairs" if self.group == 2 else "texts", self.longest
        without = "".join(f"; {count} left out: {reason}" for reason, count in sorted(self.left_out.items()))
        count = self.data.get_state()["problems"]
        return [("learns from", f"{count:,} {what}, prompt <= {prompt} tokens, {rest} behind it{without}"),
                ("held out", f"{len(self.heldout):,} {what}")]


def row_of(longest: int, batch: int, multiple: int) -> int:
    """Slots of a packed row, a multiple of `multiple`: for many short texts, one long text, or all texts of a small batch."""
    return -(-max(longest, min(ROW, batch * longest)) // multiple) * multiple


def in_turns(parts: Sequence[Sequence[Problem]]) -> list[Problem]:
    """The problems of which part i of n has numbers `i, i + n, ...`, in their order; the parts have equal lengths."""
    return [problem for row in zip(*parts, strict=True) for problem in row]


def shares(batch: int) -> tuple[int, int]:
    """`(which, count)`: this process reads every `count`-th text of a batch, from number `which` on."""
    count = int(np.gcd(batch, jax.process_count()))
    return jax.process_index() % count, count
