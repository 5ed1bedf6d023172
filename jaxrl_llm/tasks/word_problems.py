"""GSM-like word problems of one and two steps, made from templates of which half are held out; no download."""
import random
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.tasks.base import Messages, Problem, Task, disjoint_task, task
from jaxrl_llm.tools.registry import one_of

NAMES = ("Ann", "Ben", "Carla", "David", "Ella", "Frank", "Grace", "Hugo", "Iris", "Jack", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
PROMPT = "{question} Explain step by step, then give the answer as a number."
BIG, SMALL = (11, 60), (2, 9)


class Question(NamedTuple):
    """A question with gaps, the ranges of its numbers a, b, c, and its steps: `"a + b"`, then of the result r `"r - c"`."""

    text: str
    ranges: tuple[tuple[int, int], ...]
    steps: tuple[str, ...]


ONE = (
    Question("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", (BIG, BIG), ("a + b",)),
    Question("{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
             (BIG, BIG), ("a - b",)),
    Question("There are {a} boxes with {b} {things} in each. How many {things} are there in all?", (SMALL, SMALL), ("a * b",)),
    Question("{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
             (BIG, SMALL), ("a / b",)),
    Question("{name} collected {a} {things} and {other} collected {b}. How many {things} did they collect together?",
             (BIG, BIG), ("a + b",)),
    Question("{name} needs {a} {things} and has {b} already. How many more {things} does {name} need?", (BIG, BIG), ("a - b",)),
    Question("A train has {a} cars and each car has {b} seats. How many seats does the train have?",
             (SMALL, SMALL), ("a * b",)),
    Question("{name} packs {a} {things} into bags of {b}. How many bags does {name} need?", (BIG, SMALL), ("a / b",)),
)
TWO = (
    Question("{name} has {a} {things}, buys {b} more and then loses {c}. How many {things} does {name} have now?",
             (BIG, BIG, SMALL), ("a + b", "r - c")),
    Question("{name} buys {a} packs with {b} {things} in each and already had {c} {things}. "
             "How many {things} does {name} have now?", (SMALL, SMALL, BIG), ("a * b", "r + c")),
    Question("A notebook costs {a} dollars and a pen costs {b} dollars. How many dollars do {c} notebooks and one pen cost?",
             (SMALL, SMALL, SMALL), ("a * c", "r + b")),
    Question("{name} has {a} {things} and {other} has {b} more than {name}. How many {things} do they have together?",
             (BIG, SMALL), ("a + b", "r + a")),
    Question("{name} reads {a} pages every day for {b} days. The book has {c} pages. How many pages are left?",
             (SMALL, SMALL, BIG), ("a * b", "c - r")),
    Question("{name} had {a} {things}, gave away {b} and then shared the rest equally among {c} friends. "
             "How many {things} did each friend get?", (BIG, SMALL, SMALL), ("a - b", "r / c")),
    Question("A farmer has {a} rows of {b} trees. {c} trees fall in a storm. How many trees are still standing?",
             (SMALL, SMALL, SMALL), ("a * b", "r - c")),
    Question("{name} earns {a} dollars an hour and works {b} hours. Then {name} spends {c} dollars. "
             "How many dollars are left?", (SMALL, SMALL, SMALL), ("a * b", "r - c")),
)
LEVELS = {"one": ONE, "two": TWO}
TRAINED = 4  # of the eight templates of a level, the first ones; the others are held out


class Made(NamedTuple):
    """A filled template."""

    question: str
    answer: int
    solution: str
    level: str


@task
def word_problems(*, level: str = "both", most: int = 60, shots: int = 0, size: int = 2000, heldout: int = 200,
                  seed: int = 0) -> Task:
    """Problems such as "Ann has 12 apples and buys 31 more. How many ...?", asked as a chat, to be explained and answered.

    `level` is `one` or `two` steps of arithmetic, or `both`; `most` the largest number in a question. Of the eight templates of
    a level four are trained on and four are held out: no held-out question has the words of a trained one. `shots` worked
    examples, from the trained templates, precede every question as earlier turns. `Problem.level` is the level,
    `extra["solution"]` an explanation, which a warm-up imitates. Raises ValueError: an unknown level, a `most` below 4, or more
    problems than the templates make.
    """
    one_of("level of word_problems", level, ("both", *LEVELS))
    if most < 4:
        raise ValueError(f"word_problems(most={most}): give at least 4, or nothing is left to share or to give away")
    names = tuple(LEVELS) if level == "both" else (level,)
    trained = [(name, template) for place in range(TRAINED) for name in names for template in LEVELS[name][place:place + 1]]
    held = [(name, template) for name in names for template in LEVELS[name][TRAINED:]]
    made = _problems(trained, size + shots, most, random.Random(f"word problems {seed} train"))
    sides = made[shots:], _problems(held, heldout, most, random.Random(f"word problems {seed} held out"))
    before = tuple(turn for example in reversed(made[:shots]) for turn in (*asked(example), answered(example)))

    def build(one: Made, number: int) -> Problem:
        return Problem((*before, *asked(one)), str(one.answer), number, one.level, {"solution": one.solution})

    return disjoint_task(f"word_problems/{level}", *sides, build, reward="last_number")


def asked(one: Made) -> Messages:
    return ({"role": "user", "content": PROMPT.format(question=one.question)},)


def answered(one: Made) -> dict[str, str]:
    return {"role": "assistant", "content": one.solution}


def explained(left: int, sign: str, right: int) -> tuple[int, str] | None:
    """The result of a step and its explanation; None if that is not a whole number above 0."""
    ones = right % 10
    if sign == "+":
        value, tens, rest = left + right, left - left % 10 + right - ones, left % 10 + ones
        if not tens:
            return value, f"{left} + {right} = {value}."
        return value, (f"The tens of {left} and {right} make {tens} and the ones make {rest}. "
                       f"{tens} + {rest} = {value}, so {left} + {right} = {value}.")
    if sign == "-":
        value, rest = left - right, left - (right - ones)
        text = f"Take {right - ones} away first: {left} - {right - ones} = {rest}. Then {rest} - {ones} = {value}." \
            if 0 < ones < right else f"{left} - {right} = {value}."
        return (value, text) if value > 0 else None
    if sign == "*":
        return left * right, f"{left} times {right} is {left * right}."
    if left % right:
        return None
    return left // right, f"{right} times {left // right} is {left}, so {left} / {right} = {left // right}."


def _filled(level: str, template: Question, most: int, chance: random.Random) -> Made | None:
    """The template with numbers, names and things by chance; None where its steps leave the whole numbers above 0."""
    ranges = ((low if 2 * low <= most else SMALL[0], min(high, most)) for low, high in template.ranges)
    numbers = dict(zip("abc", (chance.randint(*limits) for limits in ranges)))
    name, other = chance.sample(NAMES, 2)
    question = template.text.format(name=name, other=other, things=chance.choice(THINGS), **numbers)
    texts = []
    for step in template.steps:
        left, sign, right = step.split()
        result = explained(numbers[left], sign, numbers[right])
        if result is None:
            return None
        numbers["r"], text = result
        texts.append(text)
    return Made(question, numbers["r"], " ".join([*texts, f"The answer is {numbers['r']}."]), level)


def _problems(templates: Sequence[tuple[str, Question]], wanted: int, most: int, chance: random.Random) -> list[Made]:
    """`wanted` different problems, of all templates equally many."""
    made: dict[str, Made] = {}
    for _ in range(20 * (wanted + 100)):
        if len(made) == wanted:
            return list(made.values())
        level, template = templates[len(made) % len(templates)]
        one = _filled(level, template, most, chance)
        if one is not None:
            made.setdefault(one.question, one)
    raise ValueError(f"word_problems: {wanted} problems are asked of {len(templates)} templates, which gave {len(made)} "
                     "different ones; ask for fewer")
