"""Recommendations from a catalogue, best first: an answer that is a ranked list (Rank-GRPO, arXiv 2510.20150)."""
import functools
import math
import random
import re
from collections.abc import Mapping

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.tasks.base import Problem, Task, disjoint_task

CATALOGUE: Mapping[str, tuple[str, ...]] = {
    "space": ("orbit", "comet", "lander", "eclipse", "nova", "airlock", "zenith", "probe"),
    "crime": ("alibi", "heist", "motive", "ransom", "verdict", "decoy", "witness", "cipher"),
    "ghost": ("wraith", "seance", "crypt", "omen", "haunt", "shroud", "banshee", "relic"),
    "sport": ("overtime", "relay", "podium", "sprint", "umpire", "hurdle", "regatta", "rookie"),
}
FACTS = {"hits": "list", "ranks": "spans", "eos": "last"}
_LINE = re.compile(r"[^\n]+")
_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s*")


@environment
def ranked_list(*, ranks: int = 3, liked: int = 2, size: int = 180, heldout: int = 40, seed: int = 0, brief: bool = False
                ) -> Environment:
    """A user names films that they liked, all of one kind; the policy names `ranks` others, one per line, best first.

    Other films of the same kind are hits, once each. The return is the discounted gain `sum_k hit_k / log2(k + 1)` as a share
    of the maximum. The facts are those of `rank_grpo`: `hits` of the ranks, the rank of each token (`ranks`; surplus items have
    `ranks` and more, line breaks have -1, the end of the list belongs to the last item), and `eos`, the stop token. `brief`
    prompts, for small models, omit the catalogue. Raises ValueError for more films or problems than the catalogue allows.
    """
    most = min(map(len, CATALOGUE.values()))
    if not (1 <= ranks and 1 <= liked and ranks + liked <= most):
        raise ValueError(f"ranks={ranks}, liked={liked}; allowed are at least one of each, together {most} at most")
    shown = "\n".join(f"{kind}: {', '.join(films)}" for kind, films in CATALOGUE.items())
    rules = "" if brief else f"Films by kind:\n{shown}\n\nRecommend {ranks} films, one a line, best first. "

    def reset(problem: Problem, key: int) -> tuple[Problem, list[Message]]:
        return problem, [{"role": "user", "content": f"{rules}I liked {' and '.join(problem.extra['liked'])}."}]

    return Environment(
        name="ranked_list", task=_people(liked, size, heldout, seed), reset=reset,
        step=functools.partial(_step, ranks=ranks), facts=FACTS, oracle=lambda problem: "\n".join(_wanted(problem)[:ranks]),
        choices=lambda problem: ["\n".join(films[:ranks]) for films in CATALOGUE.values()])


def _people(liked: int, size: int, heldout: int, seed: int) -> Task:
    """Problems with a kind and `liked` films of it, in the order in which the user names them."""
    chance, drawn = random.Random(f"{seed} {liked}"), dict[tuple, None]()
    possible = sum(math.perm(len(films), liked) for films in CATALOGUE.values())
    if size + heldout > possible:
        raise ValueError(f"size={size} and heldout={heldout} are more than the {possible} problems that there are")
    while len(drawn) < size + heldout:
        kind = chance.choice(list(CATALOGUE))
        drawn[kind, *chance.sample(CATALOGUE[kind], liked)] = None

    def build(person: tuple, number: int) -> Problem:
        kind, *films = person
        words = f"I liked {' and '.join(films)}."
        return Problem(({"role": "user", "content": words},), kind, number, extra={"kind": kind, "liked": films})

    people = list(drawn)
    return disjoint_task("ranked_list", people[:size], people[size:], build, reward="environment")


def _wanted(problem: Problem) -> list[str]:
    return [film for film in CATALOGUE[problem.extra["kind"]] if film not in problem.extra["liked"]]


def _step(problem: Problem, message: Message, *, ranks: int) -> Turn:
    text, left, spans = message["content"], set(_wanted(problem)), []
    hits = [0.0] * ranks
    for line in _LINE.finditer(text):
        if not line[0].strip():
            continue
        rank, item = len(spans), _NUMBER.sub("", line[0]).strip().lower()
        if rank < ranks:
            hits[rank] = float(item in left)
        left.discard(item)
        spans.append([line.start(), line.end(), rank])
    if spans:
        spans[-1][1] = len(text) + 1  # the stop token
    gains = [1 / math.log2(k + 2) for k in range(ranks)]
    return Turn(reward=sum(hit * gain for hit, gain in zip(hits, gains)) / sum(gains), done=True,
                info={"hits": hits, "ranks": spans})
