"""The definition of a reward, and the one place where rewards are run, checked and added up."""
import dataclasses
import functools
import queue
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import Conflict


class RewardError(RuntimeError):
    """A reward function failed (which reward, which completion, what to do), or its checker cannot work at all.

    A reward function that raises it stops the run under any `on_error`.
    """


class ReportedError(Exception):
    """An error of another process, whose text already names its type."""


@dataclasses.dataclass(frozen=True)
class Reward:
    """A named score function; None instead of a score abstains, see `Combined`.

    `per` says what `fn` takes. "completion": `fn(completion, answer, problem) -> float`. "batch":
    `fn(completions, answers, problems) -> f32[N]` or a `BatchOutput`. "lengths": `fn(lengths i32[N]) -> f32[N]`,
    completion lengths in tokens.
    `splits`: a "batch" reward scores every row by itself, so that several processes may each score a part.
    `timed`: a "batch" reward is also called with `until`, the `time.monotonic()` by which it must return, or None. Rows
    that are missing by then score 0 and are counted as "late" in `BatchOutput.counts`.
    `fail_fast`: a timed reward is also called with `fail_fast`, whether its first error ends the run: it then stops its
    other work and returns.
    `prepare()` describes, before a run starts, how this machine runs the reward; it raises RewardError if it cannot.
    `extract(completion)` is the answer that the reward reads, in a form in which equal answers compare equal, or None;
    methods in which rollouts vote need it.
    `check(problem)`, before a run starts, raises ValueError for a problem that lacks what the reward reads.
    `solved_above`: a completion whose value exceeds it solves its problem; partial credit does not.
    """

    name: str
    fn: Callable[..., Any]
    weight: float = 1.0
    per: str = "completion"
    extract: Callable[[str], Hashable | None] | None = None
    splits: bool = False
    timed: bool = False
    fail_fast: bool = False
    prepare: Callable[[], str] | None = None
    solved_above: float = 0.5
    check: Callable[[Any], object] | None = None

    @property
    def by_row(self) -> bool:
        """Whether the score of a completion does not depend on the others of its batch."""
        return self.per != "batch" or self.splits

    def __post_init__(self):
        if self.per not in ("completion", "batch", "lengths"):
            raise ValueError(f"reward {self.name!r}: per={self.per!r}; allowed: 'completion', 'batch', 'lengths'")
        if self.timed > (self.per == "batch") or self.fail_fast > self.timed:
            raise ValueError(f"reward {self.name!r}: timed={self.timed}, fail_fast={self.fail_fast} with per={self.per!r}; "
                             "'batch' rewards alone can be timed, timed ones alone can fail fast")
        if not np.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r}: weight {self.weight} is not finite")


REWARDS = registry.PartTable("reward", Reward)
reward = REWARDS.enter


class BatchOutput(NamedTuple):
    """`scores f32[N]`, NaN where scoring failed, None where the reward abstains.

    `counts` of failures that are scored 0; `errors` of the NaN rows.
    """

    scores: Any
    counts: dict[str, int] = {}
    errors: dict[int, Exception] = {}


class _Batch(NamedTuple):
    completions: Sequence[str]
    answers: Sequence[str]
    problems: Sequence
    lengths: np.ndarray | None


class Scores(NamedTuple):
    """`total f32[N]` = components @ weights; `components f32[N, K]` unweighted; `names` of the K; `failures` counts.

    `seconds f64[K]`: time that each reward took; 0.0 if it was not timed.
    """

    total: np.ndarray
    components: np.ndarray
    names: tuple[str, ...]
    failures: dict[str, int]
    seconds: np.ndarray | float = 0.0


@dataclasses.dataclass(frozen=True)
class Combined:
    """A weighted sum of rewards, called on lists: `combined(completions, answers, problems, lengths, spent) -> Scores`.

    `lengths` (tokens of each completion) is needed by length rewards only, `problems` by those that read them.
    None for a completion abstains: its component is NaN and the others are added up without it, to 0 where all abstain. The
    first reward, whose component is the evaluated score, has 0 there.
    `on_error`: "raise" stops with a RewardError; "zero" scores the completion 0 and counts it in `failures`.
    Time-outs and crashes that a verifier handles itself (`boxed`, `code`, `reasoning_gym`) are scored 0 and counted; `swe_rl`
    scores them -1.
    `deadline`: seconds that one reward may take for a whole batch. A timed reward scores missing rows as 0 and counts
    them (`NAME/late`); any other ends in a RewardError. A batch that comes in parts has one deadline: `spent f64[K]` are the
    `seconds` that its earlier parts took, and of what is left a timed reward takes this `share`, see `part`.
    """

    rewards: tuple[Reward, ...]
    on_error: str = "raise"
    deadline: float | None = None
    share: float = 1.0

    @property
    def parts(self) -> tuple["Combined", ...]:
        """The sums of the tasks: this one."""
        return (self,)

    def part(self, share: float) -> "Combined":
        """For a part of a batch, this share of what is left of it: slow completions do not take the time of later parts."""
        return dataclasses.replace(self, share=share)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components of the `Scores`; the first is the score that is evaluated."""
        return tuple(reward.name for reward in self.rewards)

    @property
    def by_row(self) -> bool:
        """Whether the score of a completion does not depend on the others of its batch."""
        return all(reward.by_row for reward in self.rewards)

    @property
    def timed(self) -> bool:
        """Whether a reward runs programs of its own, which can take long."""
        return any(reward.timed for reward in self.rewards)

    @property
    def extracts(self) -> bool:
        """Whether the first reward extracts the answer's text."""
        return self.rewards[0].extract is not None

    @property
    def solved_above(self) -> tuple[float, ...]:
        """The threshold above which a score means a solved problem, for each task."""
        return (self.rewards[0].solved_above,)

    def extract(self, completion: str, problem) -> Hashable | None:
        """The answer that the first reward reads, or None."""
        return None if self.rewards[0].extract is None else self.rewards[0].extract(completion)

    def prepare(self) -> list[tuple[str, str]]:
        """`(name, how it runs here)` of the rewards that depend on the machine. Raises RewardError if one cannot run."""
        return [(reward.name, reward.prepare()) for reward in self.rewards if reward.prepare is not None]

    def check(self, problem: Any) -> None:
        """Raises ValueError for a problem that lacks what a reward reads; not where `on_error` scores its completions 0."""
        for reward in self.rewards if self.on_error == "raise" else ():
            if reward.check is not None:
                reward.check(problem)

    def __call__(self, completions: Sequence[str], answers: Sequence[str], problems: Sequence | None = None,
                 lengths: Sequence[int] | None = None, spent: np.ndarray | float = 0.0) -> Scores:
        problems = [None] * len(completions) if problems is None else problems
        batch = _Batch(completions, answers, problems, None if lengths is None else np.asarray(lengths))
        for name, values in batch._asdict().items():
            if values is not None and len(values) != len(completions):
                raise ValueError(f"{len(values)} {name} for {len(completions)} completions; give one for each")
        failures: Counter = Counter()
        columns, ends = [], [time.monotonic()]
        for reward, already in zip(self.rewards, np.broadcast_to(spent, len(self.rewards))):
            columns.append(_within(self.deadline, float(already), self.share, reward, batch, self.on_error, failures))
            ends.append(time.monotonic())
        components = np.stack(columns, axis=1).astype(np.float32)
        weights = np.array([reward.weight for reward in self.rewards], np.float32)
        counted = ~np.isnan(components)
        if len(components) and not counted.any():
            warnings.warn(f"all rewards ({', '.join(self.names)}) return None for all {len(components)} completions, "
                          "so nothing is scored; a function without a return statement returns None", stacklevel=2)
        components[:, 0] = np.where(counted[:, 0], components[:, 0], 0)
        return Scores(np.where(counted, components, 0) @ weights, components, self.names, dict(failures), np.diff(ends))


def _within(deadline: float | None, spent: float, share: float, reward: Reward, batch: _Batch, on_error: str,
            failures: Counter) -> np.ndarray:
    """Scores of one reward: a timed one keeps the deadline itself, any other runs in a thread that is abandoned then."""
    left = None if deadline is None else max(deadline - spent, 0.0)
    if reward.timed:
        until = None if left is None else time.monotonic() + left * share
        return _run_batch(reward, batch, on_error, failures, until)
    score = functools.partial(_run_each if reward.per == "completion" else _run_batch, reward, batch, on_error, failures)
    if left is None:
        return score()
    outcome: queue.SimpleQueue = queue.SimpleQueue()

    def work():
        try:
            outcome.put((score(), None))
        except BaseException as error:  # handed to the caller, whatever it is
            outcome.put((None, error))

    # Python cannot end a thread. A daemon one does not keep the interpreter from exiting.
    threading.Thread(target=work, name=f"reward {reward.name}", daemon=True).start()
    try:
        scores, error = outcome.get(timeout=left)
    except queue.Empty:
        raise RewardError(f"reward {reward.name!r} did not score {len(batch.completions)} completions within {left:g} s; "
                          "run it as the reward 'isolated', which kills what hangs, or raise the deadline") from None
    if error is not None:
        raise error
    return scores


def _run_each(reward: Reward, batch: _Batch, on_error: str, failures: Counter) -> np.ndarray:
    scores = np.zeros(len(batch.completions))
    for row, arguments in enumerate(zip(batch.completions, batch.answers, batch.problems)):
        try:
            value = reward.fn(*arguments)
            scores[row] = np.nan if value is None else number(value)
        except RewardError:
            raise
        except Exception as error:
            _fail(reward, error, batch, [row], on_error, failures)
    return scores


def _run_batch(reward: Reward, batch: _Batch, on_error: str, failures: Counter, until: float | None = None) -> np.ndarray:
    count = len(batch.completions)
    if reward.per == "lengths" and batch.lengths is None:
        raise ValueError(f"reward {reward.name!r} needs the number of tokens of each completion: pass lengths=")
    arguments = (batch.lengths,) if reward.per == "lengths" else batch[:3]
    keywords = {"until": until} if reward.timed else {}
    if reward.fail_fast:
        keywords["fail_fast"] = on_error == "raise"
    try:
        output = reward.fn(*arguments, **keywords)
        output = output if isinstance(output, BatchOutput) else BatchOutput(output)
        scores, abstained = _column(output.scores, count)
    except RewardError:
        raise
    except Exception as error:
        _fail(reward, error, batch, list(range(count)), on_error, failures)
        return np.zeros(count)
    failures.update({f"{reward.name}/{kind}": number for kind, number in output.counts.items() if number})
    for row in np.flatnonzero(~_finite(scores) & ~abstained):
        why = output.errors.get(int(row)) or ValueError(f"returned {scores[row]}, not a finite number")
        _fail(reward, why, batch, [int(row)], on_error, failures)
    return np.where(_finite(scores), scores, np.where(abstained, np.nan, 0.0))


def number(value: Any) -> float:
    """One finite real number as a float: bool, int, float, Fraction, a NumPy, JAX or torch scalar; else a ValueError."""
    try:
        if value is None or isinstance(value, (str, bytes)):
            raise TypeError
        if hasattr(value, "dtype"):
            array = np.asarray(value)
            if array.shape != ():
                raise ValueError(f"returned shape {array.shape}, expected ()")
            if array.dtype.kind in "cmMOSU":
                raise TypeError
            converted = float(array.astype(np.float64))
        else:
            converted = float(value)
    except OverflowError:
        converted = np.inf
    except TypeError:
        raise ValueError(f"returned {_shorten(value)}, which is not a number") from None
    if not _finite(converted):
        raise ValueError(f"returned {_shorten(value)}, not a finite number")
    return converted


def _column(value: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`float64[count]`, NaN or infinite where `value` is, or has an integer that no float holds; where it is None."""
    try:
        array = np.asarray(value)
        abstained = np.equal(array, None)
        if array.dtype == object:
            huge = [isinstance(x, int) and abs(x) > sys.float_info.max for x in array.ravel()]
            array = np.where(np.reshape(huge, array.shape), np.inf, array)
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"returned {_shorten(value)}, which is not numbers") from error
    if array.shape != (count,):
        raise ValueError(f"returned shape {array.shape}, expected {(count,)}")
    return array, abstained


def _finite(array):
    return np.abs(array) <= np.finfo(np.float32).max  # False for NaN, and for what would overflow as f32


def _fail(reward, error, batch, rows, on_error, failures) -> None:
    if on_error == "zero":
        failures[f"{reward.name}/{_kind(error)}"] += len(rows)
        return
    where = f"a batch of {len(rows)} completions" if len(rows) != 1 else (
        f"completion {rows[0]} {_shorten(batch.completions[rows[0]])} (answer {_shorten(batch.answers[rows[0]])})")
    what = str(error) if isinstance(error, ReportedError) else f"{type(error).__name__}: {error}"
    raise RewardError(f"reward {reward.name!r} failed on {where}: {what}. Correct the reward "
                      "or the data, or pass on_error='zero' to score such completions 0 and count them.") from error


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    return "crash" if isinstance(error, ChildProcessError) else "error"


def _shorten(value: Any, limit: int = 200) -> str:
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4,300 digits
        return f"{type(value).__name__} that has no text"
    return text if len(text) <= limit else text[:limit] + "..."


def _nothing(needed: bool, reward: Any) -> str:
    """Why every total would be 0; "": a reward of each task has a weight."""
    for one in reward.parts:
        if not any(part.weight for part in one.rewards):
            return (f"the method learns from rewards, and the weight of {', '.join(one.names)} is 0: every reward would be 0")
    return ""


CONFLICTS = (
    Conflict(("needs.rewards", "reward"), _nothing, "give one of them another weight in config.rewards or the task's reward"),
    Conflict(("needs.answers", "reward"), "method {method!r} compares the answers of the rollouts, and the reward "
             "{1.names[0]!r} does not extract an answer",
             "set config.score to one that does: exact, last_number, numeric, boxed or reasoning_gym",
             lambda needed, reward: not reward.extracts))
