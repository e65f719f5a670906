"""Token shards on disk: a data set is a folder that prepare.py writes and training never changes.

    data/NAME/tokenizer.json  meta.json  train_000000.bin ...  val_000000.bin ...

**Shards** have llm.c's layout, so its pretokenized GPT-2 files (and modded-nanogpt's) are read here as they are, and
ours there: a header of 256 little-endian int32, then the tokens.

    [0] 20240520   [1] version: 1 = uint16, 2 = uint32   [2] number of tokens
    [3] bytes per token   [4:12] sha256 fingerprint of the tokenizer   [12:14] 64-bit checksum of the token bytes

Words from 3 on are ours, and zero in foreign files. Version 2 is ours as well: ids above 65,535 do not fit uint16, and
a reader that knows only version 1 has to stop there instead of reading halves of ids. A shard is written under a
temporary name, synced and renamed, so a file whose name ends in .bin is complete. meta.json holds what headers cannot:
sources, vocabulary, documents, and the bytes of text that bits per byte needs. A folder of llm.c's shards has no
meta.json and is read by its file names.

Apart from data.py, which makes batches of them, because prepare.py needs this half only: torch would be most of its
memory.
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
META_VERSION = 1
GPT2_VOCAB_SIZE, GPT2_BOUNDARY_ID = 50257, 50256  # of llm.c's and modded-nanogpt's shards

# ----------------------------------------------------------------------------------------------------------------------
# Shards


@dataclass(frozen=True)
class Header:
    n_tokens: int
    dtype: np.dtype
    fingerprint: str  # of the tokenizer, hex; "" in foreign files
    checksum: str  # of the token bytes, hex; "" in foreign files


class ShardWriter:
    """One shard, written piece by piece: nothing but the last FLUSH tokens is held in memory.

        with ShardWriter(path, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size) as shard:
            shard.write(ids)  # as often as needed; an array is kept until the next flush, so it must not be reused
        shard.entry  # {"file", "tokens", "checksum"} for meta.json

    The file has its name when the block ends and never exists if it ends by an exception. A kill leaves PATH.tmp, which
    the next writer of PATH overwrites.
    """

    FLUSH = 1 << 16  # tokens: many documents to a check, hash and write, and few enough to stay in the cache

    def __init__(self, path: str | Path, *, fingerprint: str, vocab_size: int):
        self.path, self.fingerprint, self.vocab_size = Path(path), fingerprint, vocab_size
        self.n_tokens, self.entry = 0, None
        self._version = 1 if vocab_size <= 1 << 16 else 2
        self._pieces, self._held, self._hash = [], 0, hashlib.blake2b(digest_size=8)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._file = open(self._temporary, "wb")
        self._file.write(bytes(HEADER_BYTES))

    def write(self, tokens) -> None:
        """Append token ids: a list or an array of whole numbers."""
        self._pieces.append(tokens)
        self._held += len(tokens)
        self.n_tokens += len(tokens)
        if self._held >= self.FLUSH:
            self._flush()

    def close(self) -> dict:
        """Complete the file under its name; returns its entry for meta.json."""
        self._flush()
        header = np.zeros(256, "<i4")
        header[:4] = MAGIC, self._version, self.n_tokens, DTYPES[self._version].itemsize
        header[4:12] = np.frombuffer(bytes.fromhex(self.fingerprint), "<i4")
        header[12:14] = np.frombuffer(self._hash.digest(), "<i4")
        self._file.seek(0)
        self._file.write(header.tobytes())
        _publish(self._file, self._temporary, self.path)
        self.entry = {"file": self.path.name, "tokens": self.n_tokens, "checksum": self._hash.hexdigest()}
        return self.entry

    def _flush(self):
        if self.n_tokens > MAX_SHARD_TOKENS:
            raise ValueError(f"{self.path} would hold {self.n_tokens:,} tokens; a shard holds {MAX_SHARD_TOKENS:,}.\n"
                             "  Write several shards.")
        if self._held:
            tokens = np.concatenate([piece for piece in self._pieces if len(piece)])
            for bad in (tokens.min(), tokens.max()):
                if not 0 <= bad < self.vocab_size:  # the cast below would turn it into another, valid id
                    raise ValueError(f"{self.path}: id {bad} is outside the vocabulary of {self.vocab_size} ids.\n"
                                     "  Give the vocab_size of the tokenizer that made the ids.")
            data = tokens.astype(DTYPES[self._version])
            self._hash.update(data)
            self._file.write(data)
        self._pieces, self._held = [], 0

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        try:
            if error_type is None:
                self.close()
        finally:
            if self.entry is None:
                self._file.close()
                self._temporary.unlink(missing_ok=True)


def write_shard(path: str | Path, tokens, *, fingerprint: str, vocab_size: int) -> dict:
    """Write a whole shard at once; returns its entry for meta.json."""
    with ShardWriter(path, fingerprint=fingerprint, vocab_size=vocab_size) as shard:
        shard.write(tokens)
    return shard.entry


def write_whole(path: Path, text: str):
    """A text file, whole or not at all, whatever happens in between."""
    with open(path.with_name(path.name + ".tmp"), "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        _publish(file, file.name, path)


def _publish(file, temporary, path):
    """Content, name and folder reach the disk in this order, so that no crash leaves half a file under its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(temporary, path)
    with contextlib.suppress(OSError):  # Windows opens no folder, some network drives sync none
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_header(path: str | Path) -> Header:
    """The header of a shard, after checking that it is one and that the file is as long as it says."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found.\n  Copy the missing shard, or make the data set again: prepare.py.")
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    again = "copy it again, or make the data set again with prepare.py."
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path} has {len(raw)} bytes; the header of a shard alone has {HEADER_BYTES}.\n"
                         f"  It was cut short: {again}")
    words = np.frombuffer(raw, "<i4")
    magic, version, n_tokens, width = (int(word) for word in words[:4])
    if magic != MAGIC:
        raise ValueError(f"{path} starts with {magic}; a shard starts with {MAGIC}.\n  Bare tokens (nanoGPT's) and "
                         "other layouts are not read: make shards from the text with prepare.py.")
    if version not in DTYPES or width not in (0, DTYPES[version].itemsize):
        raise ValueError(f"{path} has version {version} and {width} bytes per token; known are version 1 with 2 "
                         f"(uint16) and version 2 with 4 (uint32).\n  If it should be one of these, {again}")
    size, needed = path.stat().st_size, HEADER_BYTES + n_tokens * DTYPES[version].itemsize
    if size != needed:
        raise ValueError(f"{path} has {size:,} bytes; the {n_tokens:,} tokens of its header need {needed:,}.\n"
                         f"  It was cut short or damaged: {again}")
    fingerprint, checksum = (words[4:12].tobytes().hex(), words[12:14].tobytes().hex()) if width else ("", "")
    return Header(n_tokens, DTYPES[version], fingerprint, checksum)


def open_shard(path: str | Path) -> np.ndarray:
    """All tokens of a shard as a read-only memory map; the header is checked."""
    header = read_header(path)
    if not header.n_tokens:  # nothing to map is an error to mmap
        return np.empty(0, header.dtype)
    return np.memmap(path, header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))


def read_listed(folder: Path, entry: dict, fingerprint: str) -> tuple[Path, Header]:
    """Path and header of a shard, which have to be what meta.json says of it: its entry, the set's tokenizer."""
    path = folder / entry["file"]
    header = read_header(path)
    found = (header.n_tokens, header.fingerprint, header.checksum or entry["checksum"])
    if found != (said := (entry["tokens"], fingerprint, entry["checksum"])):
        raise ValueError(f"{path} has (tokens, tokenizer, checksum) {found}; meta.json says {said}.\n  It was damaged "
                         "or is of another data set: copy the right one, or make the set again with prepare.py.")
    return path, header


def verify_shard(path: str | Path) -> Header:
    """Read a whole shard and compare it with its checksum (foreign shards have none); returns the header."""
    header, digest = read_header(path), hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        unused = np.frombuffer(file.read(HEADER_BYTES), "<i4")[14 if header.fingerprint else 3:]
        if unused.any():
            raise ValueError(f"{path} has words in its header that no shard has.\n  They were damaged, or a later "
                             "version wrote them: copy it again, or make the data set again with prepare.py.")
        while block := file.read(1 << 24):
            digest.update(block)
    if header.checksum not in ("", digest.hexdigest()):
        raise ValueError(f"{path} has checksum {digest.hexdigest()}; its header says {header.checksum}.\n  Tokens were "
                         "damaged on disk or on the way: copy it again, or make the data set again with prepare.py.")
    return header


# ----------------------------------------------------------------------------------------------------------------------
# meta.json


def write_meta(data_dir: str | Path, *, sources, fingerprint: str, vocab_size: int, boundary_id: int,
               splits: dict[str, list[dict]], **extra) -> dict:
    """Write data_dir/meta.json, the last file of a data set, and return what it holds.

    splits: {"train": entries, "val": entries}; an entry is a shard's {"file", "tokens", "checksum"} from its writer
    plus "documents" and "bytes" (of their text). sources and extra: whatever JSON a reader may want to know.
    """
    meta = {"version": META_VERSION, "sources": sources, "tokenizer": fingerprint, "vocab_size": vocab_size,
            "boundary_id": boundary_id, "data_fingerprint": fingerprint_data(fingerprint, splits), **extra}
    meta["splits"] = {split: {**{key: sum(int(entry[key]) for entry in entries)
                                 for key in ("tokens", "documents", "bytes")}, "shards": entries}
                      for split, entries in splits.items()}
    write_whole(Path(data_dir) / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))
    return meta


def read_meta(data_dir: str | Path) -> dict:
    """What data_dir/meta.json holds; for a folder of llm.c's GPT-2 shards, the same without documents and bytes."""
    path = Path(data_dir) / "meta.json"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{data_dir} not found.\n  Make it with: python prepare.py stdlib --out {data_dir}")
    if not path.is_file():
        return _foreign_meta(path.parent)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["version"]
        missing = {"tokenizer", "vocab_size", "boundary_id", "data_fingerprint", "splits"} - set(meta)
        if version == META_VERSION and not missing:
            [(entry["file"], entry["tokens"], entry["checksum"]) for split in meta["splits"].values()
             for entry in split["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a data set ({type(error).__name__}: {error}).\n"
                         "  Make the data set again with prepare.py.") from None
    if version != META_VERSION or missing:
        raise ValueError(f"{path} has version {version} and lacks {sorted(missing) or 'nothing'}; version "
                         f"{META_VERSION} with all keys is needed.\n  Make the data set again with prepare.py.")
    return meta


def _foreign_meta(folder):
    splits = {}
    for path in sorted(folder.glob("*.bin"), key=lambda path: natural(path.name)):
        match = re.search(r"(?:^|_)(train|val)(?:_\d+)?\.bin$", path.name)
        if not match or (header := read_header(path)).fingerprint:  # ours without meta.json: prepare.py did not finish
            continue
        with open(path, "rb") as file:  # no checksum, and reading it all takes minutes: both ends tell files apart
            ends = file.read(1 << 16)
            file.seek(max(HEADER_BYTES, path.stat().st_size - (1 << 16)))
            ends += file.read()
        checksum = hashlib.blake2b(ends, digest_size=8).hexdigest()
        splits.setdefault(match[1], []).append({"file": path.name, "tokens": header.n_tokens, "checksum": checksum})
    if not splits:
        raise FileNotFoundError(f"{folder} has no meta.json, and no llm.c shards (*_train_*.bin, *_val_*.bin) either.\n"
                                f"  Make it, or finish making it: python prepare.py stdlib --out {folder}")
    return {"version": META_VERSION, "sources": ["llm.c shards"], "tokenizer": "", "vocab_size": GPT2_VOCAB_SIZE,
            "boundary_id": GPT2_BOUNDARY_ID, "data_fingerprint": fingerprint_data("", splits),
            "splits": {split: {"tokens": sum(entry["tokens"] for entry in entries), "shards": entries}
                       for split, entries in splits.items()}}


def fingerprint_data(fingerprint: str, splits: dict[str, list[dict]]) -> str:
    """One sha256 for tokenizer and contents: the same value, seed and position give the same batch."""
    shards = [[split, entry["file"], entry["tokens"], entry["checksum"]] for split in sorted(splits)
              for entry in sorted(splits[split], key=lambda entry: natural(entry["file"]))]
    return hashlib.sha256(json.dumps([fingerprint, shards]).encode()).hexdigest()


def natural(name: str):
    """A sort key by which part_2 precedes part_10, in whatever order a file system lists them."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))], name
