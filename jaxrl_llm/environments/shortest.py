"""Shortest paths, for the oracles of mazes and puzzles."""
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

PlaceT = TypeVar("PlaceT", bound=Hashable)


def shortest_way(start: PlaceT, arrived: Callable[[PlaceT], bool],
                 steps: Callable[[PlaceT], Iterable[tuple[str, PlaceT]]]) -> list[str]:
    """The names of the steps from `start` to the nearest place where `arrived` holds, by breadth-first search.

    `steps(place)` are (name, place) of all places one step away. Raises ValueError if there is no path.
    """
    waiting = deque([start])
    came: dict[PlaceT, tuple[PlaceT, str] | None] = {start: None}
    while waiting:
        place = waiting.popleft()
        if arrived(place):
            names: list[str] = []
            while (last := came[place]) is not None:
                place = last[0]
                names.append(last[1])
            return names[::-1]
        for name, other in steps(place):
            if other not in came:
                came[other] = place, name
                waiting.append(other)
    raise ValueError(f"there is no way from {start!r}")
