"""The method of a configuration with the parts that its texts name; what they name wrongly is reported at once."""
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import environments, methods, rewards, tasks
from jaxrl_llm.learning.schedules import SCHEDULES, Schedule
from jaxrl_llm.methods import composition, texts
from jaxrl_llm.sampling.evaluation_set import OF_SETS
from jaxrl_llm.sampling.stages import STAGES
from jaxrl_llm.setup.keys import check_values
from jaxrl_llm.setup.problems import OF_TASKS
from jaxrl_llm.tools import registry, written
from jaxrl_llm.tools.key_values import value_of
from jaxrl_llm.values.features import feature_size


def method_of(config: ConfigDict, known: Sequence[str] = ()) -> methods.Method:
    """The row of `config.method`, whose texts those of the configuration change, see `methods.composition`.

    Raises ValueError that lists all unknown names of methods, parts, tasks, environments, rewards, schedules and stages, and
    all numbers of parts that do not exist or are out of their range, behind faults that are already `known`.
    """
    check_values(config)
    found = [*known, *unknown_names(config)]
    of_the_run = {"max_len": config.sampling.max_tokens, "feature_size": feature_size(config.model.hidden_size)}
    given = {key: config[key] for key in texts.SLOTS}
    try:
        row = methods.get(config.method)
    except ValueError as error:
        found.append(f"config.method={config.method!r}: {error}")
        for key, text in given.items():
            if not (composition.are_numbers(text) or text.startswith("+") or text == composition.NONE):
                found += [f"config.{key}={text!r}: {line}" for line in texts.faults(key, text, of_the_run)]
        raise composition.Faults(found) from None
    return composition.composed(row, given, of_the_run, "config.", found)


def wrong_options(config: ConfigDict) -> list[str]:
    """A line for each option that tasks, environments, rewards and schedules of a configuration do not take, or lack.

    Of these the schedule alone is made, so values that other parts refuse by themselves are said when they are made.
    """
    found = list[str]()
    for key, table, of_texts in (("task", tasks.TASKS, OF_TASKS), ("eval.sets", tasks.TASKS, (*OF_TASKS, *OF_SETS)),
                                 ("environment", environments.factories(), ()), ("rewards", rewards.REWARDS, ())):
        text = value_of(config, key)
        for name, options in _calls(text):
            if ":" in name or name in table:
                try:
                    lines = table.untaken(name, {key: value for key, value in options.items() if key not in of_texts})
                except ValueError as error:  # of a module of your own
                    lines = [str(error)]
                found += [f"config.{key}={text!r}: {line}" for line in lines]
    return found + _wrong_schedule(config)


def _wrong_schedule(config: ConfigDict) -> list[str]:
    """What is wrong with the number of schedules that a text names, and with their options, if their names are known."""
    named = _calls(config.schedule)
    if bool(named) < bool(config.schedule) or not all(":" in name or name in SCHEDULES for name, _ in named):
        return []
    try:
        make_schedule(config)
    except ValueError as error:
        return [str(error)]
    return []


def make_schedule(config: ConfigDict) -> Schedule:
    """The schedule of `config.schedule`; ValueError unless it names one."""
    named = written.calls(config.schedule)
    if len(named) != 1:
        raise ValueError(f"config.schedule={config.schedule!r} names {len(named)} schedules; give one of "
                         f"{', '.join(SCHEDULES)}, or your own module:function, with its numbers in brackets")
    try:
        return SCHEDULES.make(named[0][0], **named[0][1])
    except ValueError as error:
        raise ValueError(f"config.schedule={config.schedule!r}: {error}") from error


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and options of a text; none where it cannot be read, which `unknown_names` says."""
    try:
        return written.calls(text)
    except ValueError:
        return []


def unknown_names(config: ConfigDict) -> list[str]:
    """A line for each unknown name of a task, an environment, a reward, a schedule or a stage, and for unreadable texts.

    Stages are made, which checks their numbers.
    """
    found = []
    for key, table in (("task", tasks.TASKS), ("eval.sets", tasks.TASKS), ("environment", environments.factories()),
                       ("rewards", rewards.REWARDS), ("schedule", SCHEDULES), ("stages", STAGES)):
        text = value_of(config, key)
        for piece in written.parts(text):
            try:
                name, numbers = written.call(piece)
                if ":" not in name:
                    registry.one_of(table.what, name, table)
                if table is STAGES:
                    table.make(name, **numbers)
            except ValueError as error:
                found.append(f"config.{key}={text!r}: {error}")
    return found
