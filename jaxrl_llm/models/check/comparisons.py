"""One model, by every path through it, against a reference: how far apart the numbers are."""
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import Transformer, weights
from jaxrl_llm.models.logprobs import token_logprobs

COLUMNS = ("logits", "padding", "cached decode", "packed update", "export", "GGUF")
ABSENT = "–"
N, NEW, GROUP = 20, 64, 3
jit = functools.partial(jax.jit, static_argnums=0,  # compiling is what takes time
                        compiler_options={"xla_backend_optimization_level": 0})
Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]  # tokens and mask, both [B, N] -> logits [B, N, V]


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as loaded here, and the logits of a reference for it."""

    directory: Path
    model: Transformer
    params: Any
    reference: Logits


def in_transformers(directory: Path) -> Any:
    """The model of a directory in transformers, float32; None where that is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    config = transformers.AutoConfig.from_pretrained(directory)
    multimodal = config.get_text_config() is not config
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, attn_implementation="eager", dtype="float32").eval()


def torch_logits(reference: Any) -> Logits:
    """The logits of a model in transformers; positions count real tokens."""
    def logits(tokens, mask):
        import torch

        mask = torch.tensor(mask)
        with torch.no_grad():
            return reference(torch.tensor(tokens), attention_mask=mask.long(),
                             position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits.numpy()

    return logits


@jit
def plain_logits(model, params, tokens, mask):
    """Logits `[B, N, V]` of plain rows: the path without caches and packing."""
    return model.logits(params, model.hidden_states(params, tokens, mask)[0])


@jit
def greedy(model, params, prompt_tokens, prompt_mask):
    """`i32[P, NEW]`: the most likely tokens after each prompt, by prefill and decode steps alone."""
    prompt, state = model.prefill(params, prompt_tokens, prompt_mask)
    layers = model.unstack_layers(params)

    def step(carry, t):
        cache, state = carry
        tokens = jnp.argmax(model.logits(params, state), -1)
        state, cache = model.decode_step(params, layers, tokens, t, prompt, cache)
        return (cache, state), tokens[:, 0]

    return jax.lax.scan(step, (model.empty_completions(prompt, 1, NEW), state[:, None]), jnp.arange(NEW))[1].T


def packed_logprobs(model, params, prompt_tokens, prompt_mask, tokens, lora=None):
    """Log-prob of every completion token `f32[P, G, T]` as training computes it: packed rows, logits in chunks."""
    c, states = model.config, model.packed_states(params, prompt_tokens, prompt_mask, tokens, lora=lora)[0]
    logprobs, _ = token_logprobs(states.reshape(-1, states.shape[-1]), model.unembedding(params), tokens.reshape(-1), chunk=16,
                                 divisor=c.logit_divisor, softcap=c.logit_softcap)
    return logprobs.reshape(tokens.shape)


def difference(actual, expected) -> float:
    """The largest difference, as a share of the largest expected number."""
    return float(np.abs(np.asarray(actual) - np.asarray(expected)).max() / np.abs(expected).max())


def padded_rows(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask `[4, N]`: rows without padding, with left, right and both paddings."""
    mask = np.ones((4, N), bool)
    mask[1, :7], mask[2, 9:], mask[3, :3], mask[3, 15:] = False, False, False, False
    return np.random.default_rng(0).integers(0, vocab, (4, N)), mask


def groups(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two prompts `[2, 9]`, one of them padded on the left, and three completions of each `[2, 3, 7]`."""
    random, mask = np.random.default_rng(1), np.ones((2, 9), bool)
    mask[1, :4] = False
    return random.integers(0, vocab, (2, 9)), mask, random.integers(0, vocab, (2, GROUP, 7))


def as_rows(prompt_tokens, prompt_mask, tokens) -> tuple[np.ndarray, np.ndarray]:
    """The packed rows written out one by one: `[P G, S + T]` tokens and mask."""
    both = [np.repeat(x, tokens.shape[1], axis=0) for x in (prompt_tokens, prompt_mask)]
    return (np.concatenate([both[0], tokens.reshape(-1, tokens.shape[2])], axis=1),
            np.pad(both[1], ((0, 0), (0, tokens.shape[2])), constant_values=True))


def compare(loaded: LoadedCheckpoint) -> dict[str, str]:
    """The cells of `COLUMNS`: bounds on differences, counts of equal tokens."""
    model, params, reference = loaded.model, loaded.params, loaded.reference
    tokens, mask = padded_rows(model.config.vocab_size)
    expected, actual = reference(tokens, mask), np.asarray(plain_logits(model, params, tokens, mask))
    decoded = greedy_agreement(loaded)
    cells = (bound(difference(actual[0], expected[0])), bound(difference(actual[1:][mask[1:]], expected[1:][mask[1:]])),
             f"{decoded[0]} of {decoded[1]}", bound(packed_difference(loaded)), export_difference(loaded),
             gguf_difference(loaded))
    return dict(zip(COLUMNS, cells, strict=True))


def bound(x: float) -> str:
    """A number as the power of ten that bounds it, or `equal`."""
    return "equal" if x == 0 else f"< 1e{int(np.floor(np.log10(x))) + 1}" if np.isfinite(x) else "not finite"


def greedy_agreement(loaded: LoadedCheckpoint) -> tuple[int, int]:
    """`(equal, all)`: how many greedily continued tokens are also the reference's choice, and how many there are."""
    prompts, mask, _ = groups(loaded.model.config.vocab_size)
    chosen = np.asarray(greedy(loaded.model, loaded.params, prompts, mask))
    rows, rows_mask = np.concatenate([prompts, chosen], axis=1), np.pad(mask, ((0, 0), (0, NEW)), constant_values=True)
    choices = loaded.reference(rows, rows_mask).argmax(-1)[:, prompts.shape[1] - 1:-1]
    return int((choices == chosen).sum()), chosen.size


def packed_difference(loaded: LoadedCheckpoint) -> float:
    """Difference between log-probs of packed rows and of plain rows in the reference."""
    batch = groups(loaded.model.config.vocab_size)
    rows, mask = as_rows(*batch)
    expected = jax.nn.log_softmax(loaded.reference(rows, mask), axis=-1)[:, batch[0].shape[1] - 1:-1]
    expected = np.take_along_axis(np.asarray(expected), batch[2].reshape(len(rows), -1, 1), axis=-1)
    logprobs = jit(packed_logprobs)(loaded.model, loaded.params, *batch)
    return difference(np.asarray(logprobs).ravel(), expected.ravel())


def export_difference(loaded: LoadedCheckpoint) -> str:
    """Logits of what was written, as transformers reads it; without transformers, weights as read back here."""
    with tempfile.TemporaryDirectory() as directory:
        weights.save_hf(directory, loaded.model.config, loaded.params)
        again = in_transformers(Path(directory))
        if again is None:
            back = weights.load(directory)[1]
            return bound(max(map(difference, jax.tree.leaves(back), jax.tree.leaves(loaded.params))))
        tokens, mask = padded_rows(loaded.model.config.vocab_size)
        return bound(difference(torch_logits(again)(tokens[:1], mask[:1]), loaded.reference(tokens[:1], mask[:1])))


def gguf_difference(loaded: LoadedCheckpoint) -> str:
    """Difference between logits of the directory's GGUF file, which may be quantised, and of the directory itself."""
    files = sorted(loaded.directory.glob("*.gguf"))
    if not files:
        return ABSENT
    config, params = weights.load(files[0])
    tokens, mask = padded_rows(config.vocab_size)
    logits = plain_logits(Transformer(config), params, tokens[:1], mask[:1])
    return bound(difference(logits, plain_logits(loaded.model, loaded.params, tokens[:1], mask[:1])))
