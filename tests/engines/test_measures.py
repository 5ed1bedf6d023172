"""Token columns that engines measure beside log-probs: the same by all of them, of each token, and nothing unasked."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import KEY, MODELS, STOPS, G, P, drain, engine, logits_before, params, prompts, request
from test_engines_agree import asked, nodes, scanning

from jaxrl_llm.data.columns import Column
from jaxrl_llm.engines import Sampling, generate, measures, row_keys
from jaxrl_llm.engines.engine import SlotEngine
from jaxrl_llm.engines.measures import MEASURES, Measure
from jaxrl_llm.tools.registry import Kind

MODEL = MODELS["experts"]
BOTH = ("rank", "routes")


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    """A column from outside the package: how many tokens were likelier than the one that was drawn."""
    def rank(config):
        def of_draw(logits, tokens):
            return (logits > jnp.take_along_axis(logits, tokens[:, None], axis=1)).sum(-1)
        return Measure(Column("rank", "token", np.int32, fill=-1, to="extras"), of_draw=of_draw)

    monkeypatch.setitem(MEASURES, "rank", Kind(rank))


@jax.jit
def routed(weights, row):
    """i[n, L, k], the experts of a plain row, with its attention written out."""
    seen = jnp.tril(jnp.ones((len(row), len(row)), bool))

    def attend(q, k, v, local):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) * MODEL.config.attention_scale, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v), None

    x = MODEL.embed(weights, row[None])
    experts = MODEL._scan_layers(weights, None, x, jnp.arange(len(row))[None], attend, None,
                                 tally=lambda routing: routing["experts"])[3]
    return jnp.moveaxis(experts[:, 0], 0, 1)


def check(columns, before, tokens):
    """The columns of tokens that the policy drew after those `before` are what a plain pass over all of them says."""
    whole = (*before, *tokens)
    logits = logits_before(list(whole), len(before), params("experts"), "experts")
    ranks = (logits > np.take_along_axis(logits, np.array(tokens)[:, None], 1)).sum(1)
    assert columns["rank"].dtype == np.int32 and columns["rank"].tolist() == ranks.tolist()
    row = np.pad(np.array(whole, np.int32), (0, 64 - len(whole)))
    expected = np.asarray(routed(params("experts"), row))[len(before):len(whole)]
    np.testing.assert_array_equal(np.sort(columns["routes"][:-1]), np.sort(expected[:-1]))
    assert columns["routes"].dtype == np.int16 and (columns["routes"][-1] == -1).all()


@pytest.mark.slow
def test_all_engines_measure_what_a_plain_pass_says():
    requests = asked(limits=(8,) * P)
    scan, slots, paged = (nodes(one, requests) for one in (
        scanning("experts", most=8, columns=BOTH), engine("experts", slots=4, columns=BOTH),
        engine("experts", slots=8, paged=True, columns=BOTH)))
    for n, asked_for in enumerate(requests):
        one, *others = (made[asked_for.uid] for made in (scan, slots, paged))
        for other in others:
            np.testing.assert_array_equal(one.tokens, other.tokens)
            for name in BOTH:
                np.testing.assert_array_equal(one.columns[name], other.columns[name])
        if not n % G:
            check(one.columns, tuple(prompts()[n // G]), tuple(one.tokens))
    assert len(np.unique(np.concatenate([node.columns["routes"].ravel() for node in scan.values()]))) == 5  # and none


@pytest.mark.slow
def test_turns_forks_and_stop_strings_keep_columns_with_their_tokens():
    one = engine("experts", slot_tokens=64, columns=BOTH)
    one.submit(request(0, keep=True, limit=6, stop_tokens=()))
    first, = drain(one)[0]
    check(first.columns, tuple(prompts()[0]), tuple(first.tokens))
    one.extend(0, [5, 6, 11], limit=12)
    one.submit(request(1, parent=0, tokens=(), limit=9, stop_tokens=()))
    nodes = drain(one)
    before = (*prompts()[0], *first.tokens.tolist(), 5, 6, 11)
    for uid in (0, 1):
        check(nodes[uid][0].columns, before, tuple(nodes[uid][0].tokens))
    one = engine("experts", slot_tokens=64, columns=BOTH)
    one.submit(request(2, tokens=before, seed=0, limit=12, stop_tokens=()))
    alone, = drain(one)[2]
    one.submit(request(3, tokens=before, seed=0, limit=12, stop_tokens=(), stop_sequences=[alone.tokens[2:4].tolist()]))
    cut, = drain(one)[3]
    assert cut.tokens.tolist() == alone.tokens.tolist()[:len(cut.tokens)] and len(cut.tokens) <= 4
    check(cut.columns, before, tuple(cut.tokens))


def test_columns_of_routers_belong_to_the_token_that_was_read():
    """Three steps draw three tokens; the second and third read the first and second."""
    made = measures.of(("routes",), MODEL.config)
    steps = [np.full((2, 2), n, np.int16) for n in (9, 1, 2)]
    columns = measures.of_node(made, [(step,) for step in steps])
    assert columns["routes"][:, 0, 0].tolist() == [1, 2, -1] and columns["routes"].dtype == np.int16
    whole = jnp.asarray(np.stack([*steps, steps[0]]))[None]
    settled = measures.settled(("routes",), MODEL.config, {"routes": whole}, jnp.array([[True, True, True, False]]))
    assert settled["routes"][0, :, 1, 1].tolist() == [1, 2, -1, -1]
    assert measures.of_node(made, [])["routes"].shape == (0, 2, 2)


def test_a_column_that_the_model_has_not_is_refused():
    dense = MODELS["dense"].config
    assert measures.provided(dense) == {"logprobs", "entropies", "version", "rank"}
    assert measures.provided(MODEL.config) == {"logprobs", "entropies", "version", "rank", "routes"}
    for name in ("routes", "surprise"):
        with pytest.raises(ValueError, match=f"does not provide the token column '{name}' of this model; it provides "
                                             "entropies, logprobs, rank, version"):
            SlotEngine(MODELS["dense"], {"embed": np.zeros(1)}, jax.random.key(0), slots=1, slot_tokens=2, columns=(name,))


@pytest.mark.slow
def test_what_nobody_asks_for_is_not_compiled():
    """The sampler has the same operations with an empty list of columns as without the argument."""
    assert measures.tally((), MODEL.config) is None
    given = np.ones((P, 2), np.int32), np.ones((P, 2), bool), row_keys(KEY, np.arange(P * G).reshape(P, G)), Sampling(
        np.float32(0.8))
    traced = [jax.make_jaxpr(functools.partial(generate, MODEL, max_tokens=3, stop_ids=STOPS, **more))(
        params("experts"), *given) for more in ({}, {"columns": ()}, {"columns": ("routes",)})]
    assert str(traced[0]) == str(traced[1]) and "i16" not in str(traced[0]) and "i16" in str(traced[2])
