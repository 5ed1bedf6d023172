"""Values of a configuration by the dotted names of their keys, and the ranges that they must lie in."""
import functools
import math
from typing import Any


def value_of(config: Any, key: str) -> Any:
    """The value of a key such as `sampling.group`."""
    return functools.reduce(getattr, key.split("."), config)


def at_least(config: Any, least: float, keys: str) -> None:
    """Raises ValueError for the first of these keys, separated by spaces, with a value below `least` or NaN."""
    for key in keys.split():
        value = value_of(config, key)
        if not value >= least:  # refuses NaN too
            raise ValueError(f"config.{key} is {value}; it must be at least {least}")


def finite(config: Any, keys: str) -> None:
    """Raises ValueError for an infinite value; deadlines, ages and bounds may be infinite, which is none."""
    for key in keys.split():
        if not math.isfinite(value_of(config, key)):
            raise ValueError(f"config.{key} is {value_of(config, key)}; give a finite number")


def seconds(config: Any, keys: str) -> None:
    """Raises ValueError for durations of 0 or less."""
    for key in keys.split():
        if not value_of(config, key) > 0:
            raise ValueError(f"config.{key} is {value_of(config, key)}; give a number of seconds above 0")
