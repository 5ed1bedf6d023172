"""The policy's completions at a step: a page for people and JSON lines for tools."""
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.tools.visible import visible

TOKENS_PER_PAGE = 20_000  # later completions have a text but no numbers per token, which would make pages huge


def write_samples(workdir: str | Path, step: int, prompts: Sequence[str], answers: Sequence[str],
                  completions: Sequence[Sequence[str]], rewards: Sequence[Sequence[float]],
                  components: Sequence[Sequence[dict[str, float]]], lengths: Sequence[Sequence[int]],
                  stop_reasons: Sequence[Sequence[str]], tokens: Sequence[Sequence[dict[str, list]]] | None = None) -> Path:
    """Writes samples/step_000010.txt and its .jsonl twin (one line per completion); returns the path of the page.

    prompts, answers: [P] texts. completions, rewards, components (name -> value), lengths (tokens, stop token
    included) and stop_reasons ("stop", "length", ...): [P][G]; groups may differ in size. tokens: [P][G] entries for
    the JSON lines, see `per_token`. Raises ValueError if sizes disagree.
    """
    columns = {"completions": completions, "rewards": rewards, "components": components, "lengths": lengths,
               "stop_reasons": stop_reasons}
    extra = {} if tokens is None else {"tokens": tokens}
    _check_sizes(prompts, {"answers": answers, **columns, **extra}, {**columns, **extra})
    page, lines = [f"step {step}: {len(prompts)} prompts, {sum(map(len, completions))} completions"], []
    for p, (prompt, answer) in enumerate(zip(prompts, answers)):
        group = list(zip(*(column[p] for column in columns.values())))
        mean = sum(rewards[p]) / max(len(group), 1)
        page += ["", "=" * 100, f"prompt {p + 1} of {len(prompts)}   answer: {visible(answer)}   mean reward: {mean:.3f}",
                 "=" * 100, visible(prompt)]
        for g, completion in enumerate(group):
            page += ["", _headline(g, len(group), *completion[1:]), visible(completion[0])]
            head = {"step": step, "prompt_index": p, "completion_index": g, "prompt": prompt, "answer": answer}
            lines.append(json.dumps(head | _fields(*completion) | ({} if tokens is None else tokens[p][g])))
    folder = Path(workdir) / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.txt"
    path.write_text("\n".join(page) + "\n", encoding="utf-8")
    path.with_suffix(".jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def _headline(g: int, count: int, reward: float, parts: dict[str, float], length: int, reason: str) -> str:
    """The page's headline of completion `g` of its group."""
    detail = "".join(f"   {visible(name)}: {value:.3f}" for name, value in parts.items())
    return f"--- completion {g + 1} of {count}   reward: {reward:.3f}{detail}   {length} tokens, {reason} ---"


def _fields(text: str, reward: float, parts: dict[str, float], length: int, reason: str) -> dict[str, object]:
    """The fields of a completion in the JSON lines."""
    return {"completion": text, "reward": float(reward), "components": {name: float(value) for name, value in parts.items()},
            "length": int(length), "stop_reason": reason}


def per_token(tokens: np.ndarray, mask: np.ndarray, ends: Sequence[int], spell: Callable[[Sequence[Sequence[int]]], list[str]],
              numbers: Mapping[str, np.ndarray]) -> list[dict[str, list]]:
    """For each completion {"tokens": its spellings, name: its numbers, ...}, up to `TOKENS_PER_PAGE` tokens.

    tokens: i32[N, T], with the first `ends` [N] real; spell: texts of rows of ids; numbers: name -> f32[N, T], used for the
    policy's tokens, `mask` bool[N, T]; others and NaN have None: nothing was measured; "trained" marks the policy's tokens
    if there are both. The viewer knows "logprobs" (of the sampler), "entropies", "advantages" and "ratios" (probability
    after / before the update).
    """
    distinct = np.unique(tokens).tolist()
    spelled = dict(zip(distinct, spell([[i] for i in distinct])))
    entries, left = [], TOKENS_PER_PAGE
    for row, end in enumerate(ends):
        left -= end
        if left < 0:
            entries.append({})
            continue
        values: dict[str, list] = {
            name: [float(f"{x:.4g}") if own and x == x else None for x, own in zip(rows[row, :end], mask[row])]
            for name, rows in numbers.items()}
        if not mask[row, :end].all():
            values["trained"] = mask[row, :end].tolist()
        entries.append({"tokens": [spelled[i] for i in tokens[row, :end].tolist()], **values})
    return entries


def _check_sizes(prompts: Sequence, per_prompt: dict[str, Sequence], per_completion: dict[str, Sequence]) -> None:
    for name, column in per_prompt.items():
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} entries for {len(prompts)} prompts")
    for name, column in per_completion.items():
        for p, (group, texts) in enumerate(zip(column, per_completion["completions"])):
            if len(group) != len(texts):
                raise ValueError(f"{name}[{p}] has {len(group)} entries for {len(texts)} completions")
