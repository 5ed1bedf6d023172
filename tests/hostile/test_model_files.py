"""Folders of others that hold a model: each attack on their files ends with one error that names the file and the key."""
import base64
import json
import os
import shutil
import struct

import numpy as np
import pytest
from model_files import CONFIG, TOKENIZER, write
from safetensors.numpy import load_file, save_file

from jaxrl_llm import tokenizers
from jaxrl_llm.models import families, weights
from jaxrl_llm.models.weights import config_checks
from jaxrl_llm.tools import files, gguf_header


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "model")


def change(folder, name, **changes):
    content = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps(content))


def test_the_checkpoint_itself_loads(folder):
    config, params = weights.load(folder)
    assert config.num_layers == 2 and params["embed"].shape == (64, 8)
    assert tokenizers.load(folder).encode("ab<end>") == [2, 3]


# --- config.json -------------------------------------------------------------------------------------------------------


WRONG = [("vocab_size", "16"), ("vocab_size", 64.0), ("vocab_size", True), ("num_attention_heads", 0),
         ("num_attention_heads", [2]),
         ("num_key_value_heads", 0), ("head_dim", -4), ("head_dim", 2**31), ("hidden_size", None), ("num_hidden_layers", 10**9),
         ("num_hidden_layers", "2"), ("intermediate_size", {}), ("max_position_embeddings", 0), ("rms_norm_eps", float("nan")),
         ("rms_norm_eps", "1e-6"), ("rms_norm_eps", -1e-6), ("rope_theta", 0), ("rope_theta", float("inf")), ("rope_theta", []),
         ("rope_scaling", "x"), ("rope_scaling", {"rope_type": "linear", "factor": 0}), ("rope_scaling", {"rope_type": ["x"]}),
         ("rope_scaling", {"rope_type": "linear"}), ("rope_parameters", [1]), ("tie_word_embeddings", "y"), ("hidden_act", []),
         ("hidden_act", 3), ("rope_parameters", {"full_attention": 3}), ("attention_bias", "x"), ("model_type", ["llama"]),
         ("model_type", None), ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0})]


@pytest.mark.parametrize("key, value", WRONG)
def test_values_of_wrong_types_and_ranges_are_named(folder, key, value):
    change(folder, "config.json", **{key: value})
    if (key, value) == ("hidden_size", None):  # null is as absent: the family's default, which the tensors deny
        key = "expected shape"
    with pytest.raises(ValueError, match=f"(?s)model.*{key.removesuffix('_parameters').removesuffix('_scaling')}"):
        weights.opened(folder)


@pytest.mark.parametrize("model_type, changes, key", [
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"), ("gemma2", {"sliding_window": "x"}, "sliding_window"),
    ("gemma2", {"layer_types": "full_attention"}, "layer_types"), ("gemma2", {"layer_types": [["x"]] * 2}, "layer_types"),
    ("gemma2", {"layer_types": ["full_attention"]}, "local_layers"), ("gemma2", {"sliding_window": 0}, "window"),
    ("gemma3", {"text_config": "x"}, "text_config"), ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("mixtral", {"num_local_experts": 10**9}, "num_local_experts"), ("mixtral", {"num_experts_per_tok": 9}, "per_token"),
    ("qwen2", {"max_window_layers": "x"}, "max_window_layers"), ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
    ("smollm3", {"no_rope_layers": 3}, "no_rope_layers"), ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("granite", {"logits_scaling": 0}, "logits_scaling"), ("glm4", {"partial_rotary_factor": 2}, "partial_rotary_factor"),
    ("phi3", {"rope_scaling": {"rope_type": "longrope", "short_factor": "x", "long_factor": []}}, "short_factor"),
    ("phi3", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factors"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 2, "high_freq_factor": 2}}, "high_f")])
def test_values_that_only_some_families_read_are_named(model_type, changes, key):
    raw = {"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
           "num_key_value_heads": 2, **changes}
    with pytest.raises(ValueError, match=f"^/x/config.json: .*{key}"):
        weights.hf.config_from(raw, "/x/config.json")


def test_all_keys_that_a_family_reads_have_a_rule():
    for family in families.families().values():
        assert family.read_keys() <= config_checks.KEYS.keys(), family.name


def test_more_layers_than_tensors_are_refused_before_a_table_is_made(folder):
    change(folder, "config.json", num_hidden_layers=config_checks.LAYERS)
    with pytest.raises(ValueError, match="config.json: num_hidden_layers=16384, but the files hold 20 tensors"):
        weights.opened(folder)
    change(folder, "config.json", num_hidden_layers=2, num_attention_heads=2**30, num_key_value_heads=2**30, head_dim=2**30)
    with pytest.raises(ValueError, match="expected shape"):
        weights.opened(folder)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a": 1', "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json",
                                  "added_tokens.json"])
def test_what_is_no_object_is_named(folder, name, text):
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=name):
        weights.opened(folder) if name == "config.json" else tokenizers.load(folder)


# --- files that are none, or lie elsewhere -----------------------------------------------------------------------------


def load(folder):
    return weights.load(folder), tokenizers.load(folder)


def index(folder, where):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, where)}))


NAMES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "generation_config.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates/x.jinja",
         "model.safetensors.index.json", "part.safetensors"]


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
@pytest.mark.parametrize("name", NAMES)
def test_only_regular_files_of_the_folder_are_read(folder, name, kind, tmp_path):
    if "part" in name or "index" in name:
        index(folder, "part.safetensors")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    text = file.read_bytes() if file.exists() else b"secret"
    file.unlink(missing_ok=True)
    (tmp_path / "elsewhere").write_bytes(text)
    {"pipe": lambda: os.mkfifo(file), "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
     "device": lambda: file.symlink_to("/dev/zero"), "folder": file.mkdir}[kind]()
    with pytest.raises(ValueError, match=f"{name} (is no regular file but|lies outside of its folder)"):
        load(folder)


@pytest.mark.parametrize("where", ["../other/part.safetensors", "/etc/passwd", "sub/../../other/part.safetensors", "../../x"])
def test_an_index_names_files_of_its_folder_only(folder, where):
    shutil.copytree(folder, folder.parent / "other")
    index(folder.parent / "other", "part.safetensors")
    index(folder, where)
    with pytest.raises(ValueError, match="lies outside of its folder"):
        weights.opened(folder)
    index_of = {"weight_map": {"model.embed_tokens.weight": 3}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of))
    with pytest.raises(ValueError, match="model.safetensors.index.json: model.embed_tokens.weight='3' is of type int"):
        weights.opened(folder)


def test_a_gguf_file_in_a_folder_is_a_regular_one(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    for read in (weights.opened, tokenizers.load):
        with pytest.raises(ValueError, match="x.gguf is no regular file but a pipe"):
            read(tmp_path)
    with pytest.raises(ValueError, match="neither a directory"):
        weights.opened(tmp_path / "x.gguf")


def test_links_within_a_folder_and_into_the_cache_of_the_hub_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert weights.load(snapshot)[0] == CONFIG and tokenizers.load(snapshot).eos_id == 3
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../secret")
    with pytest.raises(ValueError, match="lies outside"):
        weights.opened(snapshot)
    (folder / "a.json").write_text("{}")
    (folder / "b.json").symlink_to("a.json")
    (tmp_path / "way").symlink_to(folder)
    assert files.read_object(tmp_path / "way", "b.json") == {}
    (folder / "loop").symlink_to("loop")
    assert files.regular(folder, "absent") is None
    with pytest.raises(ValueError, match="loop"):
        files.regular(folder, "loop")


def test_files_are_read_up_to_a_limit_of_size(folder):
    os.truncate(folder / "generation_config.json", files.TEXT_LIMIT + 1)  # a hole, of no size on the disk
    with pytest.raises(ValueError, match=rf"generation_config.json has {files.TEXT_LIMIT + 1} bytes; at most"):
        tokenizers.load(folder)


def test_the_home_of_an_unknown_user_is_named():
    for read in (weights.load, tokenizers.load):
        with pytest.raises(ValueError, match="'~nosuchuser/x' begins with the home folder of a user"):
            read("~nosuchuser/x")


# --- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad, dtype", [(np.nan, np.float32), (np.inf, np.float32), (-np.inf, np.float16), (1e300, np.float64)])
def test_weights_that_are_not_finite_are_refused(folder, bad, dtype):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    tensors[name][3, 4] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor '{name}' in .*model.safetensors holds 1 values of 96 that are NaN"):
        weights.load(folder)


# --- tokenizers --------------------------------------------------------------------------------------------------------


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def tokenizer(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | changes))
    return tokenizers.load(folder)


@pytest.mark.parametrize("normalizer", [
    {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 40},
    {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replaced({"Regex": "a"}, "aa")] * 20}] * 2},
    replaced({"String": "a"}, "a" * 2_000_000), replaced({"Regex": "a"}, "b" * 2_000_000),
    replaced({"String": ""}, "b" * 300_000),
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "aaaa" * 300_000}] * 2}])
def test_a_normalizer_that_multiplies_is_refused(folder, normalizer):
    with pytest.raises(ValueError, match=r"tokenizer.json: the normalizer makes \d+ letters or more of a text of (5|10)"):
        tokenizer(folder, normalizer=normalizer).encode("a" * 10)


@pytest.mark.parametrize("pieces, ids, nested", [(65, 1, False), (1, 65, False), (9, 9, False), (33, 1, True)])
def test_a_post_processor_that_adds_many_tokens_is_refused(folder, pieces, ids, nested):
    """A hundred thousand pieces of as many ids each would fill all memory when the tokenizer is read."""
    def template(pieces, ids):
        text = [{"Sequence": {"id": "A", "type_id": 0}}]
        step = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "b", "type_id": 0}}] * pieces + text,
                "pair": text, "special_tokens": {"b": {"id": "b", "ids": [1] * ids, "tokens": ["b"] * ids}}}
        return {"type": "Sequence", "processors": [step, step]} if nested else step  # which the library cannot run

    with pytest.raises(ValueError, match="tokenizer.json: post_processor adds more than 64 tokens to a text"):
        tokenizer(folder, post_processor=template(pieces, ids))
    if not nested:
        tokenizer(folder, post_processor=template(2, 2))


def test_a_charsmap_is_as_long_as_it_says(folder):
    """The library reserves eight gigabytes for this table, and ends the process where it gets none."""
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 12).decode()}
    with pytest.raises(ValueError, match="tokenizer.json: normalizer: precompiled_charsmap is shorter than the table"):
        tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [table]})


def test_the_charsmap_of_a_normalizer_is_counted(folder):
    """A trie that maps nothing, and a text of a million letters to which it could map each."""
    table = struct.pack("<I", 4) + bytes(4) + b"x" * 1_000_000 + b"\0"
    with pytest.raises(ValueError, match="by a step of type Precompiled"):
        tokenizer(folder, normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()})


def test_an_added_token_is_normalized_within_the_same_limit(folder):
    added = [TOKENIZER["added_tokens"][0] | {"content": "a" * 10, "normalized": True}]
    normalizer = {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 40}
    with pytest.raises(ValueError, match="the normalizer makes"):
        tokenizer(folder, normalizer=normalizer, added_tokens=added)


@pytest.mark.parametrize("changes, key", [
    ({"decoder": replaced({"String": "a"}, "a" * 3000)}, "decoder multiplies"), ({"normalizer": 3}, "normalizer=3"),
    ({"model": TOKENIZER["model"] | {"vocab": {"a" * 10_000: 3}}}, "10000 letters"),
    ({"model": TOKENIZER["model"] | {"end_of_word_suffix": "a" * 100}}, "model.end_of_word_suffix"),
    ({"model": 3}, "is no tokenizer.json"), ({"normalizer": {"type": "Replace", "content": 3}}, "content=3"),
    ({"model": TOKENIZER["model"] | {"vocab": []}}, "is no tokenizer.json"), ({"added_tokens": 3}, "is no tokenizer.json")])
def test_what_multiplies_letters_elsewhere_is_refused(folder, changes, key):
    with pytest.raises(ValueError, match=f"tokenizer.json.*{key}"):
        tokenizer(folder, **changes)


def test_texts_that_real_normalizers_lengthen_are_encoded(folder):
    """Eighteen letters for one, by Unicode, and a space for each, as in published files."""
    real = tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Prepend", "prepend": "a"}, replaced({"String": " "}, "b"),
        replaced({"Regex": "c{2,}"}, "b")]})
    assert real.encode("\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}") == [2, 1, 1]  # a and three spaces
    assert len(real.encode("b" * 300_000)) == 300_000 and len(real.encode("a b" * 50_000)) == 100_001


def test_where_the_library_panics_the_error_is_a_value_error(folder):
    with pytest.raises(ValueError, match="cannot work with this tokenizer"):
        tokenizer(folder, pre_tokenizer={"type": "FixedLength", "length": 0}).encode("abc")


# --- GGUF --------------------------------------------------------------------------------------------------------------


def gguf(path, tensors=0, entries=0, rest=b""):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest)
    return path


def text(content):
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize("tensors, entries, rest, words", [
    (2**60, 0, b"", "more than it can hold"), (0, 2**60, b"", "more than it can hold"),
    (0, 1, struct.pack("<Q", 2**63) + bytes(40), "ends amid its header"),
    (0, 1, text(b"k") + struct.pack("<I", 77) + bytes(9), "type 77"),
    (0, 1, text(b"k") + struct.pack("<IIQ", 9, 0, 2**61), "arrays of 2305843009213693952 values"),
    (0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**20), "ends amid its header"),
    (0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 6, "arrays of arrays"),
    (1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0) + bytes(64), "the tensor b't' ends at byte"),
    (1, 0, text(b"t") + struct.pack("<I", 2**31) + bytes(64), "2147483648 dimensions"),
    (1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64), "the tensor b't' ends at byte")])
def test_sizes_in_a_gguf_header_are_checked_against_the_file(tmp_path, tensors, entries, rest, words):
    path = gguf(tmp_path / "x.gguf", tensors, entries, rest)
    for read in (weights.opened, tokenizers.load, gguf_header.reader):
        with pytest.raises(ValueError, match=f"x.gguf is not a readable GGUF file.*{words}"):
            read(path)
