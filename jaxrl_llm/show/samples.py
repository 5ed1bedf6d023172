"""Sampled completions of a run for the page: whole groups, spread over the run, up to a limit."""
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.tools import files

# Per-token values that a sample page may have, see runs/samples.py. A ratio is probability after over before the update.
PER_TOKEN = ("advantages", "entropies", "logprobs", "ratios")


def read_groups(folder: Path, limit: int) -> tuple[list[dict[str, Any]], int]:
    """`(groups, completions in the folder)`: about `limit` completions, equally many of each step, first prompts first.

    A group is {"step", "prompt", "answer", "rows"}; a row {"text", "reward", "parts", "length", "stop"} and, where the run
    recorded them, "tokens", the lists of `PER_TOKEN` and, if not only the policy wrote, "trained" and "messages",
    each {"role", "content"} and the "reward" of a turn of the policy. A line that was truncated by a kill is skipped.
    """
    pages = sorted((folder / "samples").glob("step_*.jsonl"))
    chosen, total = [], 0
    for number, page in enumerate(pages):
        share = limit // len(pages) + (number < limit % len(pages))
        for group in _groups(page):
            total += len(group["rows"])
            if share > 0:
                chosen.append(group)
            share -= len(group["rows"])
    return chosen, total


def _groups(page: Path) -> Iterator[dict[str, Any]]:
    """The groups of one page, in order. Raises ValueError with the line that is no sample."""
    last, group = None, None
    for number, line in enumerate(files.lines(page.parent, page.name), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            made, of = _row(row), {name: row[name] for name in ("prompt_index", "step", "prompt", "answer")}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{page}, line {number} is no sample of a run ({type(error).__name__}: {error}); remove "
                             "it") from error
        if of["prompt_index"] != last:
            if group:
                yield group
            last = of.pop("prompt_index")
            group = {**of, "rows": []}
        group["rows"].append(made)
    if group:
        yield group


def _row(row: dict[str, Any]) -> dict[str, Any]:
    shown = {"text": row["completion"], "reward": _finite(row["reward"]), "length": row["length"], "stop": row["stop_reason"],
             "parts": {name: _finite(value) for name, value in row["components"].items()}}
    if "messages" in row:
        shown["messages"] = [_message(one) for one in row["messages"]]
    if "tokens" in row:
        shown["tokens"] = row["tokens"]
        shown |= {"trained": row["trained"]} if "trained" in row else {}
        shown |= {name: [_finite(value) for value in row[name]] for name in PER_TOKEN if name in row}
    return shown


def _message(one: dict[str, Any]) -> dict[str, Any]:
    earned = {"reward": _finite(one["reward"])} if "reward" in one else {}
    return {"role": str(one["role"]), "content": str(one["content"])} | earned


def _finite(value: float | None) -> float | None:
    """The page's JSON has no NaN; None means not measured."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
