"""Whether a teacher pulls a student towards success, at places of the student's own completions, by targeted rollouts."""
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic
from jaxrl_llm.diagnostics.rows import distributions, plain, sampled
from jaxrl_llm.engines.prompts import pad
from jaxrl_llm.engines.sampler import generate, row_keys
from jaxrl_llm.evaluation import opd_alignment as opd
from jaxrl_llm.runs.trained import Trained, trained
from jaxrl_llm.sampling.scoring import cut_and_spelled, shared_scores
from jaxrl_llm.setup.streams import stop_ids
from jaxrl_llm.store.workdir import checkpoint_steps
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.figures import COLORS


class PrefixNode(NamedTuple):
    """A place in a completion: its `prefix` up to there, and whether the completion was `right`."""

    problem: Problem
    prompt: list[int]
    prefix: list[int]
    right: bool
    student: np.ndarray
    teacher: np.ndarray


@diagnostic
def opd_alignment(*, step: int | None = None, problems: int = 32, positions: int = 4, tokens: int = 4, samples: int = 8,
                  seed: int = 0) -> Diagnostic:
    """Cosine of the gradients of distillation and of success at places of the student's rollouts (arXiv 2605.10889).

    The first folder is the student, the last one the teacher; one folder is both, as an early checkpoint and the newest one.
    The most probable next tokens of both are forced, and the student continues from each. One right and one wrong completion of
    each problem are examined, if both exist.

    Args:
      step: the student's checkpoint; default: the newest, or of one folder the oldest.
      problems: held-out problems.
      positions: places in a completion, evenly spaced.
      tokens: most probable tokens of the student, and of the teacher, that are forced at a place.
      samples: completions after each forced token.
    """
    def measure(folders: Sequence[Path]) -> Result:
        steps = checkpoint_steps(folders[0] / "checkpoints")
        chosen = step if step is not None or len(folders) > 1 or not steps else steps[0]
        student, teacher = trained(folders[0], chosen), trained(folders[-1])
        if student.policy.model.config.vocab_size != teacher.policy.model.config.vocab_size:
            raise ValueError("student and teacher have vocabularies of different size; distillation by token needs one")
        nodes = nodes_of(student, teacher, problems, positions, seed)
        rows = [scored(node, *success(student, node, tokens, samples, seed + i)) for i, node in enumerate(nodes)]
        return {"student": f"{folders[0]} step {student.step}", "teacher": f"{folders[-1]} step {teacher.step}", "nodes": rows,
                "tables": {f"{len(rows)} places; cosines, 95% of their mean": summary(rows)}}

    return Diagnostic(measure, draw, panels=2, width=11)


def nodes_of(student: Trained, teacher: Trained, problems: int, positions: int, seed: int) -> list[PrefixNode]:
    """Places in one right and one wrong completion of each problem, with the distributions of both policies there."""
    forest, rollouts = sampled(student, problems, seed)
    rows = plain(rollouts)
    pi, pt = (np.asarray(distributions(run.policy, run.params, run.lora, rows), np.float64) for run in (student, teacher))
    solved = forest.solved[forest.ends].reshape(rollouts.valid.shape)
    lengths, group = np.asarray(rollouts.mask).sum(-1), rollouts.mask.shape[1]
    nodes = []
    for p, problem in enumerate(forest.problems):
        for g in sorted({int(np.argmax(solved[p] == kind)) for kind in (True, False) if (solved[p] == kind).any()}):
            line = p * group + g
            for t in np.unique(np.linspace(0, lengths[p, g] - 1, positions).astype(int)).tolist():
                nodes.append(PrefixNode(problem, forest.prompt_ids(p).tolist(), np.asarray(rollouts.tokens)[p, g, :t].tolist(),
                                        bool(solved[p, g]), pi[line, t], pt[line, t]))
    return nodes


def success(student: Trained, node: PrefixNode, tokens: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `i[J]` that were forced at a place, and which share of the student's `samples` completions after each is right.

    A token that ends the completion, or is its last one, needs none.
    """
    stream = student.source.stream
    stops = stop_ids(stream.tokenizer, stream.stop_strings)
    forced = np.unique([np.argsort(-p)[:tokens] for p in (node.student, node.teacher)])
    heads = {j: [*node.prefix, j] for j in forced.tolist()}
    left = student.config.sampling.max_tokens - len(node.prefix) - 1
    open_ended = [j for j in heads if left and j not in stops]
    made = dict(zip(open_ended, completed(student, node.prompt, [heads[j] for j in open_ended], stops, left, 2 * tokens,
                                          samples, seed)))
    ends = {j: made.get(j, [heads[j]]) for j in heads}
    rows = [row for rows in ends.values() for row in rows]
    _, _, texts = cut_and_spelled(rows, stream.tokenizer, stream.stop_strings)
    scores = shared_scores(stream.partner.reward, texts, [node.problem] * len(rows), np.array(list(map(len, rows))))
    right = scores.components[:, 0] > np.take(stream.partner.reward.solved_above, node.problem.task, mode="clip")
    owner = np.repeat(forced, [len(rows) for rows in ends.values()])
    return forced, np.array([right[owner == j].mean() for j in forced])


def completed(student: Trained, prompt: list[int], heads: Sequence[list[int]], stops: tuple[int, ...], left: int, size: int,
              samples: int, seed: int) -> list[list[list[int]]]:
    """`samples` completions, of at most `left` further tokens, of each of at most `size` beginnings `heads`, as token ids."""
    if not heads:
        return []
    stream, limit = student.source.stream, student.config.sampling.max_tokens
    rows = [prompt + head for head in heads]
    batch = pad(rows + [rows[0]] * (size - len(rows)), [0] * size, stream.prompt_tokens + limit)  # one shape for all places
    keys = row_keys(jax.random.key(seed), np.arange(size * samples).reshape(size, samples))
    made = jax.device_get(generate(student.policy.model, student.params, batch.tokens, batch.mask, keys,
                    dataclasses.replace(stream.sampling, max_tokens=np.int32(left)), max_tokens=limit, stop_ids=stops,
                    lora=student.lora))
    written = [ids[mask] for ids, mask in zip(made.tokens.reshape(-1, limit), np.asarray(made.mask).reshape(-1, limit))]
    kept, _, _ = cut_and_spelled(written, stream.tokenizer, stream.stop_strings)
    whole = [ids[:n].tolist() for ids, n in zip(written, kept)]
    return [[head + ids for ids in whole[n * samples:(n + 1) * samples]] for n, head in enumerate(heads)]


def scored(node: PrefixNode, forced: np.ndarray, rate: np.ndarray) -> Result:
    """Cosines of a place by loss, the teacher's advantage, and how much both agree on the next token."""
    visited = np.isin(np.arange(len(node.student)), forced)
    pi, pt = (opd.restrict(p, visited) for p in (node.student, node.teacher))
    success = np.zeros(len(pi))
    success[forced] = rate
    goal = opd.ideal(pi, success)
    return {"right": node.right, "position": len(node.prefix), "success": float(pi @ success),
            "teacher advantage": float(opd.teacher_advantage(pi, pt, success)),
            "overlap": float(np.minimum(node.student, node.teacher).sum()), "undecided": bool(np.abs(goal).max() > 1e-12),
            **{loss: float(opd.cosine(goal, opd.distillation(pi, pt, loss))) for loss in opd.LOSSES}}


def summary(rows: Sequence[Result]) -> list[dict[str, str | int | float]]:
    """Means over places where the next token matters, for right and for wrong completions."""
    table = []
    for name, kind in (("all", None), ("right", True), ("wrong", False)):
        mine = [row for row in rows if kind is None or row["right"] == kind]
        undecided = [row for row in mine if row["undecided"]]
        if undecided:
            def mean(key):
                values = np.array([row[key] for row in undecided], float)
                return f"{values.mean():.3f} +- {1.96 * values.std() / np.sqrt(len(values)):.3f}"
            table.append({"completions": name, "places": len(mine), "where it matters": len(undecided),
                          **{loss: mean(loss) for loss in opd.LOSSES}, "teacher advantage": mean("teacher advantage"),
                          "overlap": mean("overlap")})
    return table or [{"completions": "all", "places": len(rows), "where it matters": 0}]


def draw(results, axes) -> None:
    """Cosines by loss and kind of completion, and the teacher's advantage by position."""
    undecided = [row for row in results["nodes"] if row["undecided"]]
    random = np.random.default_rng(0)
    for color, kind, name in ((COLORS[0], True, "right"), (COLORS[1], False, "wrong")):
        mine = [row for row in undecided if row["right"] == kind]
        for place, loss in enumerate(opd.LOSSES):
            values = np.array([row[loss] for row in mine], float)
            x = place + (0.2 if kind else -0.2)
            axes[0].plot(x + random.uniform(-0.12, 0.12, len(values)), values, ".", color=color, alpha=0.4, markersize=4)
            if len(values):
                axes[0].plot([x - 0.15, x + 0.15], [values.mean()] * 2, color=color, linewidth=3,
                             label=f"{name} completions" if not place else None)
        places = sorted({row["position"] for row in mine})
        means = [np.mean([row["teacher advantage"] for row in mine if row["position"] == at]) for at in places]
        axes[1].plot(places, means, "o-", color=color, label=f"{name} completions")
    axes[0].set_xticks(range(len(opd.LOSSES)), [loss.replace("_", " ") for loss in opd.LOSSES])
    axes[0].set_ylabel("cosine with the gradient of success")
    axes[0].set_title("Alignment of each place")
    axes[1].axhline(0, color="0.5", linewidth=1)
    axes[1].set_xlabel("position of the token")
    axes[1].set_title("Success if the teacher chose it, gained")
    for panel in axes:
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
