"""What a run knows of an evaluation set."""
from typing import Any, NamedTuple

from jaxrl_llm import rewards, tasks

# Options of a set beside those of its task, with their defaults.
OF_SETS = {"problems": 64, "every": 0, "samples": None, "temperature": None, "top_p": None, "max_tokens": None}


class EvalSpec(NamedTuple):
    """An evaluation set of `config.eval.sets`: the held-out problems of a task, and the settings of their sampling.

    `every`: steps between its evaluations; 0: together with those of the run's own task. `samples`: completions per problem;
    None: a group. `temperature`, `top_p`, `max_tokens`: None: the values of training. `stream`: that of the set,
    where the stream of training is for shorter completions or for an environment; None: one like that of training.
    """

    label: str
    task: tasks.Task
    reward: rewards.Combined
    problems: int
    every: int
    samples: int | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stream: Any = None
