"""From the pieces of documents to the parts that are encoded: which text is held out, which special tokens are read.

*Held out.*  The first HELD / val_fraction characters of a document, all of a shorter one, go to val if the hash of the
first BEGIN of them is among the lowest val_fraction of all 64-bit numbers.  A longer document gives val that share of
each of its other sections (of so many characters, later of a quarter of what is before them), a stretch at a place that
the hash of its first HELD characters decides; of the first section too, if that is not held out whole, so that of a
single document there is always some (and of documents little longer than a section up to twice the share: what a
shorter one had in val stays there, so the share of whole first sections cannot be less; and without a stretch in the
others the share that prepare.py takes for too few documents would not be that of more of them).

So where text goes depends on its document alone: no other document ever moves it, be there three or a billion, and
nothing that is added behind it moves any from val to train, if there were BEGIN characters before.  (Of a shorter
document the hash is of the whole, and changes with it.)  Stretches begin and end with a line or a word where one is
near.  The modules of `stdlib` and conversations stay whole, by the hash of the whole: the README's numbers are of the
former, and the latter often begin alike.

Where that holds out nothing, or all, prepare.py takes the share that the longest document can give, and says so.

Rejected: the end of the corpus (nanoGPT's way; what is added moves it); holding out inside documents only where whole
ones are too few (the set that is no longer too small trains on what the smaller one held out); a BEGIN as short as HELD
(all files under one licence, all chats under one system prompt would be held out together, or none).
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from math import ceil
from typing import NamedTuple

import numpy as np

from stack.data.tokenizer import special_pattern

HELD = 256  # characters: the least that is held out of a document
BEGIN = 1024  # characters that decide for a document; where documents begin alike, longer than that should be rare
MOST_WAIT = 1 << 22  # characters of a document that are waited for to know whether it is a long one
SHORT_LINE = 40  # characters; below it a line that stands in two texts says nothing
MOST_LINES = 1 << 20  # lines of val that are looked for in train


class Part(NamedTuple):
    text: str
    key: int  # 64-bit hash of the whole document
    first: bool  # a document begins with this part
    after: dict | None  # with the last part of a document: the state of the reader behind it
    val: bool  # held out
    looks: dict  # names of special tokens that stay text here: how often
    shared: int  # lines that stand in val as well
    length: int  # characters of the document, where its beginning is held out or is all of it; else 0
    ids: np.ndarray | None = None  # of the text, once it is encoded


def parts(pieces, fraction: float, *, least=HELD, val=False, whole=False, begin=True, special=(), others=(),
          val_lines=frozenset()) -> Iterator[Part]:
    """The pieces of a Reader as parts.

    fraction: of the text that is held out, no stretch of less than `least` characters; all of it where val is set; in
    whole documents only where whole is set; of long ones in stretches only where begin is not.
    special: names that will be encoded as special tokens, so no part ends inside one; others: those that stay text.
    """
    seen = special_pattern(others) if others else None
    pieces = _whole_names(pieces, special)
    for piece, text, held, length in _divided(pieces, 1.0 if val else fraction, least, val or whole, begin, special):
        looks = {}
        if seen and any(name in text for name in others):  # far faster than the pattern, which knows the longer of two
            for name in seen.findall(text):
                looks[name] = looks.get(name, 0) + 1
        shared = len(val_lines.intersection(map(str.strip, text.splitlines()))) if val_lines and not held else 0
        yield Part(text, piece.key, piece.first, piece.after, held, looks, shared, length)


def _divided(pieces, fraction, least, whole, begin, special):
    """(piece, text, whether it is held out, the document's length); a piece that is divided comes several times."""
    below, pieces = fraction * 2**64, iter(pieces)
    size = min(ceil(least / fraction), MOST_WAIT) if fraction else 0
    for piece in pieces:
        begun, length = [piece], len(piece.text)
        while not whole and length < size and begun[-1].after is None:
            begun.append(next(pieces))
            length += len(begun[-1].text)
        document = chain(begun, _rest(pieces, begun[-1]))
        head = "" if whole else "".join(piece.text for piece in begun)[:min(BEGIN, size)]
        first = (piece.key if whole else _hash(head.encode())) < below  # of a short document these hashes are the same
        if whole or length < size or not fraction:
            for piece in document:
                yield piece, piece.text, first, length
            continue
        first, at, held = first and begin, 0, False
        edges = _edges(head[:least].encode(), size, fraction, first)
        edge, back = next(edges)
        for piece in document:
            divided, done = [], 0
            while edge < at + len(piece.text):
                here = _border(piece.text, max(done, edge - at - back), edge - at, special)
                divided.append((piece.text[done:here], held))
                done, held, (edge, back) = here, not held, next(edges)
            if held and piece.after is not None and edge - back < at + len(piece.text):  # more text could end it here
                low = max(done, edge - at - back)
                here = _border(piece.text, low, len(piece.text), special, low)
                divided.append((piece.text[done:here], held))
                done, held = here, False
            divided = [(text, which) for text, which in [*divided, (piece.text[done:], held)] if text]
            for i, (text, which) in enumerate(divided, 1):
                yield piece._replace(first=piece.first and i == 1, after=piece.after if i == len(divided) else None
                                     ), text, which, length if first else 0
            at += len(piece.text)


def _rest(pieces, piece):
    """What follows a piece in its document."""
    while piece.after is None:
        yield (piece := next(pieces))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _edges(head: bytes, size: int, fraction: float, whole: bool):
    """(character, how far before it a line may be looked for) where a stretch begins, ends, the next begins ...

    whole: the first section is one, and a little more, so that no line that begins in it ends it early.
    """
    start, first = 0, size
    if whole:
        start = size + min(size, 1000)
        yield 0, 0
        yield start, min(size, 1000)
    while True:
        held = max(1, round(size * fraction))
        begin = start + _hash(head + b"%d" % start) * (size - held) // 2**64
        yield begin, min(held // 2, 1000)
        yield begin + held, min(held // 2, 1000)
        start += size
        size = max(first, start // 4)


def _border(text: str, low: int, at: int, special, other=None) -> int:
    """Where to divide a text: behind a line, else before a space, else at `at` or other; not inside a token's name."""
    at = text.rfind("\n", low, at) + 1 or max(text.rfind(" ", low, at), 0) or (at if other is None else other)
    for found in special_pattern(special).finditer(text) if special else ():
        if found.start() < at < found.end():
            return found.start()
    return at


def _whole_names(pieces, names):
    """The same text in pieces that do not end inside one of the names."""
    if not names:
        yield from pieces
        return
    rest, first = "", False
    for piece in pieces:
        text, first = rest + piece.text, first or piece.first
        rest = "" if piece.after else text[_unfinished(text, names):]
        if text := text[:len(text) - len(rest)]:
            yield piece._replace(text=text, first=first)
            first = False


def _unfinished(text: str, names) -> int:
    """Where a name begins that the end of the text may have cut off; len(text) where none does."""
    inside = [(found.start(), found.end()) for found in special_pattern(names).finditer(text)][-1:]
    for at in range(max(0, len(text) - max(map(len, names)) + 1), len(text)):
        if any(name.startswith(text[at:]) for name in names) and not any(a < at < b for a, b in inside):
            return at
    return len(text)


def of_val(readers: Iterable) -> tuple[set, frozenset]:
    """(hashes of the documents, the lines of SHORT_LINE characters or more, up to MOST_LINES) of a validation set."""
    keys, lines = set(), set()
    for piece in chain.from_iterable(readers):
        keys.add(piece.key)
        if len(lines) < MOST_LINES:
            lines.update(line for line in map(str.strip, piece.text.splitlines()) if len(line) >= SHORT_LINE)
    return keys, frozenset(lines)
