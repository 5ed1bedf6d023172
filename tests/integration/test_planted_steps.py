"""What a trajectory begins with is read with the prompt: it costs no step of decoding, in either engine, by count."""
import jax
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies import Begin, BeginPart, FromTrace

HINT, MORE = [65] * 512, 16


def steps_of(engine, *several):
    """`(steps, tokens of the policy)` of decoding for each of several lists of acts, all by one program."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({
        "model.num_layers": 1, "sampling.engine": engine, "sampling.group": 8, "sampling.max_tokens": len(HINT) + MORE,
        "prompts.per_step": 1, "learner.micro_batches": 1})
    run, params = setup.build(config)
    stream, problem, found = run.source.stream, run.source.task.train[0], []
    stream.publish(Snapshot(3, params, None, jax.random.key(0)))
    counted, made = [], stream._engine
    if engine == "scan":
        program = made._program

        def counting(*args, **named):
            completions = program(*args, **named)
            counted.append(int(completions.decode_steps))
            return completions

        made._program = counting
    else:
        decode = made._caches.decode

        def counting(*args, steps, **named):
            counted.append(steps)
            return decode(*args, steps=steps, **named)

        made._caches.decode = counting
    for number, acts in enumerate(several):
        counted.clear()
        forest = run.source.planted([(problem, stream.partner.encode([problem], stream.tokenizer)[0])], 0)
        whole = stream.run(forest, acts, 800 * number)
        found.append((sum(counted), int(whole.length[whole.role == Role.POLICY].sum())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_hints_and_traces_cost_no_step(engine):
    """A hint of 512 tokens before 16 of the policy; one of eight rollouts that is a trace, beside seven completions."""
    hint, trace = (BeginPart(Role.HINT, HINT),), (BeginPart(Role.EXPERT, FromTrace()),)
    whole = BeginPart(Role.EXPERT, HINT)
    (plain, _), (hinted, drawn), (seven, few), (eight, same), (long, again) = steps_of(
        engine, [Begin(0, 2, limit=MORE)], [Begin(0, 2, hint, limit=len(HINT) + MORE)], [Begin(0, 7, limit=MORE)],
        [Begin(0, 7, limit=MORE), Begin(0, 1, trace)], [Begin(0, 7, limit=MORE), Begin(0, 1, (whole,), ends=True)])
    assert 0 < hinted <= plain <= MORE and 0 < drawn <= 2 * MORE
    assert seven == eight == long > 0 and few == same == again > 0
