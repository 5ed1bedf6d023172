"""Text that is sent while tokens arrive."""
import functools
import io

import numpy as np
import pytest
import sentencepiece
from tokenizer_cases import train_byte_level

from jaxrl_llm.engines.requests import Node, Request
from jaxrl_llm.engines.stopping import REST, StopSearch, context
from jaxrl_llm.serving.answers import Answer
from jaxrl_llm.serving.requests import CompletionRequest
from jaxrl_llm.serving.spelling import Spelling
from jaxrl_llm.tokenizers import ByteTokenizer
from jaxrl_llm.tokenizers.base import CodecTokenizer
from jaxrl_llm.tokenizers.hugging_face import FastCodec
from jaxrl_llm.tokenizers.sentence_piece import SentencePieceCodec

TEXT = "naïve 🙂 ab\nabc end"
KINDS = ("bytes", "byte-level", "sentencepiece")


@functools.cache
def tokenizer_of(kind):
    """Of sentencepiece one that drops the space before the first token of what it decodes, and spells rare letters in bytes."""
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "byte-level":
        return CodecTokenizer(FastCodec(train_byte_level()), eos_id=2, chat_templates={})
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc end, the cat sat on the mat"] * 20), model_writer=model, model_type="bpe", vocab_size=280,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2)
    return CodecTokenizer(SentencePieceCodec(model.getvalue(), "test"), eos_id=2, bos_id=1, chat_templates={})


def node_of(ids, finish="limit"):
    zeros = np.zeros(len(ids), np.float32)
    return Node(0, None, 0, np.array(ids, np.int32), zeros, zeros, np.zeros(len(ids), np.int32), finish)


def answer_to(prompt, tokenizer, stops=(), **flags):
    flags = dict(stream=False, usage=False, logprobs=True, token_ids=False, chat=False) | flags
    return Answer(CompletionRequest([prompt], 1, Request(0, 99, stop_texts=stops), 0, **flags), tokenizer, "tiny", {0: "first"})


def pieces(text, sizes, stops=()):
    ids, one, result = ByteTokenizer().encode(text), Spelling(ByteTokenizer(), stops), []
    cuts = [0, *np.cumsum(sizes), len(ids)]
    for start, end in zip(cuts, cuts[1:]):
        result.append(one.feed(ids[start:end], last=end == len(ids)))
    return result, one


@pytest.mark.parametrize("stops", [(), ("abc",), ("🙂 a", "zz"), ("nothing",), ("\nabd", " end")])
def test_pieces_are_the_whole_cut_before_the_first_stop_text(stops):
    whole = TEXT[:min([TEXT.index(stop) for stop in stops if stop in TEXT], default=len(TEXT))]
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(0, 5, 12)
        result, _ = pieces(TEXT, sizes[np.cumsum(sizes) < len(TEXT.encode())], stops)
        assert "".join(result) == whole


def test_what_may_be_the_beginning_of_a_stop_text_is_held_back():
    result, one = pieces("xabab!", [3, 1, 1], ("abc", "b!"))
    assert result == ["x", "ab", "", "a"] and one.ended and one.held == "b!"
    assert pieces("xab", [2], ("abc",))[0] == ["x", "ab"]  # the end shows that it is none


def test_long_stop_texts_are_compared_with_few_letters():
    class Counted(str):
        compared = 0

        def startswith(self, *given):
            Counted.compared += 1
            return super().startswith(*given)

    stops = [Counted(letter + "z" * 250_000) for letter in "abcdefghijklmnop"]
    one = Spelling(ByteTokenizer(), stops)
    assert one.feed(ByteTokenizer().encode("xyc")) == "xy" and one.held == "c"
    assert one.feed(ByteTokenizer().encode("zq")) == "czq" and Counted.compared <= 6 * len(stops)


def test_letters_come_whole():
    assert pieces("é🙂", [1, 1, 2])[0] == ["", "é", "", "🙂"]
    assert pieces("é", [1])[0] == ["", "é"]
    one = Spelling(ByteTokenizer())
    assert one.feed([0xC3], last=True) == REST


# --- the text before ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (1, 3, 100))
def test_a_completion_continues_the_text_of_its_prompt(kind, size):
    """Wherever the prompt ends; if it ends amid a letter, the rest of that is decoded as it was without the prompt."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXT)
    for cut in range(1, len(ids)):
        prompt, rest = ids[:cut], ids[cut:]
        before = tokenizer.decode(prompt)
        whole = tokenizer.decode(rest) if before.endswith(REST) else TEXT[len(before):]
        answer = answer_to(prompt, tokenizer, stream=True)
        parts = [node_of(rest[i:i + size], "running") for i in range(0, len(rest), size)] + [node_of([])]
        assert "".join(answer.chunk(0, part, "first")["choices"][0]["text"] for part in parts) == whole
    assert answer_to([tokenizer.encode("a")[0]], tokenizer).whole([node_of([])], "first")["choices"][0]["text"] == ""


@pytest.mark.parametrize("stop", ("\nabc", " end", "c e", "nowhere"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (1, 3, 100))
def test_stop_texts_are_found_in_the_text_that_is_sent(kind, stop, size):
    """The engine ends a completion where its text has the stop text, also if that begins with its first space."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXT)
    for cut in range(1, len(ids)):
        prompt, rest = ids[:cut], ids[cut:]
        before, ends = tokenizer.decode(prompt), [tokenizer.decode(ids[:n]) for n in range(cut + 1, len(ids) + 1)]
        if before.endswith(REST):
            continue
        wanted = next((n for n, text in enumerate(ends, 1) if stop in text[len(before):]), None)
        search = StopSearch((), (stop,), tokenizer, context(prompt, tokenizer))
        found = (search.feed(rest[i:i + size]) for i in range(0, len(rest), size))
        assert next((end for end in found if end is not None), None) == wanted
        made = answer_to(prompt, tokenizer, (stop,)).whole([node_of(rest[:wanted], "stop_string")], "first")["choices"][0]
        assert made["text"] == TEXT[len(before):].partition(stop)[0] and made["stop_reason"] == (stop if wanted else None)


# --- tokens with log-probs ----------------------------------------------------------------------------------------------------


def spelled(prompt, rest, tokenizer, size, chat):
    """The log-prob entries of all tokens, asked for piece by piece."""
    answer = answer_to(prompt, tokenizer, stream=True, chat=chat)
    parts = [node_of(rest[i:i + size], "running") for i in range(0, len(rest), size)]
    return [answer.chunk(0, part, "first")["choices"][0]["logprobs"] for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (1, 3, 100))
def test_tokens_are_spelled_where_they_stand_in_the_text(kind, size):
    """A letter of several tokens: none of them has its bytes, all have its place."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXT)
    cuts = [n for n in range(1, len(ids)) if not tokenizer.decode(ids[:n]).endswith(REST)]
    several = 0
    for cut in cuts:
        prompt, rest = ids[:cut], ids[cut:]
        whole = TEXT[len(tokenizer.decode(prompt)):]
        parts = spelled(prompt, rest, tokenizer, size, chat=False)
        texts, starts = ([x for part in parts for x in part[name]] for name in ("tokens", "text_offset"))
        entries = [entry for part in spelled(prompt, rest, tokenizer, size, chat=True) for entry in part["content"]]
        assert [entry["token"] for entry in entries] == texts and len(texts) == len(rest)
        for n, (text, start, entry) in enumerate(zip(texts, starts, entries)):
            assert start == len(tokenizer.decode(ids[:cut + n]).rstrip(REST)) - len(TEXT) + len(whole)
            if REST in text:
                several += 1
                assert entry["bytes"] is None
            else:
                assert whole[start:start + len(text)] == text and bytes(entry["bytes"]) == text.encode()
    assert several > 20


@pytest.mark.parametrize("kind", KINDS)
def test_letters_that_never_end_do_not_displace_what_follows(kind):
    """The completion begins with the rest of a letter of its prompt, and begins another one in vain."""
    tokenizer = tokenizer_of(kind)
    first, second = tokenizer.encode("é")[-2:]
    other = tokenizer.encode("ab")[-1]
    rest, word = [second, first, other, first, second, other], tokenizer.decode([other])
    answer = answer_to([first], tokenizer).whole([node_of(rest)], "first")["choices"][0]
    assert answer["text"] == f"{REST}{REST}{word}é{word}"
    assert answer["logprobs"]["tokens"] == [REST, REST, word, REST, REST, word]
    assert answer["logprobs"]["text_offset"][3:] == [len(word) + 2, len(word) + 2, len(word) + 3]
