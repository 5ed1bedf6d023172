"""SFT and DPO on one batch of texts: loss and gradients of the same weights in transformers, where it is installed."""
import given_texts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.learning import layouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import Transformer, weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model in torch, the same with other weights, and their folders."""
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                      attn_implementation="eager", initializer_range=0.3, tie_word_embeddings=False)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, folder = transformers.LlamaForCausalLM(config).float(), tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        made.append((model, folder))
    return made


def loaded(folder):
    architecture, params = weights.load(folder)
    return Transformer(architecture), params


def ours(text, groups, folder, reference=None):
    """`(loss, gradient)` by packed rows."""
    (model, params), objective = loaded(folder), objectives.of(text)
    layout = layouts.packed(Policy(model, chunk=24), objective, KEEP, (16,), 1, clip_norm=None)
    rollouts = given_texts.rollouts(groups)
    if reference is not None:
        rollouts = rollouts.replace(ref_logprobs=layout.logprobs(loaded(reference)[1], None, rollouts)[0])
    state = state_lib.create(params, None, KEEP, advantages.make("reinforce"), objective, jax.random.key(1))
    state, metrics = layout.update(state, rollouts, np.zeros(rollouts.mask.shape, np.float32))
    return float(metrics["loss"]), state.opt_state, model


def check_gradients(tmp_path, gradient, model, theirs):
    from safetensors.numpy import load_file

    weights.save_hf(tmp_path / "gradient", model.config, gradient)
    found = load_file(tmp_path / "gradient" / "model.safetensors")
    slopes = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    assert found.keys() == slopes.keys()
    largest = max(np.abs(x).max() for x in slopes.values())
    for name in slopes:
        np.testing.assert_allclose(found[name], slopes[name], atol=1e-4 * largest, err_msg=name)


def test_sft_has_the_loss_of_labels(saved, tmp_path):
    model, folder = saved[0]
    longest = max(len(text.ids) for text in given_texts.TEXTS)
    ids, labels, mask = (torch.full((len(given_texts.TEXTS), longest), fill) for fill in (0, -100, 0))
    for row, text in enumerate(given_texts.TEXTS):
        count = len(text.ids)
        ids[row, :count], mask[row, :count] = torch.tensor(text.ids), 1
        labels[row, :count] = torch.tensor(np.where(text.trained, text.ids, -100))
    model.zero_grad()
    theirs = model(ids, attention_mask=mask, labels=labels).loss
    theirs.backward()
    plain = [(given_texts.text(one.ids, one.trained, one.prompt),) for one in given_texts.TEXTS]  # of weight 1
    loss, gradient, own = ours("sft", plain, folder)
    assert loss == pytest.approx(theirs.item(), rel=1e-4)
    check_gradients(tmp_path, gradient, own, model)


def test_dpo_has_the_loss_of_its_equation(saved, tmp_path):
    (model, folder), (reference, other) = saved

    def total(of, text):
        ids = torch.tensor(text.ids).long()[None]
        every = of(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return every[torch.tensor(text.trained[1:])].sum()

    model.zero_grad()
    losses = []
    for chosen, rejected in given_texts.PAIRS:
        with torch.no_grad():
            before = total(reference, chosen) - total(reference, rejected)
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (total(model, chosen) - total(model, rejected) - before)))
    theirs = torch.stack(losses).mean()
    theirs.backward()
    loss, gradient, own = ours("dpo", given_texts.PAIRS, folder, other)
    assert loss == pytest.approx(theirs.item(), rel=1e-4)
    check_gradients(tmp_path, gradient, own, model)
