"""The rewards that runs name; each scores a completion against the answer of its problem."""
import functools

from jaxrl_llm.rewards import length, needs, segments, text
from jaxrl_llm.rewards.base import Reward, reward
from jaxrl_llm.rewards.box import HIT, box_reward, find_box
from jaxrl_llm.rewards.code import Code, tests_of
from jaxrl_llm.rewards.gym import Gym, tagged_answer
from jaxrl_llm.rewards.isolated import Isolated
from jaxrl_llm.rewards.math import Boxed, boxed_answer
from jaxrl_llm.rewards.swe_rl import Patches
from jaxrl_llm.rewards.token_f1 import find_words
from jaxrl_llm.rewards.token_f1 import token_f1 as f1_of_words
from jaxrl_llm.tools.registry import one_of


@reward
def exact(*, weight: float = 1.0) -> Reward:
    """1 when the completion is the answer, white space at both ends aside."""
    return Reward("exact", text.exact, weight, extract=text.whole_text)


@reward
def segment_prefix(*, weight: float = 1.0, tags: bool = True, unit: str = "word", least: int = 3) -> Reward:
    """1 when the prediction is how the answer begins: `least` or more of its units ("word" or "character"), and no other.

    With `tags` the prediction stands between the marks of `rewards.segments`, else it is the whole completion. Raises
    ValueError for another unit.
    """
    one_of("unit of segment_prefix", unit, ("word", "character"))

    def score(completion: str, answer: str, problem) -> float:
        predicted = segments.prediction(completion, tags)
        return float(predicted is not None and segments.is_prefix(predicted, answer, unit, least))

    return Reward("segment_prefix", score, weight, extract=functools.partial(segments.prediction, tags=tags))


@reward
def last_number(*, weight: float = 1.0) -> Reward:
    """1 when the last number in the completion equals the answer as a rational."""
    return Reward("last_number", text.last_number, weight, extract=text.find_last_number, check=needs.number("last_number"))


@reward
def numeric(*, weight: float = 1.0) -> Reward:
    """1 when the whole completion is one number equal to the answer as a rational."""
    return Reward("numeric", text.numeric, weight, extract=text.parse_rational, check=needs.number("numeric"))


@reward
def boxed(*, weight: float = 1.0, workers: int | None = None, deadline: float = 5.0, strict: bool = True) -> Reward:
    r"""1 when the last `\boxed{}` equals the answer: as text, as a number, or for math-verify within `deadline` s.

    `strict`: if the answer is a number, an expression that is not worked out yet (`123+456` for 579) is wrong.
    """
    return Reward("boxed", Boxed(workers, deadline, strict), weight, per="batch", extract=boxed_answer, splits=True, timed=True)


@reward
def format(*, pattern: str, weight: float = 1.0) -> Reward:
    """1 when the regular expression matches the whole completion (the dot matches newlines)."""
    return Reward("format", text.format_match(pattern), weight)


@reward
def soft_overlong(*, max_length: int, cache: int, factor: float = 1.0, variant: str = "paper", weight: float = 1.0) -> Reward:
    """Penalty from 0 down to -1 over the last `cache` tokens before `max_length` (DAPO, arXiv 2503.14476)."""
    return Reward("soft_overlong", length.soft_overlong(max_length, cache, factor, variant), weight, per="lengths")


@reward
def reasoning_gym(*, weight: float = 1.0, workers: int | None = None, deadline: float = 5.0) -> Reward:
    """The own scorer of a reasoning_gym data set, in [0, 1], on the last `<answer>` tags; needs the problems."""
    return Reward("reasoning_gym", Gym(workers, deadline), weight, per="batch", extract=tagged_answer, splits=True, timed=True,
                  solved_above=0.99, check=needs.gym)


@reward
def isolated(*, target: str, workers: int | None = None, deadline: float = 5.0, weight: float = 1.0) -> Reward:
    """Your own `"module:function"` in processes that are killed after `deadline` seconds a completion."""
    return Reward(target, Isolated(target, workers, deadline), weight, per="batch", splits=True, timed=True, fail_fast=True)


@reward
def code(*, weight: float = 1.0, workers: int | None = None, deadline: float = 5.0, memory_mb: int = 1024,
         partial_credit: float = 0.0, unsafe: bool = False) -> Reward:
    """1 when the last ```python block passes every test of `problem.extra["tests"]` within its limits, see `Code`."""
    scorer = Code(workers, deadline, memory_mb, partial_credit, unsafe)
    return Reward("code", scorer, weight, per="batch", splits=True, timed=True, fail_fast=True, prepare=scorer.prepare,
                  check=tests_of)


@reward
def box(*, weight: float = 1.0) -> Reward:
    """How well the last four numbers of a completion, a box in pixels, cover the target, see `box_reward`."""
    return Reward("box", box_reward, weight, per="batch", extract=find_box, splits=True, solved_above=HIT,
                  check=needs.target_box)


@reward
def token_f1(*, weight: float = 1.0) -> Reward:
    r"""The F1 of the words of the last `\boxed{}`: 1 if they equal the words of the answer in any order."""
    return Reward("token_f1", f1_of_words, weight, extract=find_words, solved_above=0.99, check=needs.answer_texts)


@reward
def swe_rl(*, weight: float = 1.0, workers: int | None = None, deadline: float = 5.0) -> Reward:
    """The similarity of a patch to the true one in [0, 1], or -1 for a bad format, see `swe_rl_reward`."""
    return Reward("swe_rl", Patches(workers, deadline), weight, per="batch", splits=True, timed=True, solved_above=0.99,
                  check=needs.repositories)
