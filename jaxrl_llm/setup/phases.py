"""Phases of a run: stretches of its steps with keys of their own, each beginning with the weights of the one before.

`config.phases="warm(steps=50), long(task='arithmetic(level=sub2)', sampling.max_tokens=64)"`: a phase has a name, keys of the
configuration that differ from those of the whole run, and the words of `Phase`.
"""
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.setup import keys, phase_words
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.resolve import as_in_paper, resolve
from jaxrl_llm.store.begun import Begun
from jaxrl_llm.tools import registry, written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps with keys of its own.

    A text may also name a key of the configuration, `where=texts.path`: the run has the phase only if that key has a value.

    Attributes:
      name: empty for a run without phases.
      number: from 1.
      config: the configuration of its steps, of which `steps` are those of this phase alone.
      changes: the values that its text sets, by key and word.
      weights: "last", those after the phase before, or "first", those before the first step of the run: then everything that
        was learned begins anew, and only what controllers know of the problems stays.
      fresh: what begins anew beside them: the state of the "optimizer", and the weights of the "reference".
      patience: evaluations without a new best value of `metric` after which the phase ends; 0: it has all its steps.
    """

    name: str
    number: int
    config: ConfigDict
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "last"
    fresh: frozenset[str] = frozenset()
    patience: int = 0
    metric: str = "eval/score"

    @property
    def described(self) -> str:
        """What it changes, in one line."""
        changes = [f"{key}={value}" for key, value in self.changes.items() if key != "steps"]
        return ", ".join(changes) or "as the whole run"

    def stalled(self, scores: Sequence[float]) -> bool:
        """Whether the best of the scores of its evaluations, of equal ones the first, is `patience` evaluations old."""
        best, place = -math.inf, 0
        for number, score in enumerate(scores):
            if score > best:
                best, place = score, number
        return 0 < self.patience <= len(scores) - 1 - place


def text_of(config: ConfigDict) -> str:
    """The phases of a configuration as text: its own, or those of its method; empty for a run without phases.

    Phases whose key `where` is empty are left out. An unknown method has none: `setup.build` reports it with all other faults.
    """
    try:
        text = config.phases or methods.get(config.method).phases
    except ValueError:
        return ""
    return phase_words.there(text, keys.flat(config)) if text else ""


def follows_steps(text: str) -> bool:
    """Whether the phases share out `config.steps`: all but the last have no number of steps, or the last one has one."""
    *counts, last = [phase_words.read(part, [])[1].get("steps", "") for part in written.parts(text)] or [""]
    return last != "" or not all(count.isdecimal() for count in counts)


def parts_of(config: ConfigDict) -> dict[str, str]:
    """The texts of the method's parts, by key; those of a phase behind its name, `warm.objective`."""
    rows = {phase.name: method_of(phase.config) for phase in phases_of(config)}
    return {f"{name}.{key}" if name else key: getattr(row, key) for name, row in rows.items() for key in SLOTS}


def recorded(config: ConfigDict) -> ConfigDict:
    """What a run folder records of a configuration: its resolved form; with phases, which are resolved each, itself."""
    text = text_of(config)
    if not text:
        return resolve(config, methods.get(config.method).defaults)
    config = config.copy_and_resolve_references()
    config.phases = text
    return config


def phases_of(config: ConfigDict) -> tuple[Phase, ...]:
    """The phases of a run; a run without any is one phase without a name.

    Raises ValueError with all faults of all phases: texts that cannot be read, keys that the configuration lacks or that are of
    the whole run, values of another type, numbers of steps that do not add up to `config.steps`.
    """
    keys.check_values(config)
    text = text_of(config)
    if not text:
        return (Phase(name="", number=1, config=config),)
    faults: list[str] = []
    read = [phase_words.read(part, faults) for part in written.parts(text)]
    names = [name for name, _ in read]
    faults += [f"two phases are named {name!r}; give each a name of its own" for name in dict.fromkeys(names)
               if name and names.count(name) > 1]
    made = [_phase(name, number, values, config, faults) for number, (name, values) in enumerate(read, start=1)]
    given = [one.changes.get("steps") for one in made]
    steps = phase_words.steps(config.steps, names, [one if isinstance(one, int) else None for one in given], faults)
    if faults:
        raise ValueError("\n  ".join([f"config.phases={text!r}:", *faults]))
    for one, count in zip(made, steps, strict=True):
        one.config.steps = count
    return tuple(made)


def at(config: ConfigDict, begun: Sequence[Begun]) -> ConfigDict:
    """The configuration of the last of the phases that have `begun`; of a run without phases, its own."""
    if not config.phases or not begun:
        return config
    found = {one.name: one for one in phases_of(config)}
    return found[registry.one_of("phase of config.phases", begun[-1].name, found)].config


def rows(phases: Sequence[Phase], begun: Sequence[Begun] = ()) -> list[tuple[str, str]]:
    """Rows for the terminal: each phase with its steps, those that have `begun` by their own starts, and what it changes."""
    made, start = [], 0
    for one in phases if phases[0].name else ():
        start = begun[one.number - 1].start if one.number <= len(begun) else start
        ends = f" at the latest, {one.patience} evaluations after its best" * bool(one.patience)
        made.append((f"phase {one.number} of {len(phases)}: {one.name}",
                     f"steps {start + 1} to {start + one.config.steps}{ends}: {one.described}"))
        start += one.config.steps
    return made


def _phase(name: str, number: int, texts: Mapping[str, str], base: ConfigDict, faults: list[str]) -> Phase:
    """The phase with these texts of values by key; what is wrong with it joins the faults, each with its name."""
    config, changes = base.copy_and_resolve_references(), dict[str, Any]()
    config.phases = ""

    def change(key: str) -> None:
        try:
            changes[key] = phase_words.value(key, texts[key], keys.flat(base))
            if key not in phase_words.WORDS:
                keys.set_key(config, key, changes[key])
        except ValueError as error:
            faults.append(f"phase {name!r}: {re.sub('; --help lists all$', '', str(error))}")

    for key in ("method", "setting"):
        if key in texts:
            change(key)
    row = _row(config.method)
    if config.method != base.method:  # texts of parts change the row of the whole run
        config.update({key: "" for key in SLOTS if key not in texts})
    if config.setting == "paper" and row is not None:  # the phase's own keys stand above the paper's
        config = as_in_paper(config, row.defaults)
        config.setting = ""
    for key in texts:
        if key not in ("method", "setting"):
            change(key)
    if "method" in changes and row is not None and row.phases:
        faults.append(f"phase {name!r}: method {config.method!r} has phases of its own, {row.phases!r}; write these here")
    words = phase_words.checked(name, number, changes, config.eval.every, faults)
    return Phase(name=name, number=number, config=config, changes=changes, **words)


def _row(method: str) -> methods.Method | None:
    """The row of a method; None for an unknown one, which is reported where the phase is built."""
    try:
        return methods.get(method)
    except ValueError:
        return None
