"""Bodies of requests: their settings, and refusals with a reason."""
import dataclasses
import json

import pytest
from published_templates import SMOLLM2
from server import TOKENIZER

from jaxrl_llm.engines import Sampling
from jaxrl_llm.serving.requests import ClientLimits, RequestError, read
from jaxrl_llm.tokenizers import ByteTokenizer, conversation


def asked(body, chat=False, limits=ClientLimits()):
    return read(body, chat, TOKENIZER, 259, 128, "tiny", limits)


def test_defaults_are_those_of_openai():
    one = asked({"prompt": "ab"})
    assert one.prompts == [[257, 97, 98]] and one.n == 1 and not one.stream and not one.logprobs and not one.token_ids
    assert one.request.limit == 16 and one.request.sampling == Sampling(1.0)
    assert one.request.stop_tokens == (258,) and one.request.stop_texts == ()
    chat = asked({"messages": [{"role": "user", "content": "ab"}]}, chat=True)
    assert TOKENIZER.decode(chat.prompts[0]) == "user: ab\nassistant:" and chat.request.limit == 128 - len(chat.prompts[0])
    assert asked({"prompt": "ab"}).seed != asked({"prompt": "ab"}).seed  # no two clients share draws


def test_every_field_is_read():
    one = asked({"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
                 "min_p": 0.1, "n": 2, "seed": 5, "stop": ["x", "yz"], "stop_token_ids": [7], "stream": True,
                 "stream_options": {"include_usage": True}, "logprobs": 0, "return_token_ids": True, "user": "me",
                 "echo": None})
    assert one.request.sampling == Sampling(0.5, 3, 0.9, 0.1) and one.request.stop_texts == ("x", "yz")
    assert asked({"prompt": "a", "stop": "a" * 1000}).request.stop_texts == ("a" * 1000,)
    assert one.request.stop_tokens == (258, 7) and one.usage and one.stream and one.logprobs and one.token_ids
    assert one.request.stops_in_context
    rows = one.requests
    assert [row.seed for row in rows] == [5, 6, 7, 8] and [len(row.tokens) for row in rows] == [3, 3, 2, 2]
    assert all(dataclasses.replace(row, tokens=(), seed=None) == one.request for row in rows)
    assert asked({"prompt": [[1, 2], [3]]}).prompts == [[1, 2], [3]] and asked({"prompt": [1, 2]}).prompts == [[1, 2]]
    off = asked({"prompt": "a", "top_k": -1, "top_p": 1, "min_p": 0, "frequency_penalty": 0.0, "logit_bias": {}})
    assert off.request.sampling == Sampling(1.0)


def test_conversations_reach_the_template_as_it_wants_them():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "<|eos|>"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    one = asked({"messages": messages, "tools": tools}, chat=True)
    assert TOKENIZER.decode(one.prompts[0]) == "[add;]user: ab\nassistant: add({'a': 1})\ntool: <|eos|>\nassistant:"
    assert 258 not in one.prompts[0]  # a tool's text adds no control token
    plain = [{"role": "user", "content": "ab"}]
    assert asked({"messages": plain, "tools": tools, "tool_choice": "none"}, chat=True).prompts == [
        conversation.start(TOKENIZER, plain)]


def text_of(body, tokenizer=TOKENIZER):
    return tokenizer.decode(read(body, True, tokenizer, 259, 4096, "tiny", ClientLimits()).prompts[0], skip_special=False)


def test_nulls_and_calls_without_arguments():
    def spoken(arguments):
        return [{"role": "user", "content": "ab", "name": None, "tool_calls": None}, {"role": "assistant", "content": None,
                "tool_calls": [{"id": None, "function": {"name": "now", **arguments}}]}, {"role": "user", "content": "?"}]

    for arguments in ({"arguments": ""}, {"arguments": " "}, {"arguments": "{}"}, {"arguments": None}, {}):
        assert text_of({"messages": spoken(arguments)}) == "user: ab\nassistant: now({})\nuser: ?\nassistant:"
    asks = ByteTokenizer("{% for m in messages %}{{ 'call' if 'tool_calls' in m else m.content }}|{% endfor %}")
    assert text_of({"messages": [spoken({})[0]]}, asks) == "ab|"


def test_the_end_of_a_prompt():
    spoken = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "So"}]
    opened, closed = "user: 1+1?\nassistant: So", "user: 1+1?\nassistant: So\nassistant:"
    for fields, expected in (({}, opened), ({"continue_final_message": True}, opened),
                             ({"continue_final_message": False}, closed),
                             ({"continue_final_message": True, "add_generation_prompt": False}, opened),
                             ({"add_generation_prompt": True}, closed), ({"add_generation_prompt": False}, closed[:-10])):
        assert text_of({"messages": spoken, **fields}) == expected
    with pytest.raises(RequestError, match="give add_generation_prompt=False as well"):
        asked({"messages": spoken, "continue_final_message": True, "add_generation_prompt": True}, chat=True)
    with pytest.raises(RequestError, match="continue_final_message=1; give true or false"):
        asked({"messages": spoken, "continue_final_message": 1}, chat=True)


def test_what_the_template_would_leave_out_is_refused():
    smol, ask = ByteTokenizer(SMOLLM2), [{"role": "user", "content": "ab"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    for body, reason, field in (({"messages": ask, "tools": tools}, "the tool 'add'", "tools"),
                                ({"messages": [*ask, call, *ask]}, "the call of 'add'", "messages")):
        with pytest.raises(RequestError, match=f"the chat template of this model leaves out {reason}") as refused:
            read(body, True, smol, 259, 4096, "tiny", ClientLimits())
        assert refused.value.param == field and refused.value.status == 400
    unused = {"messages": ask, "tools": tools, "tool_choice": "none"}
    assert read(unused, True, smol, 259, 4096, "tiny", ClientLimits()).prompts == [conversation.start(smol, ask)]


@pytest.mark.parametrize("given, first, second", [
    (5, 5, 6), (5.0, 5, 6), (-1, 2**63 - 1, 0), (2**63 - 1, 2**63 - 1, 0), (-2**63, 0, 1)])
def test_seeds_have_64_bits(given, first, second):
    assert [row.seed for row in asked({"prompt": "a", "n": 2, "seed": given}).requests] == [first, second]


def test_the_modality_text_changes_nothing():
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert asked(chat | {"modalities": ["text"]}, chat=True).prompts == asked(chat, chat=True).prompts
    for wrong in (["text", "audio"], ["audio"], "text", []):
        with pytest.raises(RequestError, match=r"modalities=.* is not supported; leave it out, or give \['text'\]"):
            asked(chat | {"modalities": wrong}, chat=True)


@pytest.mark.parametrize("chat, body, reason", [
    (False, {"prompt": "a\ud800"}, r"the text 'a\ud800' holds '\ud800', half of a surrogate pair"),
    (True, {"messages": [{"role": "user", "content": "a\ud800"}]}, r"holds '\ud800', half of a surrogate pair"),
    (False, [], "give a JSON object"),
    (False, {}, "the body has no prompt"),
    (False, {"prompt": ""}, None),  # the beginning of a text
    (False, {"prompt": []}, "an empty prompt"),
    (False, {"prompt": [259]}, "0 to 258"),
    (False, {"prompt": [True]}, "0 to 258"),
    (False, {"prompt": ["a", 1]}, "0 to 258"),
    (False, {"prompt": {"a": 1}}, "0 to 258"),
    (False, {"prompt": "a", "max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
    (False, {"prompt": "a", "messages": []}, "unknown field 'messages'"),
    (False, {"prompt": "a", "max_tokens": 0}, "max_tokens=0; give a whole number from 1"),
    (False, {"prompt": "a", "max_tokens": 1.5}, "give a whole number"),
    (False, {"prompt": "a", "max_tokens": True}, "give a whole number"),
    (False, {"prompt": "a" * 126}, "a prompt of 127 tokens and max_tokens=16 make 143; this server holds 128 in all: shorten "
                                   "the prompt, or give max_tokens=1 or less"),
    (False, {"prompt": "a" * 200}, "holds 128 in all: shorten the prompt$"),
    (False, {"prompt": "a", "temperature": -1}, "temperature=-1; give a number from 0 to 2"),
    (False, {"prompt": "a", "temperature": float("nan")}, "give a number from 0 to 2"),
    (False, {"prompt": "a", "temperature": "hot"}, "give a number from 0 to 2"),
    (False, {"prompt": "a", "top_p": 0}, "top_p=0"),
    (False, {"prompt": "a", "min_p": 1}, "min_p=1"),
    (False, {"prompt": "a", "n": 65}, "n=65; give a whole number from 1 to 64"),
    (False, {"prompt": ["a"] * 40, "n": 2}, "40 prompts with n=2 make 80 completions; this server allows 64"),
    (False, {"prompt": ["a"] * 65}, "65 prompts; this server allows 64"),
    (False, {"prompt": "a", "seed": 2**63}, "a whole number from -9223372036854775808 to 9223372036854775807"),
    (False, {"prompt": "a", "stop": [""]}, "a text that is not empty"),
    (False, {"prompt": "a", "stop": ["a"] * 17}, "a list of up to 16"),
    (False, {"prompt": "a", "stop": ["a", "a" * 1001]}, "stop has a text of 1001 letters; give texts of up to 1000"),
    (False, {"prompt": "a", "stop_token_ids": [300]}, "0 to 258"),
    (False, {"prompt": "a", "stream": "yes"}, "stream='yes'; give true or false"),
    (False, {"prompt": "a", "stream_options": {"a": 1}}, "stream_options"),
    (False, {"prompt": "a", "logprobs": 5}, "logprobs=5; give 0: the log-prob of the sampled token alone is kept"),
    (False, {"prompt": "a", "presence_penalty": 0.5}, "presence_penalty=0.5 is not supported; leave it out, or give 0"),
    (False, {"prompt": "a", "echo": True}, "echo=True is not supported"),
    (True, {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, "tool_choice='required' is not"),
    (True, {"messages": "a"}, "messages='a'; give a list"),
    (True, {"messages": []}, "give a list"),
    (True, {"messages": [{"content": "a"}]}, "must be a list of"),
    (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type 'text' only"),
    (True, {"messages": [{"role": "user", "content": "a"}], "tools": {}}, "tools={}; give a list"),
    (True, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": []}, "give an object"),
    (True, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments='{' is no JSON (Expecting property name"),
    (True, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 8000}}]}]}, "recursion"),
    (True, {"messages": [{"role": "assistant", "tool_calls": ["a"]}]}, "messages[0].tool_calls[0] is 'a'; give"),
    (True, {"messages": [{"role": "user", "content": "a"}], "logprobs": 1}, "logprobs=1; give true or false")])
def test_wrong_requests_are_refused_with_a_reason(chat, body, reason):
    if reason is None:
        assert asked(body, chat).prompts == [[257]]
        return
    with pytest.raises(RequestError, match=reason if reason.endswith("$") else None) as result:
        asked(body, chat)
    assert reason.rstrip("$") in str(result.value) and result.value.status == 400
    json.dumps(result.value.param)


def test_another_model_is_not_found():
    with pytest.raises(RequestError, match="'tiny'") as result:
        asked({"prompt": "a", "model": "other"})
    assert result.value.status == 404 and result.value.code == "model_not_found"
