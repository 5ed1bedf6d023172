"""The task of a run, and what rewards its trajectories: a reward of one turn, or the runner of an environment."""
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import environments, parallel, rewards, tasks
from jaxrl_llm.environments.compiled import opening_of
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.setup.problems import make_reward, make_task
from jaxrl_llm.tasks.answered import graded
from jaxrl_llm.tools import written

Reward = rewards.Combined | rewards.ByTask


class Judge(NamedTuple):
    """What rewards trajectories of a task: a `reward` of one turn, or the `runner` of an environment."""

    task: tasks.Task
    reward: Reward | None = None
    runner: Runner | None = None

    @property
    def environment(self) -> environments.Environment | None:
        """The environment, if there is one."""
        return None if self.runner is None else self.runner.environment


def make_judge(config: ConfigDict) -> Judge:
    """The task of a run, and what rewards its trajectories: the runner of an environment, or a reward."""
    if config.environment:
        runner = make_runner(config)
        return Judge(runner.environment.task, runner=runner)
    task = make_task(config.task)
    reward = make_reward(config, task)
    return Judge(graded(task, reward), reward)


def named_environment(config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """The name and the options of `config.environment`; ValueError unless it names one."""
    named = written.calls(config.environment)
    if len(named) != 1:
        raise ValueError(f"config.environment={config.environment!r} names {len(named)} environments; give one of "
                         f"{', '.join(environments.factories())}, or your own module:function, with its options in brackets")
    return named[0]


def make_runner(config: ConfigDict) -> Runner:
    """The runner of `config.environment`: compiled, in processes or in threads.

    Environments that wait, by `config.environment_waits`, run in threads. Others are compiled for a game of arrays, use
    processes if trajectories can be replayed, else threads.
    """
    name, options = named_environment(config)
    made = environments.make(name, **options)
    waits = {"auto": made.waits, "yes": True, "no": False}[config.environment_waits]
    kind = ("threads" if waits else "compiled" if opening_of(made) is not None else
            "processes" if made.replayable else "threads")
    workers = made.at_once or config.prompts.per_step * config.sampling.group if waits else None
    return Runner(name, options, seed=config.seed, kind=kind, workers=workers, deadline=config.environment_deadline,
                  limit=config.environment_invalid, waits=waits, joint=parallel.several())
