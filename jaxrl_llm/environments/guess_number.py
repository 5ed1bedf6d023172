"""A hidden number, guessed by higher and lower: the smallest game that needs more than one turn."""
import dataclasses
import re

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.words import AFTER_DIGITS, BEFORE_DIGITS
from jaxrl_llm.tasks.base import Problem, disjoint_task, split_position

_NUMBER = re.compile(f"{BEFORE_DIGITS}[0-9]{{1,9}}{AFTER_DIGITS}")


@dataclasses.dataclass
class GuessNumberState:
    """The hidden number, the range `[low, high]` left for it, and the guesses left."""

    hidden: int
    low: int
    high: int
    left: int


@environment
def guess_number(*, highest: int = 100, heldout_fraction: float = 0.2) -> Environment:
    """A number from 1 to `highest`, with as many guesses as bisection needs. The return is 1 for finding it, else 0.

    Each number is a problem. The last whole number in a message is the guess, so that a list of all numbers is one guess.
    Raises ValueError for fewer than 10 numbers, or a fraction that leaves training or held-out problems empty.
    """
    if highest < 10:
        raise ValueError(f"highest={highest}; give at least 10")
    sides: tuple[list, list] = ([], [])
    for hidden in range(1, highest + 1):
        sides[split_position(f"{hidden} of {highest}") < heldout_fraction].append(hidden)
    guesses = highest.bit_length()
    rules = (f"I think of a whole number from 1 to {highest}. You have {guesses} guesses. Answer with one number; I say "
             "whether mine is higher or lower.")

    def build(hidden: int, number: int) -> Problem:
        return Problem(({"role": "user", "content": rules},), str(hidden), number)

    def reset(problem: Problem, key: int) -> tuple[GuessNumberState, list[Message]]:
        return GuessNumberState(int(problem.answer), 1, highest, guesses), [{"role": "user", "content": rules}]

    task = disjoint_task(f"guess_number/{highest}", *sides, build, reward="environment")
    return Environment(name="guess_number", task=task, reset=reset, step=_step,
                       oracle=lambda game: str((game.low + game.high) // 2),
                       choices=lambda game: [str(number) for number in range(1, highest + 1)])


def _step(game: GuessNumberState, message: Message) -> Turn:
    numbers = _NUMBER.findall(message["content"])
    guess = int(numbers[-1]) if numbers else None
    info = {"state": [game.low, game.high, game.left], "action": "" if guess is None else guess}
    game.left -= 1
    if guess == game.hidden:
        return Turn(reward=1.0, done=True, info={**info, "guesses_left": game.left})
    if game.left == 0:
        return Turn(done=True, info={**info, "guesses_left": 0})
    if guess is None:
        said = "That is no number."
    elif guess < game.hidden:
        said, game.low = f"Mine is higher than {guess}.", max(game.low, guess + 1)
    else:
        said, game.high = f"Mine is lower than {guess}.", min(game.high, guess - 1)
    return Turn([{"role": "user", "content": f"{said} {game.left} left."}], info=info)
