"""convert/vocab.py and vocab_special.py: the runtime's tokenizer must give Hugging Face's ids after conversion."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_convert
from sentencepiece import SentencePieceProcessor
from tiny import write_checkpoint
from tokenizers import Tokenizer as HFTokenizer

from hotcold.convert import main as convert_main
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.tokenizer import Tokenizer

TEXTS = ["", " ", "a", "the other one", " the", "Hello,  world!\n\n\t12345 it's", "äöü 漢字 🙂 é", "<0x41> <s> </s>",
         "tell them in the end an hour", "x" * 50, "\u2581the"]  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
T = "tokenizer.ggml."


def load(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def save(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def change(folder: Path, name: str, **keys: Any) -> None:
    value = load(folder, name) if (folder / name).exists() else {}
    save(folder, name, {k: v for k, v in (value | keys).items() if v is not DROP})


DROP = object()


def metadata(folder: Path) -> dict[str, Any]:
    """`tokenizer.*` keys after conversion."""
    out = folder / "o.gguf"
    run_convert(folder, "-o", out, "--force")
    with open_gguf(out) as f:
        return {k: f.metadata[k] for k in f.metadata if k.startswith("tokenizer.")}


def error(folder: Path, *options: str) -> str:
    parser = argparse.ArgumentParser()
    convert_main.add_arguments(parser)
    with pytest.raises(HotcoldError) as e:
        convert_main.run(parser.parse_args([str(folder), *options]))
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "bpe", "llama")


@pytest.fixture
def spm(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "spm", "mistral")


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2", "smollm"])
def test_bpe_ids_equal_hugging_face(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "qwen2" if kind == "qwen2" else "llama", tokenizer=kind)
    meta = metadata(folder)
    # Llama 3 differs from DBRX only in taking whole words first, which this tokenizer does not.
    assert meta[T + "model"] == "gpt2" and meta[T + "pre"] == ("dbrx" if kind == "llama-bpe" else kind)
    ours, theirs = Tokenizer.from_gguf(folder / "o.gguf"), HFTokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_merges_as_pairs_or_lines_are_the_same(bpe: Path) -> None:
    first = metadata(bpe)
    t = load(bpe, "tokenizer.json")
    as_lines = isinstance(t["model"]["merges"][0], str)
    t["model"]["merges"] = [m.split(" ") if as_lines else " ".join(m) for m in t["model"]["merges"]]
    save(bpe, "tokenizer.json", t)
    assert metadata(bpe)[T + "merges"] == first[T + "merges"] and len(first[T + "merges"]) > 20


def test_spm_ids_equal_sentencepiece(spm: Path) -> None:
    meta = metadata(spm)
    assert meta[T + "model"] == "llama" and meta[T + "add_space_prefix"] is True
    assert meta[T + "token_type"][:4].tolist() == [UNKNOWN, CONTROL, CONTROL, BYTE]
    assert meta[T + "token_type"][-2:].tolist() == [CONTROL, CONTROL]
    ours, theirs = Tokenizer.from_gguf(spm / "o.gguf"), SentencePieceProcessor(str(spm / "tokenizer.model"))
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text), text


def spm_json(folder: Path) -> dict[str, Any]:
    """A tokenizer.json like transformers makes of a SentencePiece model: byte fallback, merges by score."""
    sp = SentencePieceProcessor(str(folder / "tokenizer.model"))
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    merges = sorted(
        (vocab[p], p[:i], p[i:]) for p in vocab for i in range(1, len(p))
         if len(p) > 1 and not p.startswith("<") and p[:i] in vocab and p[i:] in vocab)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for i, c in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (286, "<|im_start|>"),
                                           (287, "<|im_end|>"))],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocab, "merges": [[a, b] for _, a, b in merges]},
    }  # fmt: skip


def test_spm_without_tokenizer_model(spm: Path) -> None:
    save(spm, "tokenizer.json", spm_json(spm))
    with_model = metadata(spm)
    (spm / "tokenizer.model").unlink()
    meta = metadata(spm)
    for key in ("tokens", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"):
        np.testing.assert_array_equal(meta[T + key], with_model[T + key], err_msg=key)
    ours, theirs = Tokenizer.from_gguf(spm / "o.gguf"), HFTokenizer.from_file(str(spm / "tokenizer.json"))
    for text in TEXTS[1:]:
        if "<s>" not in text:  # Hugging Face parses special tokens in any text
            assert ours.encode(text) == theirs.encode(text).ids, text


def test_a_foreign_tokenizer_model_is_not_used(spm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = spm_json(spm)
    vocab = t["model"]["vocab"]
    vocab["\u2581the"], vocab["er"] = vocab["er"], vocab["\u2581the"]
    save(spm, "tokenizer.json", t)
    tokens = metadata(spm)[T + "tokens"]
    assert tokens[vocab["er"]] == "er"
    assert "tokenizer.model and tokenizer.json differ" in capsys.readouterr().err


def test_tokenizer_model_beside_byte_level_bpe_is_named(bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bpe / "tokenizer.model").write_bytes(b"tiktoken stuff")
    assert metadata(bpe)[T + "model"] == "gpt2"
    assert "tokenizer.model beside it is not used" in capsys.readouterr().err


def test_padding_up_to_the_rows(tmp_path: Path) -> None:
    meta = metadata(write_checkpoint(tmp_path / "c", "llama-vocab"))
    assert meta[T + "tokens"][288:] == [f"[PAD{i}]" for i in range(288, 320)]
    assert set(meta[T + "token_type"][288:].tolist()) == {UNUSED}


def test_more_ids_than_rows_are_refused(bpe: Path) -> None:
    t = load(bpe, "tokenizer.json")
    t["added_tokens"].append(t["added_tokens"][-1] | {"id": 288, "content": "<extra>"})
    save(bpe, "tokenizer.json", t)
    assert "'<extra>' has id 288, the embedding has rows 0 to 287: the tokenizer does not belong" in error(bpe)


def test_ids_of_the_base_vocabulary_beyond_the_rows_are_refused(bpe: Path) -> None:
    t = load(bpe, "tokenizer.json")
    t["model"]["vocab"]["zzz"] = 10**6
    save(bpe, "tokenizer.json", t)
    assert "tokenizer.json: token 'zzz' has id 1000000" in error(bpe)


def test_no_tokenizer(bpe: Path, tmp_path: Path) -> None:
    (bpe / "tokenizer.json").unlink()
    text = error(bpe)
    assert "no tokenizer: needed are tokenizer.json, or tokenizer.model, or vocab.json and merges.txt" in text
    run_convert(bpe, "-o", tmp_path / "o.gguf", "--no-vocab")
    with open_gguf(tmp_path / "o.gguf") as f:
        assert not any(k.startswith("tokenizer.") for k in f.metadata)


def gpt2_files(folder: Path) -> None:
    """tokenizer.json split into vocab.json and merges.txt, as facebook/opt-* has them."""
    t = load(folder, "tokenizer.json")
    vocab = t["model"]["vocab"] | {a["content"]: a["id"] for a in t["added_tokens"]}
    save(folder, "vocab.json", vocab)
    lines = [m if isinstance(m, str) else " ".join(m) for m in t["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    (folder / "tokenizer.json").unlink()


def test_gpt2_files_of_opt(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "opt")
    first = metadata(folder)
    gpt2_files(folder)
    change(folder, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", add_bos_token=True,
           added_tokens_decoder=DROP, additional_special_tokens=["<|im_start|>"])
    meta = metadata(folder)
    assert meta.keys() == first.keys()
    for key in meta:
        np.testing.assert_array_equal(meta[key], first[key], err_msg=key)
    assert meta[T + "add_bos_token"] is True


def test_gpt2_files_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "qwen2")
    gpt2_files(folder)
    assert "vocab.json of a Qwen2Tokenizer does not say how text is cut" in error(folder)


@pytest.mark.parametrize(("said", "want"), [(True, True), (False, False), (None, True)])
def test_add_bos(said: bool | None, want: bool, bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", add_bos_token=said)
    assert metadata(bpe)[T + "add_bos_token"] is want


def test_no_bos_in_the_template_means_no_bos(tmp_path: Path) -> None:
    assert metadata(write_checkpoint(tmp_path / "c", "qwen2"))[T + "add_bos_token"] is False


def test_eos_in_the_template(bpe: Path) -> None:
    t = load(bpe, "tokenizer.json")
    template = t["post_processor"]["processors"][1]
    template["single"].append({"SpecialToken": {"id": "<|im_end|>", "type_id": 0}})
    save(bpe, "tokenizer.json", t)
    assert metadata(bpe)[T + "add_eos_token"] is True
    template["single"][-1]["SpecialToken"]["id"] = "<|im_start|>"
    save(bpe, "tokenizer.json", t)
    assert "post_processor adds <|im_start|> to a text: supported is the EOS token alone" in error(bpe)


def test_several_end_ids(bpe: Path) -> None:
    """EOS from the tokenizer; the others as EOT and EOM, well-known texts last because the runtime knows them."""
    change(bpe, "generation_config.json", eos_token_id=[285, 287, 40, 41])
    meta = metadata(bpe)
    assert meta[T + "eos_token_id"] == 287
    assert {meta[T + "eot_token_id"], meta[T + "eom_token_id"]} == {40, 41}
    assert Tokenizer.from_gguf(bpe / "o.gguf").eog_ids >= {285, 287, 40, 41}


def test_end_ids_without_a_key_are_announced(bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(bpe, "generation_config.json", eos_token_id=[287, 40, 41, 42])
    metadata(bpe)
    assert "no key left for the end tokens 42" in capsys.readouterr().err


def test_special_tokens_from_the_map_and_as_objects(bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", eos_token=DROP, pad_token={"content": "<|im_start|>"})
    save(bpe, "special_tokens_map.json", {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|im_end|>"})
    meta = metadata(bpe)
    assert (meta[T + "eos_token_id"], meta[T + "padding_token_id"]) == (285, 286)


def test_a_special_token_outside_the_vocabulary_is_refused(bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", eos_token="<nowhere>")
    assert "eos_token is '<nowhere>', which is not in the vocabulary" in error(bpe)


def test_added_tokens_that_are_not_special(bpe: Path) -> None:
    t = load(bpe, "tokenizer.json")
    t["added_tokens"][0] |= {"content": "word\u2581x", "special": False}
    t["added_tokens"][1] |= {"content": "<|tool|>", "special": False}  # looks special
    del t["post_processor"]
    save(bpe, "tokenizer.json", t)
    change(bpe, "tokenizer_config.json", bos_token=None, pad_token=None, added_tokens_decoder=DROP)
    meta = metadata(bpe)
    assert meta[T + "tokens"][285:287] == ["word x", "<|tool|>"]
    assert meta[T + "token_type"][285:].tolist() == [USER_DEFINED, CONTROL, CONTROL]


def test_chat_templates(bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", chat_template="config")
    assert metadata(bpe)["tokenizer.chat_template"] == "config"
    save(bpe, "chat_template.json", {"chat_template": "json"})
    assert metadata(bpe)["tokenizer.chat_template"] == "json"
    (bpe / "chat_template.jinja").write_text("jinja")
    assert metadata(bpe)["tokenizer.chat_template"] == "jinja"


def test_named_chat_templates(bpe: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool use", "template": "t"}]
    change(bpe, "tokenizer_config.json", chat_template=named)
    meta = metadata(bpe)
    assert meta["tokenizer.chat_template"] == "d"
    assert meta["tokenizer.chat_template.tool_use"] == "t"
    assert meta["tokenizer.chat_templates"] == ["tool_use"]


Edit = Callable[[dict[str, Any]], Any]
BROKEN: dict[str, tuple[Edit, str]] = {
    "unigram": (lambda t: t["model"].__setitem__("type", "Unigram"), "model type 'Unigram' is not supported"),
    "no-vocab": (lambda t: t["model"].pop("vocab"), "model.vocab is missing or empty"),
    "no-merges": (lambda t: t["model"].pop("merges"), "model.merges is missing"),
    "merge": (lambda t: t["model"].__setitem__("merges", ["a b c"]), r"model.merges\[0\] is 'a b c'"),
    "merge-type": (lambda t: t["model"].__setitem__("merges", [7]), r"model.merges\[0\] is '7'"),
    "id": (lambda t: t["model"]["vocab"].__setitem__("a", "x"), "token 'a' has id x"),
    "surrogate": (lambda t: t["model"]["vocab"].__setitem__("\ud800", 5), "token 5 is not valid Unicode"),
    "added": (lambda t: t.__setitem__("added_tokens", [7]), "an added token is '7'"),
    "added-id": (lambda t: t["added_tokens"][0].pop("id"), "an added token has id 'None'"),
    "pre-tokenizer": (lambda t: t.__setitem__("pre_tokenizer", {"type": "Odd"}), "unknown pre-tokenizer .*supported"),
    "added-type": (lambda t: t.__setitem__("added_tokens", 7), "added_tokens is '7': allowed: an array or null"),
    "cutters": (lambda t: t.__setitem__("pre_tokenizer", {"type": "Sequence", "pretokenizers": 7}),
                "pretokenizers is '7': allowed: an array"),
    "post-steps": (lambda t: t.__setitem__("post_processor", {"type": "Sequence", "processors": 7}),
                   "post_processor.processors is '7'"),
    "post-single": (lambda t: t.__setitem__("post_processor", {"type": "TemplateProcessing", "single": True}),
                    "post_processor.single is 'True'"),
    "post-cls": (lambda t: t.__setitem__("post_processor", {"type": "BertProcessing", "cls": {"a": 1}}),
                 "post_processor.cls is"),
    "two-in-front": (lambda t: t["post_processor"]["processors"][1]["single"].insert(
        0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}), "adds <|im_start|>, <|endoftext|> to a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tokenizer_json(case: str, bpe: Path) -> None:
    edit, text = BROKEN[case]
    t = load(bpe, "tokenizer.json")
    edit(t)
    save(bpe, "tokenizer.json", t)
    import re

    found = error(bpe)
    assert re.search(text.replace("|", r"\|"), found), found


def test_added_tokens_decoder_of_another_type(bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", added_tokens_decoder=["x"])
    assert "added_tokens_decoder is \"['x']\": allowed: an object or null" in error(bpe)


def test_a_chat_template_with_a_lone_surrogate_is_refused(bpe: Path) -> None:
    change(bpe, "tokenizer_config.json", chat_template="a\ud800")
    assert "tokenizer.chat_template: 'a\\ud800' is not valid Unicode" in error(bpe)


def test_a_sentencepiece_that_is_not_utf8_is_refused(spm: Path) -> None:
    path = spm / "tokenizer.model"
    content = path.read_bytes()
    at = content.index(b"\xe2\x96\x81the")  # a space as SentencePiece writes it
    path.write_bytes(content[:at] + b"\xff" + content[at + 1:])
    assert "tokenizer.model: piece " in (text := error(spm)) and "is not UTF-8" in text


def test_some_byte_tokens_are_refused_by_name(spm: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto()
    model.ParseFromString((spm / "tokenizer.model").read_bytes())
    piece = next(p for p in model.pieces if p.piece == "<0x41>")
    piece.piece, piece.type = "odd", proto.ModelProto.SentencePiece.NORMAL
    (spm / "tokenizer.model").write_bytes(model.SerializeToString())
    assert "found 255 byte tokens, <0x41> is not among them; allowed: none or all 256" in error(spm)
    assert not list(spm.glob("*.gguf")) and not list(spm.glob(".*.part"))


def test_a_piece_with_a_nul_is_refused(spm: Path) -> None:
    meta = metadata(spm)
    meta[T + "tokens"][-1] = "a\0b"
    meta[T + "token_type"] = np.array(meta[T + "token_type"])
    with pytest.raises(HotcoldError, match="tokens: sentencepiece refuses the vocabulary: .*null"):
        Tokenizer.from_metadata(meta)


def test_a_vocabulary_without_unknown_token(spm: Path) -> None:
    """All 256 bytes have tokens, so nothing is ever unknown."""
    meta = metadata(spm)
    before = Tokenizer.from_metadata(meta).encode("the other \u6f22 one")
    meta[T + "token_type"] = np.where(meta[T + "token_type"] == UNKNOWN, CONTROL, meta[T + "token_type"])
    assert Tokenizer.from_metadata(meta).encode("the other \u6f22 one") == before


@pytest.mark.parametrize("content", [b"", b"\xff\xfe nonsense", b"tiktoken 1\n"])
def test_broken_tokenizer_model(content: bytes, spm: Path) -> None:
    (spm / "tokenizer.model").write_bytes(content)
    assert "tokenizer.model: not a SentencePiece model" in error(spm)


def test_unigram_sentencepiece_is_refused(spm: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto()
    model.ParseFromString((spm / "tokenizer.model").read_bytes())
    model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM
    (spm / "tokenizer.model").write_bytes(model.SerializeToString())
    assert "SentencePiece model type UNIGRAM: supported is BPE" in error(spm)


@pytest.mark.parametrize("value", ["x", {}, [1, "x"], 1.5, True])
def test_token_ids_of_a_wrong_type_are_refused(value: object, tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HotcoldError, match=r"config\.json: eos_token_id"):
        run_convert(folder, "-o", tmp_path / "out.gguf")


def test_a_key_that_stands_twice_is_refused(tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.rstrip().removesuffix("}") + ', "hidden_act": "relu"}')
    with pytest.raises(HotcoldError, match="'hidden_act' stands twice"):
        run_convert(folder, "-o", tmp_path / "out.gguf")
