"""Vocabularies trained once for all tokenizer tests."""
import pytest
from tokenizer_cases import CHATML, CORPUS, train_byte_level, write_checkpoint


@pytest.fixture(scope="session")
def backend():
    return train_byte_level()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, backend):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "bos_token": "<|im_start|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    return write_checkpoint(tmp_path_factory.mktemp("hf") / "model", backend, config, {"eos_token_id": [2, 0]})


@pytest.fixture(scope="session")
def sentencepiece_models(tmp_path_factory):
    """Two trained models: BPE with byte fallback (GGUF's "llama"), and unigram with sentencepiece's defaults."""
    import sentencepiece

    directory = tmp_path_factory.mktemp("sp")
    bpe = {
        "model_type": "bpe",
        "vocab_size": 500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["<start_of_turn>"],
        "user_defined_symbols": ["<think>", "▁▁▁▁"],
        "character_coverage": 0.98,
        "pad_id": 3,
    }
    sentences = [line for text in CORPUS for line in text.replace("\x00", "").splitlines()]
    for name, options in (("bpe", bpe), ("unigram", {"model_type": "unigram", "vocab_size": 120})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_prefix=str(directory / name),
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    return directory
