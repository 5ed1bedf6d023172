"""What the source of a run knows of its problems and its batches, for the states of controllers."""
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control import Known
from jaxrl_llm.control.passes import Shares
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.tasks.loader import levels_of, tasks_of


def known(source: Source, prompts: Callable[[], Sequence[list[int] | None]]) -> tuple[Known, ...]:
    """The values that controllers may take from a source; `prompts` reads the `prompt_tokens` of all training problems."""
    train = source.task.train
    return (
        Known("prompts", "int, N, training problems", lambda: len(train), of_task=True),
        Known("shares", "`passes.Shares`, the task of each training problem and the weights of the tasks",
              lambda: Shares(*tasks_of(train)), of_task=True),
        Known("batch", "int, B, problems that are drawn at once", lambda: source.data.size),
        Known("group", "int, G, rollouts that a prompt gets at once", lambda: source.stream.group),
        Known("max_tokens", "int, T, of a completion at most", lambda: source.max_tokens),
        Known("levels", "i32[N], the `Problem.level` of each training problem as a number from 0, see `tasks.loader.levels_of`",
              lambda: levels_of(train), of_task=True),
        Known("prompt_lengths", "i32[N], tokens of each training prompt; 0 for one that cannot be asked",
              lambda: np.array([len(one or ()) for one in prompts()], np.int32), of_task=True),
    )


def prompt_tokens(source: Source) -> list[list[int] | None]:
    """The token ids of each training prompt; None for one that cannot be asked."""
    train, stream = source.task.train, source.stream
    return parallel.first(stream.partner.encode([train[i] for i in range(len(train))], stream.tokenizer))
