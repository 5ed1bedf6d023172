"""Games of TextArena for one player, or for two that are both played by the policy (arXiv 2504.11442)."""
import contextlib
import dataclasses
import functools
import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.tasks.base import Problem, optional, seeded

_CHANCE = threading.Lock()  # the games draw from the global random generators of the process
_GAME = -1  # the speaker of messages that no player says
_MOVES = re.compile(r"\[[^\[\]\n]{1,40}\]")
_BEGUN, _PLAYED, _MOVED = 4, 2, 8  # games that are begun, and played for some moves, to see what they hide


@dataclasses.dataclass
class TextArenaEpisode:
    """A game, the number of messages that the policy may still send, and the state of its random numbers.

    `seat`: the policy's player; None: all players. `opponent`: chance of the other player's moves. `apart`: whether each player
    has a conversation of its own. `unread`: texts that each player has not read.
    """

    inside: Any
    left: int
    seat: int | None
    opponent: random.Random
    apart: bool = False
    unread: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    chance: tuple = ()

    @property
    def player(self) -> int:
        """The player who moves next."""
        return self.inside.state.current_player_id


@environment
def textarena_game(*, game: str = "GuessTheNumber-v0", turns: int = 50, problems: int = 1000, heldout: int = 200,
                   show_private: bool = False, apart: bool = False) -> Environment:
    """A game of TextArena by its id. A problem is a seed of `reset`; chance during the trajectory comes from the key.

    The return of a game for one player is the game's reward, or 0 if the `turns` are used up first. In a game for two players
    the policy plays both, agents 0 and 1. The reward is 0, and the reward of each player is in the info of the last turn
    (`returns`), unless the `turns` were used up. On held-out problems the policy is alternately player 0 and 1, and the other
    player makes a random one of the moves that it last read in square brackets; the reward is the policy's.

    Both players read one conversation. In a game that hides something from a player, see `private`, and with `apart` in any
    game for two, each player has a conversation, or context, of its own, in which it reads the other one's messages as far as
    the game passes them on; unless `show_private` lets both players read all. Raises ValueError without textarena, for an
    unknown game, for one that needs more players, and for `apart` in a game for one player or together with `show_private`.
    """
    textarena = optional("textarena", "environments")
    with _chance_of(TextArenaEpisode(None, 0, None, random.Random())):
        players = len(opened(textarena, game, 0).state.observations)
        if apart and (show_private or players == 1):
            raise ValueError(f"{game} with apart=True, show_private={show_private} and players={players}: conversations are "
                             "apart in games for two, and then nothing private is shown; leave out one of the options")
        apart = apart or players > 1 and not show_private and bool(private(textarena, game))

    def reset(problem: Problem, key: int) -> tuple[TextArenaEpisode, list[Message]]:
        seed = problem.extra["seed"]
        seat = 0 if players == 1 else seed % 2 if seed >= problems else None
        state = TextArenaEpisode(None, turns, seat, random.Random(seed), apart, {player: [] for player in range(players)})
        with _chance_of(state):
            _seed(seed)
            state.inside = opened(textarena, game, seed)
            _others_move(state)
            _seed(key)
            state.opponent = random.Random(key)
            common = [{"role": "system", "content": f"You play {game}."}] if apart else []
            return state, [*common, *_messages(state)]

    facts = {} if players == 1 else {"agent": "turn", "functional_group": "turn", "game": "once"}
    return Environment(name=game, task=seeded(f"textarena/{game}", game, problems, heldout), reset=reset,
                       step=functools.partial(_step, show_private=show_private), returns=(-1.0, 1.0), facts=facts,
                       contexts=2 if apart else 1, apart=apart)


def opened(textarena: Any, game: str, seed: int) -> Any:
    """A started game, with one player if possible, else with two. Raises ValueError."""
    for players in (1, 2):
        try:
            inside = textarena.make(f"{game}-raw")
        except ValueError as error:
            raise ValueError(f"textarena has no game {game!r}: {error}") from error
        try:
            inside.reset(num_players=players, seed=seed)
            return inside
        except (AssertionError, ValueError) as error:
            refused = error
    raise ValueError(f"{game} is no game for one player or two: {refused}") from refused


def private(textarena: Any, game: str) -> str:
    """What a game for two hides from a player, "" if nothing was found in some beginnings and random moves.

    The package says who gets each message (`State.observations`). A line for one player alone is private if it depends on the
    seed, such as a card; other lines are rules, such as "You are Player 0". For hidden moves see `_hides`.
    """
    begun = [opened(textarena, game, seed) for seed in range(_BEGUN)]
    for player in range(2):
        alone = [_lines(inside, player) - _lines(inside, 1 - player) for inside in begun]
        if hidden := sorted({line for lines in alone for line in lines if any(line not in others for others in alone)}):
            return f"player {player} alone reads {hidden[0].strip()[:100]!r}"
    chance = random.Random(0)
    for inside in begun[:_PLAYED]:
        read: dict[int, list[str]] = {0: [], 1: []}
        for _ in range(_MOVED):
            player = inside.state.current_player_id
            for one, messages in inside.state.observations.items():
                read[one] += [text for _, text, _ in messages]
                messages.clear()
            if inside.step(_any_move(read[player], chance))[0]:
                break
            if _hides(inside, player):
                return f"player {1 - player} does not see what player {player} does"
    return ""


def _lines(inside: Any, player: int) -> set[str]:
    return {line for _, text, _ in inside.state.observations[player] for line in text.splitlines()}


def _hides(inside: Any, player: int) -> bool:
    """Whether the move that was just made is hidden: the other player gets no message, or not the one that the player gets.

    A move that is no valid one is answered to its player alone (GAME_ADMIN).
    """
    own, other = inside.state.observations[player], inside.state.observations[1 - player]
    if any(kind.name == "GAME_ADMIN" for _, _, kind in own):
        return False
    heard_own, heard_other = (any(author == player for author, _, _ in messages) for messages in (own, other))
    return not other or (heard_own and not heard_other)


def _step(state: TextArenaEpisode, message: Message, *, show_private: bool) -> Turn:
    state.left -= 1
    agent, before = state.player, position(state.inside)
    with _chance_of(state):
        done = state.inside.step(message["content"])[0]
        joint = state.seat is None and not state.apart
        if joint and not done and not show_private and _hides(state.inside, agent):
            raise ValueError(f"player {1 - agent} does not see what player {agent} does, but both read one conversation; "
                             "apart=True gives each player one of its own, show_private=True lets both read all")
        done = done or _others_move(state)
        said = [] if done else _messages(state)
    alone = len(state.unread) == 1
    info: dict[str, Any] = {} if before is None else {"state": before}
    info |= ({"action": _MOVES.findall(message["content"])} if alone
             else {"agent": agent, "functional_group": agent, "game": 0})
    if not done:
        return Turn(said, done=state.left <= 0, info=info)
    rewards, facts = state.inside.close()
    info["invalid_move"] = any(fact.get("invalid_move") for fact in facts.values())
    if not alone:
        info["returns"] = [float(rewards[player]) for player in state.unread]
    return Turn(reward=0.0 if state.seat is None else rewards[state.seat], done=True, info=info)


def position(inside: Any) -> str | None:
    """A fingerprint of a game's data and of whose turn it is, without the number of turns; None if it has data of other kinds.

    Games keep what they know in `state.game_state` and in attributes of their own.
    """
    own = {name: value for name, value in vars(inside).items() if name != "state"}
    state = inside.state
    try:
        text = json.dumps(_plain([own, state.game_state, state.current_player_id, state.made_invalid_move]))
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _plain(value: Any) -> Any:
    """Data in types of JSON, the same for equal data. Raises TypeError for functions and the like."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(entry)] for key, entry in value.items()), key=json.dumps)
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, re.Pattern):
        return value.pattern
    return [type(value).__name__, _plain(vars(value))] if hasattr(value, "__dict__") else value


def _others_move(state: TextArenaEpisode) -> bool:
    """Lets the other player move until it is the policy's turn; returns whether the game is over."""
    done = False
    while state.seat is not None and state.player != state.seat and not done:
        _read(state)
        read, state.unread[state.player] = state.unread[state.player], []
        done = state.inside.step(_any_move(read, state.opponent))[0]
    return done


def _any_move(read: list[str], chance: random.Random) -> str:
    """A random one of the moves in square brackets that a player read last."""
    return chance.choice(next((moves for text in reversed(read) if (moves := _MOVES.findall(text))), ["[pass]"]))


def _messages(state: TextArenaEpisode) -> list[Message]:
    """Texts that the next player has not read. If players have one conversation, the other player reads them too."""
    _read(state)
    player = state.player
    said, state.unread[player] = state.unread[player], []
    if state.seat is None and not state.apart:
        state.unread = {other: [text for text in texts if text not in said] for other, texts in state.unread.items()}
    return [{"role": "user", "content": "\n".join(said) or "(nothing)", **({"reader": player} if state.apart else {})}]


def _read(state: TextArenaEpisode) -> None:
    """Collects the game's messages to its players; the policy's own messages are already in the conversation."""
    inside = state.inside.state
    player, seen = state.inside.get_observation()
    for other, messages in {**inside.observations, player: seen}.items():
        spoken = {1 - other} if state.apart and state.seat in (None, other) else state.unread.keys() - {state.seat}
        own = {_GAME} if state.seat is None and not state.apart else {_GAME, *spoken}
        state.unread[other] += [f"Player {author}: {text}" if state.apart and author != _GAME else text
                                for author, text, _ in messages if author in own]
        inside.observations[other] = []


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)


@contextlib.contextmanager
def _chance_of(state: TextArenaEpisode) -> Iterator[None]:
    """Sets the shared random generators to this game's state, and restores them afterwards."""
    with _CHANCE:
        outside = random.getstate(), np.random.get_state()
        if state.chance:
            _restore(state.chance)
        try:
            yield
        finally:
            state.chance = random.getstate(), np.random.get_state()
            _restore(outside)


def _restore(chance: tuple) -> None:
    random.setstate(chance[0])
    np.random.set_state(chance[1])
