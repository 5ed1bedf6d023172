"""Stop strings end rows of the engine, wherever tokens and chunks end."""
import pytest
from engines import T, drain, engine, plain, prompts, request, scanned

from jaxrl_llm.engines.stopping import StopSearch
from jaxrl_llm.tokenizers.byte import ByteTokenizer


def test_stop_sequences_end_rows_and_nothing_behind_them_is_kept():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    for chunks in ((1,), (4,)):
        for sequence in (whole[4:7], whole[:1], whole[-2:], whole[6:8]):
            end = next(n for n in range(1, T + 1) if whole[:n][-len(sequence):] == sequence)
            one = engine(chunks=chunks)
            one.submit(*(request(uid, stop_tokens=()) for uid in range(4, 8)),
                       request(8, stop_tokens=(), stop_sequences=([99, 1], sequence)), request(9, stop_tokens=()))
            found = drain(one)
            [node] = found[8]
            assert node.tokens.tolist() == whole[:end] and node.finish == "stop_string"
            assert len(node.logprobs) == len(node.entropies) == len(node.policy_version) == end
            for uid in (4, 9):
                assert found[uid][0].tokens.tolist() == scanned(stop_tokens=())[uid][0]


def test_stop_texts_are_found_wherever_tokens_end():
    tokenizer = ByteTokenizer()
    whole, _, _, _ = scanned(stop_tokens=())[8]
    text = tokenizer.decode(whole)
    for stop in (text[3:6], text[0], text[-1]):
        one = engine(tokenizer=tokenizer)
        one.submit(request(8, stop_tokens=(), stop_texts=("never there", stop)))
        [node] = drain(one)[8]
        assert node.tokens.tolist() == whole[:text.index(stop) + len(stop)] and node.finish == "stop_string"


def test_stop_texts_may_begin_with_a_letter_that_is_dropped_at_the_beginning_of_a_text():
    """As sentencepiece drops a space; with `stops_in_context` neither a completion nor a fork nor an extension is one."""
    whole, _, _, _ = scanned(stop_tokens=())[8]

    def found(letter, start, tokens, in_context):
        class Drops(ByteTokenizer):
            def decode_batch(self, rows, skip_special=True):
                return [text.removeprefix(chr(letter)) for text in super().decode_batch(rows, skip_special)]

        one = engine(tokenizer=Drops(), slot_tokens=48)
        start(one, dict(stop_tokens=(), stop_texts=(ByteTokenizer().decode([letter, *tokens]),), stops_in_context=in_context))
        node = drain(one)[8][-1]
        return node.tokens.tolist(), node.finish

    def extended(one, asked):
        one.submit(request(8, limit=1, keep=True, **asked))
        one.collect()
        one.extend(8, [5, 6], limit=T)

    def forked(one, asked):
        one.submit(request(9, limit=1, keep=True, stop_tokens=()))
        one.collect()
        one.submit(request(8, parent=9, tokens=(), **asked))

    after = plain([*prompts()[2], whole[0], 5, 6], 8, 1, T - 1)
    first = scanned(stop_tokens=())[9][0][0]
    behind = plain([*prompts()[2], first], 8, 1, T - 1)
    cases = ((lambda one, asked: one.submit(request(8, **asked)), whole[0], whole[1:3], whole[:3], whole),
             (extended, after[0], after[1:3], after[:3], after), (forked, first, behind[:2], behind[:2], behind))
    for start, letter, tokens, wanted, rest in cases:
        assert found(letter, start, tokens, True) == (wanted, "stop_string")
        assert found(letter, start, tokens, False) == (rest, "limit")


def test_a_kept_row_goes_on_behind_its_stop_string():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    one = engine(slot_tokens=48)
    one.submit(request(8, stop_tokens=(), stop_sequences=(whole[3:5],), keep=True))
    [node] = one.collect()
    one.extend(8, [5, 6])
    last = drain(one)[8][-1]
    n = len(node.tokens)
    assert last.tokens.tolist()[:4] == plain([*prompts()[2], *node.tokens, 5, 6], 8, n, T - n)[:4]


def test_a_stop_string_may_begin_before_a_fork_but_not_before_an_extension():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    one = engine()
    one.submit(request(8, stop_tokens=()))
    one.step()
    [row] = [row for row in one._slots if row]
    one._settle()
    stood = row.drawn
    first = plain([*prompts()[2], *whole[:stood]], 60, stood, 1)
    one.submit(request(60, parent=8, tokens=(), stop_tokens=(), stop_sequences=([whole[stood - 1], *first],)))
    [node] = drain(one)[60]
    assert node.tokens.tolist() == first and node.finish == "stop_string"
    ended = engine()
    ended.submit(request(8, stop_tokens=(), limit=stood, keep=True))  # a row that its limit ended continues too
    assert ended.collect()[0].finish == "limit"
    ended.submit(request(60, parent=8, tokens=(), stop_tokens=(), stop_sequences=([whole[stood - 1], *first],)))
    [node] = drain(ended)[60]
    assert node.tokens.tolist() == first and node.finish == "stop_string"
    search = StopSearch([[1, 2]], ())
    assert search.feed([1]) is None and search.feed([2]) == 2 and StopSearch([[1, 2]], ()).feed([2]) is None


def test_a_stop_text_that_ended_before_a_fork_does_not_end_the_fork():
    """The parent has other stop texts: those of the child count from where they end in its own tokens."""
    tokenizer = ByteTokenizer()
    whole, _, _, _ = scanned(stop_tokens=())[8]
    one = engine(tokenizer=tokenizer)
    one.submit(request(8, stop_tokens=(), limit=6, keep=True))
    one.collect()
    next_one = plain([*prompts()[2], *whole[:6]], 60, 6, 1)
    for uid, stop in ((60, tokenizer.decode(whole[2:5])), (61, tokenizer.decode(whole[5:6] + next_one))):
        one.submit(request(uid, parent=8, tokens=(), stop_tokens=(), stop_texts=(stop,), seed=60))
    found = drain(one)
    rest = plain([*prompts()[2], *whole[:6]], 60, 6, T - 6)
    assert found[60][0].tokens.tolist() == rest and found[60][0].finish == "limit"
    assert found[61][0].tokens.tolist() == next_one and found[61][0].finish == "stop_string"


def test_letters_are_searched_once():
    """The euro sign is three tokens of which two were searched with the stop text before it."""
    search = StopSearch((), ("ab", "b€"), ByteTokenizer())
    tokens = ByteTokenizer().encode("ab€")
    assert search.feed(tokens[:4]) == 2 and search.feed(tokens[4:]) == 5
    assert StopSearch((), ("ab", "b€"), ByteTokenizer()).feed(tokens) == 2


LETTERS = "a€b😀 éEND\n日本"


@pytest.mark.parametrize("stop", ("END", "€", "😀 é", "\n", "本", "日本", "nowhere"))
@pytest.mark.parametrize("size", (1, 2, 3, 7, 100))
def test_texts_are_found_in_pieces_where_they_are_found_in_the_whole(stop, size):
    """Byte by byte letters come in pieces too."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(LETTERS * 2)
    search, found = StopSearch((), (stop, "zzz"), tokenizer), None
    for start in range(0, len(tokens), size):
        if (found := search.feed(tokens[start:start + size])) is not None:
            break
    if stop == "nowhere":
        assert found is None
    else:
        assert found == next(n for n in range(1, len(tokens)) if stop in tokenizer.decode(tokens[:n]))
