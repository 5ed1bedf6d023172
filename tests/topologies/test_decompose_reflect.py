"""Cog-Rethinker: the worked example of its stages and its loss, what each stage reads, and both memories."""
import jax
import jax.numpy as jnp
import numpy as np
from test_hint_replaced import encode
from test_topologies import asked, follow

from jaxrl_llm import advantages, control, objectives
from jaxrl_llm.data.rollouts import Role, from_lists
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import single
from jaxrl_llm.topologies.base import remember as restore
from jaxrl_llm.topologies.base import remembered
from jaxrl_llm.topologies.decompose_reflect import DECOMPOSED, REFLECTED, decompose_reflect, need_of, shortened


def rollouts_of_the_example():
    """Prompt 0 is solved by reflection alone, prompt 1 by one of two rollouts; each rollout has one token."""
    return from_lists([[0, 0, 0, 1], [1, 0]], role=jnp.int8([[[1], [1], [6], [6]], [[1], [1], [0], [0]]]),
                      old_logprobs=jnp.full((2, 4, 1), np.log(0.5)))


def test_stages_and_loss_of_the_worked_example():
    need = need_of(np.array([0.0, 0.5]), np.array([0.0, np.nan]))
    assert [x.tolist() for x in need] == [[True, False], [True, False], [False, True]]
    rollouts = rollouts_of_the_example()
    keep = control.make_filter("moved_or_mixed").keep(rollouts)
    assert keep.tolist() == [[False, False, False, True], [True, True, False, False]]
    credited, _ = advantages.make("grpo").update(rollouts, ())
    kept = rollouts.replace(valid=keep)
    logprobs = jnp.log(jnp.array([[0.9, 0.9, 0.9, 0.25], [0.6, 0.3, 0.9, 0.9]])[..., None])
    def loss(coef, *rows):
        chosen = kept.replace(valid=keep & jnp.array(rows)[:, None])
        return objectives.make("ppo_and_moved", moved_coef=coef).update(logprobs, chosen, credited, ())[0]

    rl, moved, both = loss(0.1, False, True), loss(1.0, True, False), loss(0.1, True, True)
    np.testing.assert_allclose([rl, moved, both], [-0.141421, 1.386294, -0.002792], atol=2e-6)


def test_tokens_that_are_moved_have_the_gradient_of_supervised_learning_alone():
    rollouts = rollouts_of_the_example()
    logprobs = jnp.full((2, 4, 1), np.log(0.5))
    gradient = jax.grad(lambda x: objectives.make("ppo_and_moved").update(
        x, rollouts, jnp.full((2, 4, 1), 7.0), ())[0])(logprobs)[..., 0]
    np.testing.assert_allclose(gradient, [[-7 / 4, -7 / 4, -0.05, -0.05], [-7 / 4, -7 / 4, 0, 0]], rtol=1e-6)


def test_problems_that_are_never_solved_are_asked_twice_more():
    """Prompt 0 is solved directly, 1 by decomposition, 2 by reflection, 3 never."""
    def reward(problem, number):
        return float([number == 1, number == 2, number == 5, False][problem])

    topology = decompose_reflect(single(4, group=2), group=2, encode=encode, retries=2)
    plans, forest = follow(topology, reward)
    assert asked(plans) == [4, dict.fromkeys(range(4), 2), {1: 2, 2: 2, 3: 2}, {2: 2, 3: 2}]
    second, third = (bytes(plan.acts[0].reads).decode() for plan in plans[2:])
    first = DECOMPOSED[0]
    assert second == ("Split the problem into smaller ones, solve each, and answer.\n\n"
                      f"{first['prompt']}\n{first['solution']}\n\nq")
    other = REFLECTED[0]
    assert third == (f"{other['prompt']}\n{other['wrong']}\nThis is wrong.\n{other['solution']}\n\nq\n\n\nq\n\n\n"
                     "The answers above are wrong. Find the mistakes, and answer again.\n\nq")
    done = topology.finish(forest)
    assert topology.metrics(done) == {"decompose/prompts": 0.75, "decompose/solved": 1 / 3, "reflect/prompts": 0.5,
                                      "reflect/solved": 0.5}
    assert (done.role[done.ends] == Role.ELSEWHERE).sum() == 10 and topology.most == 6
    assert topology.memory == {"decomposed": [*DECOMPOSED, {"prompt": "q", "solution": ""}],
                               "reflected": [*REFLECTED, {"prompt": "q", "wrong": "", "solution": ""}]}
    again = decompose_reflect(single(4, group=2), group=2, encode=encode)
    restore(again, remembered(topology))
    assert again.memory == topology.memory and len(DECOMPOSED) == len(REFLECTED) == 1


def test_what_does_not_fit_is_left_out():
    """First the least near example, then the nearest, then the older wrong answer, then the newer, then the problem."""
    near = [{"prompt": "1+1=", "solution": "2"}, {"prompt": "2+2=", "solution": "4"}]
    template, problem = "{examples}{wrong}Again: {prompt}", Problem("3+3=", "6", 0)
    whole = "2+2=\n4\n\n1+1=\n2\n\n3+3=\n5\n\n3+3=\n7\n\nAgain: 3+3="
    found = [bytes(shortened(problem, template, near, ["7", "5"], encode, len(whole) - less)).decode()
             for less in (0, 1, 9, 17, 25, 33)]
    assert found == [whole, whole[8:], whole[16:], whole[24:], whole[32:], ""]
    small = decompose_reflect(single(1, group=2), group=2, encode=encode, reads=3)
    assert asked(follow(small, lambda problem, number: 0.0)[0]) == [1, {0: 2}]


def test_what_is_the_prompt_alone_is_not_asked_again():
    """Rollouts that read the prompt alone count as direct rollouts, and a plan would ask for them again and again."""
    topology = decompose_reflect(single(1, group=2), group=2, encode=encode, decompose="{examples}{prompt}", examples=0)
    assert asked(follow(topology, lambda problem, number: 0.0)[0]) == [1, {0: 2}]
    near = [{"prompt": "1+1=", "solution": "2"}]
    problem, template = Problem("3+3=", "6", 0), "{examples}{prompt}"
    assert bytes(shortened(problem, template, near, [], encode, 12)) == b"1+1=\n2\n\n3+3="
    assert shortened(problem, template, near, [], encode, 11) == []
