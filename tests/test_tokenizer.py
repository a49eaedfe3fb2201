"""Tokenizer: ids and text equal to Hugging Face's (goldens), special tokens, streaming, vocabularies from strangers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.runtime import pretokenizers
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.tokenizer import Tokenizer
from hotcold.runtime.vocab_models import SPMModel

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden").joinpath("tokenizers.json").read_text())
BPE_KINDS = list(GOLDEN["bpe"]["kinds"])
P = "tokenizer.ggml."


def bpe_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """`tokenizer.*` keys of the golden BPE vocabulary; keyword arguments replace keys, None removes them."""
    bpe = GOLDEN["bpe"]
    n, n_special, n_user = len(bpe["tokens"]), len(bpe["special"]), len(bpe["user_defined"])
    metadata: dict[str, Any] = {
        P + "model": "gpt2",
        P + "pre": pre,
        P + "tokens": bpe["tokens"] + bpe["special"] + bpe["user_defined"],
        P + "token_type": np.array([1] * n + [3] * n_special + [4] * n_user, np.int32),
        P + "merges": [" ".join(m) for m in bpe["merges"]],
        P + "bos_token_id": n,
        P + "eos_token_id": n,
        P + "add_bos_token": False,
    }
    return changed(metadata, changes)


def spm_metadata(**changes: Any) -> dict[str, Any]:
    spm = GOLDEN["spm"]
    metadata = {
        P + "model": "llama",
        P + "pre": "default",
        P + "tokens": list(spm["tokens"]),
        P + "scores": np.array(spm["scores"], np.float32),
        P + "token_type": np.array(spm["types"], np.int32),
        P + "bos_token_id": 1,
        P + "eos_token_id": 2,
        P + "unknown_token_id": 0,
    }
    return changed(metadata, changes)


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    metadata.update({P + k if k != "chat_template" else "tokenizer.chat_template": v for k, v in changes.items()})
    return {k: v for k, v in metadata.items() if v is not None}


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_metadata(bpe_metadata("qwen2"))


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer.from_metadata(spm_metadata())


def check_golden(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    for text, ids, decoded in zip(GOLDEN["texts"], golden["plain"], golden["decoded"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == decoded
        assert not any(tokenizer.is_control(i) for i in ids)
    for i, text in enumerate(GOLDEN["marked"]):
        ids = golden["marked"][i]
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids, text
        assert tokenizer.decode(ids) == golden["decoded_skip"][i]
        assert tokenizer.decode(ids, keep_special=True) == golden["decoded_keep"][i]


@pytest.mark.parametrize("kind", BPE_KINDS)
def test_bpe_ids_and_text_equal_hugging_face(kind: str) -> None:
    check_golden(Tokenizer.from_metadata(bpe_metadata(kind)), GOLDEN["bpe"]["kinds"][kind])


def test_goldens_tell_kinds_apart() -> None:
    """The shared vocabulary is worth something only if kinds that cut differently give different ids."""
    by_ids: dict[str, set[Any]] = {}
    for kind, golden in GOLDEN["bpe"]["kinds"].items():
        row = pretokenizers.kind(kind)
        by_ids.setdefault(json.dumps(golden["plain"]), set()).add((row.steps, row.nfc))
    assert all(len(rows) == 1 for rows in by_ids.values())
    assert len(by_ids) == len({(r.steps, r.nfc) for r in map(pretokenizers.kind, BPE_KINDS)})


@pytest.mark.parametrize(("kind", "whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False), ("qwen2", False)])
def test_words_taken_whole(kind: str, whole: bool) -> None:
    """Llama 3 and Tekken take a word that is in the vocabulary even when no merges lead to it."""
    metadata = bpe_metadata(kind)
    metadata[P + "tokens"] = [*metadata[P + "tokens"], "\u0120zqxj"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], 1).astype(np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("a zqxj", add_special=False)
    assert (tokenizer.n_vocab - 1 in ids) == whole
    assert tokenizer.decode(ids) == "a zqxj"


def test_spm_ids_and_text_equal_hugging_face_and_sentencepiece(spm: Tokenizer) -> None:
    golden = GOLDEN["spm"]
    check_golden(spm, golden)
    special = ("<", "\u2581low")  # special tokens in the text, or the marker itself, are where the library differs
    same = [i for i, t in enumerate(GOLDEN["texts"]) if not any(s in t for s in special)]
    assert len(same) > 40
    assert [golden["plain"][i] for i in same] == [golden["sentencepiece"][i] for i in same]


def test_default_kind_cuts_as_llama_cpp() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata("default"))
    missing = Tokenizer.from_metadata(bpe_metadata(pre=None))  # type: ignore[arg-type]
    for text in GOLDEN["texts"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert missing.encode(text) == ids
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")][0] != "1234"


# ---- special tokens


def test_control_tokens_only_when_asked(bpe: Tokenizer, spm: Tokenizer) -> None:
    text = "a<|im_end|>b</s>c<unk><s><|endoftext|>"
    for tokenizer in (bpe, spm):
        plain = tokenizer.encode(text, add_special=False)
        assert not any(tokenizer.is_control(i) for i in plain)
        assert tokenizer.decode(plain) == text
        parsed = tokenizer.encode(text, add_special=False, parse_special=True)
        assert "<|im_end|>" in [tokenizer.token_text(i) for i in parsed if tokenizer.is_control(i)]
        assert tokenizer.decode(parsed, keep_special=True).replace(" ", "") == text


def test_a_word_that_spells_a_control_token_is_not_one() -> None:
    """ignore_merges takes whole words from the vocabulary, merges may lead to a control token: neither may happen."""
    metadata = bpe_metadata("llama-bpe")
    tokens, merges = metadata[P + "tokens"], metadata[P + "merges"]
    word = next(t for t in tokens if len(t) > 3 and t.isascii() and t.isalpha())
    metadata[P + "token_type"][tokens.index(word)] = 3
    assert any(m.replace(" ", "") == word for m in merges)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode(word, add_special=False)
    assert tokens.index(word) not in ids
    assert tokenizer.decode(ids) == word
    assert tokenizer.encode(word, add_special=False, parse_special=True) == [tokens.index(word)]


def test_longest_special_token_wins() -> None:
    metadata = bpe_metadata()
    metadata[P + "tokens"] = [*metadata[P + "tokens"], "<|im_end|><|im_end|>", "|><"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [3, 3]).astype(np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    n = tokenizer.n_vocab
    end = metadata[P + "tokens"].index("<|im_end|>")
    ids = tokenizer.encode("<|im_end|><|im_end|><|im_end|>", add_special=False, parse_special=True)
    assert ids == [n - 2, end]  # leftmost, then longest; "|><" inside is never seen


def test_user_defined_tokens_are_found_in_text_from_people(bpe: Tokenizer) -> None:
    ids = bpe.encode("x<think>y")
    assert "<think>" in [bpe.token_text(i) for i in ids]
    assert not any(bpe.is_control(i) for i in ids)
    assert bpe.decode(ids) == "x<think>y"


def test_marked_text(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        marked = "<|im_start|>user\na\U0010fffd|im_end|>b <think><|im_end|>\n"
        ids = tokenizer.encode_marked(marked, {"\U0010fffd": "<"})
        assert [tokenizer.token_text(i) for i in ids if tokenizer.is_control(i)] == ["<|im_start|>", "<|im_end|>"]
        assert "a<|im_end|>b <think>" in tokenizer.decode(ids)
        benign = "<|im_start|>user\nhello<|im_end|>\n"
        assert tokenizer.encode_marked(benign, {}) == tokenizer.encode_chat(benign)


def test_bos_and_eos_as_the_file_says() -> None:
    both = Tokenizer.from_metadata(bpe_metadata(add_bos_token=True, add_eos_token=True))
    bos, eos = both.bos_id, both.eos_id
    assert both.encode("a")[0] == bos and both.encode("a")[-1] == eos
    assert both.encode("a")[1:-1] == both.encode("a", add_special=False)
    assert both.encode("")[0] == bos
    doubled = both.encode("<|endoftext|>a<|endoftext|>", parse_special=True)
    assert doubled.count(bos) == 2  # one in front, one behind, as in the text
    assert Tokenizer.from_metadata(bpe_metadata("qwen2", add_bos_token=None)).add_bos is False
    assert Tokenizer.from_metadata(bpe_metadata("llama-bpe", add_bos_token=None)).add_bos is True
    llama = Tokenizer.from_metadata(spm_metadata())
    assert llama.add_bos and not llama.add_eos and llama.encode("") == [1]
    assert llama.encode("<s>a", parse_special=True).count(1) == 1


def test_every_end_of_turn_counts(bpe: Tokenizer, spm: Tokenizer) -> None:
    def texts(t: Tokenizer) -> set[str]:
        return {t.token_text(i) for i in t.eog_ids}

    assert texts(bpe) == {"<|endoftext|>", "<|im_end|>"}
    assert texts(spm) == {"</s>", "<|endoftext|>", "<|im_end|>"}
    think = bpe.vocabulary.tokens.index("<think>")
    assert think in Tokenizer.from_metadata(bpe_metadata(eot_token_id=think)).eog_ids
    # The same text as an ordinary token ends nothing; as a user-defined one it is really a control token.
    metadata = bpe_metadata()
    at = metadata[P + "tokens"].index("<|im_end|>")
    metadata[P + "token_type"][at] = 1
    assert at not in Tokenizer.from_metadata(metadata).eog_ids
    metadata[P + "token_type"][at] = 4
    tokenizer = Tokenizer.from_metadata(metadata)
    assert at in tokenizer.eog_ids and tokenizer.is_control(at)
    assert at not in tokenizer.encode("<|im_end|>")


def test_inner_end_of_harmony_does_not_end_the_turn() -> None:
    metadata = bpe_metadata()
    metadata[P + "tokens"] = [*metadata[P + "tokens"], "<|end|>", "<|return|>", "<|call|>"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [3, 3, 3]).astype(np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} >= {"<|return|>", "<|call|>"}
    assert "<|end|>" not in {tokenizer.token_text(i) for i in tokenizer.eog_ids}


def test_padding_rows_are_not_tokens() -> None:
    metadata = bpe_metadata()
    n = len(metadata[P + "tokens"])
    metadata[P + "tokens"] = [*metadata[P + "tokens"], f"[PAD{n}]", ""]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [4, 1]).astype(np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert n not in tokenizer.encode(f"[PAD{n}]", parse_special=True)
    assert tokenizer.n_vocab == n + 2


def test_spaces_after_special_tokens_of_phi3() -> None:
    metadata = spm_metadata() | {"general.name": "Phi-3 mini"}
    phi, llama = Tokenizer.from_metadata(metadata), Tokenizer.from_metadata(spm_metadata())
    text = "<|im_end|>\n a<|endoftext|> b"
    assert llama.encode_chat(text) != phi.encode_chat(text)
    assert phi.decode(phi.encode_chat(text), keep_special=True).startswith("<|im_end|> a<|endoftext|>")
    end, after = phi.encode_chat("<|im_end|>  "), phi.encode_chat("<|endoftext|> ")
    assert len(end) == 1 and len(after) > 1


def test_space_prefix_can_be_off() -> None:
    on, off = Tokenizer.from_metadata(spm_metadata()), Tokenizer.from_metadata(spm_metadata(add_space_prefix=False))
    assert on.encode("Hello") == on.encode(" Hello")[:0] + on.encode("Hello")
    assert off.encode(" Hello", add_special=False) == on.encode("Hello", add_special=False)
    assert off.decode(off.encode(" Hello")) == " Hello"
    assert on.decode(on.encode(" Hello")) == " Hello"


# ---- decoding, streaming


def test_ids_outside_the_vocabulary_are_no_text(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode("ok", add_special=False)
        assert tokenizer.decode([tokenizer.n_vocab, *ids, tokenizer.n_vocab + 5]) == "ok"
        assert tokenizer.decode(np.array(ids, np.int32)) == tokenizer.decode(iter(ids)) == "ok"
        assert tokenizer.stream().put(tokenizer.n_vocab) == ""
        assert tokenizer.token_text(tokenizer.n_vocab) == ""


@pytest.mark.parametrize(
    ("ids", "told"), [(5, "5"), (None, "None"), (["a"], "'a'"), ("ab", "'a'"), ([1.5], "1.5"), ([None], "None"),
                      ([-1], "-1"), ([10**6], "1000000"), ([2**70], str(2**70))],
)  # fmt: skip
def test_what_is_no_token_id_is_named(bpe: Tokenizer, spm: Tokenizer, ids: Any, told: str) -> None:
    for tokenizer in (bpe, spm):
        with pytest.raises(HotcoldError, match=rf"^decode: .*{told}"):
            tokenizer.decode(ids)


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.put(i) for i in ids), stream.flush()]


def test_stream_gives_whole_characters(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer, golden in ((bpe, GOLDEN["bpe"]["kinds"]["qwen2"]), (spm, GOLDEN["spm"])):
        for ids in golden["plain"]:
            parts = streamed(tokenizer, ids)
            assert "".join(parts) == tokenizer.decode(ids)
    family = "\U0001f469\u200d\U0001f467"
    bytes_only = [spm.vocabulary.tokens.index(f"<0x{b:02X}>") for b in family.encode()]
    parts = streamed(spm, bytes_only)
    assert [p for p in parts if p] == list(family)
    assert parts[3] == family[0] and parts[:3] == ["", "", ""]


def test_stream_of_broken_bytes(spm: Tokenizer) -> None:
    tokens = spm.vocabulary.tokens
    a = tokens.index("\u2581a")
    lead, cont = tokens.index("<0xE2>"), tokens.index("<0x96>")
    assert streamed(spm, [lead]) == ["", "\ufffd"]
    assert streamed(spm, [lead, cont, a]) == ["", "", "\ufffd a", ""]
    assert streamed(spm, [cont]) == ["\ufffd", ""]
    assert spm.decode([lead, cont, a]) == "\ufffd\ufffd a"  # Hugging Face: one for each byte
    stream = spm.stream()
    assert [stream.put(lead), stream.flush(), stream.put(a)] == ["", "\ufffd", " a"]


def test_stream_and_the_space_in_front(spm: Tokenizer) -> None:
    ids = spm.encode("Hello world", add_special=False)
    assert "".join(streamed(spm, ids)) == "Hello world"
    assert "".join(streamed(spm, ids, continues=True)) == " Hello world"
    assert "".join(streamed(spm, [1, *ids])) == "Hello world"
    assert "".join(streamed(spm, [1, *ids], keep_special=True)) == "<s> Hello world"
    assert spm.decode([1, *ids], keep_special=True) == "<s> Hello world"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_round_trip_of_any_text(text: str) -> None:
    for metadata in (BPE_PLAIN, SPM_PLAIN):
        ids = metadata.encode(text, add_special=False)
        assert "".join(streamed(metadata, ids)) == metadata.decode(ids)
        assert metadata.decode(ids) == (text.replace("\u2581", " ") if metadata is SPM_PLAIN else text)
        assert not any(metadata.is_control(i) for i in ids)


BPE_PLAIN = Tokenizer.from_metadata(bpe_metadata("llama-bpe"))
SPM_PLAIN = Tokenizer.from_metadata(spm_metadata())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 1100), max_size=20))
def test_any_ids_decode_as_they_stream(ids: list[int]) -> None:
    assert "".join(streamed(BPE_PLAIN, ids)) == BPE_PLAIN.decode(ids)
    model = SPM_PLAIN._model
    assert isinstance(model, SPMModel)
    text = "".join(streamed(SPM_PLAIN, ids))
    if "\ufffd" not in text:
        assert text == SPM_PLAIN.decode(ids)


def test_surrogates() -> None:
    pair = "\ud83d\ude00"  # how JSON spells U+1F600
    for tokenizer in (BPE_PLAIN, SPM_PLAIN):
        assert tokenizer.encode(pair) == tokenizer.encode("\U0001f600")
        for text in ("a\ud83db", "\ude00", "\ude00\ud83d"):
            with pytest.raises(HotcoldError, match=r"half a surrogate pair \(U\+D"):
                tokenizer.encode(text)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_what_is_no_text_is_named(text: Any) -> None:
    with pytest.raises(HotcoldError, match="must be a str, got"):
        BPE_PLAIN.encode(text)


def test_long_runs_end() -> None:
    for tokenizer in (BPE_PLAIN, SPM_PLAIN):
        for text in ("a" * 200_000, " " * 200_000, "\n" * 50_000, "1" * 50_000, "<" * 50_000):
            assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- vocabularies from strangers


def test_from_gguf_needs_only_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    metadata = bpe_metadata("qwen2", chat_template="{{ 1 }}")
    writer.add_tokenizer_model(metadata[P + "model"])
    writer.add_tokenizer_pre(metadata[P + "pre"])
    writer.add_token_list(metadata[P + "tokens"])
    writer.add_token_types(metadata[P + "token_type"].tolist())
    writer.add_token_merges(metadata[P + "merges"])
    writer.add_bos_token_id(metadata[P + "bos_token_id"])
    writer.add_eos_token_id(metadata[P + "eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ 1 }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.chat_template == "{{ 1 }}"
    check_golden(tokenizer, GOLDEN["bpe"]["kinds"]["qwen2"])
    metadata[P + "pre"] = "wrong"
    with pytest.raises(HotcoldError, match="unknown pre-tokenizer 'wrong'; supported: command-r"):
        Tokenizer.from_metadata(metadata)


N_BPE = len(GOLDEN["bpe"]["tokens"]) + 5
BAD_BPE: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "ggml.model: found None"),
    ({"model": "bert"}, "ggml.model: found 'bert'"),
    ({"model": 3}, "ggml.model: found int"),
    ({"pre": 7}, "ggml.pre: found int"),
    ({"tokens": None}, "ggml.tokens: missing"),
    ({"tokens": []}, "ggml.tokens: found no tokens"),
    ({"tokens": np.arange(3)}, "ggml.tokens: found ndarray"),
    ({"tokens": ["a", 3]}, "ggml.tokens: found list"),
    ({"tokens": ["a", "b", "a"], "token_type": None, "merges": []}, "ggml.tokens: 'a' is both token 0 and token 2"),
    ({"tokens": ["a", "\udcff"], "token_type": None, "merges": []}, "ggml.tokens: token 1 is not UTF-8"),
    ({"token_type": np.ones(3, np.int32)}, f"ggml.token_type: found 3 entries, allowed: {N_BPE}"),
    ({"token_type": np.ones(N_BPE, np.float32)}, "ggml.token_type: found an array of float32"),
    ({"token_type": np.full(N_BPE, 9, np.int32)}, "ggml.token_type: token 0 has type 9"),
    ({"token_type": np.full(N_BPE, -1, np.int32)}, "ggml.token_type: token 0 has type -1"),
    ({"token_type": "x"}, "ggml.token_type: found an array of"),
    ({"merges": None}, "ggml.merges: missing"),
    ({"merges": ["ab"]}, "ggml.merges: entry 0 is 'ab'"),
    ({"merges": ["a b c"]}, "ggml.merges: entry 0 is 'a b c'"),
    ({"merges": [" a"]}, "ggml.merges: entry 0"),
    ({"merges": ["a \u00e9\u00e9\u00e9"]}, "ggml.merges: entry 0 .* not in tokenizer.ggml.tokens"),
    ({"bos_token_id": N_BPE}, f"ggml.bos_token_id: found {N_BPE}, allowed: 0 to {N_BPE - 1}"),
    ({"eos_token_id": -1}, "ggml.eos_token_id: found -1"),
    ({"eot_token_id": 2**31}, "ggml.eot_token_id: found 2147483648"),
    ({"eos_token_id": "x"}, "ggml.eos_token_id: found str, allowed: int"),
    ({"bos_token_id": True}, "ggml.bos_token_id: found bool"),
    ({"add_bos_token": 1}, "ggml.add_bos_token: found int, allowed: bool"),
    ({"bos_token_id": None, "add_bos_token": True}, "ggml.bos_token_id: missing, needed because"),
    ({"chat_template": 5}, "tokenizer.chat_template: found int"),
]
N_SPM = len(GOLDEN["spm"]["tokens"])
BAD_SPM: list[tuple[dict[str, Any], str]] = [
    ({"scores": None}, "ggml.scores: missing"),
    ({"scores": np.zeros(2, np.float32)}, f"ggml.scores: found 2 entries, allowed: {N_SPM}"),
    ({"scores": np.full(N_SPM, np.nan, np.float32)}, "ggml.scores: token 0 has score nan"),
    ({"token_type": None}, "ggml.token_type: missing"),
    ({"token_type": np.ones(N_SPM, np.int32)}, "neither an unknown token nor all 256 byte tokens"),
    ({"token_type": np.full(N_SPM, 6, np.int32)}, r"token 0 \('<unk>'\) is a byte"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_BPE)
def test_bad_bpe_vocabulary_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HotcoldError, match=message) as caught:
        Tokenizer.from_metadata(bpe_metadata(**changes), "model.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), BAD_SPM)
def test_bad_spm_vocabulary_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HotcoldError, match=message) as caught:
        Tokenizer.from_metadata(spm_metadata(**changes), "model.gguf")
    assert str(caught.value).startswith("model.gguf: ")


def test_damaged_vocabularies_never_crash() -> None:
    """Random damage to one key: a clean error or a tokenizer that works."""
    random_ = random.Random(7)
    for _ in range(150):
        metadata = random_.choice((bpe_metadata, spm_metadata))()
        key = random_.choice(list(metadata))
        value = metadata[key]
        if isinstance(value, list):
            value = list(value)
            value[random_.randrange(len(value))] = random_.choice(("", " ", "\0", "x y", "<0x00>", "\u2581" * 9))
        elif isinstance(value, np.ndarray):
            value = value.copy()
            value[random_.randrange(len(value))] = random_.choice((0, 2, 3, 5, 6, 100, -1))
        else:
            value = random_.choice((0, 10**9, "x", None, True))
        metadata[key] = value
        try:
            tokenizer = Tokenizer.from_metadata({k: v for k, v in metadata.items() if v is not None})
        except HotcoldError:
            continue
        ids = tokenizer.encode("Hello <|im_end|> \u4f60", parse_special=True)
        assert all(0 <= i < tokenizer.n_vocab for i in ids)
        tokenizer.decode(ids)


# ---- recognising tokenizer.json


def tokenizer_json(kind: str, **changes: Any) -> dict[str, Any]:
    golden = GOLDEN["bpe"]["kinds"][kind]
    model = {"type": "BPE", "ignore_merges": golden["ignore_merges"], "byte_fallback": False}
    return {"normalizer": golden["normalizer"], "pre_tokenizer": golden["pre_tokenizer"], "model": model, **changes}


@pytest.mark.parametrize("kind", BPE_KINDS)
def test_identify_names_a_kind_that_cuts_alike(kind: str) -> None:
    name = pretokenizers.identify(tokenizer_json(kind))
    assert pretokenizers.kind(name) == pretokenizers.kind(kind)
    assert name == {"starcoder": "smollm", "refact": "smollm", "deepseek-r1-qwen": "qwen2"}.get(kind, kind)


def test_identify_sentencepiece() -> None:
    llama2 = {"normalizer": GOLDEN["spm"]["normalizer"], "pre_tokenizer": GOLDEN["spm"]["pre_tokenizer"]}
    model = {"type": "BPE", "byte_fallback": True}
    assert pretokenizers.identify({**llama2, "model": model}) == pretokenizers.SPM
    assert pretokenizers.spm_space_prefix({**llama2, "model": model})
    gemma = {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, "pre_tokenizer": None}
    assert pretokenizers.identify({**gemma, "model": model}) == pretokenizers.SPM
    assert not pretokenizers.spm_space_prefix({**gemma, "model": model})
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    mistral = {"normalizer": None, "pre_tokenizer": metaspace, "model": model}
    assert pretokenizers.identify(mistral) == pretokenizers.SPM and pretokenizers.spm_space_prefix(mistral)
    with pytest.raises(HotcoldError, match="byte_fallback is not true"):
        pretokenizers.identify({**llama2, "model": {"type": "BPE"}})


@pytest.mark.parametrize("changes", [
    {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"String": "x"}, "behavior": "Isolated", "invert": False}},
    {"normalizer": {"type": "Lowercase"}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
    {"model": {"type": "Unigram"}},
    {"model": None},
])  # fmt: skip
def test_identify_refuses_what_it_does_not_know(changes: dict[str, Any]) -> None:
    with pytest.raises(HotcoldError, match="supported: ") as caught:
        pretokenizers.identify(tokenizer_json("gpt-2", **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
