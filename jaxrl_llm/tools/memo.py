"""Functions that remember what they made, so that runs of a process share it."""
import functools
from collections.abc import Callable
from typing import Any


def remembered(maxsize: int) -> Callable[[Callable], Callable]:
    """Decorates a pure function: equal arguments give the same object again, as long as it is among the last `maxsize`.

    This is `functools.lru_cache` for arguments that may be unhashable: calls with such arguments are not remembered.
    """
    def decorate(function: Callable) -> Callable:
        kept = functools.lru_cache(maxsize, typed=True)(function)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any):
            try:
                hash((args, *kwargs.values()))
            except TypeError:
                return function(*args, **kwargs)
            return kept(*args, **kwargs)

        return called

    return decorate
