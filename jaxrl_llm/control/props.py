"""PROPS: a behaviour policy that prefers tokens that a group has drawn too rarely so far (arXiv 2311.08290)."""
import jax.numpy as jnp

from jaxrl_llm.control.base import Controller, controller


@controller
def props(*, step: float = 2.0) -> Controller:
    """`spread`: the first tokens of a group are drawn from `p exp(-step (share so far - p))`.

    See `engines.sampling.spread_out`. At the first token all completions of a group are in one state; other states seldom
    repeat in text. The update treats the tokens as drawn by the policy. The closed form for tokens and `step` are ours. Raises
    ValueError: a negative step.
    """
    if step < 0:
        raise ValueError(f"step={step} away from what was drawn; give 0 (plain draws) or more")
    return Controller(lambda: (), lambda state: {"spread": jnp.float32(step)}, lambda state, facts: state, facts=(),
                      knobs=("spread",))
