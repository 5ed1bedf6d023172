"""Chat templates: literals, transformers, errors and the sandbox."""
from datetime import datetime

import numpy as np
import pytest
from tokenizer_cases import CHATML, FAMILIES, MESSAGES, write_checkpoint

from jaxrl_llm.tokenizers import load


def chat(template, messages=MESSAGES, **variables):
    return load("bytes", chat_template=template).render_chat(messages, **variables)


def test_chat_template_literals():
    assert chat(CHATML, MESSAGES[1:3]) == (
        "<|im_start|>user\n2+2?\n<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat("{% if true %}\n  {% if true %}\nx\n{% endif %}\n{% endif %}\ny") == "x\ny", (
        "trim_blocks, lstrip_blocks"
    )
    assert chat("{{ {'a': '<é&>'} | tojson }}") == '{"a": "<é&>"}', "no HTML escapes"
    assert chat("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert chat("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert (
        chat("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}")
        == "system"
    )
    assert chat("{% for m in messages %}{% generation %}{{ m.role[0] }}{% endgeneration %}{% endfor %}") == "suau"
    assert chat("{{ tools is none }}{{ enable_thinking }}", enable_thinking=False) == "TrueFalse"
    assert chat("{{ unknown }}.") == "."


def test_chat_template_features_equal_transformers(checkpoint):
    from transformers import AutoTokenizer

    template = (
        "{%- set ns = namespace(seen=0) -%}{{ bos_token }}\n{% for m in messages %}\n    {%- if m.role == 'user' %}\n"
        "  {% set ns.seen = ns.seen + 1 %}\n{% endif %}\n"
        "{% generation %}{{ m.content | trim | tojson }}{% endgeneration %}"
        "{{ eos_token }}{% endfor %}\n{%- if tools %}{{ tools | tojson(indent=4) }}{% endif %}\n"
        "{{ pad_token }}{{ ns.seen }}"
    )
    theirs = AutoTokenizer.from_pretrained(str(checkpoint))
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]
    for variables in ({}, {"tools": tools}):
        expected = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **variables)
        got = load(checkpoint, chat_template=template).render_chat(MESSAGES, add_generation_prompt=False, **variables)
        assert got == expected


def test_chat_template_errors():
    with pytest.raises(ValueError, match="no chat template; give one with load.*chat_template.jinja"):
        load("bytes").render_chat(MESSAGES)
    with pytest.raises(ValueError, match="cannot render these messages: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="cannot render"):
        chat("{% if %}")
    for wrong in ("hello", {"role": "user", "content": "x"}, ["hello"], [{"content": "x"}]):
        with pytest.raises(ValueError, match="messages must be a list of"):
            chat(CHATML, wrong)


def test_chat_templates_are_sandboxed():
    messages = [{"role": "user", "content": "x"}]
    for attack in ("{{ messages.append(1) }}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(ValueError, match="cannot render"):
            chat(attack, messages)
    assert messages == [{"role": "user", "content": "x"}]


TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]
PARTS = [{"type": "text", "text": "The sum"}, {"type": "image"}, {"type": "text", "text": "is 4 "}]
FINALS = ["4", "The answer is ", " \n<think>\nso 2+2 is 4</think>\n\n4\n", "", "CONTINUE_FINAL_MESSAGE_TAG \n", "é 🙂"]


def theirs_and_ours(checkpoint, template, messages, **variables):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(checkpoint))
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    variables = {"add_generation_prompt": False} | variables
    return expected, load(checkpoint, chat_template=template).render_chat(messages, **variables)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_transformers(checkpoint, family):
    earlier = [*MESSAGES[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}, MESSAGES[3]]
    cases = [{}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"add_generation_prompt": True, "enable_thinking": False}]
    for messages in (MESSAGES, earlier):
        for variables in cases:
            expected, got = theirs_and_ours(checkpoint, FAMILIES[family], messages, **variables)
            assert got == expected


@pytest.mark.parametrize("final", FINALS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_message_equals_transformers(checkpoint, family, final):
    messages = [*MESSAGES, {"role": "assistant", "content": final}]
    for variables in ({}, {"tools": TOOLS}):
        expected, got = theirs_and_ours(checkpoint, FAMILIES[family], messages, continue_final_message=True, **variables)
        assert got == expected
    assert messages[-1] == {"role": "assistant", "content": final}, "what was given stays as it is"


def test_a_continued_message_in_parts_equals_transformers(checkpoint):
    template = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": PARTS[:1]}, {"role": "assistant", "content": PARTS}]
    expected, got = theirs_and_ours(checkpoint, template, messages, continue_final_message=True)
    assert got == expected == "[user]The sum|[assistant]The sum||is 4 " and PARTS[2]["text"] == "is 4 "


def test_a_continued_message_literals():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(CHATML, messages, **options) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is "
    trimming = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    assert chat(trimming, messages, **options) == "<user>2+2?</><assistant>It is"
    t = load("bytes", chat_template=trimming)
    assert t.encode_chat(messages, **options) == list(b"<user>2+2?</><assistant>It is")


def test_a_message_that_cannot_be_continued():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ValueError, match="add_generation_prompt=False as well"):
        chat(CHATML, continue_final_message=True)
    for nothing in ([], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}, "text"]}]):
        with pytest.raises(ValueError, match="needs a last message whose content is a text"):
            chat("", nothing, **options)
    for template in ("{{ messages[0].content }}", "{{ messages[-1].content | upper }}", "{{ messages[-1].content[4:] }}"):
        with pytest.raises(ValueError, match="changes or leaves out the last message"):
            chat(template, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long text"}], **options)


def test_values_of_numpy_and_enumerations_are_plain_in_a_template():
    class Level(int):
        pass

    class Name(str):
        def __str__(self):
            return "wrong"

    values = [np.int64(3), np.float32(0.5), np.bool_(False), np.str_("s"), Level(7), Name("n"), (1, None), {2: [True]}]
    assert chat("{{ values }}", values=values) == "[3, 0.5, False, 's', 7, 'n', (1, None), {2: [True]}]"


TEXTS = {"tool_use": "[TOOLS]", "default": "[DEFAULT]", "rag": "[RAG]"}
NAMED = [{"name": name, "template": text} for name, text in TEXTS.items()]


@pytest.fixture(params=["list", "files", "files and list", "only more files"])
def several(request, tmp_path, backend):
    """A checkpoint with several templates, written in every way that there is."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if request.param == "files and list":
        config["chat_template"] = [{"name": name, "template": "OLD"} for name in ("default", "tool_use", "older")]
    if request.param in ("list", "only more files"):
        config["chat_template"] = NAMED if request.param == "list" else "[DEFAULT]"
    directory = write_checkpoint(tmp_path / "m", backend, config)
    if request.param != "list":
        (directory / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (directory / "additional_chat_templates" / f"{name}.jinja").write_text(TEXTS[name])
    if request.param.startswith("files"):
        (directory / "chat_template.jinja").write_text("[DEFAULT]")
    return directory


def test_several_templates(several, tmp_path):
    t = load(several)
    assert t.chat_templates == TEXTS
    assert [t.render_chat(MESSAGES, tools=tools) for tools in (None, [], TOOLS)] == ["[DEFAULT]", "[TOOLS]", "[TOOLS]"]
    rag = load(several, chat_template="rag")
    assert rag.render_chat(MESSAGES) == rag.render_chat(MESSAGES, tools=TOOLS) == "[RAG]"
    with pytest.raises(ValueError, match=r"which are \['default', 'rag', 'tool_use'\]; did you mean 'tool_use'\?"):
        load(several, chat_template="tool-use")
    assert load(several, chat_template="own source").render_chat(MESSAGES, tools=TOOLS) == "own source"
    (tmp_path / "saved").mkdir()
    t.save(tmp_path / "saved")
    assert load(tmp_path / "saved").chat_templates == t.chat_templates


def test_several_templates_equal_transformers(several, tmp_path, request):
    from transformers import AutoTokenizer

    (tmp_path / "saved").mkdir()
    load(several).save(tmp_path / "saved")
    directories = [tmp_path / "saved"] if "only more files" in request.node.name else [several, tmp_path / "saved"]
    for theirs in (AutoTokenizer.from_pretrained(str(directory)) for directory in directories):
        for tools in (None, [], TOOLS):
            expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
            assert load(several).render_chat(MESSAGES, tools=tools) == expected
        assert theirs.apply_chat_template(MESSAGES, chat_template="rag", tokenize=False) == "[RAG]"


def test_templates_without_a_default(tmp_path, backend):
    listed = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T<|im_end|>"}]
    t = load(write_checkpoint(tmp_path / "m", backend, {"eos_token": "<|endoftext|>", "chat_template": listed}))
    with pytest.raises(ValueError, match=r"has the chat templates \['rag', 'tool_use'\] and none called 'default'; .*NAME"):
        t.render_chat(MESSAGES)
    assert t.chat_template is None and t.render_chat(MESSAGES, tools=TOOLS) == "T<|im_end|>"
    assert t.stop_ids == (0, 2), "an end of turn that any of them writes"
