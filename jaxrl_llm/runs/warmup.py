"""A short supervised warm-up on the task's own answers: it gives a policy from scratch a behaviour that RL can improve."""
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxrl_llm import advantages, objectives, parallel
from jaxrl_llm.data.forest import contexts, paths, select
from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.engines.prompts import encode_problem, fit, pad, solution_ids
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.state import create
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.store import preemption
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.tasks.base import Problem


def demonstrations(problems: list[Problem], tokenizer, prompt_tokens: int, max_tokens: int, overlong: str) -> Rollouts:
    """Solutions, each followed by the end token, as a batch of groups of one; fitting ones replace skipped ones.

    Raises ValueError for a solution that does not fit: cut short, it would be wrong to imitate.
    """
    fitted = [(p, fit(encode_problem(p, tokenizer), p, prompt_tokens, overlong, tokenizer)) for p in problems]
    fitted = [(p, ids) for p, ids in fitted if ids is not None]
    if not fitted:
        raise ValueError(f"no prompt of a warm-up batch fits in prompts.max_tokens={prompt_tokens}; raise it")
    problems, rows = zip(*(fitted * len(problems))[:len(problems)])
    prompts = pad(rows, [p.id for p in problems], prompt_tokens)
    solutions = [solution_ids(problem, tokenizer) for problem in problems]
    for problem, solution in zip(problems, solutions):
        if len(solution) > max_tokens:
            raise ValueError(f"the solution of problem {problem.id} has {len(solution)} tokens with the end token, the limit "
                             f"is sampling.max_tokens={max_tokens}: {tokenizer.decode(solution)[:120]!r}. Raise it, or set "
                             "warmup.steps=0")
    rows = pad(solutions, prompts.ids, max_tokens)
    return Rollouts(mask=rows.mask[:, None], valid=np.ones((len(problems), 1), bool), tokens=rows.tokens[:, None],
                    prompt_tokens=prompts.tokens, prompt_mask=prompts.mask)


RECENT = 10  # number of steps whose mean loss measures the imitation
EVERY = 200  # updates between saves, from which the next start of a run that was killed goes on


def imitate(policy: Policy, params, batches: Iterator[list[Problem]], tokenizer, *, prompt_tokens: int, max_tokens: int,
            overlong: str, **options) -> tuple[dict, list[float]]:
    """As `minimise`, on the answers of problems."""
    shown = (demonstrations(problems, tokenizer, prompt_tokens, max_tokens, overlong) for problems in batches)
    return minimise(policy, params, shown, **options)


def oracle_demonstrations(source: Source, problems: list[Problem], strays: float = 0.0) -> Rollouts:
    """A trajectory of an environment's oracle for each problem, its contexts as a group; fitting ones replace others.

    `strays`: share of turns that are random and not imitated, see `Dialogue.demonstrated`.

    Raises ValueError if the environment has no oracle, or no prompt fits.
    """
    stream = source.stream
    forest = stream.partner.demonstrated(problems, strays)
    forest = select(forest, forest.length[forest.role == Role.PROMPT] <= stream.prompt_tokens)
    if not forest.problems:
        raise ValueError(f"no prompt of a warm-up batch fits in prompts.max_tokens={stream.prompt_tokens}; raise it")
    sizes = source.ladders
    view = paths if stream.contexts == 1 else contexts
    shown = view(forest, stream.turns, group=stream.contexts, prompts=len(problems), version=0,
                 tokens=functools.partial(smallest, sizes.tokens),
                 prompt_tokens=functools.partial(smallest, sizes.prompt_tokens))
    return texts_of(shown)


def minimise(policy: Policy, params, batches: Iterator[Rollouts], *, steps: int, learning_rate: float, progress,
             loss: float = 0.0, micro_batches: int = 1, kept: Checkpoints | None = None,
             seek: Callable[[int], None] = lambda update: None) -> tuple[dict, list[float]]:
    """The updates of the method `sft`, by Adam, until the last `RECENT` steps' mean is at most `loss`, or for `steps`.

    All weights are trained. The rate rises for 20 updates and falls along a cosine. Seeds learn at different speeds: they are
    comparable at the same loss, not after the same number of steps. Returns `(params, losses per step in nats)`, of a
    continuation those since `RECENT` updates before it.

    kept: where its state is saved every `EVERY` updates, and found after a kill; `seek(n)` puts the batches behind n of them.
    """
    objective = objectives.make("sft")
    optimizer, _ = optimizers.make_optimizer(learning_rate, steps, name="adam", warmup_updates=min(20, steps - 1),
                                             schedule="cosine")
    update = make_update(policy, objective, optimizer, micro_batches=micro_batches)
    state = create(params, None, optimizer, advantages.make("reinforce"), objective, jax.random.key(0))
    state = parallel.put(state, parallel.tree_shardings(state, policy.mesh))
    first, losses = 0, list[float]()
    if kept is not None and kept.steps():
        found = kept.restore(state)
        first, state, losses = found.step, found.state, found.host["losses"]
        seek(first)
    for number in range(first, steps):
        if kept is not None and number > first and number % EVERY == 0:
            kept.save(number, state, {"losses": losses[-RECENT:]})
        batch = parallel.put(next(batches), parallel.batch_sharding(policy.mesh))
        state, metrics = update(state, batch, np.zeros(batch.mask.shape, np.float32))
        losses.append(float(metrics["loss"]))
        if number % 20 == 0:
            preemption.check()  # no signal may stop one of several processes alone
            progress.phase(f"supervised warm-up {number}/{steps}, loss {losses[-1]:.2f}", number, steps)
        if len(losses) >= RECENT and np.mean(losses[-RECENT:]) <= loss:
            break
    return state.params, losses
