"""A short supervised warm-up on the task's own answers: gives a policy from scratch something for RL to sharpen."""
from collections.abc import Iterator

import jax
import numpy as np
import optax

from jaxrl_llm import masked
from jaxrl_llm.generation.prompts import encode_problem, fit, pad
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.training import preemption
from jaxrl_llm.training.policy import Policy


def demonstrations(problems: list[Problem], tokenizer, prompt_tokens: int, max_tokens: int, overlong: str) -> Rollouts:
    """Answers, each followed by the end token, as a batch of groups of one; those that fit stand in for skipped ones.

    Raises ValueError for an answer that does not fit: cut short, it would be a wrong answer to imitate.
    """
    fitted = [(p, fit(encode_problem(p, tokenizer), p, prompt_tokens, overlong)) for p in problems]
    fitted = [(p, ids) for p, ids in fitted if ids is not None]
    if not fitted:
        raise ValueError(f"no prompt of a warm-up batch fits in prompts.max_tokens={prompt_tokens}; raise it")
    problems, rows = zip(*(fitted * len(problems))[:len(problems)])
    prompts = pad(rows, [p.id for p in problems], prompt_tokens)
    answers = [tokenizer.encode(p.answer) + [tokenizer.eos_id] for p in problems]
    for problem, answer in zip(problems, answers):
        if len(answer) > max_tokens:
            raise ValueError(f"the answer of problem {problem.id} has {len(answer)} tokens with the end token, the limit is "
                             f"sampling.max_tokens={max_tokens}: {problem.answer[:120]!r}. Raise it, or set warmup.steps=0")
    rows = pad(answers, prompts.ids, max_tokens)
    return Rollouts(mask=rows.mask[:, None], valid=np.ones((len(problems), 1), bool), tokens=rows.tokens[:, None],
                    prompt_tokens=prompts.tokens, prompt_mask=prompts.mask)


def imitate(policy: Policy, params, batches: Iterator[list[Problem]], tokenizer, *, steps: int, learning_rate: float,
            prompt_tokens: int, max_tokens: int, overlong: str, progress) -> tuple[dict, list[float]]:
    """Minimises -mean log p(answer token) for `steps` Adam steps. Returns `(params, losses per step in nats)`."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0),
                            optax.adam(optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(20, steps - 1), steps)))

    def step(params, opt_state, batch):
        def loss(params):
            return -masked.mean(policy.logprobs(params, None, batch)[0], batch.token_mask)
        value, grads = jax.value_and_grad(loss)(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    opt_state, losses = optimizer.init(params), []
    for number in range(steps):
        batch = demonstrations(next(batches), tokenizer, prompt_tokens, max_tokens, overlong)
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(value)
        if number % 20 == 0:
            preemption.check()  # for one of several processes, which no signal may stop alone
            progress.phase(f"supervised warm-up {number}/{steps}, loss {float(value):.2f}")
    return params, [float(x) for x in losses]
