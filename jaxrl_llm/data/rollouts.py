"""The data that flows through the library: `PromptBatch`es go into the sampler, `Rollouts` come out and go into the learner.

Axes: `P` prompts in the batch, `G` rollouts per prompt, `S` prompt tokens, `T` completion tokens, `K` reward parts.
All shapes are static. Axes of varying length are padded; `mask`, `role` and `valid` say what is real.
"""
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array


class PromptBatch(struct.PyTreeNode):
    """Tokenised prompts: `tokens` i32[P, S], `mask` bool[P, S] (True on real tokens), `ids` i32[P] (data-set rows)."""

    tokens: Array
    mask: Array
    ids: Array | None = None


def _axes(axes: str) -> Any:
    return struct.field(default=None, kw_only=True, metadata={"axes": axes})


class Role(enum.IntEnum):
    """Who wrote a token. Padding is 0, so that filling up with zeros means padding.

    The policy's sampler wrote a token of `POLICY` under the text that it is trained under, and one of `ELSEWHERE` under another
    text, such as a prompt with a hint.
    """

    PADDING = 0
    POLICY = 1
    ENVIRONMENT = 2
    HINT = 3
    EXPERT = 4
    PROMPT = 5
    ELSEWHERE = 6


SAMPLED = (Role.POLICY, Role.ELSEWHERE)  # what the policy's sampler wrote
TRAINED = (*SAMPLED, Role.EXPERT)  # what views train on

CURRENT_ENTROPIES = "current_entropies"  # an extra, f32[P, G, T], that an update adds: of the policy that it differentiates
POSITION = "position"  # alike: what an objective computes of the logits at each position, see `Objective.position`
SEEDS = "token_seeds"  # an extra, u32[P, G, T]: of what is drawn at each position, see `recorders.token_seeds`
APART = "apart"  # an extra, bool[P, G, T], see `with_apart`
GIVEN = "given"  # an extra, bool[P, G]: given texts, which stand beside rollouts in a batch
ROUTES, OWN_ROUTES = "routes", "own_routes"  # extras that a mixture's pass may read, see `Objective.replays`


class Rollouts(struct.PyTreeNode):
    """Sampled completions of P prompts, G each, with all measurements on them. Fields that are not needed are None.

    `mask` is True on trained tokens, those that count in the loss (the stop token counts); `valid` is False on padding in the
    G axis. `role`, a `Role` for each token, says who wrote it, and thereby which tokens are present (`present`). Present tokens
    need not be trained: an environment's answer is present and not trained, an expert's token can be both. Tokens that are
    present but not trained are holes of the mask. The model reads them; advantages, losses and statistics of tokens ignore
    them, and the successor of a trained token is the next trained one. Without roles all present tokens are trained, and masks
    have no holes. Padding comes after the present tokens, never between them, so positions are slots. Numbers of trained tokens
    (`lengths`) are not indices.
    `extras` holds the inputs of particular methods by name (each leaf starts with axis P): for instance
    `truncated`, `correct` bool[P, G], `traj`, `obs`, `act`, `agent`, `parent` i32[P, G], `teacher_logprobs` f32[P, G, T].
    `temperature` is the sampler's temperature if it changes in a run: log-probs are taken at it.
    `loss_weights` is the result of `Objective.weights` for the whole mini-batch, if this is a part of one.
    `filled` (1 to 4, static) is a promise: of the prompts that go through the model at once, at most `filled` quarters of the
    `[., G, T]` slots are trained tokens or have one after them. The other slots are not computed.
    """

    mask: Array = struct.field(metadata={"axes": "PGT"})
    valid: Array = struct.field(metadata={"axes": "PG"})
    rewards: Array | None = _axes("PG")
    reward_components: Array | None = _axes("PGK")
    tokens: Array | None = _axes("PGT")
    role: Array | None = _axes("PGT")
    prompt_tokens: Array | None = _axes("PS")
    prompt_mask: Array | None = _axes("PS")
    prompt_ids: Array | None = _axes("P")
    behavior_logprobs: Array | None = _axes("PGT")
    old_logprobs: Array | None = _axes("PGT")
    ref_logprobs: Array | None = _axes("PGT")
    entropies: Array | None = _axes("PGT")
    policy_version: Array | None = _axes("PGT")
    step_ids: Array | None = _axes("PGT")
    features: Array | None = _axes("PGD")
    temperature: Array | None = _axes("P")
    extras: Mapping[str, Array] = struct.field(default_factory=dict, kw_only=True)
    loss_weights: Mapping[str, Array] | None = struct.field(default=None, kw_only=True)
    filled: int = struct.field(default=4, kw_only=True, pytree_node=False)

    @property
    def token_mask(self) -> Array:
        """bool[P, G, T]: trained tokens, of rollouts that exist."""
        return self.mask & self.valid[..., None]

    @property
    def present(self) -> Array:
        """bool[P, G, T]: all real tokens, trained or not, of rollouts that exist; without roles the trained ones."""
        return self.token_mask if self.role is None else (self.role != Role.PADDING) & self.valid[..., None]

    @property
    def fresh(self) -> Array:
        """bool[P, G]: rollouts that exist and were sampled in this step; `extras["replayed"]` bool[P, G] names the others."""
        return self.valid & ~self.extras["replayed"] if "replayed" in self.extras else self.valid

    @property
    def lengths(self) -> Array:
        """i32[P, G]: number of trained tokens of each rollout; it is not the index of the last one."""
        return jnp.sum(self.token_mask, axis=-1, dtype=jnp.int32)

    @property
    def live(self) -> Array:
        """bool[P, G]: rollouts with at least one trained token."""
        return jnp.any(self.token_mask, axis=-1)

    @property
    def score(self) -> Array:
        """f32[P, G]: the first reward component, unweighted and unshaped; the rewards if no components are recorded."""
        return self.rewards if self.reward_components is None else self.reward_components[..., 0]

    @property
    def correct(self) -> Array:
        """bool[P, G]: right answers, as recorded in `extras["correct"]`; without that record, rewards above 0.5.

        A total reward may contain bonuses and penalties: only the record then tells right from wrong.
        """
        return self.extras["correct"].astype(bool) if "correct" in self.extras else self.rewards > 0.5


def check(rollouts: Rollouts, *needs: str) -> Rollouts:
    """`rollouts`, if shapes agree and every field (or `extras` entry) named in `needs` is there; else ValueError."""
    sizes: dict[str, int] = {}
    for name, field in Rollouts.__dataclass_fields__.items():
        axes, value = field.metadata.get("axes"), getattr(rollouts, name)
        if axes is None or value is None:
            continue
        shape = tuple(value.shape)
        if len(shape) != len(axes) or any(sizes.setdefault(a, n) != n for a, n in zip(axes, shape)):
            expected = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
            raise ValueError(f"rollouts.{name} has shape {shape}, expected [{expected}] like the fields before it")
    for name in ("mask", "valid"):
        dtype = getattr(rollouts, name).dtype
        if dtype != jnp.bool_:
            raise ValueError(f"rollouts.{name} must be boolean, got {dtype}; compare or cast it first")
    if rollouts.role is not None and not jnp.issubdtype(rollouts.role.dtype, jnp.integer):
        raise ValueError(f"rollouts.role must hold integers, see rollouts.Role, got {rollouts.role.dtype}")
    for name, value in rollouts.extras.items():
        shape = tuple(value.shape)
        if not shape or shape[0] != sizes["P"]:
            raise ValueError(f"rollouts.extras[{name!r}] has shape {shape}; its first axis must be P={sizes['P']}")
    for name in needs:
        if getattr(rollouts, name, None) is None and name not in rollouts.extras:
            where = f"field {name!r}" if name in Rollouts.__dataclass_fields__ else f"extras[{name!r}]"
            raise ValueError(f"this method needs the rollouts' {where}, which is missing; record it before the update")
    return rollouts


_MEASURED = ("rewards", "reward_components", "entropies", "features", "behavior_logprobs", "old_logprobs", "ref_logprobs")


def in_float(x: Array, name: str) -> Array:
    """`x` in float32; float32 and float64 stay unchanged.

    Sums of 16-bit floats round and overflow, and divisions of integers and booleans truncate. Raises TypeError for numbers that
    are not real.
    """
    dtype = x.dtype
    if dtype in (jnp.float32, jnp.float64):
        return x if dtype == jnp.float32 else jnp.asarray(x)  # float32, unless jax is set to 64 bits
    if dtype != jnp.bool_ and not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(f"rollouts.{name} is of dtype {dtype}; give real numbers: floats, integers or booleans")
    return jnp.asarray(x).astype(jnp.float32)


def measured(rollouts: Rollouts) -> Rollouts:
    """The rollouts with all measurements in float32 (see `in_float`); of `extras`, which may hold ids, only 16-bit floats."""
    cast = {name: in_float(value, name) for name in _MEASURED if (value := getattr(rollouts, name)) is not None}
    def floating(x):
        return in_float(x, "extras") if jnp.issubdtype(x.dtype, jnp.floating) else x
    return rollouts.replace(**cast, extras=jax.tree.map(floating, dict(rollouts.extras)))


def clean(rollouts: Rollouts, *needs: str) -> Rollouts:
    """`check` and `measured`, then zero floating entries of padding and holes: no NaN or infinity can leak out of them.

    Entries that are not floating-point, such as ids, stay: read them with the mask.
    """
    rollouts = measured(check(rollouts, *needs))
    tokens, valid = rollouts.token_mask, rollouts.valid

    def zero(x, real):
        if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, jnp.zeros((), x.dtype))

    def of_shape(x):  # entries of extras have no declared axes
        if x.shape[:3] == tokens.shape:
            return zero(x, tokens)
        return zero(x, valid) if x.shape[:2] == valid.shape else x

    axes = {name: Rollouts.__dataclass_fields__[name].metadata["axes"] for name in _MEASURED}
    cleaned = {name: zero(getattr(rollouts, name), tokens if axes[name] == "PGT" else valid) for name in _MEASURED}
    return rollouts.replace(**cleaned, extras=jax.tree.map(of_shape, dict(rollouts.extras)))


def with_apart(rollouts: Rollouts) -> Rollouts:
    """The rollouts with the tokens of `extras["apart"]`, from which terms of the loss alone learn, and the texts of `given`.

    A source leaves both out of `mask` and `valid`, so that estimators, filters and controllers do not see them. A learner adds
    them before it measures and updates.
    """
    if APART not in rollouts.extras:
        return rollouts
    valid = rollouts.valid | rollouts.extras[GIVEN] if GIVEN in rollouts.extras else rollouts.valid
    return rollouts.replace(mask=rollouts.mask | rollouts.extras[APART], valid=valid)


def without_apart(rollouts: Rollouts) -> Rollouts:
    """The rollouts as they were before `with_apart`."""
    if APART not in rollouts.extras:
        return rollouts
    valid = rollouts.valid & ~rollouts.extras[GIVEN] if GIVEN in rollouts.extras else rollouts.valid
    return rollouts.replace(mask=rollouts.mask & ~rollouts.extras[APART], valid=valid)


def known_logprobs(logprobs: Array | None, otherwise: Array) -> Array:
    """`logprobs f32[P, G, T]`, and those of another policy where they are unknown: NaN, or all of them if there are none."""
    return otherwise if logprobs is None else jnp.where(jnp.isnan(logprobs), otherwise, logprobs)


def sampled_logprobs(rollouts: Rollouts, otherwise: Array) -> Array:
    """f32[P, G, T], log-probs of the sampler; `otherwise` for trained tokens that it did not draw under their own text.

    Weights that correct for the gap of sampler and learner are 1 where there is no such gap. Where `otherwise` is NaN, as
    under a lag, the writer's count.
    """
    known = known_logprobs(rollouts.behavior_logprobs, otherwise)
    if rollouts.role is None:
        return known
    apart = rollouts.token_mask & (rollouts.role != Role.POLICY)
    return jnp.where(apart, known_logprobs(otherwise, known), known)


def seen_returns(rollouts: Rollouts) -> Array:
    """f32[P, G, T], `extras["returns"]`, or without that record the reward of the rollout at each of its tokens."""
    if "returns" in rollouts.extras:
        return rollouts.extras["returns"]
    return jnp.broadcast_to(rollouts.rewards[..., None], rollouts.mask.shape)


def take(rollouts: Rollouts, start: int, size: int) -> Rollouts:
    """The prompts `start : start + size` of a batch with all their data (`start` may be traced)."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=0), rollouts)


def pad_lists(rows: Sequence[Sequence[Sequence[float]]], fill: float = 0.0) -> np.ndarray:
    """[P, G, T] from nested lists of unequal length, `fill` where there is nothing; for small examples."""
    group, length = max(len(row) for row in rows), max(len(values) for row in rows for values in row)
    padded = np.full((len(rows), group, length), fill, np.float32)
    for p, row in enumerate(rows):
        for g, values in enumerate(row):
            padded[p, g, : len(values)] = values
    return padded


def from_lists(rewards: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]] | None = None, **fields: Any) -> Rollouts:
    """Rollouts from one list of rewards per prompt (of unequal length, if groups differ) and their lengths (default 1).

    `fields` are passed on to `Rollouts`; per-token ones can be made with `pad_lists`.
    """
    lengths = [[1] * len(row) for row in rewards] if lengths is None else lengths
    padded = pad_lists([[[r] for r in row] for row in rewards], fill=np.nan)[..., 0]
    tokens = pad_lists([[[1] * n for n in row] for row in lengths])
    valid = ~np.isnan(padded)
    arrays = {"mask": tokens == 1, "valid": valid, "rewards": np.where(valid, padded, 0), **fields}
    return Rollouts(**jax.tree.map(jnp.asarray, arrays))
