"""A game for untrained models: every message with a lower-case letter earns a quarter; some problems can fail on purpose."""
import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp

from jaxrl_llm.environments import Environment, Turn, games, make
from jaxrl_llm.environments.compiled import environment_of
from jaxrl_llm.rewards.call_kinds import COUNTS
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tasks.base import seeded

TEMPLATE = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"


FACTS = {"tool_calls": "count", "tool_errors": "count", "answer_blocks": "count", "malformed": "any", "void": "tokens",
         "tool_failed": "count", "tool_unknown": "count", "error_words": "count"}


def letters(*, broken: int = -1, waits: bool = False, facts: dict | None = None, returns=(0.0, 0.75), replayable: bool = False,
            slow: float = 0.0, last: str = "", early: int = 0) -> Environment:
    """Three turns. The second turn raises for the problem with id `broken`, and for every problem if `broken` is -2.

    So do the first `early` of all second turns.

    With `waits` answers take different times in different trajectories. One of all steps takes `slow` seconds more.
    """
    steps, seconds = itertools.count(), itertools.count()

    def reset(problem, key):
        return {"id": problem.id, "turn": 0, "key": key}, [{"role": "user", "content": f"Say {problem.id % 3}."}]

    def step(state, message):
        state["turn"] += 1
        if waits:
            time.sleep(0.002 * (state["key"] % 13))
        if next(steps) == 5:
            time.sleep(slow)
        if state["turn"] == 2 and (next(seconds) < early or broken in (state["id"], -2)):
            raise KeyError("no such letter")
        good = any("a" <= letter <= "z" for letter in message["content"])
        upper = any("A" <= letter <= "Z" for letter in message["content"])
        info = {"tool_calls": int(good), "tool_errors": int(good and upper), "answer_blocks": int(state["turn"] == 3),
                "malformed": upper, "void": not good, "tool_failed": int(good and upper), "tool_unknown": 0,
                "error_words": int(good and upper)}
        return Turn([{"role": "user", "content": "Good." if good else "No."}], 0.25 * good, state["turn"] == 3, info)

    return Environment(name="letters", task=seeded("letters", "Say it.", 20, 8), reset=reset, step=step, replayable=replayable,
                       facts=FACTS if facts is None else facts, waits=waits, returns=returns, last=last,
                       oracle=lambda state: "abc"[state["turn"]])


def seeking() -> Environment:
    """`letters` whose messages search once for each lower-case letter, and search again for each upper-case letter."""
    inner = letters()

    def step(state, message):
        turn, said = inner.step(state, message), message["content"]
        counts = sum("a" <= letter <= "z" for letter in said), sum("A" <= letter <= "Z" for letter in said), 0, 0
        return turn._replace(info={**turn.info, **dict(zip(COUNTS, counts))})

    return dataclasses.replace(inner, step=step, facts=FACTS | dict.fromkeys(COUNTS, "count"))


def programs() -> Environment:
    """Sums with the tool `python`: the first two messages, whatever they say, become programs, which take unequal times."""
    inner = make("tool_use", tools=("python",), options={"level": "digit", "chat": True}, turns=3)

    def step(state, message):
        if state.turns == 2:
            return inner.step(state, message)
        said = message["content"]
        code = f"import time\ntime.sleep({len(said) % 4 / 20})\nprint(sum(map(ord, {said!r})))"
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        return inner.step(state, {**message, "content": f"<tool_call>{call}</tool_call>"})

    return dataclasses.replace(inner, step=step)


def shifting() -> Environment:
    """`letters` that ask for another letter at each opening, as a server does that ignores the seed."""
    opened = itertools.count()
    made = letters()
    return dataclasses.replace(made, reset=lambda problem, key: (
        made.reset(problem, key)[0], [{"role": "user", "content": f"Say {chr(ord('a') + next(opened) % 26)}."}]))


def uncounted() -> Environment:
    """`letters` with a tool, and without facts of its calls."""
    return dataclasses.replace(letters(facts={}), tools=({"type": "function", "function": {"name": "spell"}},))


def duel() -> Environment:
    """Two agents take two turns each, alternately; the agent with more lower-case letters wins."""
    def reset(problem, key):
        return {"letters": [0, 0], "turn": 0}, [{"role": "user", "content": f"Say {problem.id % 3}."}]

    def step(state, message):
        agent = state["turn"] % 2
        state["letters"][agent] += sum("a" <= letter <= "z" for letter in message["content"])
        state["turn"] += 1
        info = {"agent": agent, "functional_group": agent, "game": 0, "skill_used": 0}
        if state["turn"] < 4:
            return Turn([{"role": "user", "content": "Next."}], info=info)
        ahead = state["letters"][0] - state["letters"][1]
        first = (ahead > 0) - (ahead < 0)
        return Turn(done=True, info={**info, "returns": [first, -first]})

    return Environment(name="duel", task=seeded("duel", "Say it.", 20, 8), reset=reset, step=step, replayable=False,
                       facts={"agent": "turn", "functional_group": "turn", "game": "once", "skill_used": "count"},
                       returns=(-1.0, 1.0))


def marked() -> Environment:
    """Three turns; the action is whether a message has a lower-case letter, and the oracle says one."""
    def step(state, message):
        state["turn"] += 1
        action = "lower" if any("a" <= letter <= "z" for letter in message["content"]) else "other"
        return Turn([{"role": "user", "content": f"{action}{state['turn']}."}], 0.0, state["turn"] == 3, {"action": action})

    return Environment(name="marked", task=seeded("marked", "Say it.", 20, 8), step=step,
                       reset=lambda problem, key: ({"turn": 0}, [{"role": "user", "content": f"Say {problem.id % 3}."}]),
                       oracle=lambda state: "abc"[state["turn"]])


def forgetful() -> Environment:
    """Three contexts of two turns each, which keep a number of x; an upper-case letter ends the trajectory."""
    def reset(problem, key):
        return {"turn": 0, "good": 0}, [{"role": "user", "content": f"Say {problem.id % 3}."}]

    def step(state, message):
        state["turn"] += 1
        good = any("a" <= letter <= "z" for letter in message["content"])
        if state["turn"] == 6 or any("A" <= letter <= "Z" for letter in message["content"]):
            return Turn(reward=float(good), done=True)
        if state["turn"] % 2:
            return Turn([{"role": "user", "content": "And?"}])
        return Turn([{"role": "user", "content": f"You kept {'x' * (state['turn'] // 2)}."}], fresh=True)

    return Environment(name="forgetful", task=seeded("forgetful", "Say it.", 20, 8), reset=reset, step=step, replayable=False,
                       contexts=3, oracle=lambda state: "a")


def cards() -> Environment:
    """Two agents, each of which alone reads its card, speak at most three times in turns; an upper-case letter loses.

    Without one the higher card wins.
    """
    def dealt(problem):
        return problem.id % 3, (problem.id + 1) % 3

    def reset(problem, key):
        first = {"role": "user", "content": f"Yours is {dealt(problem)[0]}.", "reader": 0}
        return {"cards": dealt(problem), "turn": 0, "heard": {0}}, [{"role": "user", "content": "Cards."}, first]

    def step(state, message):
        agent = state["turn"] % 2
        state["turn"] += 1
        info = {"agent": agent, "functional_group": agent, "game": 0}
        upper = any("A" <= letter <= "Z" for letter in message["content"])
        if upper or state["turn"] == 6:
            first = (1 if state["cards"][0] > state["cards"][1] else -1) if not upper else -1 if agent == 0 else 1
            return Turn(done=True, info={**info, "returns": [first, -first]})
        deal = "" if state["turn"] > 1 else f"Yours is {state['cards'][1]}. "
        return Turn([{"role": "user", "content": f"{deal}Now {state['turn']}.", "reader": 1 - agent}], info=info)

    return Environment(name="cards", task=seeded("cards", "Say it.", 20, 8), reset=reset, step=step, contexts=2, apart=True,
                       facts={"agent": "turn", "functional_group": "turn", "game": "once"}, returns=(-1.0, 1.0),
                       replayable=False, oracle=lambda state: "ab"[state["turn"] % 2])


def spelled() -> Environment:
    """Two turns in tokens: the bytes of question and answer, without a template."""
    def message(text):
        return {"role": "user", "content": "", "ids": list(text.encode())}

    def reset(problem, key):
        return {"turn": 0}, [message(f"Say {'abcdefghij'[problem.id % 10]}.\n")]

    def step(state, sent):
        state["turn"] += 1
        good = any(ord("a") <= token <= ord("z") for token in sent["ids"])
        return Turn([message("Good.\n" if good else "No.\n")], 0.5 * good, state["turn"] == 2)

    return Environment(name="spelled", task=seeded("spelled", "Say it.", 20, 8), reset=reset, step=step, tokens=True,
                       replayable=False)


ALPHABET = games.Game(
    words=tuple("abcdefghijklmnopqrstuvwxyz"), reset=lambda key, heldout: jax.random.randint(key, (), 0, 3),
    legal=lambda state: jnp.arange(26) < 24, seen=lambda state: state, text=lambda seen: f"Say {int(seen)}.", turns=3,
    brief=True,
    step=lambda state, action, key: (jax.random.randint(key, (), 0, 9), games.Move(jnp.float32(0.25), jnp.bool_(False))))


def alphabet() -> Environment:
    """A game of arrays with three turns: every letter except y and z earns a quarter, and the next observation is random."""
    return environment_of(ALPHABET, name="alphabet", task=seeded("alphabet", "Say it.", 20, 8), returns=(0.0, 0.75))


def get_config(**changes):
    c = default_config()
    c.environment, c.model.chat_template = "chatter:letters", TEMPLATE
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 3, 4, 4, 32
    c.sampling.max_turns, c.sampling.turn_tokens, c.prompts.max_tokens = 3, 4, 16
    c.optimizer.learning_rate, c.optimizer.warmup_updates = 3e-3, 2
    c.eval.every, c.eval.problems, c.checkpoint.every, c.samples_every = 3, 4, 1, 2
    c.update_from_flattened_dict(changes)
    return c
