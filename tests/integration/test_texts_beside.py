"""Given texts beside the prompts of a batch: how many, what is seen of them, their order, what is held out, and refusals."""
import dataclasses
import json

import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm import objectives
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.rollouts import Role, with_apart
from jaxrl_llm.recorders import Recorder
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling import beside
from jaxrl_llm.setup import agreement, setup
from jaxrl_llm.store import pending


def tiny(method="chord", **changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "texts.heldout": 5, **changes})
    return config


def source(**changes):
    return setup.opened(tiny(**changes))[0].source


def test_chord_has_a_fifth_of_texts():
    one = source()
    assert one.beside.count == 4 and one.prompts == 4 and one.stream.group == 4  # 16 rollouts
    assert one.position()["texts"]["next_problem"] == 0
    assert source(**{"texts.share": 0.5, "learner.micro_batches": 2}).beside.count == 16
    assert source(method="grpo").beside.count == 0


def test_texts_stand_apart_in_their_rollouts():
    first, second = source().held_out_texts(2)
    assert first.valid.shape == (8, 4) and not first.token_mask.any()
    assert first.extras["given"].sum(1).tolist() == [1] * 4 + [0] * 4 and second.extras["given"].sum() == 1
    whole = with_apart(first)
    assert (whole.role[whole.token_mask] == Role.EXPERT).all() and (whole.valid == first.extras["given"]).all()
    assert whole.extras["apart"].sum() == whole.token_mask.sum() > 0 and (first.prompt_ids[:4] < 0).all()


def test_a_position_belongs_to_its_texts_and_processes_compare_them(tmp_path):
    def of(answer):
        path = tmp_path / f"{answer}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{n}", "response": answer}) + "\n" for n in range(9)))
        return source(**{"texts.path": str(path), "texts.options": "chat=False", "texts.heldout": 2})

    one, other = of("a"), of("b")
    with pytest.raises(ValueError, match="given texts, have other prompts or answers"):
        other.set_position(one.position())
    found = [agreement.digests(each.task, each, 4) for each in (one, other)]
    assert [name for name in found[0] if found[0][name] != found[1][name]] == ["the given texts", "the held-out texts"]


def test_a_batch_with_texts_that_waits_is_stored_and_read_again():
    """Under a lag a checkpoint holds it as JSON."""
    one = source()
    forest = beside.planted(one.beside.held_out[0], one, 0, 0)
    batch = Finished(one.held_out_texts(0)[0], forest, {})
    again = pending.decode(json.loads(json.dumps(pending.encode(batch))), one)
    assert again.forest.tokens.tolist() == forest.tokens.tolist() and again.forest.problems == forest.problems
    jax.tree.map(np.testing.assert_array_equal, again.rollouts, batch.rollouts)


def test_a_file_of_texts_stands_beside_prompts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * 40, "response": "y" * 30, "weight": n}) + "\n" for n in range(4)))
    one = source(**{"texts.path": str(path), "texts.options": "chat=False", "texts.heldout": 1})
    assert one.beside.longest == (48, 32) and one.ladders.tokens == (32,) and one.ladders.prompt_tokens[-1] >= 40
    assert one.held_out_texts(0)[0].extras["weight"].tolist() == [[0.0] * 4] + [[1.0] * 4] * 7


@pytest.mark.parametrize("changes, said", [
    ({"method": "grpo", "texts.share": 0.2}, "learns from none"), ({"texts.share": 1.0}, "give a share from 0 to less than 1"),
    ({"method": "grpo", "objective": "+ nll(0.1, on=given)"}, "texts beside the prompts, config.texts.share"),
    ({"method": "grpo", "objective": "+ echo(0.05)"}, "this run has none; set environment"),
    ({"method": "sil", "objective": "+ nll(0.1, on=given)", "texts.share": 0.1}, "without such a replay")])
def test_what_cannot_be(changes, said):
    with pytest.raises((ValueError, NotImplementedError), match=said):
        source(**changes)


@pytest.mark.slow
def test_the_loss_of_held_out_texts_fits_nothing():
    """A critic of turns is fitted to a batch first, and its fit consumes the state that the run goes on with."""
    def fit(own, policy, rollouts):
        raise AssertionError("the loss of held-out texts fits a recorder")

    run, params = setup.build(tiny(**{"eval.problems": 0}))
    one = Recorder("mine", ("mine",), lambda own, params, lora, rollouts: {"mine": rollouts.rewards + own}, fit=fit,
                   fits_first=True)
    learner = dataclasses.replace(run.learner, recorders=(*run.learner.recorders, one))
    state = setup.initial_state(run, params).replace(beside={"mine": jnp.ones(())})
    found = learner.loss(state, run.source.held_out_texts(0), run.learner.frozen(params), objectives.make("sft"))
    assert found["loss"] > 0 and float(state.beside["mine"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method, changes", [
    ("chord", {}), ("grpo", {"objective": "+ nll(1.0, on=given)", "texts.share": 0.3, "texts.pack": False,
                             "learner.minibatches": 2, "lora.rank": 2})])
def test_a_resumed_run_is_the_straight_one(tmp_path, method, changes):
    def config(steps):
        return tiny(method, steps=steps, **{"checkpoint.every": 2, "eval.every": 0, "eval.problems": 2, **changes})

    loop.train(config(3), tmp_path / "straight")
    loop.train(config(2), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(config(3), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config(3)) for name in ("broken", "straight")))
    lines = run_files.lines(tmp_path / "straight")
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] and lines[1]["texts/count"] == lines[2]["texts/count"] > 0
    assert all(line["trained/rollouts"] == 16 for line in lines[1:])


@pytest.mark.slow
def test_an_agent_of_turns_learns_from_words_of_its_environment_and_from_texts(tmp_path):
    said = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "a"}]
    (tmp_path / "texts.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 6)
    config = chatter.get_config(method="gigpo", steps=1, objective="+ echo(0.05) + nll(0.1, on=given)", **{
        "texts.share": 0.3, "texts.path": str(tmp_path / "texts.jsonl"), "eval.every": 0, "eval.problems": 0,
        "samples_every": 0, "model.num_layers": 1})
    loop.train(config, tmp_path / "run")
    line = run_files.lines(tmp_path / "run")[-1]
    assert line["echo"] > 0 and line["nll_given"] > 0 and line["grad_norm"] > 0


@pytest.mark.slow
def test_rollouts_and_their_metrics_are_those_without_texts(tmp_path):
    """Weights are equal before the first update: what is sampled, and all that is said of it, is what it is without texts."""
    texts = {"objective": "+ nll(0.1, on=given)", "texts.share": 0.3, "controllers": "pass_rate"}
    alone = {"controllers": "pass_rate", "learner.packed_rows": 1}
    lines = []
    for name, changes in (("texts", texts), ("alone", alone)):
        loop.train(tiny("grpo", steps=1, **{"eval.problems": 0, **changes}), tmp_path / name)
        lines.append(run_files.lines(tmp_path / name)[-1])
    with_them, without = lines
    same = [key for key in without if not key.startswith(("seconds", "time", "host", "loss", "grad_norm", "tokens_per"))]
    for key in same:
        assert key in with_them, key
    for key in ("reward/mean", "completion/length", "entropy", "groups/all_equal", "trained/rollouts", "max/ratio"):
        np.testing.assert_allclose(with_them[key], without[key], rtol=1e-5, err_msg=key)
    assert with_them["loss"] == pytest.approx(without["loss"] + 0.1 * with_them["nll_given"], rel=1e-5)
