"""Token shards on disk, and the batches made from them.

A data set is a folder that prepare.py writes and training never changes:

    data/NAME/tokenizer.json  meta.json  train_000000.bin ...  val_000000.bin ...

**Shards** have llm.c's layout, so its pretokenized GPT-2 files (and modded-nanogpt's) are read here as they are, and
ours there: a header of 256 little-endian int32, then the tokens.

    [0] 20240520   [1] version: 1 = uint16, 2 = uint32   [2] number of tokens
    [3] bytes per token   [4:12] sha256 fingerprint of the tokenizer   [12:14] 64-bit checksum of the token bytes

Words from 3 on are ours, and zero in foreign files. Version 2 is ours as well: ids above 65,535 do not fit uint16, and
a reader that knows only version 1 has to stop there instead of reading halves of ids. A shard is written under a
temporary name, synced and renamed, so a file whose name ends in .bin is complete. meta.json holds what headers cannot:
sources, vocabulary, documents, and the bytes of text that bits per byte needs. Headers, sizes and meta.json have to
agree before the first step. A folder of llm.c's shards has no meta.json and is read by its file names.

**Windows** are seq_len + 1 tokens that start every seq_len tokens of a shard: each token but a shard's first is a
target exactly once per epoch, and the rest at a shard's end, less than one window, is left out. They are read by
np.fromfile and not through one long-lived memory map. The pages of a map count as resident, so a process that has
passed over 40 GB of shards looks 40 GB big and may be killed for it; and a file that is cut short under a map is a
SIGBUS, where a short read is an error that names the file. A read takes 20 microseconds; 10 of them a map would save.

**Order** is a pure function of (seed, position): sequence s of a run is window order(epoch)[s % n_windows], where
epoch = s // n_windows and order is one permutation for all ranks. A step takes the next batch_seqs sequences, and ranks
only divide these among themselves. So there is no state to save: a run resumes from the number of sequences it has
consumed, on any number of ranks. The permutation is numpy's RandomState's, whose stream never changes between versions.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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


def open_shard(path: str | Path, *, fingerprint: str | None = None) -> np.ndarray:
    """All tokens of a shard as a read-only memory map; the header is checked, for the tokenizer too if one is given."""
    header = read_header(path)
    if fingerprint and header.fingerprint not in ("", fingerprint):
        raise ValueError(f"{path} holds ids of tokenizer {header.fingerprint[:12]}; ids of {fingerprint[:12]} are "
                         "needed.\n  Make the data set again with prepare.py --tokenizer, naming the right one.")
    if not header.n_tokens:  # nothing to map is an error to mmap
        return np.empty(0, header.dtype)
    return np.memmap(path, header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))


def verify_shard(path: str | Path) -> Header:
    """Read a whole shard and compare it with its checksum (foreign shards have none); returns the header."""
    header, digest = read_header(path), hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
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
            "boundary_id": boundary_id, "data_fingerprint": _data_fingerprint(fingerprint, splits), **extra}
    meta["splits"] = {split: {**{key: sum(int(entry[key]) for entry in entries)
                                 for key in ("tokens", "documents", "bytes")}, "shards": entries}
                      for split, entries in splits.items()}
    path = Path(data_dir) / "meta.json"
    temporary = path.with_name("meta.json.tmp")
    file = open(temporary, "w", encoding="utf-8")
    json.dump(meta, file, indent=1, ensure_ascii=False)
    _publish(file, temporary, path)
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
    for path in sorted(folder.glob("*.bin"), key=lambda path: _natural(path.name)):
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
            "boundary_id": GPT2_BOUNDARY_ID, "data_fingerprint": _data_fingerprint("", splits),
            "splits": {split: {"tokens": sum(entry["tokens"] for entry in entries), "shards": entries}
                       for split, entries in splits.items()}}


def _data_fingerprint(fingerprint, splits):
    """One sha256 for tokenizer and contents: the same value, seed and position give the same batch."""
    shards = [[split, entry["file"], entry["tokens"], entry["checksum"]] for split in sorted(splits)
              for entry in sorted(splits[split], key=lambda entry: _natural(entry["file"]))]
    return hashlib.sha256(json.dumps([fingerprint, shards]).encode()).hexdigest()


def _natural(name):
    """A sort key by which shard_2 precedes shard_10; the order of a folder's listing differs between machines."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))]


# ----------------------------------------------------------------------------------------------------------------------
# Windows and batches


class TokenData:
    """The windows of one split. What can be wrong with a data set is found here, before the first step.

    fingerprint and vocab_size are those of the tokenizer and the model that the ids will meet, if there are any yet.
    Foreign shards do not say which tokenizer made them: fingerprint is "" and GPT-2's is presumed.
    """

    def __init__(self, data_dir: str | Path, split: str, *, seq_len: int, fingerprint: str | None = None,
                 vocab_size: int | None = None):
        self.dir, self.split, self.seq_len, self.meta = Path(data_dir), split, seq_len, read_meta(data_dir)
        self.fingerprint: str = self.meta["tokenizer"]
        self.vocab_size: int = self.meta["vocab_size"]
        self.boundary_id: int = self.meta["boundary_id"]
        self.data_fingerprint: str = self.meta["data_fingerprint"]
        self._id_limit = vocab_size or self.vocab_size
        if fingerprint and self.fingerprint not in ("", fingerprint):
            raise ValueError(f"{self.dir} holds ids of tokenizer {self.fingerprint[:12]}; the model's is "
                             f"{fingerprint[:12]}.\n  Use the data set the model was trained on, or make one for it: "
                             "python prepare.py SOURCE --tokenizer RUN_FOLDER --out data/NAME")
        if self._id_limit < self.vocab_size:
            raise ValueError(f"{self.dir} holds ids of a vocabulary of {self.vocab_size}; the model's has only "
                             f"{self._id_limit}.\n  Set --vocab_size={self.vocab_size}, or prepare the data with the "
                             "model's tokenizer.")
        self._shards, windows = [], []  # (path, dtype) and the number of windows in it
        shards = self.meta["splits"].get(split, {"shards": []})["shards"]
        for entry in sorted(shards, key=lambda entry: _natural(entry["file"])):
            path, header = self.dir / entry["file"], read_header(self.dir / entry["file"])
            found = (header.n_tokens, header.fingerprint[:12], header.checksum or entry["checksum"])
            if found != (said := (entry["tokens"], self.fingerprint[:12], entry["checksum"])):
                raise ValueError(f"{path} has (tokens, tokenizer, checksum) {found}; meta.json says {said}.\n  It is "
                                 "of another data set: copy the right one, or make the set again with prepare.py.")
            self._shards.append((path, header.dtype))
            windows.append(max(header.n_tokens - 1, 0) // seq_len)
        self._ends = np.cumsum(windows)  # windows up to and including each shard
        self.n_windows, self.n_tokens = sum(windows), sum(entry["tokens"] for entry in shards)
        self._order = (None, None)
        if not self.n_windows:
            longest = max((entry["tokens"] for entry in shards), default=0)
            shorter = f"Set --seq_len={longest - 1} or less, or prepare" if longest > 1 else "Prepare"
            raise ValueError(f"Split {split!r} of {self.dir} has {self.n_tokens:,} tokens, {longest:,} in its longest "
                             f"shard; one window of seq_len {seq_len} needs {seq_len + 1:,}.\n"
                             f"  {shorter} more text, or more of it for this split (--val_fraction).")

    def window(self, i: int) -> np.ndarray:
        """Window i in file order, its ids checked against the vocabulary.  -> (seq_len + 1,) int64"""
        shard = int(np.searchsorted(self._ends, i, side="right"))
        path, dtype = self._shards[shard]
        first = (int(i) - int(self._ends[shard - 1] if shard else 0)) * self.seq_len
        ids = np.fromfile(path, dtype, count=self.seq_len + 1, offset=HEADER_BYTES + first * dtype.itemsize)
        if len(ids) < self.seq_len + 1:
            raise ValueError(f"{path} ends before token {first + self.seq_len:,}, which was there when the run began.\n"
                             "  Leave a data set alone while it is used; make it again with prepare.py and resume.")
        if ids.max() >= self._id_limit:
            at = int((ids >= self._id_limit).argmax())
            raise ValueError(f"{path} has id {ids[at]} at token {first + at:,}; the vocabulary has {self._id_limit} "
                             "ids.\n  Shard and tokenizer do not belong together: make the data set again.")
        return ids.astype(np.int64)

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """The order of an epoch, equal on all ranks: a permutation of range(n_windows). The last one is kept."""
        key, order = self._order
        if key != (epoch, seed):
            order = np.arange(self.n_windows, dtype=np.int32 if self.n_windows < 2**31 else np.int64)
            np.random.RandomState([seed % 2**32, epoch]).shuffle(order)
            self._order = (epoch, seed), order
        return order


class Batches:
    """One rank's micro batches without end: (x, y), both (micro_batch_size, seq_len) int64, y one token after x.

    A step is batch_seqs sequences over all ranks, from start_seq on. Its micro step m gives rank r those from
    (m * world_size + r) * micro_batch_size on, so a step is the same set for every world size.
    """

    AHEAD = 3  # micro batches made in advance, by one thread

    def __init__(self, data: TokenData, *, seed: int, micro_batch_size: int, batch_seqs: int, rank: int = 0,
                 world_size: int = 1, start_seq: int = 0, device="cpu", prefetch: bool = True):
        together = micro_batch_size * world_size
        if batch_seqs < 1 or batch_seqs % together:
            near = [n for n in (batch_seqs // together * together, (batch_seqs // together + 1) * together) if n > 0]
            raise ValueError(f"A step of {batch_seqs} sequences does not divide into {world_size} rank(s) x micro "
                             f"batches of {micro_batch_size}, {together} sequences at a time.\n  The nearest that do "
                             f"have {' or '.join(map(str, near))}: set --batch_tokens="
                             f"{' or '.join(str(n * data.seq_len) for n in near)}, or change --micro_batch_size.")
        self.data, self.seed, self.micro_batch_size, self.device = data, seed, micro_batch_size, torch.device(device)
        self._next, self._stride = start_seq + rank * micro_batch_size, together
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches") if prefetch else None
        self._coming = deque()

    def __iter__(self):
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pool is None:
            return self._make(self._take())
        while len(self._coming) <= self.AHEAD:
            self._coming.append(self._pool.submit(self._make, self._take()))
        return self._coming.popleft().result()  # raises here what was raised in the thread

    def _take(self):
        first, self._next = self._next, self._next + self._stride
        return first

    def _make(self, first):
        rows = []
        for s in range(first, first + self.micro_batch_size):
            epoch, i = divmod(s, self.data.n_windows)
            rows.append(self.data.window(self.data.order(epoch, self.seed)[i]))
        return _to_device(rows, self.device)

    def close(self) -> None:
        """End the thread. It also ends by itself with this object or the program."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def iterate_windows(data: TokenData, micro_batch_size: int, *, max_windows: int | None = None, rank: int = 0,
                    world_size: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A split once, in file order, for evaluation: (x, y) as Batches gives them, on the CPU, the last pair shorter.

    max_windows takes that many, evenly spaced and always the same. Ranks take every world_size-th of them, so that sums
    over ranks are the same for any number of ranks; a rank may get none.
    """
    chosen = np.arange(data.n_windows)
    if max_windows is not None and max_windows < data.n_windows:
        chosen = np.arange(max_windows) * data.n_windows // max_windows
    chosen = chosen[rank::world_size]
    for i in range(0, len(chosen), micro_batch_size):
        yield _to_device([data.window(w) for w in chosen[i:i + micro_batch_size]], torch.device("cpu"))


def _to_device(rows: Iterable[np.ndarray], device):
    ids = torch.from_numpy(np.stack(rows))  # (B, T + 1)
    if device.type == "cuda":  # only from pinned memory does the copy run beside the GPU's work
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def document_ids(x: torch.Tensor, boundary_id: int) -> torch.Tensor:
    """The number of the document each token is in, counted per row; a boundary starts one.  (B, T) -> (B, T) int32"""
    return (x == boundary_id).cumsum(dim=1, dtype=torch.int32)
