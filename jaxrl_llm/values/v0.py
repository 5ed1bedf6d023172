"""V0: the success of any policy on a prompt, from that policy's results on other prompts (arXiv 2602.03584).

    z = adapter(token states of a frozen text encoder)            residual query adapter: a prompt as K * E numbers
    p = head(context of (z, outcome) of one policy, queries z)    one forward pass, nothing is retrained as the policy changes

The paper's head is a published tabular model; ours is a small transformer of the same kind, fitted to a synthetic prior of
classification tasks (`v0_prior`): rows are tokens, and every row sees the rows of the context only, so queries do not see
each other. Rows have no order.
"""
import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array

from jaxrl_llm.values.buffer import Buffer, append, empty
from jaxrl_llm.values.in_context import standardise


class QueryAdapter(nn.Module):
    """Token states to K queries of size E that depend on the prompt; flattened, not pooled.

        Q = static[K, E] + MLP(state of the last token),   u = Linear(states)
        z = flatten(out(attention(LayerNorm(Q), LayerNorm(u), u)))

    The MLP ends in zeros, so that training starts from the static queries. Values are not normalised. E is a multiple of
    the number of heads.
    """

    queries: int = 168
    size: int = 6
    heads: int = 3
    hidden: int = 128
    dropout: float = 0.2

    @nn.compact
    def __call__(self, states: Array, mask: Array, *, training: bool = False) -> Array:
        """`states` f32[B, S, D], `mask` bool[B, S] (padded on either side) -> z f32[B, K * E]."""
        B, K, E = states.shape[0], self.queries, self.size
        last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1])[None], 0), axis=1)
        v = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
        x = nn.gelu(nn.LayerNorm(epsilon=1e-5, name="mlp_norm")(nn.Dense(self.hidden, name="mlp_in")(v)), approximate=False)
        x = nn.Dropout(self.dropout, deterministic=not training)(x)
        dynamic = nn.Dense(K * E, kernel_init=nn.initializers.zeros, name="mlp_out")(x).reshape(B, K, E)
        q = self.param("static", nn.initializers.normal(1.0), (K, E))[None] + dynamic
        u = nn.Dense(E, name="tokens")(states)
        def split(y):
            return y.reshape(*y.shape[:-1], self.heads, E // self.heads)
        q, k = split(nn.LayerNorm(epsilon=1e-5, name="query_norm")(q)), split(nn.LayerNorm(epsilon=1e-5, name="key_norm")(u))
        out = jax.nn.dot_product_attention(q, k, split(u), mask=mask[:, None, None, :])
        return nn.Dense(E, name="out")(out.reshape(B, K, E)).reshape(B, K * E)


class _Layer(nn.Module):
    """Pre-norm attention to context rows, and an MLP."""

    heads: int

    @nn.compact
    def __call__(self, x: Array, rows: int, mask: Array) -> Array:
        """`x` f32[N + Q, W], of which the first `rows` = N are the context with `mask` bool[N]."""
        W = x.shape[1]
        h = nn.LayerNorm(name="attention_norm")(x)
        def split(y):
            return y.reshape(1, -1, self.heads, W // self.heads)
        def project(name, y):
            return split(nn.Dense(W, use_bias=False, name=name)(y))
        out = jax.nn.dot_product_attention(project("q", h), project("k", h[:rows]), project("v", h[:rows]),
                                           mask=mask[None, None, None, :])
        x = x + nn.Dense(W, name="o")(out.reshape(-1, W))
        h = nn.LayerNorm(name="mlp_norm")(x)
        return x + nn.Dense(W, name="down")(nn.gelu(nn.Dense(4 * W, name="up")(h)))


class Head(nn.Module):
    """In-context classifier: reads labelled rows, judges unlabelled ones.

    Features are standardised by the context. A row is `Linear(z)` + its label's embedding, interpolated for outcomes
    between 0 and 1; a learned row that is always present represents what is known without any context.
    """

    features: int
    width: int = 64
    layers: int = 3
    heads: int = 4

    @nn.compact
    def __call__(self, context: Array, outcomes: Array, mask: Array, queries: Array) -> Array:
        """`context` f32[N, F], `outcomes` f32[N] in [0, 1], `mask` bool[N], `queries` f32[Q, F] -> logits f32[Q, 2]."""
        context, queries = standardise(context, mask, queries)
        project = nn.Dense(self.width, kernel_init=nn.initializers.lecun_normal(), name="row")
        wrong, right, unknown, nothing = self.param("labels", nn.initializers.normal(1.0), (4, self.width))
        y = jnp.where(mask, outcomes, 0)[:, None]  # a weight of 0 does not silence NaN
        rows = [nothing[None], project(context) + (1 - y) * wrong[None] + y * right[None], project(queries) + unknown[None]]
        x, mask = jnp.concatenate(rows), jnp.concatenate([jnp.ones(1, bool), mask])
        for i in range(self.layers):
            x = _Layer(self.heads, name=f"layer_{i}")(x, mask.size, mask)
        return nn.Dense(2, name="logits")(nn.LayerNorm(name="final_norm")(x[mask.size:]))


def success(logits: Array) -> Array:
    """`softmax(logits)[..., 1]`: the probability of a right answer."""
    return jax.nn.sigmoid(logits[..., 1] - logits[..., 0])


@dataclasses.dataclass(frozen=True)
class V0:
    """Adapter and head; parameters are `{"adapter": ..., "head": ...}` and always arguments. `states` is the encoder's D.

    With `adapter=None` the caller supplies features and `parameters["adapter"]` is missing.
    """

    head: Head
    adapter: QueryAdapter | None = None
    states: int = 0

    def init(self, key: Array) -> dict[str, Any]:
        """Fresh parameters."""
        adapter_key, head_key = jax.random.split(key)
        row, one = jnp.zeros((1, self.head.features)), jnp.ones(1)
        params = {"head": self.head.init(head_key, row, one, one > 0, row)["params"]}
        if self.adapter is not None:
            params["adapter"] = self.adapter.init(adapter_key, jnp.zeros((1, 1, self.states)), jnp.ones((1, 1), bool))["params"]
        return params

    def encode(self, params, states: Array, mask: Array, *, dropout_key: Array | None = None) -> Array:
        """z f32[B, F] of prompts: `states` f32[B, S, D], `mask` bool[B, S]. With a key, as in training."""
        training = dropout_key is not None
        rngs = {"dropout": dropout_key} if training else None
        return self.adapter.apply({"params": params["adapter"]}, states, mask, training=training, rngs=rngs)  # type: ignore[return-value]

    def logits(self, params, context: Array, outcomes: Array, mask: Array, queries: Array) -> Array:
        """f32[Q, 2] for one policy, see `Head`."""
        return self.head.apply({"params": params["head"]}, context, outcomes, mask, queries)  # type: ignore[return-value]

    def predict(self, params, context: Array, outcomes: Array, mask: Array, queries: Array) -> Array:
        """f32[M, Q], probabilities that M policies, each with its own context (`[M, N, F]`, `[M, N]`), solve Q prompts."""
        return success(jax.vmap(self.logits, in_axes=(None, 0, 0, 0, None))(params, context, outcomes, mask, queries))


def empty_context(capacity: int, features: int) -> Buffer:
    """The context of a running policy before its first result: a ring of the latest `capacity` ones (256 in the paper)."""
    row = {"features": jnp.zeros(features), "outcome": jnp.zeros(()), "prompt": jnp.zeros((), jnp.int32)}
    return empty(capacity, row)


def remember(context: Buffer, features: Array, outcomes: Array, prompt_ids: Array, real: Array) -> Buffer:
    """The context with P more results: `features` f32[P, F], mean `outcomes` f32[P], `prompt_ids` i32[P], `real` bool[P]."""
    rows = {"features": features, "outcome": outcomes.astype(jnp.float32), "prompt": prompt_ids.astype(jnp.int32)}
    return append(context, jax.tree.map(lambda x: x[:, None], rows), real[:, None])


def judge(model: V0, params, context: Buffer, queries: Array, prompt_ids: Array) -> Array:
    """f32[P], success of the running policy on P prompts with `queries` f32[P, F].

    Earlier results on these very prompts are excluded from the context: they would answer the question instead of the model.
    """
    rows = context.rows
    mask = context.real & ~jnp.any(rows["prompt"][:, None] == prompt_ids[None, :], axis=1)
    return success(model.logits(params, rows["features"], rows["outcome"], mask, queries))


def save(path: str | Path, model: V0, params) -> Path:
    """Writes sizes and parameters (as float16) to one .npz file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    def fields(module):
        return {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name not in ("parent", "name")}
    sizes = {"head": fields(model.head), "adapter": model.adapter and fields(model.adapter), "states": model.states}
    arrays = {name: np.asarray(x, np.float16) for name, x in traverse_util.flatten_dict(params, sep="/").items()}
    with path.open("wb") as file:
        np.savez_compressed(file, sizes=json.dumps(sizes), **arrays)  # type: ignore[arg-type]
    return path


def load(path: str | Path) -> tuple[V0, dict[str, Any]]:
    """`(model, params)` of a file written by `save`; ValueError for other files."""
    with np.load(path) as stored:
        if "sizes" not in stored:
            raise ValueError(f"{path} holds no V0 weights; write them with experiments/pretrain_value.py")
        sizes = json.loads(str(stored["sizes"]))
        arrays = {name: jnp.asarray(stored[name], jnp.float32) for name in stored.files if name != "sizes"}
    adapter = QueryAdapter(**sizes["adapter"]) if sizes["adapter"] else None
    return V0(Head(**sizes["head"]), adapter, sizes["states"]), traverse_util.unflatten_dict(arrays, sep="/")
