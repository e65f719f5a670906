"""Tokenizers of Hugging Face folders: with identical ids, or not at all.

tiktoken merges any two neighbours whose concatenation has a rank, lowest rank first; Hugging Face merges listed pairs
in listed order.  The two agree when every split of every token into two tokens is listed, in order of rank, and a piece
that is itself a token is taken whole (`ignore_merges`): written so on the way out.  On the way in the conditions under
which ranks can stand for merges are checked, and then both tokenizers encode a thousand hard strings and the whole
vocabulary; one that differs anywhere is refused, because wrong ids train a model on noise in silence.
"""

import json
import random
import re
from pathlib import Path

from stack.data import chat
from stack.data.tokenizer import BOUNDARY, FORMAT, Tokenizer
from stack.exchange.hf_files import blaming, local, read_json

# ByteLevel's own rule as tiktoken spells it, so that GPT-2's tokenizer has one fingerprint wherever it comes from
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# SmolLM cuts out single digits before ByteLevel's rule looks at what is between them: as one rule, no piece begins with
# a space and a digit, and white space before a digit stays in one piece
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
# how byte-level BPE files write each byte: the printable character that it is, or the next one from U+0100 on
LETTERS = [chr(0x100 + OTHERS.index(b) if b in OTHERS else b) for b in range(256)]


def spell(token: bytes) -> str:
    return "".join([LETTERS[b] for b in token])


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to split a token into two tokens, by rank of the token."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def tokenizer_to_hf(tokenizer: Tokenizer) -> dict:
    """tokenizer.json: byte-level BPE with our split pattern and special tokens."""
    vocab = {spell(token): rank for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1])}
    if clash := [name for name in tokenizer.special_ids if name in vocab]:
        raise ValueError(f"the special token {clash[0]!r} is spelled like token {vocab[clash[0]]}, and Hugging Face "
                         "keeps both in one table.\n  Add it under a name that is no word, such as <|name|>.")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    specials = sorted(tokenizer.special_ids.items(), key=lambda item: item[1])
    if [i for _, i in specials] != [*range(len(vocab), len(vocab) + len(specials))]:
        vocab |= specials  # else Hugging Face numbers them as if they stood right behind the ranks
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    # a possessive {1,3}+ of tiktoken's own patterns means "repeat that" to Oniguruma; without + it cuts the same pieces
    split = {"type": "Split", "pattern": {"Regex": re.sub(r"(\{\d+,\d*\})\+", r"\1", tokenizer.pattern)},
             "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in specials],
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocab, "merges": [f"{spell(a)} {spell(b)}" for a, b in merges_of(tokenizer.ranks)]},
    }


def split_pattern(pre: dict | None) -> str | None:
    """The one regular expression that cuts text as this pre_tokenizer does, or None where that is not known."""
    pre = pre or {}
    *first, last = pre.get("pretokenizers") or [{}] if pre.get("type") == "Sequence" else [pre]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    match last.get("use_regex", True), first:
        case True, []:
            return GPT2_PATTERN
        case True, [{"type": "Digits", "individual_digits": True}]:
            return DIGITS_PATTERN
        case False, ([{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
                     | [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}]):
            return pattern


def hard_strings(n: int, specials=()) -> list[str]:
    """The same n texts every time: scripts, spaces, controls, contractions, digits and special names, shuffled."""
    family = "\u200d".join("👨👩👧👦")
    parts = ["a", "Hello", " world", "don't", "I'LL", "'ſ", "’s", "naïve", "ǅ", "ﬀ", "e\u0301", "x²", "½", "Ⅷ", "٣٤٥",
             "0", "42", "1234567", "3.14", "१२३४", "你好", "世界", "ひらがな", "한국어", "각", "ไทย", "العربية",
             "עברית", "हिन्दी", "ß", "👍🏽", "🇩🇪", "🤷", family, "\x00", "\x07", "\x1b[0m", "\x7f", "\x85", "\u200b",
             "\u200d", "\ufeff", "\ufffd", "\uffff", "\U0010ffff", " ", "  ", "    ", " " * 40, "\t", "\t\t", "\n",
             "\n\n\n", "\r\n", "\r", "\v", "\f", "\u00a0", "\u2003", "\u2028", "\u3000", "\u1680", "==", "->", "/*",
             "...", "!!!!", "def f(x):\n    return x", "_", "__init__", "<", "|>", "http://a.b/c?d=e&f", "\\n", '"',
             "'", "`", "…", "“", "a" * 30, "=" * 70, *specials]
    rng = random.Random(0)
    texts = ["", " " * 3000, "\n" * 500, "a" * 2000, "ab" * 800, "\u3000" * 300, "".join(parts)]
    ranges = ((0x20, 0x250), (0x20, 0xD800), (0xE000, 0x30000))
    while len(texts) < n:
        texts.append("".join(rng.choice(parts) if rng.random() < 0.9 else chr(rng.randrange(*rng.choice(ranges)))
                             for _ in range(rng.randint(1, 20))))
    return texts[:n]


def check_agreement(tokenizer: Tokenizer, theirs: dict) -> None:
    """Raise ValueError with the first of 1,000 hard strings, or of the vocabulary, that the two encode differently."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError("the package tokenizers is not installed, and without it nobody can tell whether a converted "
                         "tokenizer gives the same ids.\n  Install it with: pip install tokenizers") from None
    other = tokenizers.Tokenizer.from_str(json.dumps(theirs))
    texts = hard_strings(1000, tokenizer.special_ids) + [t.decode("utf-8", "ignore") for t in tokenizer.ranks]
    for text, found in zip(texts, other.encode_batch(texts, add_special_tokens=False), strict=True):
        ids = tokenizer.encode(text, special=True)
        if ids != found.ids:
            at = next((i for i, (a, b) in enumerate(zip(ids, found.ids, strict=False)) if a != b), 0)
            raise ValueError(f"the tokenizers disagree on {text[:60]!r}: from token {at} on {ids[at:at + 8]} here, "
                             f"{found.ids[at:at + 8]} there.  It has rules that ranks and one pattern cannot express.")


def tokenizer_from_hf(folder) -> Tokenizer:
    """Our tokenizer with the ids of a folder's tokenizer.json, or a ValueError that says why there is none."""
    folder = local(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found.\n  Save the tokenizer again with transformers, or name "
                                "another: --tokenizer data/NAME (or tiktoken's name, --tokenizer gpt2).")
    data = read_json(path)
    if data.get("format") == FORMAT:
        raise ValueError(f"{path} is a tokenizer as prepare.py writes it.\n  Name its folder without hf:.")
    with blaming(path):
        bpe, added, pre = data["model"], data.get("added_tokens") or [], data.get("pre_tokenizer")
        specials = {token["content"]: token["id"] for token in added}
        words = {word: i for word, i in bpe["vocab"].items() if word not in specials} if bpe["type"] == "BPE" else {}
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in bpe.get("merges") or ()]
    in_bytes = bpe["type"] == "BPE" and not bpe.get("byte_fallback") and {*LETTERS} >= {*"".join(words)}
    lost = sum(letter not in words for letter in LETTERS)
    unknown = next((pair for pair in merges if not {*pair, "".join(pair)} <= words.keys()), None)
    order = [words.get("".join(pair), -1) for pair in merges]
    pattern, normalizer = split_pattern(pre), (data.get("normalizer") or {}).get("type")
    boundary = next((name for name in (BOUNDARY, *_end_tokens(folder, specials)) if name in specials), None)
    refusals = [
        (not in_bytes, f"it is {bpe['type']} over characters; only byte-level BPE can be expressed."),
        (in_bytes and lost, f"{lost} of the 256 bytes have no token."),
        (in_bytes and unknown, f"it merges {unknown}, which makes no token."),
        (in_bytes and order != sorted(order), "its merges are not in the order of its ids, and tiktoken merges in the "
         "order of ids."),
        *((bpe.get(key), f"{key} is {bpe.get(key)!r}; there is none here.")
          for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")),
        *((token.get(flag), f"the added token {token['content']!r} has {flag}; here names match exactly.")
          for token in added for flag in ("lstrip", "rstrip", "single_word")),
        (pattern is None, "only one split pattern, or GPT-2's with or without single digits, before byte level can be "
         f"expressed; its pre_tokenizer is {json.dumps(pre)[:200]}."),
        (normalizer not in (None, "NFC"), f"it normalizes text ({normalizer}); here there is NFC or nothing."),
        (boundary is None, f"no special token can mark where documents start: {BOUNDARY} or an eos_token is needed."),
    ]
    if problems := [sentence for refused, sentence in refusals if refused]:
        raise ValueError(f"{path} cannot be converted with identical ids:\n  " + "\n  ".join(problems))
    byte_of = {letter: b for b, letter in enumerate(LETTERS)}
    ranks = {bytes(byte_of[letter] for letter in word): i for word, i in words.items()}
    tokenizer = Tokenizer(pattern, ranks, specials, boundary=boundary, nfc=normalizer == "NFC")
    check_agreement(tokenizer, data)
    if not chat.lacking(tokenizer):
        tokenizer.chat_template = chat.OWN
    if (theirs := _chat_template(folder)) != chat.jinja(tokenizer):
        ends = [name for name in _end_tokens(folder, specials) if name in specials]
        tokenizer.chat_template, tokenizer.chat_ends = theirs, tuple(dict.fromkeys(ends)) if theirs else ()
    return tokenizer


def _chat_template(folder: Path) -> str:
    """The Jinja text by which a folder's model talks; "" where there is none."""
    path, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(path) if path.is_file() else {}
    said = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template") or ""
    if isinstance(said, list):  # several, by name
        said = next((form.get("template") for form in said if form.get("name") == "default"), "")
    for name in ("bos_token", "eos_token"):  # here one token is both
        token = config.get(name)
        token = token["content"] if isinstance(token, dict) else token
        if token and re.search(rf"\b{name}\b", said):
            said = f"{{%- set {name} = {json.dumps(token)} -%}}{said}"
    return said


def _end_tokens(folder: Path, specials: dict[str, int]) -> list[str]:
    """What a folder's files call the end of a text, most specific first."""
    found = []
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        data = read_json(folder / name) if (folder / name).is_file() else {}
        token, ids = data.get("eos_token"), data.get("eos_token_id")
        found += [token["content"] if isinstance(token, dict) else token]
        found += [text for text, i in specials.items() if i in (ids if isinstance(ids, list) else [ids])]
    return found
