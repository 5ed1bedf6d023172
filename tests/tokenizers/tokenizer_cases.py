"""Texts, templates and small vocabularies that the tokenizer tests share, and writers of the files that hold them."""
import json
from itertools import pairwise

import regex

SAMPLES = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, and trailing  ",
    "a\tb\r\n\n\n  c\u00a0d",
    "I'LL don't we've SHE'S",
    "3 + 14 = 17; 1234567 0.5 ½ ٣ x2y3  1   23",
    "def f(x):\n    return x ** 2  # carré\n",
    "Größe, déjà vu, Ελλάδα, Привет, मानक हिन्दी, שלום",
    "你好，世界。東京 한국어",
    "🙂👩‍👩‍👧‍👦 emoji 🇫🇷 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<think>so</think>",
    '{"a": [1, 2], "b": null}\x00\x7f',
]
CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of published models: how they trim, rename roles, begin, and show tools and reasoning.
LLAMA3 = (
    "{{- bos_token }}{% if tools is not none %}{{ 'Tools: ' + tools | tojson(indent=4) }}{% endif %}\n"
    "{%- for m in messages %}\n"
    "    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}\n"
    "{%- for m in (messages[1:] if first else messages) -%}\n"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}\n"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}\n"
    "{%- if m.content is string -%}{{ m.content | trim }}\n"
    "{%- else -%}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{%- endif -%}\n"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}\n{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- if tools %}{{- '<|im_start|>system\n<tools>' }}\n"
    "{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}\n"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\n"
    "{%- for m in messages %}{%- set text = m.content %}\n"
    "    {%- if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}\n"
    "        {%- set text = text.split('</think>')[-1].lstrip('\n') %}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}\n"
    "{%- endif %}"
)
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "gemma3": GEMMA3, "qwen3": QWEN3}
MESSAGES = [
    {"role": "system", "content": "Be brief & <exact>."},
    {"role": "user", "content": "2+2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "déjà 🙂"},
]
CORPUS = [text for text in SAMPLES if text and "<|" not in text] * 3 + ["the theme of the then there"] * 5
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return backend


def write_checkpoint(directory, backend, config, generation=None):
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def write_gguf(path, model, tokens, types, pre=None, merges=None, scores=None, eos=2, **more):
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if eos is not None:
        writer.add_eos_token_id(eos)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path, backend, pre, **more):
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    types = [3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in tokens]
    return write_gguf(path, "gpt2", tokens, types, pre, [" ".join(m) for m in model["merges"]], **more)


def llama_gguf(path, model_path, space_prefix=True, scores=None, unknown_kind=2, **more):
    from sentencepiece import SentencePieceProcessor

    sp = SentencePieceProcessor(model_file=str(model_path))
    kinds = [
        unknown_kind if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
        for i in range(len(sp))
    ]
    pieces = [sp.id_to_piece(i) for i in range(len(sp))]
    for user_defined in ("<think>", "▁▁▁▁"):
        assert sp.piece_to_id(user_defined) != sp.unk_id()
        kinds[sp.piece_to_id(user_defined)] = 4
    tokens = [p.replace("▁", " ") if k == 4 else p for p, k in zip(pieces, kinds)]
    scores = [sp.get_score(i) for i in range(len(sp))] if scores is None else scores(sp)
    return write_gguf(
        path,
        "llama",
        tokens,
        kinds,
        scores=scores,
        bos_token_id=1,
        pad_token_id=3,
        add_space_prefix=space_prefix,
        **more,
    )


def plain_bpe(text, vocab, merges, specials, cut):
    """Byte-level BPE: cut, spell bytes in GPT-2's alphabet, join the best-ranked pair while one is left."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    rank, ids = {tuple(m): n for n, m in enumerate(merges)}, []
    for part in regex.split("(" + "|".join(map(regex.escape, specials)) + ")", text):
        for piece in [part] if part in specials else cut(part):
            symbols = [piece] if piece in specials else [letter[b] for b in piece.encode()]
            while pairs := [(rank[p], n) for n, p in enumerate(pairwise(symbols)) if p in rank]:
                _, n = min(pairs)
                symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]
            ids += [vocab[s] for s in symbols]
    return ids


GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def smollm_cut(text):
    return [p for part in regex.split(r"(\p{N})", text) for p in regex.findall(GPT2_CUT, part)]
