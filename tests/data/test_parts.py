"""What is held out is decided by each document alone: nothing lost, nothing twice, nothing moved by what is added."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.data.parts import BEGIN, HELD, parts
from stack.data.sources import Piece
from stack.data.tokenizer import cut, special_pattern

WORDS = ["the", "cat", "sat", "on", "漢字", "a\n", "é.\n", "🙂", "\n\n", "x=1", "<|a|>", "<|a|>b", "<|"]


def text_of(seed, n, joint=" "):
    return joint.join(random.Random(seed).choices(WORDS, k=n))


def pieces_of(texts, size=500):
    """As a Reader gives them."""
    for text in texts:
        chunks, key = list(cut([text], size)), int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        for i, chunk in enumerate(chunks, 1):
            yield Piece(chunk, key, i == 1, {"behind": text[-9:]} if i == len(chunks) else None)


def divided(text, fraction, size=500, **settings):
    """[(text, held out)] of a document, joined where the same."""
    found = []
    for part in parts(pieces_of([text], size), fraction, **settings):
        if found and found[-1][1] == part.val:
            found[-1] = found[-1][0] + part.text, part.val
        else:
            found.append((part.text, part.val))
    return found


documents = st.builds(text_of, st.integers(0, 10**6), st.integers(1, 4000), st.sampled_from([" ", ""]))


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(documents, min_size=1, max_size=5), fraction=st.sampled_from([0.01, 0.1, 0.5, 0.9]))
def test_parts_are_the_documents(texts, fraction):
    """In order, whole, begun once and ended once, whatever is held out; and each as if it were alone."""
    alone = [part for text in texts for part in parts(pieces_of([text]), fraction)]
    assert list(parts(pieces_of(texts), fraction)) == alone
    found, held = [], []
    for part in alone:
        assert part.first == (not held) and part.text
        held.append(part.text)
        if part.after:
            found.append("".join(held))
            held = []
    assert found == texts and not held


@settings(max_examples=300, deadline=None)
@given(text=documents, more=documents, fraction=st.sampled_from([0.02, 0.1, 0.4, 0.7]), at=st.integers(BEGIN, 20_000))
def test_what_is_added_behind_moves_nothing_to_train(text, more, fraction, at):
    """What was held out of a document is held out of the longer one, short before or long, wherever it ended."""
    text = (text * (1 + BEGIN // len(text)))[:at]
    def places(text):
        at, held = 0, set()
        for part, val in divided(text, fraction, size=1 << 18):
            held |= set(range(at, at + len(part))) if val else set()
            at += len(part)
        return held
    assert places(text) <= places(text + more)


@pytest.mark.parametrize("fraction", [0.004, 0.05, 0.3, 0.8])
def test_the_share(fraction):
    """Over documents of all lengths about val_fraction is held out; of a long one within a quarter, in lines."""
    rng = random.Random(1)
    texts = [text_of(i, int(rng.lognormvariate(5, 1.5)) + 1) for i in range(1500)]
    found = [(len(part.text), part.val) for part in parts(pieces_of(texts), fraction)]
    assert sum(n for n, val in found if val) / sum(n for n, _ in found) == pytest.approx(fraction, rel=0.35)
    text = text_of("long", 400_000)
    held = [part for part, val in divided(text, fraction, size=1 << 18) if val]
    assert sum(map(len, held)) / len(text) == pytest.approx(fraction, rel=0.25)
    assert sum(part.endswith("\n") for part in held) >= len(held) - 2 and min(map(len, held)) >= HELD // 4


def test_documents_that_stay_whole():
    """Short ones by their hash, all of a source whose documents are never divided, all of a validation set."""
    short = [text_of(i, 20) for i in range(400)]
    found = list(parts(pieces_of(short), 0.25))
    assert [part.text for part in found] == short
    assert [part.val for part in found] == [part.key < 2**62 for part in found]
    assert [part.length for part in found] == list(map(len, short))
    long = text_of(1, 9000)
    assert len(divided(long, 0.25)) > 3 and len(divided(long, 0.25, whole=True)) == 1
    assert divided(long, 0, val=True) == [(long, True)] and divided(long, 0) == [(long, False)]


@settings(max_examples=100, deadline=None)
@given(text=documents, size=st.integers(6, 60), fraction=st.sampled_from([0, 0.5]))
def test_names_that_are_tokens_are_never_cut(text, size, fraction):
    """Found in the parts they are those found in the text, the longest where one begins another."""
    names = ("<|a|>", "<|a|>b", "<| <|a")
    found = list(parts(pieces_of([text], size), fraction, least=2, special=names))
    pattern = special_pattern(names)
    assert "".join(part.text for part in found) == text
    assert [name for part in found for name in pattern.findall(part.text)] == pattern.findall(text)
    assert found[0].first and found[-1].after and sum(part.first for part in found) == 1


def test_what_is_counted():
    """Names that stay text, the longer of two once; lines that stand in val, outside of val."""
    line = "a line that is longer than forty characters, yes"
    text = f"<|a|>b <|a|> <|a|>\n {line} \nshort\n"
    (part,) = parts(pieces_of([text]), 0, others=("<|a|>", "<|a|>b"), val_lines=frozenset([line, "short"]))
    assert (part.looks, part.shared) == ({"<|a|>b": 1, "<|a|>": 2}, 2)
    (part,) = parts(pieces_of([text]), 0, val=True, val_lines=frozenset([line]))
    assert (part.looks, part.shared, part.val) == ({}, 0, True)
