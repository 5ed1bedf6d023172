"""Values of a configuration by the dotted names of their keys, and a line for each value that cannot work."""
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_llm.tools import registry


def value_of(config: Any, key: str) -> Any:
    """The value of a key such as `sampling.group`."""
    return functools.reduce(getattr, key.split("."), config)


def at_least(config: Any, least: float, keys: str) -> Iterator[str]:
    """A line for each of these keys, separated by spaces, with a value below `least` or NaN."""
    for key in keys.split():
        value = value_of(config, key)
        if not value >= least:  # refuses NaN too
            yield f"config.{key} is {value}; it must be at least {least}"


def finite(config: Any, keys: str) -> Iterator[str]:
    """A line for each infinite value; deadlines, ages and bounds may be infinite, which is none."""
    for key in keys.split():
        if math.isinf(value_of(config, key)):
            yield f"config.{key} is {value_of(config, key)}; give a finite number"


def seconds(config: Any, keys: str) -> Iterator[str]:
    """A line for each duration of 0 or less."""
    for key in keys.split():
        if not value_of(config, key) > 0:
            yield f"config.{key} is {value_of(config, key)}; give a number of seconds above 0"


def named(config: Any, key: str, allowed: Iterable[str]) -> Iterator[str]:
    """A line for a value that is none of the allowed names."""
    allowed = tuple(allowed)
    if value_of(config, key) not in allowed:
        yield str(registry.unknown(f"config.{key}", value_of(config, key), allowed))
