"""What the head of a run says of its configuration."""
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.setup.resolve import PAPER, in_paper, resolve
from jaxrl_llm.tools.key_values import value_of


def arithmetic_table(config: ConfigDict, prompt_tokens: int, rollouts: int = 0) -> list[tuple[str, str]]:
    """Rows for the terminal: the samples of one step, up to `rollouts` of a prompt, and their split into batches."""
    P, G, T = config.prompts.per_step, config.sampling.group, config.sampling.max_tokens
    learner, updates = config.learner, config.learner.epochs * config.learner.minibatches
    budget, most = config.budget, rollouts or G
    whole = f"{P} x {G} to {most} = {P * G} to {P * most}" if most > G else f"{P} x {G} = {P * G}"
    sizes = f"{budget.prompts} x up to {most}, together {P * G}" if budget.utility else whole
    pieces = f"{learner.packed_rows} packed rows at a time" if learner.packed_rows else f"{learner.micro_batches} micro-batches"
    return [("prompts x completions per step", sizes), ("tokens per sequence", f"prompt <= {prompt_tokens}, completion <= {T}"),
            ("epochs x minibatches per step", f"{learner.epochs} x {learner.minibatches} = {updates}"),
            ("prompts per update", f"{P // learner.minibatches} in {pieces}")]


def paper_table(config: ConfigDict, defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for the terminal: the paper's settings that differ from a resolved configuration, or that no key sets."""
    rows = []
    for name, value in defaults.items():
        key = PAPER.get(name)
        yours = None if key is None else value_of(config, key)
        if yours != in_paper(config, name, value):
            other = "which no key sets" if key is None else f"yours: {yours} ({key})"
            rows.append((f"{name} of the paper", f"{value}, {other}"))
    return rows


def replaced_table(config: ConfigDict, defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for the terminal: values of a configuration, as it was given, that the paper's settings replace."""
    if not config.setting:
        return []
    plain = config.copy_and_resolve_references()
    plain.setting = ""
    yours, theirs = resolve(plain, defaults), resolve(config, defaults)
    keys = {name: PAPER[name] for name in defaults if name in PAPER}
    return [(f"{name} of the paper", f"{value_of(theirs, key)} ({key} was {value_of(yours, key)})")
            for name, key in keys.items() if value_of(theirs, key) != value_of(yours, key)]
