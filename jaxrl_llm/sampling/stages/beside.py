"""Puts given texts beside the prompts of a complete batch."""
from typing import Any

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.sampling import beside as texts
from jaxrl_llm.sampling.stages import made
from jaxrl_llm.sampling.stages.base import Stage, StageMemory, Unfinished
from jaxrl_llm.sampling.stages.guide import marked
from jaxrl_llm.topologies.base import GUIDED


def beside() -> Stage:
    """The next texts of `source.beside`; the memory `texts` is the position in their order.

    The rollouts have `given`, `apart` and `weight`, see `sampling.beside`, and what `guide` says of an expert's tokens. Metrics
    of rollouts, facts of problems and replays leave the texts out. A batch that samples no prompt has no texts.
    """
    def end(batch: Unfinished, source: Any) -> Unfinished:
        data, count, forest = source.beside.data, source.beside.count, batch.forest
        data.set_state(place := source.memory["texts"])
        problems = data.take(count)
        source.memory["texts"] = data.get_state()
        if not forest.problems:
            return batch
        new = texts.planted(problems, source, source.next_uid, batch.snapshot.version, int(forest.draw.max(initial=0)))
        source.next_uid += count * source.stream.group
        facts = {"tokens": float(new.length.sum()), "count": float(count),
                 "epoch": (place["next_problem"] + count) / place["problems"]}
        whole = forests.join([forest, made.with_facts_of(new, forest)])
        return batch._replace(forest=whole).noted("beside", problems).measured(
            {f"texts/{name}": value for name, value in facts.items()})

    def view(rollouts: Rollouts, batch: Unfinished, source: Any) -> Rollouts:
        if (problems := batch.notes.get("beside")) is None:
            return rollouts
        return texts.marked(marked(rollouts), problems, first=len(batch.forest.problems) - len(problems))

    def read(stored: Any, source: Any) -> Any:
        source.beside.data.set_state(stored)  # refuses the position of other texts before anything is sampled
        return stored

    memory = StageMemory("texts", lambda source: source.beside.data.get_state(), read)
    return Stage("beside", end=end, view=view, provides=("given", "apart", "weight", *GUIDED), memory=memory)
