"""Tokenizer: every text survives the round trip, ids are deterministic, and no input panics, hangs or lies."""

import json
import random
import threading
import unicodedata

import numpy as np
import pytest
import regex
import rustbpe
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shards import write_foreign

from stack.data import tokenizer as tokenizer_module
from stack.data.shards import read_meta
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer, cut, replace_surrogates, train_tokenizer

CORPUS = [
    "def forward(self, x):\n    return self.norm(x + self.attn(x))\n\n# comments don't count, it's 12345 of them\n" * 3,
    "The <|endoftext|> marker is discussed here, as <|user|> and <|pad|> are. We'll see; they've said I'm right!\n" * 3,
    "größer als 100 Ångström, 日本語のテキスト、한국어 텍스트, русский текст 🙂🙂👩‍👩‍👧 e\u0301\u0323\n" * 3,
    "\t\tx  =  1\r\n\r\n  y = x ** 2   \n" * 5,
]
HARD = [
    "", " ", "\n", "a", "\0", "\ufeffbom", "\r\n\r\n", " \n \n x", "\u2028\u2029\x0b\x0c\x1c\x85", "a\u00a0b\u3000c",
    "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301\u0327", "العربية 123456789", "\U0010ffff", "'S 's 'LL 'ſ", "12345678", "x" * 5000,
    " " * 5000 + "x", "\n" * 5000, "=" * 5000, "<|endoftext|>" * 3, "<|endof" + "text|>", "日本語" * 3000,
]


@pytest.fixture(scope="module")
def tok():
    return train_tokenizer(CORPUS, 450)


# ---- training


def test_layout_is_bytes_then_merges_then_specials(tok):
    assert [tok.ranks[bytes([i])] for i in range(256)] == list(range(256))
    assert sorted(tok.ranks.values()) == list(range(len(tok.ranks)))
    assert list(tok.special_ids.items()) == [(name, len(tok.ranks) + i) for i, name in enumerate(SPECIALS)]
    assert tok.vocab_size == len(tok.ranks) + len(SPECIALS) == 450
    assert tok.boundary_id == tok.special_ids["<|endoftext|>"] == len(tok.ranks)


def test_training_depends_on_the_texts_and_on_nothing_else():
    prints = {train_tokenizer(texts, 400).fingerprint for texts in
              (CORPUS, CORPUS, CORPUS[::-1], iter(CORPUS[2:] + CORPUS[:2]), random.Random(0).sample(CORPUS, 4))}
    assert len(prints) == 1
    assert train_tokenizer(CORPUS[:3], 400).fingerprint not in prints


def test_training_learns_the_commonest_pair_first():
    tok = train_tokenizer(["ab ab ab ab ab abc abc"], 256 + 3 + len(SPECIALS))
    assert [token for token, rank in tok.ranks.items() if rank >= 256] == [b"ab", b" ab", b" abc"]


@pytest.mark.parametrize("texts", [[], [""], ["   "], ["aaaa"], ["a\ud800b"], [bytes(range(100)).decode("latin-1")]])
def test_too_small_a_corpus_gives_a_smaller_real_size_and_says_so(texts, capsys):
    tok = train_tokenizer(texts, 5000)
    said = capsys.readouterr().err
    assert tok.vocab_size == len(tok.ranks) + len(SPECIALS) < 5000
    assert str(tok.vocab_size) in said and "5000" in said and said.count("\n") == 1
    for text in HARD:  # all 256 bytes stay encodable
        assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("vocab_size", [-1, 0, 255, 256, 264])
def test_a_vocabulary_without_room_for_bytes_and_specials_is_refused(vocab_size):
    with pytest.raises(ValueError, match=rf"{vocab_size} is too small.* need 265\.\n  Set --vocab_size"):
        train_tokenizer(CORPUS, vocab_size)
    assert train_tokenizer(CORPUS, 265).vocab_size == 265


def test_training_never_merges_a_special_token(tok):
    text = "<|endoftext|>" * 500
    trained = train_tokenizer([text], 400)
    assert not {name.encode() for name in SPECIALS} & set(trained.ranks)
    assert not set(trained.encode(text)) & set(trained.special_ids.values())


def test_training_streams_and_passes_on_errors_of_its_source():
    def source():
        yield from CORPUS
        raise OSError("disk on fire")
    with pytest.raises(OSError, match="disk on fire"):
        train_tokenizer(source(), 400)


def test_training_stops_before_counts_overflow(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_TRAINING_BYTES", 1000)
    with pytest.raises(ValueError, match="1,000 bytes.*\n  Train on a sample"):
        train_tokenizer(["x" * 600, "é" * 300], 300)


@pytest.fixture
def trained_on(monkeypatch):
    """The texts that rustbpe's trainer got last."""
    texts, trainer = [], rustbpe.Tokenizer

    class Recording:
        def train_from_iterator(self, slices, *args, **settings):
            self.trainer, texts[:] = trainer(), slices
            self.get_mergeable_ranks = self.trainer.get_mergeable_ranks
            self.trainer.train_from_iterator(iter(texts), *args, **settings)
    monkeypatch.setattr(rustbpe, "Tokenizer", Recording)
    return texts


def unspaced(seed, n):
    """n texts of random Chinese characters, a comma after every 5 to 20 of them: hardly a piece comes twice."""
    draw = random.Random(seed)
    return ["，".join("".join(map(chr, draw.choices(range(0x4E00, 0x5000), k=draw.randint(5, 20)))) for _ in range(90))
            for _ in range(n)]


def test_training_on_any_text_is_bounded(trained_on, monkeypatch, capsys):
    """rustbpe gets no more different pieces than MAX_PIECES: the same part of a text in any order, and all of one that
    has not so many."""
    monkeypatch.setattr(tokenizer_module, "MAX_PIECES", 30_000)
    spaced = [" ".join(random.Random(i).choices(CORPUS[0].split(), k=3000)) for i in range(20)]  # few words, 300 kB
    train_tokenizer(spaced, 400)
    assert sorted(trained_on) == sorted(part for text in spaced for part in cut([text], tokenizer_module.SLICE))
    assert "random" not in capsys.readouterr().err
    hard = {"no spaces": unspaced(1, 60),  # 200 kB each
            "words": [" ".join("".join(random.Random(f"{i} {j}").choices("abcdefgh", k=8)) for j in range(300))
                      for i in range(60)],
            "spaces": ["x".join(" " * random.Random(i).randrange(9000) for i in range(n, n + 3)) for n in range(40)]}
    for name, texts in hard.items():
        one = train_tokenizer(texts, 300)
        assert "trained on a random 1/" in capsys.readouterr().err, name
        pieces = {piece for text in trained_on for piece in regex.findall(PATTERN, text)}
        assert 0 < sum(len(piece.encode()) for piece in pieces) < 1.2 * 30_000, name  # 1.2: of words some begin lines
        assert train_tokenizer(texts[::-1], 300).fingerprint == one.fingerprint


def test_training_on_degenerate_documents_is_done_in_slices(trained_on):
    """Of which none is long: rustbpe's steps grow with the square of a piece without spaces."""
    letters = "".join(random.Random(0).choices("ACGT", k=300_000))  # one word of 300,000 letters
    train_tokenizer(["a" * 1_000_000, " " * 1_000_000, "1" * 1_000_000, "\0" * 1_000_000, letters], 1000)
    assert len(trained_on) > 10 and max(map(len, trained_on)) <= tokenizer_module.SLICE <= 1 << 14


# ---- text to ids to text


@pytest.mark.parametrize("text", HARD + CORPUS)
def test_round_trip_of_hard_strings(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
    assert tok.encode_to_numpy(text).tolist() == ids
    assert int(tok.token_bytes()[ids].sum()) == len(text.encode())


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_round_trip_of_any_text(tok_text):
    tok = _shared()
    assert tok.decode(tok.encode(tok_text)) == tok_text
    assert tok.decode(tok.encode(tok_text, special=True)) == tok_text


@given(st.text(st.characters(categories=("Cs", "L", "Z", "N", "So"))))
@settings(max_examples=200, deadline=None)
def test_lone_surrogates_become_replacement_characters(text):
    tok, clean = _shared(), replace_surrogates(text)
    assert tok.decode(tok.encode(text)) == clean == clean.encode().decode()
    if not any(unicodedata.category(c) == "Cs" for c in text):
        assert clean == text


def test_surrogates_one_by_one(tok):
    assert tok.decode(tok.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert tok.decode(tok.encode("\ud83d\ude42")) == "🙂"
    far = "word " * 10_000 + "\udc00" + " word" * 10_000  # in one of many slices
    assert tok.decode(tok.encode(far)) == far.replace("\udc00", "\ufffd")
    assert tok.decode(tok.encode("\ud800<|end|>", special=True)) == "\ufffd<|end|>"


def test_special_names_are_text_unless_asked_for(tok):
    text = "a<|endoftext|><|end|>b<|endoftext"
    assert not set(tok.encode(text)) & set(tok.special_ids.values())
    ids = tok.encode(text, special=True)
    assert [i for i in ids if i >= len(tok.ranks)] == [tok.boundary_id, tok.special_ids["<|end|>"]]
    assert tok.decode(ids) == tok.decode(tok.encode(text)) == text


def test_the_longest_special_name_wins(tok):
    more = tok.with_specials(["<|end|>+", "«é tool»"])
    assert more.encode("<|end|>+", special=True) == [tok.vocab_size]
    assert more.encode("x«é tool»", special=True) == more.encode("x") + [tok.vocab_size + 1]
    assert more.decode(more.encode("é«é tool»é")) == "é«é tool»é"


def test_slicing_changes_no_id_where_there_are_spaces(tok, monkeypatch):
    text = "".join(CORPUS * 60)
    whole = tok._encoding.encode_ordinary(text)
    assert len(text) > 2 * tokenizer_module.SLICE
    assert tok.encode(text) == whole
    monkeypatch.setattr(tokenizer_module, "SLICE", 300)
    slices = list(cut([text], 300))
    assert "".join(slices) == text and max(map(len, slices)) <= 300 and len(slices) > 100
    assert tok.encode(text) == whole


@pytest.mark.parametrize("unit", ["a", " ", "1", "=", "\n", "\t", "\0", "é", "日", "a1", "var x=1;", " \n", "🙂"])
def test_huge_repetitive_documents(tok, unit, monkeypatch):
    """Are encoded in slices of which none is long: tiktoken's steps grow with the square of a piece."""
    lengths, encode = [], tok._encoding.encode_to_numpy

    class Recording:
        def encode_to_numpy(self, text, **settings):
            lengths.append(len(text))
            return encode(text, **settings)
    monkeypatch.setattr(tok, "_encoding", Recording())
    text = unit * (1_200_000 // len(unit))
    assert tok.decode(tok.encode_to_numpy(text)) == text
    assert sum(lengths) == len(text) and max(lengths) <= tokenizer_module.SLICE <= 1 << 14


def test_decode_never_raises(tok):
    pad = tok.vocab_size
    assert tok.decode([72, pad, 73, -1, 10**12, pad + 60]) == "H\ufffdI\ufffd\ufffd\ufffd"
    assert tok.decode([]) == "" and tok.decode(np.array([72, 73], np.uint16)) == "HI"
    assert tok.decode([0xF0, 0x9F]) == "\ufffd"
    assert tok.decode([tok.boundary_id]) == "<|endoftext|>"


# ---- streaming


def _streamed(tok, ids):
    stream = tok.stream()
    return "".join([stream.push(i) for i in ids] + [stream.flush()])


@given(st.lists(st.integers(-2, 470), max_size=40))
@settings(max_examples=500, deadline=None)
def test_stream_adds_up_to_decode(ids):
    assert _streamed(_shared(), ids) == _shared().decode(ids)


def test_stream_holds_back_split_characters_and_nothing_else(tok):
    stream = tok.stream()
    assert [stream.push(b) for b in "🙂é".encode()] == ["", "", "", "🙂", "", "é"]
    assert [stream.push(b) for b in (0xE2, 0x41)] == ["", "\ufffdA"]  # a lead byte that can never be completed
    assert [stream.push(b) for b in "🙂".encode()[:3]] == ["", "", ""] and stream.flush() == "\ufffd"
    assert stream.push(0x41) == "A" and stream.flush() == ""
    one, two = tok.stream(), tok.stream()  # samples do not share state
    assert [one.push(0xC3), two.push(0x41), one.push(0xA9)] == ["", "A", "é"]


# ---- many documents


@pytest.mark.parametrize("workers", [1, 2, 5, None])
def test_documents_come_in_order_whatever_the_workers(tok, workers, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "GROUP", 1000)
    rng = random.Random(1)
    texts = ["".join(rng.choices(CORPUS[0] + CORPUS[2], k=rng.randrange(0, 400))) for _ in range(300)] + ["", "\ud800"]
    out = list(tok.encode_documents(iter(texts), workers))
    assert [ids.tolist() for ids in out] == [tok.encode(text) for text in texts]


def test_documents_of_no_corpus(tok):
    assert list(tok.encode_documents([])) == []
    assert [ids.tolist() for ids in tok.encode_documents([""])] == [[]]


def test_documents_are_read_only_a_little_ahead(tok, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "GROUP", 100)
    read = 0

    def source():
        nonlocal read
        while True:
            read += 1
            yield "x" * 50
    documents = tok.encode_documents(source(), workers=2)
    for _ in range(10):
        next(documents)
    assert read < 30
    documents.close()  # early stop: no thread stays
    assert not [t for t in threading.enumerate() if t.name.startswith("encode")]


class PanicException(BaseException):
    """What pyo3 raises when Rust panics: no Exception."""


def test_a_panic_names_its_document_and_leaves_no_pool_hanging(tok, monkeypatch):
    class Panicking:
        def encode_to_numpy(self, text, disallowed_special):
            if text == "bad":
                raise PanicException("called `Result::unwrap()` on an `Err` value")
            return np.zeros(len(text), np.uint32)
    broken = Tokenizer(tok.pattern, tok.ranks, tok.special_ids)
    broken.__dict__["_encoding"] = Panicking()
    monkeypatch.setattr(tokenizer_module, "GROUP", 10)
    with pytest.raises(RuntimeError, match="document 57 .*panicked on a text of 3 characters"):
        list(broken.encode_documents(["good"] * 57 + ["bad"] + ["good"] * 500, workers=3))
    assert not [t for t in threading.enumerate() if t.name.startswith("encode")]


def test_a_document_that_is_no_text_is_named(tok):
    with pytest.raises(RuntimeError, match="document 1 "):
        list(tok.encode_documents(["good", b"bytes"], workers=2))


# ---- files, fingerprints, other tokenizers


def test_save_and_load(tok, tmp_path):
    tok.save(tmp_path)
    tok.save(tmp_path / "copy.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.json", "tokenizer.json"]
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert data["version"] == 1 and data["vocab_size"] == 450 and data["tokens"][97] == "a"
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path / "copy.json")):
        again = Tokenizer.load(path)
        assert again.fingerprint == tok.fingerprint and again.ranks == tok.ranks
        assert (again.special_ids, again.boundary_id, again.vocab_size) == (tok.special_ids, tok.boundary_id, 450)
        assert all(again.encode(text) == tok.encode(text) for text in HARD + CORPUS)


def test_fingerprint_covers_everything_that_decides_ids(tok):
    swapped = {**tok.ranks, b"a": tok.ranks[b"b"], b"b": tok.ranks[b"a"]}
    renamed = {**{k: v for k, v in tok.special_ids.items() if k != "<|end|>"}, "<|stop|>": tok.special_ids["<|end|>"]}
    others = [Tokenizer(PATTERN + "|x", tok.ranks, tok.special_ids), Tokenizer(PATTERN, swapped, tok.special_ids),
              Tokenizer(PATTERN, tok.ranks, renamed), tok.with_specials(["<|x|>"]),
              Tokenizer(PATTERN, tok.ranks, tok.special_ids, boundary="<|end|>")]
    assert len({tok.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert len(tok.fingerprint) == 64
    shuffled = dict(random.Random(0).sample(list(tok.ranks.items()), len(tok.ranks)))
    assert Tokenizer(PATTERN, shuffled, tok.special_ids).fingerprint == tok.fingerprint


def _edit(path, change):
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("change", [
    lambda data: data["tokens"].__setitem__(300, "other"), lambda data: data["tokens"].pop(),
    lambda data: data["tokens"].__setitem__(97, None), lambda data: data.__setitem__("tokens", 5),
    lambda data: data["tokens"].__setitem__(300, [300]), lambda data: data.pop("pattern"),
    lambda data: data["special_tokens"].__setitem__("<|pad|>", 3), lambda data: data["special_tokens"].clear(),
    lambda data: data.__setitem__("version", 2), lambda data: data.__setitem__("format", "other"),
])
def test_a_changed_file_is_refused_in_three_parts(tok, tmp_path, change):
    tok.save(tmp_path)
    _edit(tmp_path / "tokenizer.json", change)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*\n  \w"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'"text"', b"{}", b"null"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*version 1 is needed\.\n  \w"):
        Tokenizer.load(tmp_path)


def test_a_cut_file_is_refused(tok, tmp_path):
    tok.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match="is not JSON"):
        Tokenizer.load(tmp_path)


def test_hugging_faces_file_is_recognised(tmp_path):
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers.models import BPE
    HFTokenizer(BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="Hugging Face.*\n  .*--tokenizer hf:"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "no.json", tmp_path / "no" / "folder"):
        with pytest.raises(FileNotFoundError, match="not found.\n  .*prepare.py"):
            Tokenizer.load(path)


def test_added_specials_go_after_all_ids(tok):
    more = tok.with_specials(["<|x|>", "<|y|>"])
    assert more.vocab_size == 452 and (more.special_ids["<|x|>"], more.special_ids["<|y|>"]) == (450, 451)
    assert all(more.encode(text) == tok.encode(text) for text in CORPUS) and more.boundary_id == tok.boundary_id
    assert tok.vocab_size == 450
    for names in (["<|pad|>"], ["<|x|>", "<|x|>"], [""]):
        with pytest.raises(ValueError, match="cannot be added"):
            tok.with_specials(names)


def _toy_encoding():  # ids with gaps and a special token in their midst, as p50k_base has
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 258}
    return {"name": "toy", "pat_str": r"\w+|\W+", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 257}}


def test_tiktokens_own_encodings_keep_their_ids(tmp_path, monkeypatch):
    import tiktoken
    import tiktoken.registry
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", {"toy": _toy_encoding})
    tok = Tokenizer.from_tiktoken("toy")
    assert tok.special_ids == {"<|endoftext|>": 257} and tok.boundary_id == 257 and tok.vocab_size == 259
    assert tok.encode("ababc!") == tiktoken.get_encoding("toy").encode("ababc!")
    assert tok.decode([256, 257, 258]) == "ab<|endoftext|>abc"
    assert tok.token_bytes()[[255, 256, 257, 258]].tolist() == [1, 2, 0, 3]
    tok.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tok.fingerprint
    with pytest.raises(ValueError, match="no encoding 'gtp2' in tiktoken.\n  It has toy"):
        Tokenizer.from_tiktoken("gtp2")


@pytest.mark.parametrize("name", ["fineweb_train_000001.bin", "train.bin", "tiny_shakespeare_val.bin"])
def test_a_folder_of_llm_c_shards_has_gpt2s_tokenizer(tmp_path, monkeypatch, name):
    """By the names under which its shards are read; bare tokens, as nanoGPT writes them, are refused as such."""
    import tiktoken.registry
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", {"gpt2": _toy_encoding})
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / name)
    for read in (Tokenizer.load, read_meta):
        with pytest.raises(ValueError, match=rf"{name} starts with .*\n?.*Bare tokens \(nanoGPT's\)"):
            read(tmp_path)
    write_foreign(tmp_path / name, range(40))
    assert Tokenizer.load(tmp_path).boundary_id == 257 and read_meta(tmp_path)["vocab_size"] == 50257
    (tmp_path / "meta.json").write_text("{}")  # a set of ours that lost its tokenizer is no such folder
    with pytest.raises(FileNotFoundError, match="tokenizer.json not found"):
        Tokenizer.load(tmp_path)


def test_without_a_network_tiktokens_encodings_say_how_to_seed_the_cache(tmp_path, monkeypatch):
    import requests
    import tiktoken.registry
    given_timeout = []

    def get(url, timeout=None):
        given_timeout.append(timeout)
        raise requests.ConnectionError("no route to host")
    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConnectionError, match="'gpt2' is not in tiktoken's cache(.|\n)*TIKTOKEN_CACHE_DIR"):
        Tokenizer.from_tiktoken("gpt2")
    assert given_timeout == [10]  # tiktoken itself would wait for ever


# ---- the pattern


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_hugging_faces_engine_splits_as_rusts_does(text):
    from tokenizers import Regex, pre_tokenizers
    pieces = [piece for piece, _ in pre_tokenizers.Split(Regex(PATTERN), "isolated").pre_tokenize_str(text)]
    # a tokenizer whose ranks hold every piece (and no merge inside one) makes one token of each piece tiktoken sees
    ranks = {bytes([i]): i for i in range(256)}
    for piece in pieces:
        ranks.setdefault(piece.encode(), len(ranks))
    ids = Tokenizer(PATTERN, ranks, {"<|endoftext|>": len(ranks)}).encode(text)
    assert ids == [ranks[piece.encode()] for piece in pieces]


def test_digits_go_in_threes(tok):
    tok = train_tokenizer(["1234567 12345 123 " * 50], 400)
    assert max(len(token) for token in tok.ranks if token.isdigit()) == 3


_tok = []


def _shared():  # hypothesis refuses fixtures that live longer than one example
    if not _tok:
        _tok.append(train_tokenizer(CORPUS, 450))
    return _tok[0]
