"""Word problems of one and two steps made from templates, of which some are held out whole: GSM-like, no download."""
import dataclasses
import random
from collections.abc import Callable

from jaxrl_llm.registry import one_of
from jaxrl_llm.tasks.base import Problem, Task, disjoint_task

NAMES = ("Ann", "Ben", "Carla", "David", "Ella", "Frank", "Grace", "Hugo", "Iris", "Jack", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
PROMPT = "{question} Explain step by step, then give the answer as a number."


@dataclasses.dataclass(frozen=True)
class Template:
    """A question with the gaps `{name}`, `{other}`, `{things}`, `{a}`, `{b}`, `{c}`; `value` and `fits` are functions of a, b, c."""

    text: str
    value: Callable[[int, int, int], int]
    ranges: tuple[tuple[int, int], ...]
    fits: Callable[[int, int, int], bool] = lambda a, b, c: True


BIG, SMALL = (11, 60), (2, 9)
ONE = (
    Template("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", lambda a, b, c: a + b, (BIG, BIG)),
    Template("{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
             lambda a, b, c: a - b, (BIG, BIG), lambda a, b, c: a > b),
    Template("There are {a} boxes with {b} {things} in each. How many {things} are there in all?",
             lambda a, b, c: a * b, (SMALL, SMALL)),
    Template("{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
             lambda a, b, c: a // b, (BIG, SMALL), lambda a, b, c: a % b == 0),
    Template("{name} collected {a} {things} and {other} collected {b}. How many {things} did they collect together?",
             lambda a, b, c: a + b, (BIG, BIG)),
    Template("{name} needs {a} {things} and has {b} already. How many more {things} does {name} need?",
             lambda a, b, c: a - b, (BIG, BIG), lambda a, b, c: a > b),
    Template("A train has {a} cars and each car has {b} seats. How many seats does the train have?",
             lambda a, b, c: a * b, (SMALL, SMALL)),
    Template("{name} packs {a} {things} into bags of {b}. How many bags does {name} need?",
             lambda a, b, c: a // b, (BIG, SMALL), lambda a, b, c: a % b == 0),
)
TWO = (
    Template("{name} has {a} {things}, buys {b} more and then loses {c}. How many {things} does {name} have now?",
             lambda a, b, c: a + b - c, (BIG, BIG, SMALL)),
    Template("{name} buys {a} packs with {b} {things} in each and already had {c} {things}. How many {things} does {name} have now?",
             lambda a, b, c: a * b + c, (SMALL, SMALL, BIG)),
    Template("A notebook costs {a} dollars and a pen costs {b} dollars. How many dollars do {c} notebooks and one pen cost?",
             lambda a, b, c: a * c + b, (SMALL, SMALL, SMALL)),
    Template("{name} has {a} {things} and {other} has {b} more than {name}. How many {things} do they have together?",
             lambda a, b, c: a + a + b, (BIG, SMALL)),
    Template("{name} reads {a} pages every day for {b} days. The book has {c} pages. How many pages are left?",
             lambda a, b, c: c - a * b, (SMALL, SMALL, BIG), lambda a, b, c: c > a * b),
    Template("{name} had {a} {things}, gave away {b} and then shared the rest equally among {c} friends. "
             "How many {things} did each friend get?",
             lambda a, b, c: (a - b) // c, (BIG, SMALL, SMALL), lambda a, b, c: a > b and (a - b) % c == 0),
    Template("A farmer has {a} rows of {b} trees. {c} trees fall in a storm. How many trees are still standing?",
             lambda a, b, c: a * b - c, (SMALL, SMALL, SMALL), lambda a, b, c: a * b > c),
    Template("{name} earns {a} dollars an hour and works {b} hours. Then {name} spends {c} dollars. "
             "How many dollars are left?",
             lambda a, b, c: a * b - c, (SMALL, SMALL, SMALL), lambda a, b, c: a * b > c),
)
LEVELS = {"one": ONE, "two": TWO}
HELD_OUT = (4, 5, 6, 7)  # places of the held-out templates in each level


def word_problems(*, level: str = "both", size: int = 2000, heldout: int = 200, seed: int = 0) -> Task:
    """Problems such as "Ann has 12 apples and buys 31 more. How many ...?", asked as a message of a chat with an explanation.

    `level` is `one` or `two` steps of arithmetic, or `both`. Of eight templates of a level four are trained on and four are
    held out, so that no held-out question has the words of a trained one. `Problem.level` is the level.

    Raises:
      ValueError: an unknown level, or more problems than the templates make.
    """
    one_of("level of word_problems", level, ("both", *LEVELS))
    names = tuple(LEVELS) if level == "both" else (level,)
    sides = []
    for held, wanted in ((False, size), (True, heldout)):
        templates = [(name, template) for name in names for place, template in enumerate(LEVELS[name])
                     if (place in HELD_OUT) == held]
        sides.append(_problems(templates, wanted, random.Random(f"word problems {seed} {held}")))

    def build(made: tuple[str, str, str], number: int) -> Problem:
        question, answer, step = made
        return Problem(({"role": "user", "content": PROMPT.format(question=question)},), answer, number, step)

    return disjoint_task(f"word_problems/{level}", *sides, build, reward="last_number")


def _problems(templates, wanted: int, chance: random.Random) -> list[tuple[str, str, str]]:
    """`wanted` different (question, answer, level), of all templates equally many."""
    made: dict[str, tuple[str, str, str]] = {}
    draws = 0
    while len(made) < wanted:
        if draws > 100 * (wanted + 1000):
            raise ValueError(f"word_problems: {wanted} problems are asked of {len(templates)} templates, which gave "
                             f"{len(made)} different ones; ask for fewer")
        level, template = templates[len(made) % len(templates)]
        draws += 1
        numbers = [chance.randint(*limits) for limits in template.ranges] + [0] * (3 - len(template.ranges))
        if template.fits(*numbers):
            name, other = chance.sample(NAMES, 2)
            question = template.text.format(name=name, other=other, things=chance.choice(THINGS), **dict(zip("abc", numbers)))
            made.setdefault(question, (question, str(template.value(*numbers)), level))
    return list(made.values())
