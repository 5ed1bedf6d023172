"""The source of a run that learns from given texts, and its configuration as its batches are."""
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.data import reading
from jaxrl_llm.data import shapes as shapes_lib
from jaxrl_llm.data.text_forest import TEXTS, turns_of
from jaxrl_llm.data.texts import Text, fitting
from jaxrl_llm.engines.prompts import encode_problem, solution_ids
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.beside import Beside
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.given import TextSource, options_of, row_of, shares
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.setup.judge import Judge
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.sources import make_plain_source, sizes_of
from jaxrl_llm.setup.values import Around
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.loader import batches

Group = tuple[Text, ...]


def make_given(config: ConfigDict, made: Parts, policy: Policy, mesh: Mesh, tokenizer, judge: Judge,
               sets: tuple[EvalSpec, ...] = (), around: Around = Around()) -> TextSource:
    """The source of the texts of `config.texts`; evaluations sample the task, whose stream makes no engine before the first.

    Methods that read `chosen` learn from pairs. Raises ValueError if no text fits, for pairs in the place of texts or the other
    way round, and for a pair of equal texts.
    """
    pairs, P = "chosen" in made.needs, config.prompts.per_step
    train, heldout, left_out = groups_of(config, tokenizer, judge, pairs)
    plain = make_plain_source(config, policy, mesh, tokenizer, judge, sets)
    which, count = shares(P)
    texts = [text for group in (*train, *heldout) for text in group]
    source = TextSource(
        **{name: getattr(plain, name) for name in ("task", "stream", "topology", "prompts", "max_tokens", "overlong", "sets",
                                                   "model")},
        data=batches(_problems(train), P, config.seed, which, count), readers=count, stages=(),
        heldout=_problems(heldout, len(train)), group=1 + pairs,
        longest=_longest([*train, *heldout]), left_out=left_out,
        row=row_of(max(len(text.ids) for text in texts), P * (1 + pairs), mesh.shape["seq"]) if config.texts.pack else 0)
    source.sizes = sizes_of(as_batches(config, source), policy.model.config)
    return source


def with_texts(config: ConfigDict, source: Source, tokenizer, judge: Judge) -> Source:
    """The source with the texts of `config.texts` beside the prompts of each batch, a `texts.share` of its rollouts and texts.

    Their number is the nearest one above 0 that minibatches, micro-batches and devices share out. Raises ValueError if no text
    fits, and for pairs of texts.
    """
    t, learner, facts = config.texts, config.learner, dict.fromkeys(source.task.facts, 0.0)
    train, heldout, left_out = groups_of(config, tokenizer, judge, False)
    most = max(turns_of(group[0]) for group in (*train, *heldout))
    if source.stream.partner.goes_on and most > source.stream.turns:
        raise ValueError(f"a text of config.texts has {most} turns, and trajectories of the environment at most "
                         f"{source.stream.turns}; give shorter texts, or raise sampling.max_turns")
    parts = learner.minibatches * learner.micro_batches * parallel.shards_of(source.stream.mesh.shape)
    wanted = config.prompts.per_step * config.sampling.group * t.share / (1 - t.share)
    count = parts * max(round(wanted / parts), 1)
    held = _problems(heldout, len(train), made=True, facts=facts)
    texts = Beside(batches(_problems(train, made=True, facts=facts), count, config.seed), count, _longest([*train, *heldout]),
                   [held[first:first + count] for first in range(0, len(held), count)], left_out)
    return dataclasses.replace(source, beside=texts, stages=(*source.stages[:-1], stages.beside(), source.stages[-1]),
                               sizes=shapes_lib.limits if t.pack else source.sizes)


def as_batches(config: ConfigDict, source: Source) -> ConfigDict:
    """The configuration with the sizes of the batches that a run learns from: those of texts, if it learns from given ones."""
    if not source.of_texts:
        return config
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(source.of_texts)
    if config.texts.pack and not config.learner.packed_rows:
        config.learner.packed_rows, config.learner.micro_batches = parallel.shards_of(source.stream.mesh.shape), 1
    return config


def groups_of(config: ConfigDict, tokenizer, judge: Judge, pairs: bool) -> tuple[list[Group], list[Group], Counter]:
    """`(train, held out, left out)`: groups of one text, or of the chosen and the rejected one of a pair, that fit."""
    t = config.texts
    read_out: Counter = Counter()
    if t.path:
        read, read_out = _read(config, tokenizer, pairs)
        rows = [*dict.fromkeys(group[0].place for group in read)]  # turns of one row are held out together
        out = {rows[i] for i in np.linspace(0, len(rows), min(t.heldout, len(rows) // 2), endpoint=False, dtype=int)}
        train, heldout = ([group for group in read if (group[0].place in out) == held] for held in (False, True))
    else:
        task = judge.task
        some = [task.heldout[i] for i in range(min(t.heldout, len(task.heldout)))]
        train, heldout = (solved(side, tokenizer, pairs) for side in (task.train, some))
    for group in (*train, *heldout):
        check_pair(group)
    kept, out_of_train = fits(train, t.max_tokens)
    held, out_of_held = fits(heldout, t.max_tokens)
    if not kept:
        given = f"texts of config.texts.path={t.path!r}" if t.path else "solutions of the problems of config.task"
        raise ValueError(f"none of the {len(train)} {given} can be learned from: "
                         f"{', '.join(f'{count} {reason}' for reason, count in out_of_train.items()) or 'it has none'}; raise "
                         "texts.max_tokens, or give other texts")
    return kept, held, out_of_train + out_of_held + read_out


def fits(groups: Sequence[Group], longest: int) -> tuple[list[Group], Counter]:
    """The groups whose texts all have at most `longest` tokens (0: any number) and a trained one, and why others are left out.
    """
    kept, out = [], Counter()
    for group in groups:
        fit, reasons = fitting(group, longest or max(len(text.ids) for text in group))
        if len(fit) == len(group):
            kept.append(group)
        else:
            out[min(reasons)] += 1
    return kept, out


def solved(problems: Sequence[Problem], tokenizer, pairs: bool) -> list[Group]:
    """The solution of each problem behind its prompt; in a pair the rejected text is the solution of another problem.

    A problem whose next eight have the same solution makes no pair.
    """
    prompts = [encode_problem(problems[i], tokenizer) for i in range(len(problems))]
    said = [solution_ids(problems[i], tokenizer) for i in range(len(problems))]
    if not pairs:
        return [(behind(prompt, own),) for prompt, own in zip(prompts, said)]
    found: list[Group] = []
    for place, (prompt, own) in enumerate(zip(prompts, said)):
        following = [*said[place + 1:place + 9], *said[:max(place + 9 - len(said), 0)]]
        if other := next((one for one in following if one != own), None):
            found.append((behind(prompt, own), behind(prompt, other)))
    return found


def behind(prompt: Sequence[int], said: Sequence[int], weight: float = 1.0) -> Text:
    """The text of a prompt and of what is said behind it, all of which is trained."""
    return Text(np.array([*prompt, *said], np.int32), np.arange(len(prompt) + len(said)) >= len(prompt), len(prompt), weight)


def check_pair(group: Group) -> None:
    """Raises ValueError for a pair of equal texts, which no likelihood tells apart, and for one of two prompts."""
    if len(group) < 2:
        return
    chosen, rejected = group
    where = f"{chosen.place}: " if chosen.place else ""
    if np.array_equal(chosen.ids, rejected.ids):
        raise ValueError(f"{where}the chosen and the rejected text of a pair are equal; leave the pair out")
    if not np.array_equal(chosen.ids[:chosen.prompt], rejected.ids[:rejected.prompt]):
        raise ValueError(f"{where}the chosen and the rejected text of a pair have different prompts; give both the same")


def _longest(groups: Sequence[Group]) -> tuple[int, int]:
    """The most tokens of a prompt and behind it, multiples of 8."""
    texts = [text for group in groups for text in group]
    sizes = max(text.prompt for text in texts), max(len(text.ids) - text.prompt for text in texts)
    return -(-sizes[0] // 8) * 8, -(-sizes[1] // 8) * 8


def _problems(groups: Sequence[Group], first: int = 0, made: bool = False, facts: Mapping[str, float] = {}) -> list[Problem]:
    """A problem for each group, whose prompt is a digest of all that is learned: positions belong to these texts alone.

    `made`: their ids are below 0, as they are no problems of the task.  `facts`: further entries of their extras.
    """
    def digest(group: Group) -> str:
        found = hashlib.blake2b(digest_size=16)
        for text in group:
            found.update(np.asarray(text.ids, np.int32).tobytes() + np.asarray(text.trained, bool).tobytes())
            found.update(repr((text.prompt, float(text.weight))).encode())
        return found.hexdigest()

    return [Problem(digest(group), "", -1 - number if made else number, extra={TEXTS: tuple(group), **facts},
                    place=group[0].place) for number, group in enumerate(groups, first)]


def _read(config: ConfigDict, tokenizer, pairs: bool) -> tuple[list[Group], Counter]:
    """The groups of a data set, and how many of its rows are left out, by reason."""
    path, options = config.texts.path, options_of(config)
    read = reading.read(path, tokenizer, longest=config.texts.max_tokens, **options)
    if bool(read.pairs) != pairs:
        found, wanted = ("texts", "pairs of them") if pairs else ("pairs", "texts")
        raise ValueError(f"config.texts.path={path!r} has {found}, and method {config.method!r} learns from {wanted}: "
                         "method=sft from texts, method=dpo from pairs, with the columns 'chosen' and 'rejected'")
    names = ("too_long", "invalid", *(("no_answer", "contradicts") if options.get("wrong") == "drop" else ()))
    out = Counter({name.replace("_", " "): read.counts[name] for name in names})
    groups: list[Group] = [(pair.chosen, pair.rejected) for pair in read.pairs] or [(text,) for text in read.texts]
    return groups, out
