"""Windows over the token shards, and the batches made from them.

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

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from shards import HEADER_BYTES, natural, read_header, read_meta


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
        for entry in sorted(shards, key=lambda entry: natural(entry["file"])):
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
