"""Tokenizers leave and come in with identical ids, or not at all."""

import json

import numpy as np
import pytest
import tiktoken_ext.openai_public
import tokenizers
import transformers
from exchange_models import sharp, texts, trained_words
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.exchange import hf, hf_tokenizers

transformers.utils.logging.set_verbosity_error()
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
          r"|\s+(?!\S)|\s")


@pytest.fixture(scope="module")
def words():
    return trained_words()


def test_exported_tokenizer_gives_the_same_ids(tmp_path, words):
    """1,000 hard strings, special names parsed and as text, decoded back; special tokens have their roles."""
    hf.save_folder(sharp(words), words, tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(other, transformers.PreTrainedTokenizerFast)
    hard = hf_tokenizers.hard_strings(1000, words.special_ids)
    assert len(set(hard)) > 950 and sum(any(name in text for name in SPECIALS) for text in hard) > 100
    parsed = other(hard)["input_ids"]
    as_text = other(hard, split_special_tokens=True)["input_ids"]
    for text, special, plain in zip(hard, parsed, as_text, strict=True):
        assert special == words.encode(text, special=True), text[:80]
        assert plain == words.encode(text), text[:80]
        assert other.decode(plain) == text
    for name, i in words.special_ids.items():
        assert other.convert_tokens_to_ids(name) == i and i in other.all_special_ids + list(other.added_tokens_decoder)
        assert other.decode([i, 97], skip_special_tokens=True) == words.decode([97])
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (
        words.boundary_id, words.boundary_id, words.special_ids["<|pad|>"])
    assert len(other) == words.vocab_size and other.model_max_length == 160
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends["eos_token_id"] == words.boundary_id


@pytest.mark.parametrize("seed", range(8))
def test_ranks_and_merges_agree_where_it_is_hard(seed):
    """Tokens over two letters, which can be put together in many ways: as lists of merges they cut the same."""
    rng = np.random.default_rng(seed)
    ranks, tokens = {bytes([b]): b for b in range(256)}, [b"a", b"b"]
    while len(tokens) < 30:
        token = tokens[rng.integers(len(tokens))] + tokens[rng.integers(len(tokens))]
        if token not in ranks and len(token) < 9:
            ranks[token] = len(ranks)
            tokens.append(token)
    words = Tokenizer(PATTERN, ranks, {"<|endoftext|>": len(ranks)})
    other = tokenizers.Tokenizer.from_str(json.dumps(hf_tokenizers.tokenizer_to_hf(words)))
    for _ in range(300):
        text = "".join(rng.choice(["a", "b"], rng.integers(1, 60)))
        assert other.encode(text).ids == words.encode(text), text


def test_special_tokens_may_stand_anywhere(words):
    """Ids before the ranks, with gaps, or added later arrive as they are; a special token that is a word cannot."""
    shifted = {token: rank + 5 for token, rank in words.ranks.items()}
    gaps = Tokenizer(PATTERN, shifted, {"<|endoftext|>": 0, "<|b|>": 3, "<|c|>": 999})
    for case in (gaps, words.with_specials(["<|late|>", "two words"])):
        hf_tokenizers.check_agreement(case, hf_tokenizers.tokenizer_to_hf(case))
    token = next(t.decode() for t in words.ranks if len(t) > 3 and t.isalpha())
    with pytest.raises(ValueError, match="is spelled like token"):
        hf_tokenizers.tokenizer_to_hf(words.with_specials([token]))


def test_tiktokens_own_patterns_cut_alike(words):
    """Possessive quantifiers mean other things to Hugging Face's engine; written out, they cut the same pieces."""
    # so `--tokenizer gpt2` is known everywhere
    assert tiktoken_ext.openai_public.r50k_pat_str == hf_tokenizers.GPT2_PATTERN
    numbers = {token: words.vocab_size + i for i, token in enumerate((b"12", b"34", b"1234", b"12345", b"\n\n\n"))}
    for pattern in (hf_tokenizers.GPT2_PATTERN, hf_tokenizers.DIGITS_PATTERN, CL100K):
        case = Tokenizer(pattern, words.ranks | numbers, words.special_ids)
        hf_tokenizers.check_agreement(case, hf_tokenizers.tokenizer_to_hf(case))


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_RULE = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTERS = {
    "gpt2": GPT2_RULE,
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_RULE]),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"), BYTES]),
    "qwen": pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(PATTERN.replace("{1,3}", "")), "removed",
                                                          invert=True), BYTES]),
}


@pytest.fixture(scope="module")
def their_words():
    """Tokenizers that Hugging Face's own trainer makes, special tokens first as in SmolLM2, by name of the splitter."""
    made = {}
    for name, splitter in SPLITTERS.items():
        made[name] = tokenizers.Tokenizer(models.BPE())
        made[name].pre_tokenizer, made[name].decoder = splitter, decoders.ByteLevel()
        made[name].train_from_iterator(texts(20), trainers.BpeTrainer(
            vocab_size=1500, special_tokens=["<|endoftext|>", "<|im_start|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return made


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_their_tokenizers_give_identical_ids(tmp_path, their_words, splitter):
    """GPT-2's, SmolLM2's, Llama 3's and Qwen's kinds of byte-level BPE: same ids on hard strings and on real text."""
    data = json.loads(their_words[splitter].to_str())
    data["model"]["ignore_merges"] = splitter == "llama3"
    theirs = tokenizers.Tokenizer.from_str(json.dumps(data))
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = hf_tokenizers.tokenizer_from_hf(tmp_path)
    assert ours.special_ids == {"<|endoftext|>": 0, "<|im_start|>": 1} and ours.boundary_id == 0
    for text in hf_tokenizers.hard_strings(1000, ours.special_ids) + texts(60)[40:]:
        assert ours.encode(text, special=True) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.ranks) + 2 == ours.vocab_size == theirs.get_vocab_size()


def change(their_words, **changes):
    data = json.loads(their_words["gpt2"].to_str())
    for key, value in changes.items():
        part, _, last = key.rpartition("__")
        (data[part] if part else data)[last] = value
    return data


def test_tokenizers_that_cannot_be_said_are_refused_with_the_reason(tmp_path, their_words):
    """Each rule that our format lacks is named; nothing is converted that gives other ids."""
    def reason(data, **kwargs):
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match="cannot be converted|disagree") as caught:
            hf_tokenizers.tokenizer_from_hf(tmp_path, **kwargs)
        return str(caught.value)

    plain = change(their_words)
    spm = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    assert "byte-level" in reason(json.loads(spm.to_str()))
    pieces = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    assert "WordPiece" in reason(json.loads(pieces.to_str()))
    stripped = [{**token, "lstrip": token["id"] == 1} for token in plain["added_tokens"]]
    assert "'<|im_start|>' has lstrip" in reason(change(their_words, added_tokens=stripped))
    assert "pre_tokenizer" in reason(change(their_words, pre_tokenizer={"type": "Whitespace"}))
    spaced = {**plain["pre_tokenizer"], "add_prefix_space": True}
    assert "pre_tokenizer" in reason(change(their_words, pre_tokenizer=spaced))
    assert "Lowercase" in reason(change(their_words, normalizer={"type": "Lowercase"}))
    assert "end_of_word_suffix" in reason(change(their_words, model__end_of_word_suffix="</w>"))
    both = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    assert "normalizes text (Sequence)" in reason(change(their_words, normalizer=json.loads(both.__getstate__())))
    merges = plain["model"]["merges"]
    assert "order" in reason(change(their_words, model__merges=[*merges[1:], merges[0]]))
    vocab = {word: i for word, i in plain["model"]["vocab"].items() if word != "A"}
    assert "of the 256 bytes" in reason(change(their_words, model__vocab=vocab))
    assert "no special token" in reason(change(their_words, added_tokens=[], model__vocab=plain["model"]["vocab"]))
    assert "disagree" in reason(change(their_words, model__merges=merges[:-400]))  # tokens nothing merges into
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="--tokenizer"):
        hf_tokenizers.tokenizer_from_hf(tmp_path)


def test_nfc_comes_along(tmp_path, their_words):
    """Qwen's tokenizers write é as one character before they cut: so does ours, through its own file and on the way
    out, and it is another tokenizer than the one that does not."""
    data = change(their_words, normalizer={"type": "NFC"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    theirs, plain = tokenizers.Tokenizer.from_str(json.dumps(data)), change(their_words)
    hf_tokenizers.tokenizer_from_hf(tmp_path).save(tmp_path / "ours.json")
    ours = Tokenizer.load(tmp_path / "ours.json")
    text = "e\u0301 \u1100\u1161<|im_start|>A\u030a\u0323"
    assert ours.encode(text, special=True) == theirs.encode(text).ids
    assert ours.encode("e\u0301") == ours.encode("é")
    back = hf_tokenizers.tokenizer_to_hf(ours.with_specials(["<|late|>"]))
    assert tokenizers.Tokenizer.from_str(json.dumps(back)).encode(text).ids == theirs.encode(text).ids
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    without = hf_tokenizers.tokenizer_from_hf(tmp_path)
    assert without.fingerprint != ours.fingerprint and without.encode("e\u0301") != ours.encode("e\u0301")


def test_the_boundary_is_what_the_folder_calls_its_end(tmp_path, their_words):
    """Without <|endoftext|> the eos_token of the folder's files marks where documents start."""
    data = json.loads(json.dumps(change(their_words)).replace("<|endoftext|>", "<|end_of_text|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1]}))
    assert hf_tokenizers.tokenizer_from_hf(tmp_path).boundary == "<|im_start|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end_of_text|>"}}))
    assert hf_tokenizers.tokenizer_from_hf(tmp_path).boundary == "<|end_of_text|>"
