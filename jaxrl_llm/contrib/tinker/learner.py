"""LoRA adapters on one frozen base, each with gradients that add up until a step: `learning.accumulate` and `descend`."""
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.contrib.tinker.examples import Datum, micro_batches
from jaxrl_llm.contrib.tinker.losses import MARK, WEIGHTS, loss_of, summed
from jaxrl_llm.learning import accumulate, optimizers
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.maths.descent import descend
from jaxrl_llm.models import Transformer, lora

ALPHA = 32  # LoRA's scale is ALPHA / rank
_ATTENTION = ("q", "k", "v", "o")


class LoraShape(NamedTuple):
    """The shape of an adapter: its rank, and whether attention and the feed-forward layers are adapted."""

    rank: int
    attention: bool = True
    mlp: bool = True


class Adam(NamedTuple):
    """Settings of one optimiser step; a `clip_norm` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_norm: float = 0.0


@dataclasses.dataclass(eq=False)
class Adapter:
    """An adapter in training.

    Attributes:
      shape: see `LoraShape`.  tree: its matrices, as from `lora.init`.
      moments: Adam's moments, with the step count.
      grads: gradients added up since the last step; None: there are none.
    """

    shape: LoraShape
    tree: Any
    moments: Any
    grads: Any = None


class PassResult(NamedTuple):
    """The results of a pass: log-prob and loss of each token, one `f32[n]` for each example, and the sum of the losses."""

    logprobs: list[np.ndarray]
    losses: list[np.ndarray]
    loss: float


class AdapterLearner:
    """A frozen base, with passes and steps of adapters on it. Not thread-safe."""

    def __init__(self, model: Transformer, params: Any, *, longest: int, budget: int, mesh: Mesh | None = None):
        """
        Args:
          model, params: the base.
          longest: maximum number of tokens of an example.
          budget: slots of a micro-batch, which bounds memory.
          mesh: the mesh of the base, of adapters and of rows; None: one device.
        """
        model.check_length(longest)
        self.model, self.longest, self.budget = model, longest, budget
        self.policy = Policy(model, mesh=mesh)
        self.params = params if mesh is None else parallel.put(params, parallel.tree_shardings(params, mesh))
        self._shards = 1 if mesh is None else parallel.shards_of(mesh.shape)

    def targets_of(self, shape: LoraShape) -> list[str]:
        """The matrices that have an adapter. Raises ValueError if there are none."""
        there = [name for name in lora.TARGETS if name in self.params["layers"]
                 and (shape.attention if name in _ATTENTION else shape.mlp)]
        if not there:
            raise ValueError("no matrix of this model would be trained; set train_attn or train_mlp (the unembedding has no "
                             "adapter here, nor have a mixture's experts)")
        return there

    def check(self, shape: LoraShape, tree: Any, moments: Any, where: str) -> None:
        """Raises ValueError unless the arrays of an adapter, and Adam's, are those of an adapter of this shape on the base."""
        sizes = {target: self.params["layers"][target]["kernel"].shape for target in self.targets_of(shape)}
        wanted = {target: {"a": (layers, fan_in, shape.rank), "b": (layers, shape.rank, fan_out)}
                  for target, (layers, fan_in, fan_out) in sizes.items()}
        for name, one in (("lora", tree), *(() if moments is None else (("mu", moments.mu), ("nu", moments.nu)))):
            found = {target: {part: x.shape for part, x in parts.items()} for target, parts in one.items()}
            if found != wanted:
                raise ValueError(f"{where}: its tensors {name!r} have the shapes {str(found)[:300]}; its header says {shape}, "
                                 f"which has {str(wanted)[:300]} on this model")
            if any(x.dtype != np.float32 for parts in one.values() for x in parts.values()):
                raise ValueError(f"{where}: its tensors {name!r} are not all of float32")
        if moments is not None and any((x < 0).any() for x in jax.tree.leaves((moments.nu, moments.count))):
            raise ValueError(f"{where}: its optimiser state has negative squares, or a negative number of steps")
        if moments is not None and (moments.count.shape != () or moments.count.dtype.kind not in "iu"):
            raise ValueError(f"{where}: its tensor 'count' is of shape {moments.count.shape}; expected one whole number")

    def create(self, shape: LoraShape, seed: int) -> Adapter:
        """An adapter that changes nothing yet. Raises ValueError as `lora.init` does, and if nothing would be trained."""
        tree = lora.init(jax.random.key(seed), self.params, shape.rank, ALPHA, self.targets_of(shape))
        return self.adapter(shape, tree)

    def adapter(self, shape: LoraShape, tree: Any, moments: Any = None) -> Adapter:
        """An adapter of these matrices on the devices of the base; without moments its optimiser begins."""
        tree, moments = jax.tree.map(jnp.asarray, (tree, fresh_moments(tree) if moments is None else moments))
        if self.policy.mesh is None:
            return Adapter(shape, tree, moments)
        shardings = parallel.tree_shardings((tree, moments), self.policy.mesh)
        return Adapter(shape, *parallel.put((tree, moments), shardings))

    def padded(self, tree: Any, rank: int) -> Any:
        """An adapter of `rank` on all targets with the scale 1 and the same update, filled up with 0. None: the base alone."""
        base = lora.init(jax.random.key(0), self.params, rank, alpha=rank)
        padded = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), base)
        for target, given in (lora.scaled(tree) or {}).items():
            own = given["a"].shape[-1]
            padded[target]["a"][..., :own], padded[target]["b"][:, :own] = given["a"], given["b"]
        return padded

    def forward(self, tree: Any, data: Sequence[Datum], loss: str, given: Mapping[str, float]) -> PassResult:
        """Log-probs and losses under an adapter, or the base (None). Raises ValueError for wrong examples or settings."""
        return self._run(tree, data, loss, given, None)[0]

    def forward_backward(self, adapter: Adapter, data: Sequence[Datum], loss: str, given: Mapping[str, float]) -> PassResult:
        """As `forward`; also adds the gradient to the adapter's. After an error the adapter is unchanged."""
        zeros = jax.tree.map(jnp.zeros_like, adapter.tree)
        outcome, grads = self._run(adapter.tree, data, loss, given, zeros)
        adapter.grads = grads if adapter.grads is None else jax.tree.map(jnp.add, adapter.grads, grads)
        return outcome

    def step(self, adapter: Adapter, adam: Adam) -> float:
        """One optimiser step with the added-up gradient, which is then cleared; returns the gradient norm before clipping.

        A gradient of 0, as of examples without advantage, moves neither weights nor moments. Raises ValueError for settings
        that `checked` refuses, without a gradient, for one that is not finite, and for a step to weights or moments that are
        not; the adapter stays as it was.
        """
        settings = checked(adam)
        if adapter.grads is None:
            raise ValueError("optim_step without a gradient; call forward_backward first")
        grads, adapter.grads = adapter.grads, None
        tree, moments, norm, finite = _stepped(self.policy.mesh, adapter.tree, adapter.moments, grads, *settings)
        if not np.isfinite(norm):
            raise ValueError(f"the gradient has the norm {norm}; it was dropped and the weights are as before")
        if not finite:
            raise ValueError(f"a step with {adam} and a gradient of the norm {norm:g} leads to weights or moments that are not "
                             "finite; the gradient was dropped and the weights are as before")
        adapter.tree, adapter.moments = tree, moments
        return float(norm)

    def _run(self, tree, data, loss, given, grads):
        objective, settings = summed(loss, given)
        data = self._alike([self._checked(i, one, loss) for i, one in enumerate(data)])
        found = []
        for numbers, packed, rollouts, advantages in micro_batches(data, self.budget, self._shards):
            ((rows, _),), index = accumulate.placed(self.policy, len(packed.node), packed)
            inputs = settings, rows, index, rollouts, advantages
            if grads is None:
                outputs = _forward(self.policy, objective, self.params, tree, *inputs)
            else:
                grads, outputs = _backward(self.policy, objective, grads, self.params, tree, *inputs)
            found.append((numbers, outputs))
        of_tokens = [[np.zeros(0, np.float32)] * len(data) for _ in range(2)]
        for numbers, outputs in jax.device_get(found):
            for mine, values in zip(of_tokens, outputs):
                for i, row in zip(numbers, values[:, 0]):
                    mine[i] = row[:len(data[i].tokens)]
        return PassResult(*of_tokens, float(sum(x.sum() for x in of_tokens[1]))), grads

    def _checked(self, i: int, one: Datum, loss: str) -> Datum:
        """The example with the fields that the loss reads. Raises ValueError for others, or for tokens that do not fit."""
        wanted, size, vocab = loss_of(loss), len(one.tokens), self.model.config.vocab_size
        if not 0 < size <= self.longest:
            raise ValueError(f"data[{i}] has {size} tokens; give 1 to {self.longest}")
        for name, ids in (("model_input", one.tokens), ("target_tokens", one.targets)):
            if len(ids) != size or ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"data[{i}]: {name} must have {size} tokens, each from 0 to {vocab - 1}; it has {len(ids)}, "
                                 f"from {ids.min(initial=0)} to {ids.max(initial=0)}")
        fields = {WEIGHTS: np.ones(size, np.float32), **one.fields}
        if not {*wanted.fields} <= fields.keys() <= {*wanted.fields, *wanted.optional}:
            given = ", ".join(sorted(one.fields)) or "none"
            raise ValueError(f"data[{i}] has the loss_fn_inputs {given} beside target_tokens; {loss} reads "
                             f"{', '.join(wanted.fields) or 'nothing else'}, and may have {', '.join(wanted.optional)}")
        if MARK in wanted.optional and not one.fields.keys() & {MARK, WEIGHTS}:
            raise ValueError(f"data[{i}]: {loss} tells tokens of the completion from others by {MARK} or weights; give one")
        for name, values in fields.items():
            counts = (fields[WEIGHTS] != 0) | (fields.get(MARK, 0) != 0)
            if values.shape != (size,) or not np.isfinite(values[counts]).all():
                raise ValueError(f"data[{i}]: {name} has the shape {list(values.shape)}; give {size} finite numbers, one for "
                                 "each token of model_input")
        return one._replace(fields=fields)

    @staticmethod
    def _alike(data: list[Datum]) -> list[Datum]:
        """The examples. Raises ValueError if there are none, or some with other fields."""
        if not data:
            raise ValueError("no examples; give one at least")
        for i, one in enumerate(data):
            if one.fields.keys() != data[0].fields.keys():
                raise ValueError(f"data[{i}] has the loss_fn_inputs {', '.join(sorted(one.fields))}, data[0] "
                                 f"{', '.join(sorted(data[0].fields))}; give all the same")
        return data


def checked(adam: Adam) -> list[np.float32]:
    """The settings as float32. Raises ValueError for one that is not finite there, or with which Adam is not defined."""
    with np.errstate(over="ignore"):
        values = {name: np.float32(value) for name, value in adam._asdict().items()}
    for name, value in values.items():
        low = "above 0" if name == "eps" else "from 0"
        below = 1.0 if name.startswith("beta") else np.inf
        if not 0 <= value < below or name == "eps" and value == 0:
            raise ValueError(f"{name}={getattr(adam, name)}; give a number {low}, "
                             + ("below 1 in float32" if below == 1 else "finite in float32"))
    if values["learning_rate"] * values["weight_decay"] > 1:
        raise ValueError(f"learning_rate={adam.learning_rate} and weight_decay={adam.weight_decay}: their product is the share "
                         "of each weight that a step takes away; give 1 at most")
    return list(values.values())


def fresh_moments(tree: Any) -> Any:
    """Adam's state before the first step."""
    return optax.scale_by_adam().init(tree)


def _of_tokens(metrics):
    return metrics["logprobs"], metrics["losses"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(policy, objective, params, tree, settings, rows, index, rollouts, advantages):
    view = policy.packed_logprobs(params, tree, rows, index)
    return _of_tokens(accumulate.loss(policy, objective, view, rollouts, advantages, settings)[1][0])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _backward(policy, objective, grads, params, tree, *inputs):
    new, metrics, _ = accumulate.gradient(policy, objective, params, tree, *inputs)
    return _laid(policy.mesh, jax.tree.map(jnp.add, grads, new)), _of_tokens(metrics)


@functools.partial(jax.jit, static_argnums=0)
def _stepped(mesh, tree, moments, grads, learning_rate, beta1, beta2, eps, weight_decay, clip_norm):
    """`(tree, moments, norm, finite)` after a step of AdamW with settings that change no program."""
    optimizer = optimizers.TABLE["adamw"].make(learning_rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay)
    limit, state = jnp.where(clip_norm > 0, clip_norm, jnp.inf), (moments, *optimizer.init(tree)[1:])
    tree, (moments, *_), norm, finite = descend(optimizer, limit, grads, jnp.zeros(()), tree, state)
    every = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves((tree, moments))])  # any rate may come
    return *_laid(mesh, (tree, moments)), norm, finite & every.all()


def _laid(mesh, tree):
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, parallel.tree_shardings(tree, mesh))
