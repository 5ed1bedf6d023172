"""Text to token ids and back: bytes, sentencepiece, Hugging Face, the vocabulary inside a GGUF; and chat templates."""
from jaxrl_llm.tokenizers.base import Tokenizer
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.tokenizers.gguf import GgufTokenizer
from jaxrl_llm.tokenizers.hugging_face import HuggingFaceTokenizer
from jaxrl_llm.tokenizers.loading import load
from jaxrl_llm.tokenizers.sentence_piece import SentencePieceTokenizer

__all__ = ["ByteTokenizer", "GgufTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "Tokenizer", "load"]
