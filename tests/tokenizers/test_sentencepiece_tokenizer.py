"""Sentencepiece models against the library itself."""
import json
import shutil

import pytest
from tokenizer_cases import CHATML, MESSAGES, SAMPLES

from jaxrl_llm.tokenizers import SentencePieceTokenizer, load


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_sentencepiece_equals_the_library(sentencepiece_models, name):
    from sentencepiece import SentencePieceProcessor

    path = sentencepiece_models / f"{name}.model"
    ours, theirs = load(path), SentencePieceProcessor(model_file=str(path))
    assert isinstance(ours, SentencePieceTokenizer) and ours.vocab_size == theirs.get_piece_size()
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_id(), theirs.bos_id()) == (2, 1)
    assert ours.pad_id == {"bpe": 3, "unigram": ours.eos_id}[name]
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ours.decode(ids) == theirs.decode(ids), text
        assert name == "unigram" or ours.decode(ids) == text


def test_sentencepiece_control_pieces(sentencepiece_models):
    t = load(sentencepiece_models / "bpe.model")
    turn = t._codec.find("<start_of_turn>")
    ids = t.encode("<s><start_of_turn>the theme</s>")
    assert ids == [1, turn, *t.encode("the theme"), 2]
    assert t.decode(ids) == "the theme" and t.decode(ids, skip_special=False) == "<s><start_of_turn>the theme</s>"


def test_directory_with_tokenizer_model_reads_its_template(tmp_path, sentencepiece_models):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_models / "bpe.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": "{{ bos_token }}the{{ eos_token }}", "legacy": True}))
    t = load(tmp_path)
    assert t.encode_chat(MESSAGES) == [1, *t.encode("the"), 2]


def with_files(directory, model, described, **others):
    """A folder with a sentencepiece model and JSON files beside it, as LlamaTokenizer reads it; the model's pieces are 500."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.model").write_bytes(model.read_bytes())
    described = {"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>", **described}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    for name, content in others.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def token(content, **flags):
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


CHAT = {"<|im_end|>": 500, "<|im_start|>": 501}
DECODER = {"500": token("<|im_end|>", special=True), "501": token("<|im_start|>", special=True)}


@pytest.mark.parametrize("config, others, words", [
    ({"eos_token": "<|im_end|>"}, {"added_tokens": CHAT}, "its own"),
    ({}, {"added_tokens": CHAT, "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, "named in the map"),
    ({"eos_token": "<|im_end|>", "added_tokens_decoder": DECODER}, {}, "by number"),
    ({"eos_token": "<|im_end|>", "added_tokens_decoder": DECODER, "legacy": True}, {}, "a space after each"),
    ({"eos_token": "<|im_end|>", "added_tokens_decoder": DECODER | {"502": token("<tool>", rstrip=True, lstrip=True)}}, {},
     "with white space"),
    ({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}, {}, "without ids"),
])
def test_tokens_beside_a_sentencepiece_model_are_those_of_transformers(tmp_path, sentencepiece_models, config, others, words):
    from transformers import AutoTokenizer

    directory = with_files(tmp_path / "m", sentencepiece_models / "bpe.model", config | {"chat_template": CHATML}, **others)
    ours, theirs = load(directory), AutoTokenizer.from_pretrained(str(directory))
    assert (ours.eos_id, ours.bos_id, ours.pad_id) == (500, 1, 3) == (theirs.eos_token_id, theirs.bos_token_id, 3)
    assert ours.vocab_size == len(theirs) and ours.stop_ids == (500,)
    for text in ("<|im_start|>user\nthe theme<|im_end|>\n<|im_start|>assistant\n", "the <tool>  then<|im_end|> there", "the"):
        text = text.replace("> ", ">") if config.get("legacy") else text  # theirs merges a space with the one put in front
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), (words, text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) or config.get("legacy"), (words, text)
    assert ours.encode_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(MESSAGES)[0] == 501 and {"<|im_end|>", "</s>"} <= ours.control_tokens.keys()
    saved = tmp_path / "saved"
    saved.mkdir()
    ours.save(saved)
    assert load(saved).encode_chat(MESSAGES) == ours.encode_chat(MESSAGES) and load(saved).stop_ids == (500,)


def test_added_tokens_may_leave_ids_out_and_are_decoded(tmp_path, sentencepiece_models):
    t = load(with_files(tmp_path / "m", sentencepiece_models / "bpe.model", {"added_tokens_decoder": {
        "505": token("<a>", special=True), "510": token("<b>")}}))
    assert t.vocab_size == 511 and t.encode("<a>the<b>")[0] == 505 and t.encode("<a>the<b>")[-1] == 510
    assert t.decode(t.encode("<a>the<b>")) == "the<b>" and t.decode(t.encode("<a>the<b>"), skip_special=False) == "<a>the<b>"
    assert t.decode([505, 507, 510]) == "<b>" and t.limited_to(511).pad_id == 3


def test_plain_text_gets_no_space_where_the_config_says_so(tmp_path, sentencepiece_models):
    from transformers import AutoTokenizer

    directory = with_files(tmp_path / "m", sentencepiece_models / "bpe.model", {"add_prefix_space": False})
    assert load(directory).encode("the") == AutoTokenizer.from_pretrained(directory).encode("the", add_special_tokens=False)
    assert load(directory).decode(load(directory).encode("the")) == "the"


@pytest.mark.parametrize("config, others, message", [
    ({"added_tokens_decoder": {"7": token("<a>")}}, {}, r"give '<a>' the id 7, but the model gives this id to"),
    ({}, {"added_tokens": {"</s>": 600}}, r"give '</s>' the id 600, but the model gives '</s>' the id 2"),
    ({"added_tokens_decoder": {"500": token("<a>", single_word=True)}}, {}, "single_word, which is not supported"),
    ({"added_tokens_decoder": DECODER}, {"added_tokens": {"<|im_end|>": 501}}, r"the id 501, but it has 500"),
    ({}, {"added_tokens": {"<a>": 500, "<b>": 500}}, "the same id, 500"),
    ({"added_tokens_decoder": {"x": token("<a>")}}, {}, r"tokenizer_config.json: added_tokens_decoder\['x'\]"),
    ({"added_tokens_decoder": {"500": "<a>"}}, {}, r"added_tokens_decoder\['500'\]='<a>' is no object"),
    ({}, {"added_tokens": {"<a>": "500"}}, r"added_tokens.json: '<a>': 500 is no id"),
    ({"eos_token": 3}, {}, "tokenizer_config.json: eos_token='3' is of type int"),
    ({"add_bos_token": "yes"}, {}, "tokenizer_config.json: add_bos_token='yes' is of type str; expected true or false"),
    ({}, {"generation_config": {"eos_token_id": "2"}}, "generation_config.json: eos_token_id='2' is of type str"),
])
def test_what_cannot_be_honoured_beside_a_model_is_an_error(tmp_path, sentencepiece_models, config, others, message):
    with pytest.raises(ValueError, match=message):
        load(with_files(tmp_path / "m", sentencepiece_models / "bpe.model", config, **others))


@pytest.mark.parametrize("generation, model, wanted", [
    (None, {"eos_token_id": [2, 4]}, (2, 4)), (None, {"text_config": {"eos_token_id": [4, 2]}}, (2, 4)),
    ({"temperature": 0.6}, {"eos_token_id": [2, 4, 50_256, -1]}, (2, 4)),
    ({"eos_token_id": 5}, {"eos_token_id": [2, 4]}, (2, 5))])
def test_end_tokens_of_the_model_count_where_the_generation_has_none(
        tmp_path, sentencepiece_models, checkpoint, generation, model, wanted):
    others = {"config": model} | ({} if generation is None else {"generation_config": generation})
    assert load(with_files(tmp_path / "m", sentencepiece_models / "bpe.model", {}, **others)).stop_ids == wanted
    published = shutil.copytree(checkpoint, tmp_path / "hf", ignore=shutil.ignore_patterns("generation_config.json"))
    with_files(published, sentencepiece_models / "bpe.model", {"eos_token": "<|im_end|>"}, **others)
    (published / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load(published).stop_ids == wanted


def test_sentencepiece_rejects_other_files(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="x.model is not a sentencepiece model"):
        load(tmp_path / "x.model")
