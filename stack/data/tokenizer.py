"""Text to ids and back: byte-level BPE, trained by rustbpe and run by tiktoken.

Ids are ranks, then special tokens. Ranks 0-255 are the single bytes, so any text can be encoded; each after them is one
learned merge. Text is first cut into pieces by PATTERN, and merges never cross pieces. The vocabulary size is what this
comes to, never what was asked for; the model pads its own matrix.

PATTERN is GPT-4's rule as Llama 3 writes it, without possessive quantifiers: `{1,3}+` means different things to the
three regex engines that read it (Rust's for rustbpe and tiktoken, Oniguruma in Hugging Face's tokenizers after export).
Written so they agree on every code point, and tiktoken runs it a third faster.

The two libraries are fast and have edges, which are blunted here:

- a run of white space near a million characters exhausts the regex engine: an error in tiktoken, in rustbpe (and some
  functions and releases of tiktoken) a panic that is no Exception; and the cost of a piece grows faster than its
  length. So both get slices of at most SLICE characters from cut(): exact round trip always, the ids of the uncut text
  where a word begins near the cut, a token or two more per slice where none does (a megabyte of minified code);
- lone surrogates, which a str can hold and UTF-8 cannot, become U+FFFD before either library sees them;
- special tokens are found here and never by tiktoken, so text that discusses "<|endoftext|>" stays text unless the
  caller says special=True, and no name of a special token can upset its regex;
- rustbpe only trains. Its encoder loses data on long runs, and its trainer keeps the places of all pairs in each
  different piece: 50 bytes for a byte, nothing in prose, gigabytes in text without spaces. So the pieces are counted
  first, and of text with more of them than MAX_PIECES a random part is used that has not.

Text is encoded as it is, but by a tokenizer from elsewhere that was trained on text in NFC (Qwen's): nfc=True writes é
as one character before it cuts, whichever way it was typed. The file is JSON that a person can read: tokens in order of
rank, as text where they are UTF-8 and as a list of byte values where they are not. It also says how a model that was
trained to talk does so (chat_template, see chat.py; chat_ends, of an imported one), which changes no id.
"""

import codecs
import hashlib
import json
import os
import re
import sys
import tempfile
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np

from stack.data.shards import foreign_shards, how_to_make, whole_file

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
BOUNDARY = "<|endoftext|>"  # stands before every document: begin and stop sign in one
SPECIALS = (BOUNDARY, "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool_call|>",
            "<|tool_result|>", "<|reserved_0|>")
FILE_NAME, FORMAT, VERSION = "tokenizer.json", "stack100m-tokenizer", 1
SLICE = 1 << 14  # characters given to tiktoken or rustbpe at once
GROUP = 1 << 18  # characters per task of encode_documents: 10 ms of work, handed over in 0.05
MAX_TRAINING_BYTES = 2**31 - 1  # rustbpe counts in int32
MAX_PIECES = 5 << 20  # bytes of different pieces, and 3 for each, to train on: rustbpe then takes about 250 MB
REPLACEMENT = "\ufffd".encode()
LONG_SPACE = re.compile(r"\s{64,}")
CUT = re.compile(r"\S(?=[ \t])")  # where text may be cut without changing a token: the next word brings its space


class Tokenizer:
    """Ranks, special tokens and the split pattern, from train_tokenizer, Tokenizer.load or Tokenizer.from_tiktoken."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], specials: dict[str, int], *, boundary: str = BOUNDARY,
                 nfc: bool = False, chat_template: str = "", chat_ends: Iterable[str] = ()):
        ids = [*ranks.values(), *specials.values()]
        problems = []
        if missing := [i for i in range(256) if bytes([i]) not in ranks]:
            problems.append(f"{len(missing)} of the 256 single bytes have no rank, {missing[0]} first")
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            problems.append("two tokens share an id, or an id is negative")
        if boundary not in specials or "" in specials:
            problems.append(f"the special tokens {list(specials)} lack the boundary {boundary!r}, or one is empty")
        if problems:
            raise ValueError(f"These tokens make no tokenizer: {'; '.join(problems)}.\n  Every byte needs a rank, each "
                             "token an id of its own, and one special token marks where documents start.")
        self.pattern, self.ranks, self.special_ids, self.boundary, self.nfc = pattern, ranks, specials, boundary, nfc
        self.chat_template, self.chat_ends = chat_template, tuple(chat_ends)
        self.boundary_id: int = specials[boundary]
        self.vocab_size: int = max(ids) + 1  # foreign encodings may have gaps; a gap is an id that is never produced
        tokens = {i: token for token, i in ranks.items()} | {i: name.encode() for name, i in specials.items()}
        self._bytes = [tokens.get(i, REPLACEMENT) for i in range(self.vocab_size)]

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over all that decides ids: equal fingerprints give equal ids for every text."""
        specials = sorted(self.special_ids.items(), key=lambda item: item[1])
        digest = hashlib.sha256(json.dumps([self.pattern, self.boundary, specials, *["NFC"] * self.nfc]).encode())
        for token, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d %b" % (rank, len(token), token))
        return digest.hexdigest()

    # ---- text to ids

    @cached_property
    def _encoding(self):
        import tiktoken
        # One ASCII name where tiktoken wants its special tokens: none makes its search for them match everywhere.
        return tiktoken.Encoding("stack100m", pat_str=self.pattern, mergeable_ranks=self.ranks,
                                 special_tokens={BOUNDARY: self.vocab_size})

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text. The names of special tokens are text like any other unless special=True."""
        return self.encode_to_numpy(text, tuple(self.special_ids) if special else ()).tolist()

    def encode_to_numpy(self, text: str, special: tuple[str, ...] = ()) -> np.ndarray:
        """Ids of a text as uint32, without the detour through a list; names are text but for those in `special`.
        Releases the GIL."""
        if special:
            names_and_texts = enumerate(special_pattern(special).split(text))  # text, name, text, ...
            return np.concatenate([np.array([self.special_ids[part]], np.uint32) if i % 2 else
                                   self.encode_to_numpy(part) for i, part in names_and_texts])
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        try:
            parts = [self._encoding.encode_to_numpy(part, disallowed_special=())
                     for part in (cut([text], SLICE) if len(text) > SLICE else [text])]
        except UnicodeEncodeError:
            return self.encode_to_numpy(replace_surrogates(text))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # pyo3's; it derives from BaseException only
                raise
            raise RuntimeError(f"tiktoken panicked on a text of {len(text):,} characters: {error}") from None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode_documents(self, texts: Iterable[str], workers: int | None = None, special: tuple[str, ...] = (),
                         encode=None) -> Iterator[np.ndarray]:
        """encode, encode_to_numpy if none is given, of every text, in order, by a pool of threads; texts are read only
        a few groups ahead.

        The ids do not depend on workers. An error in a document ends the iteration and says which one it was.
        """
        workers = workers or os.cpu_count() or 1
        encode = encode or partial(self.encode_to_numpy, special=special)
        self._encoding  # built here, else each thread builds it  # noqa: B018

        def encode_group(group):
            out = []
            for i, text in group:
                try:
                    out.append(encode(text))
                except Exception as error:
                    raise RuntimeError(f"document {i} (counted from 0) cannot be encoded: {error}") from error
            return out

        pool, running = ThreadPoolExecutor(workers, thread_name_prefix="encode"), deque()
        try:
            for group in _grouped(texts):
                running.append(pool.submit(encode_group, group))
                if len(running) > 2 * workers:
                    yield from running.popleft().result()
            while running:
                yield from running.popleft().result()
        finally:  # also when the caller stops early: what runs is finished, what waits is dropped
            pool.shutdown(cancel_futures=True)

    # ---- ids to text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids; special tokens give their names, ids outside the vocabulary U+FFFD."""
        table, n = self._bytes, self.vocab_size
        return b"".join([table[i] if 0 <= i < n else REPLACEMENT for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; what is no UTF-8 and what is no id gives U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self) -> "Stream":
        """A decoder for one growing sample."""
        return Stream(self)

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int32: how many bytes of text each id stands for, 0 for special tokens; for bits per byte."""
        lengths = np.zeros(self.vocab_size, np.int32)
        lengths[list(self.ranks.values())] = [len(token) for token in self.ranks]
        return lengths

    # ---- making, saving, loading

    def with_specials(self, names: Iterable[str]) -> "Tokenizer":
        """The same tokenizer with more special tokens, at the next free ids; all old ids stay what they are."""
        names = list(names)
        if taken := [name for i, name in enumerate(names) if not name or name in self.special_ids or name in names[:i]]:
            raise ValueError(f"{taken} cannot be added: empty, twice in the list, or special tokens already.\n"
                             f"  Choose names other than {', '.join(self.special_ids)}.")
        added = {name: self.vocab_size + i for i, name in enumerate(names)}
        return Tokenizer(self.pattern, self.ranks, {**self.special_ids, **added}, boundary=self.boundary, nfc=self.nfc,
                         chat_template=self.chat_template, chat_ends=self.chat_ends)

    @staticmethod
    def from_tiktoken(name: str) -> "Tokenizer":
        """One of tiktoken's own encodings ("gpt2", "cl100k_base", ...), ids as they are there. Downloads it once."""
        import requests
        import tiktoken
        if name not in tiktoken.list_encoding_names():
            raise ValueError(f"There is no encoding {name!r} in tiktoken.\n"
                             f"  It has {', '.join(tiktoken.list_encoding_names())}.")
        get = requests.get
        requests.get = partial(get, timeout=10)  # tiktoken's request waits for ever where a network swallows packets
        try:
            encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # no route, no name, proxy, certificate, 404, damaged download
            raise ConnectionError(
                f"{name!r} is not in tiktoken's cache and cannot be fetched ({type(error).__name__}: {error!s:.100}).\n"
                f"  Where there is a network run: TIKTOKEN_CACHE_DIR=cache python -c \"import tiktoken; "
                f"tiktoken.get_encoding('{name}')\"\n  Copy the folder cache here and set TIKTOKEN_CACHE_DIR to it."
            ) from error
        finally:
            requests.get = get
        return Tokenizer(encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens)

    def save(self, path: str | Path) -> None:
        """Write the file, or tokenizer.json in a folder; complete or not at all."""
        path = Path(path, FILE_NAME) if os.path.isdir(path) else Path(path)
        tokens = [None] * (max(self.ranks.values()) + 1)
        for token, rank in self.ranks.items():
            try:
                tokens[rank] = token.decode()
            except UnicodeDecodeError:
                tokens[rank] = list(token)
        head = {"format": FORMAT, "version": VERSION, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint,
                "pattern": self.pattern, "boundary": self.boundary, "special_tokens": self.special_ids}
        head |= {key: value for key in ("nfc", "chat_template", "chat_ends") if (value := getattr(self, key))}
        lines = ",\n".join(json.dumps(token, ensure_ascii=False) for token in tokens)  # a line per token
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "tokens": [\n{lines}\n ]\n}}\n'
        with whole_file(path) as file:
            file.write(text)

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Read a file that save() wrote, or tokenizer.json of a folder; a folder of llm.c's shards has GPT-2's."""
        path = Path(path, FILE_NAME) if os.path.isdir(path) else Path(path)
        if not path.is_file():
            if any(foreign_shards(path.parent)):
                return Tokenizer.from_tiktoken("gpt2")
            folder = path.parent if path.name == FILE_NAME else path
            raise FileNotFoundError(f"{path} not found.\n  A data set's or a run's folder is needed. A data set is "
                                    f"made with: {how_to_make(folder)}")
        needed = f"{FORMAT} version {VERSION} is needed"
        again = "Copy it again from the data set or checkpoint it belongs to."
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # JSON's and UTF-8's
            raise ValueError(f"{path} is not JSON ({error}); {needed}.\n  {again}") from None
        data = data if isinstance(data, dict) else {}
        found, version = data.get("format"), data.get("version")
        if (found, version) != (FORMAT, VERSION):
            theirs = "added_tokens" in data
            kind = "is Hugging Face's tokenizer file" if theirs else (
                f"has format {found!r}, version {version!r}" if found else "is no tokenizer of ours")
            rename = f"Rename it {FILE_NAME}; then " * (path.name != FILE_NAME)
            raise ValueError(f"{path} {kind}; {needed}.\n  " + (
                f"{rename}prepare.py takes --tokenizer hf:{path.parent}" if theirs else "Name a data set or a run."))
        try:
            ranks = {token.encode() if isinstance(token, str) else bytes(token): rank
                     for rank, token in enumerate(data["tokens"]) if token is not None}
            tokenizer = Tokenizer(data["pattern"], ranks, data["special_tokens"], boundary=data["boundary"],
                                  **{key: data[key] for key in ("nfc", "chat_template", "chat_ends") if key in data})
            stored, computed = data["fingerprint"], tokenizer.fingerprint
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {needed}.\n  {again}") from None
        if stored != computed:
            raise ValueError(f"{path} was changed after it was written: its fingerprint says {stored}, its contents "
                             f"give {computed}.\n  {again}")
        return tokenizer


class Stream:
    """Ids in, text out, for printing while a sample grows: holds back an unfinished character, three bytes at most.

    What push() and flush() return adds up to decode() of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes((token_id,)))

    def flush(self) -> str:
        """The rest, at the end of the sample; the stream can be used again afterwards."""
        return self._decoder.decode(b"", final=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of vocab_size ids, the special tokens among them, from texts read once as a stream.

    The result depends on which texts there are and not on their order: pieces are counted, and merges of equal count
    are taken in order of their ids. Where there are too few pairs the vocabulary is smaller, and where there are too
    many different pieces a random part of the texts is used; a line on stderr says so. Memory stays below 300 MB for
    any text; the texts wait in a temporary file.
    """
    import rustbpe
    if vocab_size < 256 + len(SPECIALS):
        raise ValueError(f"vocab_size {vocab_size} is too small: the 256 bytes and {len(SPECIALS)} special tokens need "
                         f"{256 + len(SPECIALS)}.\n  Set --vocab_size to at least that; 4096 suits a few MB of text, "
                         "32768 gigabytes.")
    trainer, halvings = rustbpe.Tokenizer(), 0
    with tempfile.TemporaryFile() as file:
        _store_slices(texts, file)
        while not _few_pieces(_stored_slices(file, halvings)):
            halvings += 1
        if halvings:
            print("tokenizer: this text has more different words, or stretches without spaces, than are held in "
                  f"memory; trained on a random 1/{2**halvings} of it.", file=sys.stderr)
        trainer.train_from_iterator(_stored_slices(file, halvings), vocab_size - len(SPECIALS), buffer_size=256,
                                    pattern=PATTERN)
    tokens = dict.fromkeys(bytes(token) for token, _ in trainer.get_mergeable_ranks())  # two merges can spell one token
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer(PATTERN, ranks, {name: len(ranks) + i for i, name in enumerate(SPECIALS)})
    if tokenizer.vocab_size < vocab_size:
        print(f"tokenizer: this text has pairs to merge for {tokenizer.vocab_size} ids only, {vocab_size} were asked "
              f"for; the vocabulary is {tokenizer.vocab_size}.", file=sys.stderr)
    return tokenizer


@cache
def special_pattern(names: tuple[str, ...]) -> re.Pattern:
    """Finds any of the names, the longest where one begins another."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")


def cut(chunks: Iterable[str], size: int) -> Iterator[str]:
    """The text that arrives in chunks in parts of at most `size` characters, which depend on nothing but the text.

    They end where pieces end anyhow if such a place is near.
    """
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > size:
            end = start + size
            if space := CUT.search(rest, max(end - 256, start), end):
                end = space.end()
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def replace_surrogates(text: str) -> str:
    """Lone surrogates as U+FFFD, the only characters of a str that UTF-8 has no bytes for; pairs as what they spell."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_bytes(text: str) -> tuple[str, bytes]:
    """(the text without lone surrogates, its UTF-8)"""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        text = replace_surrogates(text)
        return text, text.encode()


def _store_slices(texts, file):
    total = 0
    for text in texts:
        text, data = to_bytes(text)
        total += len(data)
        if total > MAX_TRAINING_BYTES:  # a count that overflows gives wrong merges without a word
            raise ValueError(f"More than {MAX_TRAINING_BYTES:,} bytes to train a tokenizer on; rustbpe's counts end "
                             "there.\n  Train on a sample: some hundred MB give nearly the same vocabulary.")
        for part in cut([text], SLICE):
            data = part.encode()
            file.write(len(data).to_bytes(4) + data)


def _stored_slices(file, halvings: int):
    """All slices, or those whose hashes begin with so many zero bits: of text in any order the same."""
    file.seek(0)
    while size := file.read(4):
        data = file.read(int.from_bytes(size))
        if not halvings or not int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> (64 - halvings):
            yield data.decode()


def _few_pieces(slices) -> bool:
    """Whether the different pieces are within MAX_PIECES. Words that were looked at lately are not split again."""
    import regex  # tiktoken's; it reads PATTERN as rustbpe does
    find, pieces, words, size = regex.compile(PATTERN).findall, set(), set(), 0
    for text in slices:
        new_words = set(text.split()) - words
        new = set(find(" " + " ".join(new_words)) if new_words else ())
        new.update(LONG_SPACE.findall(text))
        new -= pieces
        size += sum(len(piece.encode()) + 3 for piece in new)
        if size > MAX_PIECES:
            return False
        pieces |= new
        words.update(word for word in new_words if len(word) < 64)
        if len(words) > 1 << 17:
            words = set()
    return True


def _grouped(texts):
    """Lists of (number, text): as many texts as reach GROUP characters together."""
    group, size = [], 0
    for numbered in enumerate(texts):
        group.append(numbered)
        size += len(numbered[1])
        if size >= GROUP:
            yield group
            group, size = [], 0
    yield group
