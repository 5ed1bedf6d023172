"""GVM-RAFT: a pilot group measures success and gradients, then rollouts go to prompts of high variance (arXiv 2505.02391)."""
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.control.gvm_raft import round_shares, shares
from jaxrl_llm.topologies.rules import Rule, rule, success


def share_out(success_P: np.ndarray, norms_P: np.ndarray, total: int, most: int, *, alpha: float = 1e-3, beta: float = 2.0
              ) -> np.ndarray:
    """i64[P], `total` rollouts, or as many as `most` for each allows, in proportion to `control.gvm_raft.shares`.

    A prompt's rollouts beyond `most` go to the others in the same proportion, or evenly to all if no other has a share.
    """
    counts = np.zeros(len(success_P), np.int64)
    total = min(total, most * len(counts))
    while (left := total - int(counts.sum())) > 0:
        room = counts < most
        share = shares(jnp.where(room, success_P, 0), jnp.asarray(norms_P), alpha=alpha, beta=beta)
        share = share if share.any() else jnp.asarray(room / room.sum())
        counts = np.minimum(counts + np.asarray(round_shares(share, left)), most)
    return counts


@rule
def gvm_raft(*, mean: float = 2.0, pilot: int = 0, alpha: float = 1e-3, beta: float = 2.0) -> Rule:
    """A pilot of rollouts for every prompt, then others by `share_out` until there are `mean` pilots per prompt on average.

    `pilot` is the number of its rollouts; 0: a group. Gradients are those of the pilot's right rollouts under the weights of
    the step. The pilot's rollouts, which the released code discards, are trained on too; a prompt without a right one gets
    others only in an even split, see `share_out`. Raises ValueError: a mean below one pilot per prompt, or a negative pilot.
    """
    if mean < 1 or pilot < 0:
        raise ValueError(f"mean={mean} pilots a prompt, the first included, and pilot={pilot} rollouts; give 1 or more, and 0 "
                         "(one group) or more")

    def more(rewards, valid, first, most, gradient_norms):
        if (valid.sum(1) > first).any():  # the second stage is over
            return np.zeros(len(valid), np.int64)
        return share_out(success(rewards, valid), gradient_norms, int((mean - 1) * len(valid) * first + 1e-6), most - first,
                         alpha=alpha, beta=beta)

    return Rule(more, reads=("gradient_norms",), solved=True, mean=mean, pilot=pilot)
