"""tokenizer.json and the files beside it, against transformers."""
import json
import shutil

import pytest
from tokenizer_cases import CHATML, MESSAGES, SAMPLES, train_byte_level, write_checkpoint

from jaxrl_llm.sampling.scoring import spelled
from jaxrl_llm.tokenizers import HuggingFaceTokenizer, conversation, load


def test_huggingface_equals_transformers(checkpoint):
    from transformers import AutoTokenizer

    ours, theirs = HuggingFaceTokenizer(checkpoint), AutoTokenizer.from_pretrained(str(checkpoint))
    assert (ours.eos_id, ours.bos_id, ours.pad_id) == (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id)
    assert (ours.eos_id, ours.bos_id, ours.pad_id, ours.stop_ids) == (2, 1, 0, (2, 0))
    assert ours.vocab_size == len(theirs)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.encode(text, add_bos=True) == [1, *ids]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(MESSAGES, add_generation_prompt=prompt) == expected
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        assert ours.encode_chat(MESSAGES, add_generation_prompt=prompt) == expected


def test_tokenizer_json_padding_and_truncation_are_ignored(tmp_path):
    backend = train_byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50, pad_id=0)
    t = load(write_checkpoint(tmp_path / "m", backend, {"eos_token": "<|im_end|>"}))
    ids = t.encode("A long text about carré and nothing else.")
    assert 2 < len(ids) < 50 and t.decode(ids) == "A long text about carré and nothing else."


def test_post_processor_never_adds_tokens_behind_our_back(tmp_path):
    from tokenizers import processors

    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    t = load(write_checkpoint(tmp_path / "m", backend, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    assert t.encode("the", add_bos=True) == [1, *t.encode("the")] and 1 not in t.encode("the")


def test_missing_pad_falls_back_to_eos_and_missing_bos_is_an_error(tmp_path, backend):
    t = load(write_checkpoint(tmp_path / "m", backend, {"eos_token": "<|im_end|>", "bos_token": None}))
    assert t.pad_id == t.eos_id == 2 and t.bos_id is None and t.stop_ids == (2,)
    with pytest.raises(ValueError, match="add_bos=True.*no beginning-of-sequence"):
        t.encode("x", add_bos=True)


def test_eos_comes_from_whichever_file_names_it(tmp_path, backend):
    only_generation = write_checkpoint(tmp_path / "a", backend, {}, {"eos_token_id": [2, 0]})
    assert load(only_generation).eos_id == 2 and load(only_generation).stop_ids == (2, 0)
    from_map = write_checkpoint(tmp_path / "b", backend, {}, {"eos_token_id": 2})
    (from_map / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load(from_map).eos_id == 0 and load(from_map).stop_ids == (0, 2)
    from_model = write_checkpoint(tmp_path / "c", backend, {})
    (from_model / "config.json").write_text('{"eos_token_id": 2}')
    assert load(from_model).eos_id == 2
    with pytest.raises(ValueError, match="names no end-of-sequence token.*tokenizer_config.json"):
        load(write_checkpoint(tmp_path / "d", backend, {}))
    with pytest.raises(ValueError, match="eos_token '</s>', which is not in the vocabulary"):
        load(write_checkpoint(tmp_path / "e", backend, {"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"special token ids \[9999\] lie outside"):
        load(write_checkpoint(tmp_path / "f", backend, {"eos_token": "<|im_end|>"}, {"eos_token_id": [2, 9999]}))


def test_end_of_turn_written_by_the_template_is_a_stop_token(tmp_path, backend):
    config = {"eos_token": "<|endoftext|>"}
    assert load(write_checkpoint(tmp_path / "base", backend, config)).stop_ids == (0,)
    assert load(write_checkpoint(tmp_path / "chat", backend, {**config, "chat_template": CHATML})).stop_ids == (0, 2)


def test_a_named_special_token_is_skipped_even_if_the_file_calls_it_ordinary(tmp_path):
    from tokenizers import AddedToken

    backend = train_byte_level()
    backend.add_tokens([AddedToken("<stop>", special=False)])
    t = load(write_checkpoint(tmp_path / "m", backend, {"eos_token": "<stop>"}))
    assert t.decode([*t.encode("the"), t.eos_id]) == "the"


def test_chat_template_sources(tmp_path, backend):
    named = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": "DEFAULT"}]
    directory = write_checkpoint(tmp_path / "m", backend, {"eos_token": "<|im_end|>", "chat_template": named})
    assert load(directory).chat_template == "DEFAULT"
    (directory / "chat_template.jinja").write_text("FILE")
    assert load(directory).chat_template == load(directory / "tokenizer.json").chat_template == "FILE"
    assert load(directory, chat_template="GIVEN").chat_template == "GIVEN"
    single = {"eos_token": "<|im_end|>", "chat_template": [{"name": "only", "template": "ONLY"}]}
    assert load(write_checkpoint(tmp_path / "s", backend, single)).chat_template == "ONLY"


def test_added_tokens_of_the_config_are_those_of_transformers(tmp_path, backend):
    """Tokens that tokenizer.json lacks, one that it has as a plain piece, and one that it does not call special."""
    from transformers import AutoTokenizer

    size = backend.get_vocab_size()
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    think, the = (backend.token_to_id(piece) for piece in ("<think>", "the"))
    added = {str(size): {"content": "<|new|>", "special": True}, str(size + 1): plain | {"content": "<call>", "rstrip": True},
             str(think): plain | {"content": "<think>", "special": True}, str(the): plain | {"content": "the"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|new|>", "added_tokens_decoder": added}
    directory = write_checkpoint(tmp_path / "m", backend, config)
    ours, theirs = load(directory), AutoTokenizer.from_pretrained(str(directory))
    assert (ours.eos_id, ours.vocab_size) == (size, size + 2) == (theirs.eos_token_id, len(theirs))
    for text in ("<call>  theme<|new|><think>there", "other"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    older = write_checkpoint(tmp_path / "older", backend, {"eos_token": "<|new|>"})
    (older / "added_tokens.json").write_text(f'{{"<|new|>": {size}}}')
    assert load(older).eos_id == size and load(older).encode("<|new|>") == [size]
    (older / "added_tokens.json").write_text(f'{{"<|new|>": {size + 3}}}')
    with pytest.raises(ValueError, match=rf"give '<\|new\|>' the id {size + 3}, but with tokenizer.json it gets the id {size}"):
        load(older)


def test_a_word_that_ends_completions_is_no_control_token(checkpoint, tmp_path):
    """An exported run names the token of a stop string among its end tokens, and its users still write the word."""
    word, plain = load(checkpoint).encode("\n")[0], load(checkpoint)
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0, word]}))
    tokenizer, asked = load(folder), [{"role": "user", "content": "a\nb"}, {"role": "tool", "content": "\n"}]
    assert tokenizer.stop_ids == (2, 0, word) and tokenizer.end_ids == {2, 0} == plain.end_ids
    assert tokenizer.control_tokens == plain.control_tokens
    assert conversation.start(tokenizer, asked) == conversation.start(plain, asked)
    said = tokenizer.encode("the\n")
    assert said[-1] == word and conversation.said(tokenizer, said)["content"] == "the\n" == spelled([said], tokenizer)[0]
    assert conversation.said(tokenizer, [*said, 2])["content"] == "the\n" == spelled([[*said, 2]], tokenizer)[0]
    assert conversation.extend(tokenizer, said, asked[:1])[0] == 2, "the turn is not ended by the word"
