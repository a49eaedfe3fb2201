"""Makes tokenizers.json: small vocabularies with the ids that transformers gives for hostile texts.

Run in an environment with transformers 5 and sentencepiece: python tests/golden/make_tokenizer_golden.py
In: nothing. Out: tokenizers.json beside this file, read by test_tokenizer.py.

All BPE kinds share one vocabulary, trained on the texts without cutting them into words: its merges run across every
boundary, so a pre-tokenizer that cuts one character differently gives different ids. The pre-tokenizers are spelled
out here as published tokenizer.json files hold them, not taken from the product.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\t\n \n",
    "a",
    " a",
    "a ",
    "  a  ",
    "Hello world",
    " Hello world",
    "Hello, world!  How's it going?",
    "hello\nworld\r\n\r\nagain\n\n\n",
    "1234567",
    "1",
    "12",
    "123",
    "1234",
    "3.14159 and 10,000,000.00",
    "x1y22z333",
    "\u00b2\u00b3\u00bd \u0663\u0664\u0665 \u2167",
    "I'm you're he's we'll they'd I've can't",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T",
    "'s 'S'Ll''re rock'n'roll",
    "don\u2019t it\u2019s",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "e\u0301 a\u030a \u00e9 \u0061\u0300\u0301 \u1e69 s\u0323\u0307",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0967\u0968\u0969",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442 \u0438 English \u4e2d\u6587 mix",
    "\u05e9\u05dc\u05d5\u05dd \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0 \u03b3\u03b5\u03b9\u03ac \u13a3\u13b3\u13a9",
    "def f(x):\n    if x > 0:\n\t\treturn x**2  # comment\n    return {'a': [1, 2, 3]}\n",
    "camelCaseWord HTTPServer snake_case CONSTANT_NAME",
    "\u0000",
    "a\u0000b",
    "\u0001\u0002\u001f\u007f\u0085\u00a0\u00ad\u200b\ufeff\ufffd",
    "\u2028\u2029\u3000x\u2003y",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                        x",
    "----------------========!!!!!!!!????....",
    "((()))[[[]]]{{{}}}<<<>>>$$$+++===^^^~~~|||```",
    "<|im_end|>",
    "user text </s> <|im_start|>system\nhi<|im_end|>",
    "<|im_start|",
    "<s>",
    "[INST] x [/INST]",
    "https://example.com/a?b=c&d=%20#frag",
    "a/b\\c//d/\n/e",
    "$5.00 \u20ac10 \u00a31.50 +1-2*3/4=5",
    "\U0001d54f\U0001d552 \U00010400 \U000e0041",
    "\u0149 \u01c4 \u1e9e \ufb01 \uff21\uff22\uff13\uff01 \u2126 \u212b",
    "tail newline\n",
    " \t mixed \u00a0 spaces \u3000 ",
    "\u2581low\u2581line \u2581",
    "it's 5 o'clock: 12:34:56\t(UTC)\n\n- item 1\n- item 2\n",
    "\ud7a3\uac00\u1100\u1161 \u30ab\u3099",
]
MARKED = [
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|> b",
    "<|im_end|><|im_end|>",
    " <|im_end|> ",
    "<|im_end|",
    "x<think>y</think>z",
    "<|im_start|><|im_start|>x",
]
# A vocabulary must not spell a special token by merging, or ids would be ambiguous.
TRAINING = [t for t in TEXTS if "<|" not in t and "<s>" not in t]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
NFC = {"type": "NFC"}
DIGITS = {"type": "Digits", "individual_digits": True}


def byte_level(words: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(steps)}


# llama.cpp's kind -> (normalizer, pre_tokenizer, ignore_merges) of the published tokenizer.json
PUBLISHED = {
    "gpt-2": (None, byte_level(True), False),
    "mpt": (NFC, byte_level(True), False),
    "smollm": (None, sequence(DIGITS, byte_level(True)), False),
    "starcoder": (None, sequence(DIGITS, byte_level(True)), False),
    "refact": (None, sequence(DIGITS, byte_level(True)), False),
    "command-r": (NFC, sequence(DIGITS, byte_level(True)), False),
    "falcon": (
        None,
        sequence(
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(True),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ),
        False,
    ),
    "llama-bpe": (None, sequence(split(LLAMA3), byte_level(False)), True),
    "dbrx": (None, sequence(split(LLAMA3, "Removed", True), byte_level(False)), False),
    "qwen2": (NFC, sequence(split(QWEN2), byte_level(False)), False),
    "deepseek-r1-qwen": (NFC, sequence(split(QWEN2), byte_level(False)), False),
    "qwen35": (NFC, sequence(split(QWEN35), byte_level(False)), False),
    "deepseek-llm": (
        {"type": "Sequence", "normalizers": []},
        sequence(
            split("[\r\n]"), split(DEEPSEEK_LETTERS),
            split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"), split("\\s+$"), split(HANGUL),
            DIGITS, byte_level(False),
        ),
        False,
    ),
    "deepseek-coder": (
        {"type": "Sequence", "normalizers": []},
        sequence(split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split(HANGUL), DIGITS, byte_level(False)),
        False,
    ),
    "deepseek-v3": (
        {"type": "Sequence", "normalizers": []},
        sequence(
            split("\\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            split(DEEPSEEK3), byte_level(False),
        ),
        False,
    ),
    "gpt-4o": (None, sequence(split(O200K, "Removed", True), byte_level(False)), False),
    "tekken": (None, sequence(split(TEKKEN), byte_level(False)), True),
}  # fmt: skip


def encode_all(hf: PreTrainedTokenizerFast) -> dict:
    """Ids of TEXTS as text from people, of MARKED with special tokens parsed, and what comes back from the ids."""
    plain = [hf.encode(t, add_special_tokens=False, split_special_tokens=True) for t in TEXTS]
    marked = [hf.encode(t, add_special_tokens=False) for t in MARKED]
    return {
        "plain": plain,
        "marked": marked,
        "decoded": [hf.decode(ids, clean_up_tokenization_spaces=False) for ids in plain],
        "decoded_skip": [hf.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False) for i in marked],
        "decoded_keep": [hf.decode(i, skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in marked],
    }


def bpe() -> dict:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    trained.train_from_iterator(TRAINING * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    n = len(tokens)
    added = [
        {"id": n + i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": t in SPECIAL}
        for i, t in enumerate(SPECIAL + USER_DEFINED)
    ]  # fmt: skip
    kinds = {}
    for name, (normalizer, cutter, ignore_merges) in PUBLISHED.items():
        whole = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": cutter, "post_processor": None, "decoder": byte_level(True),
            "model": {**model, "ignore_merges": ignore_merges},
        }  # fmt: skip
        hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)))
        kinds[name] = {
            "normalizer": normalizer, "pre_tokenizer": cutter, "ignore_merges": ignore_merges, **encode_all(hf)
        }  # fmt: skip
    return {
        "tokens": tokens,
        "merges": model["merges"],
        "special": SPECIAL,
        "user_defined": USER_DEFINED,
        "kinds": kinds,
    }


def spm() -> dict:
    """A SentencePiece BPE model and the tokenizer transformers makes of it: Llama 2's normalizer and decoder."""
    buffer = io.BytesIO()
    lines = [t.replace("\n", " ").replace("\0", " ") for t in TRAINING if t.strip()] * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=buffer, model_type="bpe", vocab_size=900, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(buffer.getvalue())
    tokens = [p.piece for p in proto.pieces]
    scores = [p.score for p in proto.pieces]
    types = [p.type for p in proto.pieces]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in vocab and token[k:] in vocab]
        merges += [(*pair, score) for pair in sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    merges.sort(key=lambda m: (m[2], len(m[0]), len(m[1])), reverse=True)
    fast = Tokenizer(models.BPE(vocab, [m[:2] for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>", *SPECIAL)])
    fast.add_tokens([AddedToken(t, normalized=False) for t in USER_DEFINED])
    structure = json.loads(fast.to_str())
    hf = PreTrainedTokenizerFast(tokenizer_object=fast)
    reference = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
    n = len(tokens)
    return {
        "tokens": tokens + SPECIAL + USER_DEFINED,
        "scores": scores + [0.0] * (len(SPECIAL) + len(USER_DEFINED)),
        "types": types + [3] * len(SPECIAL) + [4] * len(USER_DEFINED),
        "normalizer": structure["normalizer"], "pre_tokenizer": structure["pre_tokenizer"],
        **encode_all(hf), "sentencepiece": [reference.encode(t) for t in TEXTS], "n_trained": n,
    }  # fmt: skip


def main() -> None:
    golden = {"texts": TEXTS, "marked": MARKED, "bpe": bpe(), "spm": spm()}
    path = Path(__file__).with_name("tokenizers.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="ascii")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
