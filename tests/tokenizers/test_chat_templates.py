"""Chat templates: literals, transformers, errors and the sandbox."""
from datetime import datetime

import pytest
from tokenizer_cases import CHATML, MESSAGES

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
