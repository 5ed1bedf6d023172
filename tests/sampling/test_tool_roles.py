"""Results of tools in runs, token by token, for chat templates with a role of tools and without one (the shape of Gemma 3)."""
import json

import chatter
import pytest
from published_templates import BEGINS, ENDS, TEMPLATES, vocabulary
from tokenizer_cases import write_checkpoint

from jaxrl_llm import environments
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments import Environment
from jaxrl_llm.environments.parsers import PARSERS
from jaxrl_llm.sampling import shown_tools
from jaxrl_llm.setup import setup
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers import ByteTokenizer, conversation

MUTE = ("{% if messages | length > 1 %}{{ raise_exception('one question, one answer') }}{% endif %}{{ messages[0].content }}"
        "{% if add_generation_prompt %}{{ '\n' }}{% endif %}")
CALLS = "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in (
    {"name": "calculator", "arguments": {"expression": "6*7"}}, {"name": "abacus"}))
PREFACE = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "calculator"},
           {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}, {"role": "user", "content": "Now you."}]


def forced(*, preface=()) -> Environment:
    """A task with a calculator. The first message of the policy is read as two calls, whatever it says."""
    inner = environments.make("tool_use", turns=3, preface=preface)
    return Environment(
        name="forced", task=inner.task, reset=inner.reset, tools=inner.tools, facts=inner.facts, replayable=False,
        step=lambda state, message: inner.step(state, message if state.turns else {**message, "content": CALLS}))


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    def of(family, **changes):
        folder = tmp_path_factory.mktemp("tokenizer") / family
        write_checkpoint(folder, vocabulary(), {
            "eos_token": ENDS.get(family, "<|im_end|>"), "pad_token": "<|endoftext|>", "chat_template": TEMPLATES[family],
            **({"bos_token": BEGINS[family]} if family in BEGINS else {})})
        return chatter.get_config(**{
            "environment": "test_tool_roles:forced", "model.tokenizer": str(folder), "model.chat_template": "",
            "prompts.max_tokens": 1024, "sampling.max_tokens": 192, "prompts.per_step": 2, "sampling.group": 2, **changes})

    return of


@pytest.mark.slow
@pytest.mark.parametrize("family, hears", [("gemma3", False), ("qwen2.5", True)])
def test_a_trajectory_with_calls_in_the_roles_of_the_template(configured, family, hears):
    run, params = setup.build(configured(family))
    stream = run.source.stream
    tokenizer, noted = stream.tokenizer, [name for name, _ in stream.prepare()]
    assert stream.partner.hears_tools == hears and noted == ["environment", *([] if hears else ["results of tools"])]
    forest = run.source.next(run.learner.publish(setup.initial_state(run, params))).forest
    assert len(forest.ends) == 4, "none was lost"
    variables = {"tools": list(stream.partner.runner.environment.tools)}
    for end in forest.ends:
        nodes = []
        while forest.role[end] != Role.PROMPT:
            nodes.insert(0, end)
            end = forest.parent[end]
        ids = forest.prompt_ids(int(forest.prompt[nodes[0]])).tolist()
        messages = list(forest.problems[forest.prompt[nodes[0]]].prompt)
        assert ids == conversation.start(tokenizer, messages, **variables)
        own = [forest.tokens[forest.offset[node]:][:forest.length[node]].tolist() for node in nodes]
        first, _, rest = forest.texts[nodes[1]].partition("\n")
        assert first == "42" and rest.startswith("error: Unknown tool 'abacus'") and "\n" not in rest
        said = [{"role": "tool", "content": first}, {"role": "tool", "content": rest}] if hears else [
            {"role": "user", "content": f"{first}\n{rest}"}]
        assert own[1] == conversation.extend(tokenizer, [*ids, *own[0]], said, **variables)
        shown = tokenizer.decode([*ids, *own[0], *own[1]], skip_special=False)
        spoken = {"role": "assistant", "content": forest.texts[nodes[0]]}
        if spoken["content"] == spoken["content"].strip():  # what Gemma 3's template would trim
            assert shown == tokenizer.render_chat([*messages, spoken, *said], **variables)
        assert shown.endswith("<start_of_turn>model\n" if not hears else "</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_results_in_the_opening_are_the_users_as_well(configured):
    run, _ = setup.build(configured("gemma3", environment=f"test_tool_roles:forced(preface={PREFACE!r})"))
    stream = run.source.stream
    problem = run.source.task.train[0]
    [ids] = stream.partner.encode([problem], stream.tokenizer)
    assert stream.tokenizer.decode(ids, skip_special=False) == (
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\ncalculator<end_of_turn>\n<start_of_turn>user\n"
        f"2\n3\nNow you.\n{problem.prompt[0]['content']}<end_of_turn>\n<start_of_turn>model\n")


def test_a_template_that_cannot_show_results_is_refused_at_the_start(configured):
    with pytest.raises(ValueError, match="'forced' answers calls, and the chat template writes neither messages of tools"):
        setup.build(configured("gemma3", **{"model.chat_template": MUTE}))
    run, _ = setup.build(configured("gemma3", **{"model.chat_template": MUTE, "environment": "single(options={'chat': True})"}))
    assert run.source.stream.prepare() == [], "nothing is to be shown after its one turn"


@pytest.mark.parametrize("family, described", [("smollm2", True), ("gemma3", True), ("qwen2.5", False)])
def test_a_template_that_shows_no_tools_gets_a_description_of_them(configured, family, described):
    """Names, types and an example that the parser reads, behind the system's message or before the user's."""
    run, _ = setup.build(configured(family, environment="tool_use(turns=3, parser=pythonic)"))
    stream = run.source.stream
    [ids] = stream.partner.encode([run.source.task.train[0]], stream.tokenizer)
    shown = stream.tokenizer.decode(ids, skip_special=False)
    assert ("tools" in dict(stream.prepare())) == described and "calculator" in shown
    line = shown.partition("A call is written like this: ")[2].partition("\n")[0]
    assert ([call.name for call in PARSERS["pythonic"](line)] == ["calculator"]) == described
    assert shown.count('"expression"') == 1 + described or not described
    preface = [{"role": "system", "content": "Call the calculator."}]
    run, _ = setup.build(configured(family, environment=f"tool_use(turns=3, parser=pythonic, preface={preface!r})"))
    assert "tools" not in dict(run.source.stream.prepare()), "the messages say it"


@pytest.mark.parametrize("template, lost", [
    ("{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or () %}{{ c.function.name }}{% endfor %}"
     "{% endfor %}", ""),
    ("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}", "the call of 'add'"),
    ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "the result '2'")])
def test_calls_of_a_data_set_that_the_template_leaves_out_are_said(template, lost, recwarn):
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    asked = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "2"})
    problems = [Problem("1+1", "2", 0), Problem(asked[:1], "2", 1), Problem(asked, "2", 2)]
    shown_tools.warn_of_calls_left_out(ByteTokenizer(template), problems)
    said = [str(warning.message).partition(" in the prompt")[0] for warning in recwarn]
    assert said == ([f"the chat template leaves out {lost}"] if lost else [])
