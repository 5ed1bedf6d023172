"""Where every parameter lies in a checkpoint: one table, read by the loaders and by the export."""
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.models.weights import experts

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


Index = tuple[slice, ...]
Layout = Callable[[Any], Any]  # a tree of shapes -> a tree of shardings


class Place(NamedTuple):
    """One stored tensor: our `path` and `layer` (None outside the stack), its names in files, its shape there.

    expert: which of the layer's it belongs to, if to one; GGUF files keep those of a layer as one tensor `[E, ...]`.
    """

    path: tuple[str, ...]
    layer: int | None
    hf: str
    gguf: str
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def transposed(self) -> bool:
        """Files keep matrices as `[out, in]`, we keep them as `[in, out]`."""
        return self.path[-1] == "kernel"


Read = Callable[[Place, Index], np.ndarray]


def places(config: ModelConfig) -> Iterator[Place]:
    """All stored tensors of a model, those of one stacked parameter in a row."""
    in_layer = {**_LAYER, **(_POST_NORMS if config.post_norms else {}), **experts.names(config.family)}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(Transformer(config).abstract_params())[0]:
        path = tuple(key.key for key in keys)
        suffix = "bias" if path[-1] == "bias" else "weight"
        if path[0] != "layers":
            hf, gguf = _TOP[path[0]]
            yield Place(path, None, f"{hf}.{suffix}", f"{gguf}.{suffix}", leaf.shape)
            continue
        hf, gguf = in_layer[path[1]]
        many, shape = leaf.ndim == 4, leaf.shape[:-3:-1] if path[-1] == "kernel" else leaf.shape[1:]
        for i in range(config.num_layers):
            for expert in range(leaf.shape[1]) if many else (None,):
                name = f"model.layers.{i}.{hf.format(expert)}.{suffix}"
                yield Place(path, i, name, f"blk.{i}.{gguf}.{suffix}", shape, expert)


def assemble(config: ModelConfig, read: Read, dtype: Any, layout: Layout | None = None) -> dict:
    """The parameter tree from `read(place, index)`, the part `index` of a stored tensor; without a `layout` on one device.

    With one each device gets its piece and nothing else, and of the tensors only what the devices of this process hold is
    asked for. The host has one parameter at a time.
    """
    abstract = Transformer(config).abstract_params()
    shardings = [None] * len(jax.tree.leaves(abstract)) if layout is None else jax.tree.leaves(layout(abstract))
    found = []
    for (_, stored), leaf, sharding in zip(
            itertools.groupby(places(config), lambda place: place.path), jax.tree.leaves(abstract), shardings, strict=True):
        part = functools.partial(_part, tuple(stored), leaf.shape, read, dtype)
        found.append(jnp.array(part(())) if sharding is None else jax.make_array_from_callback(leaf.shape, sharding, part))
    return jax.tree.unflatten(jax.tree.structure(abstract), found)


def _part(stored: tuple[Place, ...], shape: tuple[int, ...], read: Read, dtype: Any, index: Index) -> np.ndarray:
    """The part `index` of a parameter of that `shape`; `()` is all of it."""
    index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index or (slice(None),) * len(shape), shape))
    if stored[0].layer is None:
        return np.array(read(stored[0], index), dtype)
    part = np.empty([one.stop - one.start for one in index], dtype)  # assigning to a layer converts its precision
    lead = 1 if stored[0].expert is None else 2  # axes of layers, and of their experts
    asked = [place for place in stored
             if all(one.start <= number < one.stop for one, number in zip(index[:lead], (place.layer, place.expert)))]
    inner = index[lead:]
    for own, place in zip(part.reshape(-1, *part.shape[lead:]), asked, strict=True):
        own[...] = read(place, inner[::-1]).T if place.transposed else read(place, inner)
    return part


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
