"""What the head of a run says of its learning rate where the configuration may not mean it."""
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.learning.optimizers import schedule_of
from jaxrl_llm.setup.run import Run


def rate_rows(run: Run, earlier: Mapping[str, Any] | None, step: int) -> list[tuple[str, str]]:
    """Rows for the terminal: a warm-up that the run does not finish, and a resumed run whose rate rises again.

    `earlier`: the resolved configuration before the resume at this `step`; None: a new run.
    """
    c, alone, rows = run.config, run.learner.pretrain_steps, []
    planned, warm = (c.steps - alone) * run.learner.per_step, c.optimizer.warmup_updates
    if warm > planned:
        rows.append(("learning rate", f"optimizer.warmup_updates={warm} of {planned} planned updates: the last has "
                                      f"{planned / warm:.0%} of optimizer.learning_rate"))
    if earlier is not None and c.optimizer.schedule != "constant":
        o, steps = earlier["optimizer"], earlier["steps"]
        per_step = earlier["learner"]["epochs"] * earlier["learner"]["minibatches"]
        old = schedule_of(o["learning_rate"], (steps - alone) * per_step, o["warmup_updates"], o["schedule"])
        done = max(step - alone, 0)
        last, now = float(old(max(done * per_step - 1, 0))), float(run.learning_rate(done * run.learner.per_step))
        if done * per_step > o["warmup_updates"] and now > 1.001 * last:
            rows.append(("learning rate", f"rises from {last:.2g} to {now:.2g}: the {c.optimizer.schedule} schedule now ends "
                                          f"at step {c.steps}, and ended at {steps}"))
    return rows
