"""Windows over the token shards, and the batches made from them.

**Windows** hold seq_len tokens x, their targets y, and docs, the document each is in. A target is the token that
follows in the shard, whatever follows in the window: the last token of a document has the boundary behind it. A slot
without a target has y = -100. How a shard becomes windows is the packing:

*stream* cuts it every seq_len tokens: each token but a shard's first is a target exactly once per epoch, and the rest
at a shard's end, less than one window, is left out. Most windows begin amid a document whose beginning they lack.

*best_fit* lays documents whole into windows, longest first, each where it leaves the least room; one longer than a
window fills some, and its tail is laid like any other. So an epoch has every token once, and no token is cut off from
the beginning of its document but those more than a window behind it (arXiv 2404.10830 has what this is good for). Slots
that no document fits into hold a boundary each. It goes with document masks: without them a document sees its
neighbours. Shards are packed anew at every start, as an index on disk could be out of date: that reads them all, 1.1 s
per GB, and keeps 9 kB per million tokens in documents of 1,000, 180 MB per process for 20 billion (0.4 GB of files in
memory, one core of an AMD EPYC, 2026-11-29).

*Conversations* are learned by the assistant's tokens alone (chat.py), so the targets of all others are -100. They are
laid by best_fit: never cut, but where one is longer than a window, whose end is then left out. Documents that are no
conversations are laid beside them as ever, and all of their tokens are learned.

Shards are read by np.fromfile and not through a long-lived memory map, whose pages count as resident: a process that
has passed over 40 GB of shards looks 40 GB big and may be killed for it. And a file cut short under a map is a SIGBUS,
where a short read is an error that names the file. A read takes 20 microseconds; 10 of them a map would save.

**Order** is a pure function of (seed, position): sequence s of a run is window order(epoch)[s % n_windows] of epoch
s // n_windows. Where the mixture has phases (writer.py) an epoch goes through them one after the other, and only the
windows of each, which are those of whole shards, are shuffled; the next epoch begins with the first again. Ranks only
divide a step's sequences among themselves, so there is no state to save: a run resumes from the number of sequences it
has consumed, on any number of ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from stack.data.chat import Marks
from stack.data.shards import HEADER_BYTES, natural, read_listed, read_meta, token_blocks


class TokenData:
    """The windows of one split. What can be wrong with a data set is found here, before the first step.

    stride: of a stream, windows begin so many tokens after another, and of those but a shard's first only so many at
    the end are targets: each of these sees at least seq_len - stride tokens before its own input.
    packing: "stream" or "best_fit"; None is what goes with loss_on: "all", "assistant", or "auto", which is "assistant"
    where the set has conversations. doc_mask: whether attention will stay inside documents. fingerprint, vocab_size: of
    the tokenizer and the model that the ids will meet, if there are any yet. Foreign shards do not say which tokenizer
    made them: "", and GPT-2's is presumed.
    """

    def __init__(self, data_dir: str | Path, split: str, *, seq_len: int, packing: str | None = None,
                 stride: int | None = None, loss_on: str = "auto", doc_mask: bool = True,
                 fingerprint: str | None = None, vocab_size: int | None = None):
        self.dir, self.split, self.seq_len, self.meta = Path(data_dir), split, seq_len, read_meta(data_dir)
        self.stride = stride or seq_len
        chat = self.meta.get("chat")
        self.loss_on = ("assistant" if chat else "all") if loss_on == "auto" else loss_on
        self.packing = packing or ("best_fit" if self.loss_on == "assistant" else "stream")
        if self.loss_on == "assistant" and (not chat or self.packing != "best_fit" or not doc_mask):
            raise ValueError(f"loss_on is assistant, and {self.dir} has no conversations.\n  Make a set of them with: "
                             "python prepare.py FILE.jsonl --chat --tokenizer RUN --out data/NAME" if not chat else
                             f"{self.dir} has conversations, which are laid whole and do not see each other.\n  Set "
                             "--packing=best_fit --doc_mask=true, or learn every token, the users' too, with "
                             "--loss_on=all.")
        self._marks = Marks(chat["ids"]) if self.loss_on == "assistant" else None
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
        self._shards, windows = [], []  # (path, header, layout) and the number of windows in it
        shards = self.meta["splits"].get(split, {"shards": []})["shards"]
        for entry in sorted(shards, key=lambda entry: natural(entry["file"])):
            path, header = read_listed(self.dir, entry, self.fingerprint)
            layout = (Layout(path, header, self.boundary_id, seq_len, self._marks) if self.packing == "best_fit" else
                      None)
            self._shards.append((path, header, layout))
            windows.append(layout.n_windows if layout else max((header.n_tokens - 1 - seq_len) // self.stride + 1, 0))
        self._ends = np.cumsum(windows)  # windows up to and including each shard
        of = [entry.get("phase", 0) for entry in sorted(shards, key=lambda entry: natural(entry["file"]))]
        counts = np.bincount(of, windows).astype(int) if of else np.zeros(1, int)
        self.phases = np.cumsum([0, *counts[np.flatnonzero(counts)]]).tolist()  # windows before each, and of all
        self.n_windows, self.n_tokens = sum(windows), sum(entry["tokens"] for entry in shards)
        self.n_shards, n_docs = len(windows), self.meta["splits"].get(split, {}).get("documents")
        self.mean_doc_len = self.n_tokens / n_docs if n_docs else None  # in tokens; foreign shards do not say
        self._layouts = [layout for _, _, layout in self._shards if layout]
        self.empty_share, self._order = 0.0, (None, None)  # empty_share: of slots without a token
        if self._layouts and self.n_windows:
            self.empty_share = 1 - sum(layout.n_laid for layout in self._layouts) / (self.n_windows * seq_len)
        if not self.n_windows:
            longest = max((entry["tokens"] for entry in shards), default=0)
            shorter = f"Set --seq_len={longest - 1} or less, or prepare" if longest > 1 else "Prepare"
            raise ValueError(f"Split {split!r} of {self.dir} has {self.n_tokens:,} tokens, {longest:,} in its longest "
                             f"shard; one window of seq_len {seq_len} needs {seq_len + 1:,}.\n"
                             f"  {shorter} more text, or more of it for this split (--val_fraction).")

    def window(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Window i in file order, its ids checked against the vocabulary.  -> x, y, docs, each (seq_len,) int64

        docs numbers the documents of the window, and each slot left over as one of its own.
        """
        shard, T = int(np.searchsorted(self._ends, i, side="right")), self.seq_len
        path, header, layout = self._shards[shard]
        i = int(i) - int(self._ends[shard - 1] if shard else 0)
        x, y, begins, at = np.full(T, self.boundary_id), np.full(T, -100), np.zeros(T, bool), 0
        with open(path, "rb", buffering=0) as file:
            for first, n in layout.pieces(i) if layout else [(i * self.stride, T)]:
                file.seek(HEADER_BYTES + first * header.dtype.itemsize)
                ids = np.fromfile(file, header.dtype, n + 1)
                if len(ids) < min(n + 1, header.n_tokens - first):
                    raise ValueError(f"{path} ends before token {first + n:,}, which was there when the run began.\n  "
                                     "Leave a data set alone while it is used; make it again with prepare.py and "
                                     "resume.")
                if ids.max() >= self._id_limit:
                    bad = int((ids >= self._id_limit).argmax())
                    raise ValueError(f"{path} has id {ids[bad]} at token {first + bad:,}; the vocabulary has "
                                     f"{self._id_limit} ids.\n  Shard and tokenizer do not belong together: make the "
                                     "data set again.")
                x[at:at + n], y[at:at + len(ids) - 1], begins[at] = ids[:n], ids[1:], True
                if self._marks:
                    y[at:at + len(ids) - 1][~self._marks.learned(ids)] = -100
                at += n
        if i and not layout:
            y[:T - self.stride] = -100  # the window before had them
        return x, y, np.cumsum(begins | (x == self.boundary_id))

    def describe(self) -> str:
        """How documents lie in windows, for people. Counted in the data, which has to be read for it."""
        said = (f"packing {self.packing}: {self.cut_share():.1%} of tokens are cut off from the beginning of their "
                f"document, {self.empty_share:.2%} of slots are empty")
        if len(self.phases) > 2:
            said += (f"\nthe mixture has {len(self.phases) - 1} phases, of "
                     f"{', '.join(f'{n:,}' for n in np.diff(self.phases))} windows, one after the other")
        if self._marks:
            longer, lost = (sum(getattr(layout, name) for layout in self._layouts) for name in ("n_longer", "n_lost"))
            said += (f"\nlearned of conversations: the assistant's tokens; {longer:,} conversations are longer than a "
                     f"window and lose their ends, {lost:,} tokens in all")
        return said

    def cut_share(self) -> float:
        """The share of tokens that are cut off from their document's beginning, which is in another window or shard.

        Of a stream it is counted in 1,024 windows at most, spread evenly: exact to about a percentage point, where
        counting in all would read all shards.
        """
        if self.packing == "best_fit":
            return sum(layout.n_cut for layout in self._layouts) / self.n_tokens
        n = min(self.n_windows, 1024)
        return 1 - float(np.mean([np.logical_or.accumulate(self.window(w)[0] == self.boundary_id)
                                  for w in np.arange(n) * self.n_windows // n]))

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """The order of an epoch, equal on all ranks: a permutation of range(n_windows), phase by phase. The last one is
        kept."""
        key, order = self._order
        if key != (epoch, seed):
            order = np.arange(self.n_windows, dtype=np.int32 if self.n_windows < 2**31 else np.int64)
            draw = np.random.RandomState([seed % 2**32, epoch])  # its stream never changes between versions
            for first, end in zip(self.phases, self.phases[1:], strict=False):
                draw.shuffle(order[first:end])
            self._order = (epoch, seed), order
        return order


class Layout:
    """Where the pieces of a shard's best_fit windows are. n_laid: tokens in them; n_cut: those behind a cut, in windows
    or between shards. With the marks of conversations, n_longer of these are more than a window and n_lost tokens, of
    their ends, in none."""

    BLOCK = 1 << 24  # tokens read at a time

    def __init__(self, path: Path, header, boundary_id: int, seq_len: int, marks: Marks | None = None):
        found, at = [np.zeros(1, np.int64)], 0  # a shard may begin amid a document; that is a piece as well
        turns = []  # where conversations have their openings
        for ids in token_blocks(path, header.dtype, size=self.BLOCK):
            found.append(np.flatnonzero(ids == boundary_id) + at)
            if marks:
                turns.append(np.flatnonzero(np.isin(ids, marks.openings)) + at)
            at += len(ids)
        documents = np.unique(np.concatenate(found))[:at]  # where they begin; none in an empty shard
        counts = -(-np.diff(documents, append=at) // seq_len)  # pieces of each
        behind = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
        starts = np.repeat(documents, counts) + behind
        lengths = np.diff(starts, append=at)
        cut = behind > 0
        if at and not (len(found[1]) and found[1][0] == 0):
            cut[:counts[0]] = True
        self.n_longer = self.n_lost = 0
        if turns:
            talk = np.isin(documents + 1, np.concatenate(turns))
            over = np.diff(documents, append=at)[talk] - (seq_len + 1)  # a window's last target is the token behind it
            self.n_longer, self.n_lost = int((over > 0).sum()), int(over[over > 0].sum())
            laid = (behind == 0) | ~np.repeat(talk, counts)
            starts, lengths, cut = starts[laid], lengths[laid], cut[laid]
        self.n_cut, self.n_laid = int(lengths[cut].sum()), int(lengths.sum())
        window = best_fit(lengths, seq_len)
        order = np.argsort(window, kind="stable")  # in a window, as in the shard
        self._starts = starts[order].astype(np.uint32)
        self._lengths = lengths[order].astype(np.min_scalar_type(seq_len))
        self._firsts = np.cumsum(np.bincount(window), dtype=np.uint32)
        self.n_windows = len(self._firsts)

    def pieces(self, i: int) -> list[tuple[int, int]]:
        """(first token in the shard, number of tokens) of the pieces of window i."""
        some = slice(int(self._firsts[i - 1]) if i else 0, int(self._firsts[i]))
        return list(zip(self._starts[some].tolist(), self._lengths[some].tolist(), strict=True))


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """The window of each piece, (n,) from 0: longest first, into the one with the least room that is left and enough.

    lengths (n,) from 1 to size. Pieces of a length are laid together into all windows with the same room, which gives
    up the order among equals and makes the number of steps one of different lengths, not of pieces.
    """
    window, n_windows, by_length = np.empty(len(lengths), np.int64), 0, np.argsort(lengths, kind="stable")
    windows, rooms = {}, 0  # room -> the windows that have so much of it; and a bit for each room there is
    for length, first in reversed(list(zip(*np.unique(lengths[by_length], return_index=True), strict=True))):
        length, pieces, by_length = int(length), by_length[first:], by_length[:first]
        while len(pieces):
            if enough := rooms >> length:
                room = length + (enough & -enough).bit_length() - 1
                into, rooms = windows.pop(room), rooms & ~(1 << room)
            else:
                room, new = size, -(-len(pieces) // (size // length))
                into, n_windows = np.arange(n_windows, n_windows + new), n_windows + new
            window[pieces[:len(into)]], left = into[:len(pieces)], into[len(pieces):]
            for now, those in ((room, left), (room - length, into[:len(pieces)])):
                if now and len(those):
                    windows[now] = np.concatenate([windows.get(now, those[:0]), those])
                    rooms |= 1 << now
            pieces = pieces[len(into):]
    return window


class Batches:
    """One rank's micro batches without end: x, y and docs of that many windows, (micro_batch_size, seq_len) each.

    From start_seq on, micro step m gives rank r the sequences from (m * world_size + r) * micro_batch_size on. So a
    step, which train.py makes a whole number of micro steps, is the same set for every world size.
    """

    AHEAD = 3  # micro batches made in advance, by one thread

    def __init__(self, data: TokenData, *, seed: int, micro_batch_size: int, rank: int = 0, world_size: int = 1,
                 start_seq: int = 0, device="cpu"):
        self.data, self.seed, self.micro_batch_size, self.device = data, seed, micro_batch_size, torch.device(device)
        self._next, self._stride = start_seq + rank * micro_batch_size, micro_batch_size * world_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._coming = deque()

    def __iter__(self):
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._begin(self.AHEAD + 1)
        return self._coming.popleft().result()  # raises here what was raised in the thread

    def peek(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next micro batch, which stays the next."""
        self._begin(1)
        return self._coming[0].result()

    def _begin(self, n):
        while len(self._coming) < n:
            self._coming.append(self._pool.submit(self._make, self._next))
            self._next += self._stride

    def _make(self, first):
        rows = []
        for s in range(first, first + self.micro_batch_size):
            epoch, i = divmod(s, self.data.n_windows)
            rows.append(self.data.window(self.data.order(epoch, self.seed)[i]))
        return _to_device(rows, self.device)

    def close(self) -> None:
        """End the thread. It also ends by itself with this object or the program."""
        self._pool.shutdown(cancel_futures=True)


def iterate_windows(data: TokenData, micro_batch_size: int, *, max_windows: int | None = None, rank: int = 0,
                    world_size: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A split once, in file order, for evaluation: x, y, docs as Batches gives them, on the CPU, the last ones shorter.

    max_windows takes that many, evenly spaced and always the same. Ranks take every world_size-th of them, so that sums
    over ranks are the same for any number of ranks; a rank may get none.
    """
    n = data.n_windows if max_windows is None else min(max_windows, data.n_windows)
    chosen = (np.arange(n) * data.n_windows // n)[rank::world_size]
    for i in range(0, len(chosen), micro_batch_size):
        yield _to_device([data.window(w) for w in chosen[i:i + micro_batch_size]], torch.device("cpu"))


def _to_device(windows: Iterable[tuple[np.ndarray, ...]], device):
    together = torch.from_numpy(np.stack([np.stack(part) for part in zip(*windows, strict=True)]))  # (3, B, T)
    if device.type == "cuda":  # from pinned memory the copy is put in the queue, and nobody waits for it
        together = together.pin_memory()
    return together.to(device, non_blocking=True).unbind()
