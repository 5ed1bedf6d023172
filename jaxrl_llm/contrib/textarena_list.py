"""`python -m jaxrl_llm.contrib.textarena_list`: the games of TextArena that begin on this machine without a network.

It prints the players of each, 1 or 2, and what the game hides from a player, who then has a conversation of its own.
"""
import collections
import contextlib
import io
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from jaxrl_llm.contrib.textarena_game import opened, private
from jaxrl_llm.tasks.base import optional


class ListedGame(NamedTuple):
    """A game by its id; `private`: what it hides from a player; `players` is 0 if it does not begin, `why` is the reason."""

    name: str
    players: int
    private: str = ""
    why: str = ""


def look(textarena: Any, name: str) -> ListedGame:
    """The entry of a game, started without downloads."""
    try:
        players = len(opened(textarena, name, 0).state.observations)
    except Exception as error:
        return ListedGame(name, 0, why=f"{type(error).__name__}: {str(error).replace(name, 'it')}".splitlines()[0][:100])
    return ListedGame(name, players, private(textarena, name) if players > 1 else "")


def games() -> list[ListedGame]:
    """All games, started with connections refused and nothing printed. Raises ValueError without textarena."""
    textarena = optional("textarena", "environments")
    names = [name for name in textarena.envs.registration.ENV_REGISTRY if not name.endswith(("-raw", "-train"))]
    with _silent_and_offline():
        return [look(textarena, name) for name in sorted(names)]


@contextlib.contextmanager
def _silent_and_offline() -> Iterator[None]:
    """Refuses connections and host names, and discards errors, since downloaders print them past `sys.stderr`."""
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("no network, to see what is needed of it")

    with contextlib.ExitStack() as stack:
        for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
            stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        try:
            yield
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            os.close(nothing)


def main() -> int:
    """Prints a line for each game that begins, then the number of others with their reasons."""
    entries = games()
    for game in entries:
        if game.players:
            print(f"{game.name}  players {game.players}{f'  private: {game.private}' if game.private else ''}")
    reasons = collections.Counter(game.why for game in entries if not game.players)
    print(f"{sum(game.players > 0 for game in entries)} of {len(entries)} games begin without a network; the others:")
    for why, count in reasons.most_common():
        print(f"  {count}  {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
