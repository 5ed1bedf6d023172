"""Given conversations as ids and masks: to the last id, with templates in the manner of published ones, and as transformers."""
import itertools

import numpy as np
import pytest
from published_templates import BEGINS, ENDS, TEMPLATES, vocabulary
from tokenizer_cases import write_checkpoint

from jaxrl_llm.tokenizers import ByteTokenizer, conversation, load, turns

# What the assistant says is marked with its end of turn, and without the head of its message.
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")
# As in SmolLM3, where the head and the line break behind the turn are marked too.
MARKED_WHOLE = (
    "{%- for message in messages -%}{%- if message.role == 'user' -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- elif message.role == 'assistant' -%}\n"
    "  {% generation %}\n  {%- if enable_thinking is defined and not enable_thinking -%}\n"
    "    {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}\n  {%- else -%}\n"
    "    {{ '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}\n  {%- endif -%}\n"
    "  {% endgeneration %}\n{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n' }}{%- endif -%}{%- endif -%}")
ASKED = [{"role": "user", "content": "u1"}]
TWO = [*ASKED, {"role": "assistant", "content": "<think>\nt1\n</think>\n\na1"}, {"role": "user", "content": "u2"},
       {"role": "assistant", "content": "<think>\nt2\n</think>\n\na2"}]
TOOLS = [*ASKED, {"role": "assistant", "content": "<tool_call>\nadd\n</tool_call>"}, {"role": "tool", "content": "5<|im_end|>"},
         {"role": "assistant", "content": "It is 5."}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, backend, known = tmp_path_factory.mktemp("hf"), vocabulary(), {}

    def make(name, template=None):
        if name not in known:
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS.get(name, "<|im_end|>"),
                      "pad_token": "<|endoftext|>", "chat_template": template or TEMPLATES[name]}
            config |= {"bos_token": BEGINS[name]} if name in BEGINS else {}
            path = write_checkpoint(folder / name, backend, config)
            known[name] = path, load(path)
        return known[name]

    return make


def parts(tokenizer, example):
    """The stretches of an example, as texts, and whether they are trained."""
    runs = itertools.groupby(zip(example.trained.tolist(), example.ids.tolist()), key=lambda one: one[0])
    return [(trained, tokenizer.decode([token for _, token in run], skip_special=False)) for trained, run in runs]


def test_a_conversation_is_one_example_where_the_template_keeps_what_was_said(made):
    _, tokenizer = made("qwen2.5")
    (example,) = turns.conversations(tokenizer, TWO)
    assert parts(tokenizer, example) == [
        (False, "<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nt1\n</think>\n\na1<|im_end|>"),
        (False, "\n<|im_start|>user\nu2<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nt2\n</think>\n\na2<|im_end|>")]
    assert example.ids.tolist() == tokenizer.encode_chat(TWO, add_generation_prompt=False)[:-1]  # a line break ends it
    assert example.ids[:example.prompt].tolist() == tokenizer.encode_chat(ASKED)
    assert (example.prompt, example.turns) == (10, (1, 3))


def test_the_ids_are_these(made):
    _, tokenizer = made("qwen2.5")
    (example,) = turns.conversations(tokenizer, [*ASKED, {"role": "assistant", "content": "the answer"}])
    whole = tokenizer.encode("<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>")
    assert example.ids.tolist() == whole
    assert [tokenizer.decode([i], skip_special=False) for i in example.ids[example.prompt:].tolist()] == [
        "the", " answer", "<|im_end|>"]
    assert example.trained.tolist() == [False] * 10 + [True] * 3 and len(whole) == 13


def test_turns_are_examples_of_their_own_where_the_template_drops_earlier_thoughts(made):
    _, tokenizer = made("qwen3")
    first, second = turns.conversations(tokenizer, TWO)
    assert parts(tokenizer, first) == [
        (False, "<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\n"), (True, "<think>\nt1\n</think>\n\na1<|im_end|>")]
    assert parts(tokenizer, second) == [
        (False, "<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
                "<|im_start|>user\nu2<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nt2\n</think>\n\na2<|im_end|>")]
    assert (first.turns, second.turns) == ((1,), (3,))
    (last,) = turns.conversations(tokenizer, TWO, last=True)
    assert last.ids.tolist() == second.ids.tolist() and last.turns == (3,)


def test_turns_between_which_nothing_changes_stay_together(made):
    """Qwen3 keeps thoughts while tools answer, and drops them once the user speaks."""
    _, tokenizer = made("qwen3")
    called = {"role": "assistant", "content": "<think>\nt\n</think>\n\n<tool_call>\nadd\n</tool_call>"}
    steps = [*ASKED, called, {"role": "tool", "content": "5"}, TWO[1], *TWO[2:]]
    assert [example.turns for example in turns.conversations(tokenizer, steps)] == [(1, 3), (5,)]


def test_the_words_of_tools_are_not_trained_and_spell_no_control_token(made):
    _, tokenizer = made("qwen2.5")
    (example,) = turns.conversations(tokenizer, TOOLS)
    assert [text for trained, text in parts(tokenizer, example) if trained] == [
        "<tool_call>\nadd\n</tool_call><|im_end|>", "It is 5.<|im_end|>"]
    end = tokenizer.encode("<|im_end|>")[0]
    assert example.ids.tolist().count(end) == 4, "of the user, two of the assistant, and the one behind the result"
    assert example.ids.tolist() != tokenizer.encode_chat(TOOLS, add_generation_prompt=False)[:-1]
    assert tokenizer.decode(example.ids, skip_special=False) == tokenizer.render_chat(TOOLS, add_generation_prompt=False)[:-1]


def test_it_is_what_a_policy_that_samples_these_words_has_read(made):
    _, tokenizer = made("qwen2.5")
    ids = conversation.start(tokenizer, ASKED)
    ids += tokenizer.encode(TOOLS[1]["content"]) + [tokenizer.eos_id]
    ids += conversation.extend(tokenizer, ids, TOOLS[2:3])
    ids += tokenizer.encode(TOOLS[3]["content"]) + [tokenizer.eos_id]
    (example,) = turns.conversations(tokenizer, TOOLS)
    assert example.ids.tolist() == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_stands_behind_its_prompt_and_ends_as_the_template_ends_it(made, name):
    _, tokenizer = made(name)
    words = [{"role": "assistant", "content": "\n\n2+3=5"}]  # the line breaks join with those before them, if they can
    example = turns.reply(tokenizer, ASKED, words)
    assert example.ids[:example.prompt].tolist() == tokenizer.encode_chat(ASKED)
    assert example.trained[example.prompt:].all() and int(example.ids[-1]) == tokenizer.eos_id
    assert tokenizer.decode(example.ids[example.prompt:]).strip().removeprefix("<think>\n\n</think>\n\n") == "2+3=5"


def test_a_reply_continues_words_of_the_prompt(made):
    _, tokenizer = made("smollm2")
    prompt = [*ASKED, {"role": "assistant", "content": "Let me"}]
    example = turns.reply(tokenizer, prompt, [{"role": "assistant", "content": " see: 5"}])
    assert example.ids[:example.prompt].tolist() == tokenizer.encode_chat(prompt, False, True)
    assert parts(tokenizer, example)[1:] == [(True, " see: 5<|im_end|>")]


def test_a_template_that_changes_what_is_said_is_refused_with_the_first_difference():
    answers = ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
               "{% if add_generation_prompt %}<think>{% endif %}")
    with pytest.raises(ValueError, match=r"message 1 otherwise than behind its prompt.*behind 'u1' the rendering before has "
                                         r"'<think>', and the longer one has '\\n\\na1'.*config.model.chat_template"):
        turns.conversations(ByteTokenizer(answers), TWO)
    with pytest.raises(ValueError, match="leaves out message 1 of the assistant"):
        turns.conversations(ByteTokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"), TWO)
    with pytest.raises(ValueError, match="no message of the assistant"):
        turns.conversations(ByteTokenizer("{{ messages[0].content }}"), ASKED)


def test_a_template_without_an_end_of_turn_gets_the_end_token():
    tokenizer = ByteTokenizer("{% for m in messages %}{{ m.content }};{% endfor %}")
    (example,) = turns.conversations(tokenizer, [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"),
                                                                                       ("user", "c"), ("assistant", "d"))])
    assert example.ids.tolist() == [*b"a;b;", 258, *b"c;d;", 258]
    assert example.trained.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3


def test_plain_texts_begin_and_end_as_the_model_was_trained():
    tokenizer = ByteTokenizer()
    example = turns.plain(tokenizer, "2+3=", "5")
    assert example.ids.tolist() == [257, *b"2+3=5", 258] and example.trained.tolist() == [False] * 5 + [True] * 2
    whole = turns.plain(tokenizer, "", "5")
    assert whole.ids.tolist() == [257, *b"5", 258] and whole.prompt == 1 and whole.trained.tolist() == [False, True, True]


def test_marks_of_the_template_say_what_is_trained(made):
    _, tokenizer = made("smollm3", MARKED_WHOLE)
    (example,) = turns.conversations(tokenizer, TWO, marks=True)
    assert parts(tokenizer, example) == [
        (False, "<|im_start|>user\nu1<|im_end|>\n"),
        (True, "<|im_start|>assistant\n<think>\nt1\n</think>\n\na1<|im_end|>\n"),
        (False, "<|im_start|>user\nu2<|im_end|>\n"),
        (True, "<|im_start|>assistant\n<think>\nt2\n</think>\n\na2<|im_end|>\n")]
    (last,) = turns.conversations(tokenizer, TWO, marks=True, last=True)
    assert [trained for trained, _ in parts(tokenizer, last)] == [False, True] and last.ids.tolist() == example.ids.tolist()
    (plainly,) = turns.conversations(tokenizer, TWO)
    assert parts(tokenizer, plainly)[1] == (True, "<think>\nt1\n</think>\n\na1<|im_end|>")
    with pytest.raises(ValueError, match="marks nothing of message 1"):
        nothing = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
        turns.conversations(ByteTokenizer(nothing), TWO[:2], marks=True)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "variables"), [(MARKED, {}), (MARKED_WHOLE, {}),
                                                     (MARKED_WHOLE, {"enable_thinking": False})])
def test_masks_equal_those_of_transformers_for_a_template_with_marks(made, template, variables):
    transformers = pytest.importorskip("transformers")
    path, tokenizer = made(f"marked{len(template)}", template)
    theirs = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
        TWO, return_dict=True, return_assistant_tokens_mask=True, **variables)
    (example,) = turns.conversations(tokenizer, TWO, marks=True, **variables)
    count = len(example.ids)
    assert example.ids.tolist() == theirs["input_ids"][:count]
    assert example.trained.astype(int).tolist() == theirs["assistant_masks"][:count]
    assert not any(theirs["assistant_masks"][count:]) and np.sum(example.trained) >= 20
    if template is MARKED:
        assert example.trained.tolist() == turns.conversations(tokenizer, TWO)[0].trained.tolist(), "as without marks"
