"""By which names other code bases know the rows of the catalogue, and the numbers of parts.

A name is `PEER KEY=VALUE`, as in `verl loss_mode=geo_mean`, or `PEER CLASS`, as in `trl RLOOTrainer`: what a user of the peer
writes into its configuration. `Method.known_as` has those of a row, `NUMBERS` those of numbers. A name belongs to one of them.
"""
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxrl_llm.methods.base import Method

PEERS = {"verl": "verl", "trl": "TRL", "skyrl": "SkyRL", "prime-rl": "prime-rl", "slime": "slime", "tunix": "Tunix",
         "tinker": "Tinker"}


class Number(NamedTuple):
    """A number of a part: the key of its text, the text, its meaning, and the peers' names."""

    key: str
    text: str
    about: str
    known_as: tuple[str, ...]


NUMBERS = (
    Number("objective", "aggregation=token_mean", "the mean over all tokens of the batch, whatever its micro-batches",
           ("verl loss_agg_mode=token-mean", "trl loss_type=dapo", "trl loss_type=bnpo", "skyrl loss_reduction=token_mean",
            "tunix loss_agg_mode=token-mean")),
    Number("objective", "aggregation=seq_mean_token_mean", "the mean over rollouts of the mean over their tokens",
           ("verl loss_agg_mode=seq-mean-token-mean", "skyrl loss_reduction=sequence_mean",
            "tunix loss_agg_mode=sequence-mean-token-mean")),
    Number("objective", "aggregation=seq_mean_token_sum", "the mean over rollouts of the sum over their tokens",
           ("verl loss_agg_mode=seq-mean-token-sum", "tunix loss_agg_mode=seq-mean-token-sum")),
    Number("objective", "aggregation=fixed_length", "the mean over rollouts of the sum over their tokens / generation budget",
           ("verl loss_agg_mode=seq-mean-token-sum-norm", "skyrl loss_reduction=seq_mean_token_sum_norm",
            "tunix loss_agg_mode=sequence-mean-token-scale")),
    Number("objective", "aggregation=prompt_mean", "the mean over prompts of the mean over the tokens of their rollouts",
           ("skyrl loss_reduction=prompt_mean",)),
    Number("objective", "ppo_clip(clip_low=1, clip_high=inf)", "-A times the ratio to the policy before the update, unclipped",
           ("skyrl policy_loss_type=importance_sampling", "tinker loss_fn=importance_sampling")),
    Number("objective", "icepop_direct(min_ratio=0.8, max_ratio=1.2, veto=None, aggregation=token_mean)",
           "-A log p times the detached ratio to the sampler, 0 outside the band", ("skyrl policy_loss_type=rollout_is",)),
    Number("objective", "+ kl(0.001, estimator=k1)", "log p - log p_ref, which as a loss has no pull towards the reference",
           ("verl kl_loss_type=kl", "verl kl_loss_type=k1", "slime kl_loss_type=k1")),
    Number("objective", "+ kl(0.001, estimator=k2)", "half the square of log p - log p_ref",
           ("verl kl_loss_type=mse", "verl kl_loss_type=k2", "slime kl_loss_type=k2")),
    Number("objective", "+ kl(0.001, estimator=k3)", "p_ref / p - 1 - log(p_ref / p), at least 0",
           ("verl kl_loss_type=low_var_kl", "verl kl_loss_type=k3", "slime kl_loss_type=k3", "slime kl_loss_type=low_var_kl")),
    Number("objective", "+ kl(0.001, estimator=k3+)", "the value of k3 with the gradient of k2",
           ("verl kl_loss_type=low_var_kl+", "verl kl_loss_type=k3+")),
    Number("objective", "+ kl(0.001, estimator=k1+)", "the value of k1 with the gradient of k2",
           ("verl kl_loss_type=kl+", "verl kl_loss_type=k1+")),
    Number("objective", "+ kl(0.001, estimator=abs)", "the absolute value of log p - log p_ref", ("verl kl_loss_type=abs",)),
    Number("objective", "+ kl(0.001, estimator=unbiased)", "k3 times the ratio to the policy before the update",
           ("trl use_bias_correction_kl=True", "slime use_unbiased_kl=True")),
    Number("objective", "dpo(kind=ipo)", "of pairs (method dpo): the squared distance of a margin from 1 / (2 beta)",
           ("trl loss_type=ipo",)),
)


def value(name: str) -> str:
    """What is behind the peer and its key: `geo_mean` of `verl loss_mode=geo_mean`, `RLOOTrainer` of `trl RLOOTrainer`."""
    return name.partition(" ")[2].rpartition("=")[2]


def said(names: Iterable[str]) -> str:
    """The names as text, by peer: `verl loss_mode=gspo, slime advantage_estimator=gspo`; "" without any."""
    pairs = [name.partition(" ") for name in names]
    return ", ".join(f"{PEERS[peer]} {setting}" for peer, _, setting in pairs)


def answers(word: str, rows: Mapping[str, Method]) -> list[str]:
    """What the peers' setting or class `word` is here, a sentence for each of its names."""
    wanted = word.lower().replace("-", "_")
    found = [(name, f"is method {row.slug!r}") for row in rows.values() for name in row.known_as]
    found += [(name, f"is config.{number.key}={number.text!r}") for number in NUMBERS for name in number.known_as]
    return [f"{said([name])} {what}" for name, what in found if value(name).lower().replace("-", "_") == wanted]
