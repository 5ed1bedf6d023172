"""Where every parameter lies in a checkpoint: one table, read by the loaders and by the export."""
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer

# module of our tree -> its name in Hugging Face files, its name in GGUF files
_TOP = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "unembed": ("lm_head", "output"),
}
_LAYER = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_POST_NORMS = {  # Gemma 3 gives `post_attention_layernorm` its literal meaning
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}


class Place(NamedTuple):
    """One stored tensor: our `path` and `layer` (None outside the stack), its names in files, its shape there."""

    path: tuple[str, ...]
    layer: int | None
    hf: str
    gguf: str
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        """Files keep matrices as `[out, in]`, we keep them as `[in, out]`."""
        return self.path[-1] == "kernel"


def places(config: ModelConfig) -> Iterator[Place]:
    """All stored tensors of a model, those of one stacked parameter in a row."""
    in_layer = _LAYER | (_POST_NORMS if config.post_norms else {})
    for keys, leaf in jax.tree_util.tree_flatten_with_path(Transformer(config).abstract_params())[0]:
        path = tuple(key.key for key in keys)
        suffix = "bias" if path[-1] == "bias" else "weight"
        if path[0] != "layers":
            hf, gguf = _TOP[path[0]]
            yield Place(path, None, f"{hf}.{suffix}", f"{gguf}.{suffix}", leaf.shape)
            continue
        hf, gguf = in_layer[path[1]]
        shape = leaf.shape[:0:-1] if path[-1] == "kernel" else leaf.shape[1:]
        for i in range(config.num_layers):
            yield Place(path, i, f"model.layers.{i}.{hf}.{suffix}", f"blk.{i}.{gguf}.{suffix}", shape)


def assemble(config: ModelConfig, read: Callable[[Place], np.ndarray], dtype: Any) -> dict:
    """The parameter tree from `read(place)`, tensor by tensor; peak memory is the tree and one stacked parameter."""
    params: dict = {}
    stack = None
    for place in places(config):
        tensor = read(place)
        tensor = tensor.T if place.transposed else tensor
        parent = params
        for key in place.path[:-1]:
            parent = parent.setdefault(key, {})
        if place.layer is None:
            parent[place.path[-1]] = jnp.array(tensor, dtype)
            continue
        if place.layer == 0:
            stack = np.empty((config.num_layers, *tensor.shape), dtype)  # assigning to a layer converts its precision
        stack[place.layer] = tensor
        if place.layer == config.num_layers - 1:
            parent[place.path[-1]] = jnp.array(stack)
    return params


def check_shape(tensor_name: str, found: tuple[int, ...], expected: tuple[int, ...], file: Any) -> None:
    """Raises ValueError unless a stored tensor has the shape that the config implies."""
    if tuple(found) != tuple(expected):
        raise ValueError(f"tensor {tensor_name!r} in {file}: expected shape {tuple(expected)}, found {tuple(found)}; "
                         "the file and its config disagree")


def check_nothing_left(names: set[str], file: Any) -> None:
    """Raises ValueError for stored tensors that the architecture would not read: the model would compute otherwise."""
    if names:
        some = ", ".join(sorted(names)[:4])
        raise ValueError(f"{file} holds {len(names)} tensors that this architecture does not read ({some}"
                         f"{', ...' if len(names) > 4 else ''}); the model has a feature that is not supported")
