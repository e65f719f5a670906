"""From encoded documents to shards: what is kept, where it goes, and how a run that was killed goes on.

*Continuing.*  All decisions are made here, one document after the other, so a run is a function of its documents, and
its state is small.  save() writes it to progress.json when what it speaks of is on disk; a new Output cuts the files
back to what the state says, whatever a kill left behind, and goes on to the same bytes.

*Split.*  Which text is held out is decided before it comes here (parts.py).  Where val is a set of its own, its sources
are written first, and documents that stand in it are dropped from the others.

*Conversations* stay whole: one that a limit would cut is left out, one that a shard would cut begins the next.

*Duplicates.*  A document whose hash was seen before, in any source, is dropped.  Up to Seen.LIMIT documents are
remembered (270 MB; twice that for a moment, when they are sorted); later ones are compared with those, but not
remembered, which the report says.  That any of 20 million is dropped for a hash it shares by accident has a chance of
1 in 90,000.

*Mixture.*  next_source takes the source with the fewest training tokens for its weight.  So tokens, not documents,
follow the weights at any place: of W tokens in a row a source of weight w, one of n, has w * W, give or take
D * (1 + w * (n - 2)) at most, D tokens being the longest document.  No order of whole documents does much better.  So
1 % of the stream is within 2 points of the weights if documents are short beside it; else the report says up to what
length it would be.  The run ends when a source does: what would follow is another mixture.  Rejected: drawing sources
at random; long documents pull the tokens away from the weights.  Cutting long ones and laying other sources between
the parts; a model trained on that has no long documents.

*Phases.*  A mixture may change at some shares of max_tokens.  The next phase begins between two documents, once so many
tokens are written; its shares are counted from there, and its training tokens begin a shard.  So each shard is of one
phase, which meta.json says of it, and windows are shuffled inside of a phase only (batches.py).
"""

import contextlib
import json
import os
import time

import numpy as np

from stack.data.shards import token_blocks, whole_file, write_shard

SAVE_SECONDS = 10  # between two records of progress


def fresh(command):
    source = {"after": None, "done": False, "documents": 0, "tokens": 0, "bytes": 0, "train": 0, "base": 0,
              "duplicates": 0, "in_val": 0, "shared_lines": 0, "divided": 0, "parts": 0}
    split = {"shards": [], "tokens": 0}  # tokens: of the shard that is being filled
    sources = [{**source, "val": key == "val", "specials": {}, "looks": {}}
               for key in ("sources", "val") for _ in command.get(key, ())]
    return {"command": command, "tokenizer": None, "ended": False, "share": None, "longest": 0, "lowest": 1.0,
            "documents": 0, "tokens": 0, "bytes": 0, "seen": [0, 0], "bins": None, "mixture": None, "phases": [0],
            "sources": sources, "splits": {"train": split, "val": dict(split)}}


def start(folder, command, ours):
    """The state that an earlier run of this command left in the folder, or a new one. ours: the names of its files."""
    path = folder / "progress.json"
    state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if state and not state["tokens"] and state["command"] != json.loads(json.dumps(command)):
        clean(folder, *ours)  # nothing of another command is here yet, so nothing is in this one's way
    elif state:
        check_same(folder, state["command"], command)
        print(f"{folder}: continuing after {state['tokens']:,} tokens")
        return state
    if others := sorted(set(os.listdir(folder)) - {"progress.json.tmp"}):
        raise ValueError(f"{folder} holds {', '.join(others[:3])}{', ...' * (len(others) > 3)} and no record of a run; "
                         "a data set needs a folder of its own.\n  Choose a new one with --out.")
    state = fresh(command)
    with whole_file(path) as file:
        json.dump(state, file)
    return state


def check_same(folder, then, now):
    """Refuse to mix the work of two commands; the message lists what differs."""
    then, now = _flat(then), _flat(json.loads(json.dumps(now)))
    differences = ["names, sizes or dates of the files" if key.endswith("listing") else
                   f"{key}: {then.get(key, 'not given')} then, {now.get(key, 'not given')} now"
                   for key in {**then, **now} if then.get(key) != now.get(key)]
    if differences:
        raise ValueError(f"{folder} belongs to another command, or its sources have changed since. What differs:\n  "
                         + "\n  ".join(dict.fromkeys(differences))
                         + f"\n  Choose another --out, or delete {folder} to make it anew.")


def _flat(tree, path=""):
    """{"sources": [{"source": "a"}]} -> {"sources 1 source": "a"}"""
    if not isinstance(tree, dict | list):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree, 1)
    return {key: value for name, branch in items for key, value in _flat(branch, f"{path} {name}".strip()).items()}


def locked(folder):
    """Keep a second run out of the folder, where the system can do that; the lock goes when the process does."""
    held = contextlib.ExitStack()
    try:
        import fcntl
        handle = os.open(folder, os.O_RDONLY)
        held.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise ValueError(f"{folder} is being made by another process.\n"
                         "  Wait for it, or choose another --out.") from None
    except (ImportError, OSError):  # Windows; network file systems without locks
        pass
    return held


def clean(folder, *patterns):
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def next_source(records, weights):
    """Those of val, then in the order given; of a mixture, the one with the fewest training tokens of its phase for its
    weight, until one ends."""
    still = [i for i, record in enumerate(records) if not record["done"]]
    if weights is None or still and records[still[-1]].get("val"):  # those of val stand behind the others
        return min(still, key=lambda i: not records[i].get("val"), default=None)
    mixed = [i for i, weight in enumerate(weights) if weight]
    return None if any(records[i]["done"] for i in mixed) else min(
        mixed, key=lambda i: (records[i]["train"] - records[i].get("base", 0)) / weights[i])


def interleaved(readers, streams, records, weights):
    """(number of the source, piece) of all sources in their order; a record ends with what became of its reader."""
    while (i := next_source(records, weights)) is not None:
        for piece in streams[i]:
            yield i, piece
            if piece.after:  # the end of a document: here the source can change
                break
        else:
            records[i].update(after=readers[i].state(), done=True)


class Output:
    """Where documents go.  job: folder, sources, mixtures, special, max_tokens, max_bytes, shard_tokens.

    val_keys: hashes of the documents of a validation set of its own.  weights: of the sources, in the phase that is
    being written; this list changes with it.
    """

    def __init__(self, job, tokenizer, state, val_keys=frozenset()):
        self.job, self.state, self.tokenizer, self.val_keys = job, state, tokenizer, val_keys
        self.splits = {name: Split(job, name, tokenizer, kept) for name, kept in state["splits"].items()}
        self.seen, self.mixture = Seen(job.folder / "seen.bin", *state["seen"]), Mixture(job.weights, state["bins"])
        shares = job.mixtures[len(state["phases"]) - 1][1]
        self.weights, self.splits["train"].phase = shares and [*shares], len(state["phases"]) - 1
        self.lengths, self.boundary = tokenizer.token_bytes(), np.array([tokenizer.boundary_id], np.uint32)
        self.full, self.saved = False, 0.0  # full: max_tokens or max_bytes is reached
        self.is_new, self.in_split, self.parts = True, None, 0  # of the document that is being written

    def take(self, i, part):
        """Write a part of a document of source i, unless the document is a duplicate."""
        record = self.state["sources"][i]
        if part.first:
            in_val = not record["val"] and part.key in self.val_keys
            self.is_new, self.in_split, self.parts = not in_val and self.seen.add(part.key), None, 0
            record["in_val" if in_val else "duplicates"] += not self.is_new
        if not self.is_new:
            return
        ids, ends, room = part.ids, np.cumsum(self.lengths[part.ids]), len(part.ids) + 1  # + 1: this is not the end
        if self.job.max_tokens:
            room = min(room, max(0, self.job.max_tokens - self.state["tokens"] - part.first))  # first: the boundary
        if self.job.max_bytes:
            allowed = int(np.searchsorted(ends, self.job.max_bytes - self.state["bytes"], "right"))
            room = min(room, allowed + (allowed == len(ids)))
        self.full, whole = room <= len(ids), self.job.sources[i].chat
        if whole and self.full:
            return
        ids = ids[:room]
        for name in () if whole else self.job.special:
            if n := int(np.count_nonzero(ids == self.tokenizer.special_ids[name])):
                record["specials"][name] = record["specials"].get(name, 0) + n
        for name, n in part.looks.items():
            record["looks"][name] = record["looks"].get(name, 0) + n
        record["shared_lines"] += part.shared
        self.state["longest"] = max(self.state["longest"], part.length)
        self.state["lowest"] = min(self.state["lowest"], part.key / 2**64)
        self.put(i, "val" if part.val else "train", ids)

    def put(self, i, name, ids):
        if not len(ids):
            return
        begins, self.in_split = self.in_split != name, name  # a document begins, or the part of one in this split
        size, record = int(self.lengths[ids].sum()), self.state["sources"][i]
        ids = np.concatenate([self.boundary, ids]) if begins else ids
        split = self.splits[name]
        if self.job.sources[i].chat and 0 < split.n_tokens > split.shard_tokens - len(ids):
            split.finish_shard()  # before it is full: no conversation is in two
        split.write(ids)
        self.parts += begins
        if begins and self.parts > 1:
            record["divided"] += self.parts == 2
            record["parts"] += 2 if self.parts == 2 else 1
        for totals in (self.state, record):
            totals["documents"] += begins and self.parts == 1
            totals["tokens"] += len(ids)
            totals["bytes"] += size
        if name == "train":
            record["train"] += len(ids)
            self.mixture.add(i, len(ids), begins)

    def turn(self):
        """Begin the next phase of the mixture, in a shard of its own, if so many tokens are written.  Between documents
        only, as save."""
        now, train = len(self.state["phases"]), self.splits["train"]
        if now == len(self.job.mixtures) or self.state["tokens"] < self.job.mixtures[now][0]:
            return
        if train.n_tokens:
            train.finish_shard()
        train.phase, self.weights[:] = now, self.job.mixtures[now][1]
        for record in self.state["sources"]:
            record["base"] = record["train"]
        self.state["phases"].append(sum(record["train"] for record in self.state["sources"]))

    def is_due(self):
        return time.monotonic() - self.saved > SAVE_SECONDS or any(split.finished for split in self.splits.values())

    def save(self):
        """Record where we are. Only between documents, as the state knows no half ones."""
        self.state.update(splits={name: split.sync() for name, split in self.splits.items()}, seen=self.seen.sync(),
                          bins=self.mixture.bins)
        with whole_file(self.job.folder / "progress.json") as file:
            json.dump(self.state, file)
        for split in self.splits.values():
            split.forget_others()
        self.saved = time.monotonic()

    def finish(self):
        for split in self.splits.values():
            if split.n_tokens:
                split.finish_shard()
        names = [source.source for source in self.job.sources[:len(self.job.recipe)]]
        ends = [name for name, record in zip(names, self.state["sources"], strict=False) if record["done"]]
        phases = [(start, shares) for start, (_, shares) in zip(self.state["phases"], self.job.mixtures, strict=False)]
        self.state.update(ended=True, mixture=self.mixture.report(names, ends, phases))
        self.save()
        for file in (self.seen.file, *(split.file for split in self.splits.values())):
            file.close()  # Windows deletes no open file


class Split:
    """One split on its way to disk: finished shards, and a .part file of bare tokens for the one being filled.

    The .part stays until progress.json has the shard made from it: to continue from the record before takes it again.
    """

    def __init__(self, job, name, tokenizer, kept):
        self.folder, self.name, self.tokenizer, self.shard_tokens = job.folder, name, tokenizer, job.shard_tokens
        self.shards, self.n_tokens = list(kept["shards"]), kept["tokens"]
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.lengths, self.phase = tokenizer.token_bytes(), 0
        self.forget_others()
        self.open_part()

    def part(self):
        return self.folder / f"{self.name}_{len(self.shards):06d}.part"

    def open_part(self):
        self.file = open(self.part(), "ab", buffering=0)  # unbuffered: a full disk shows here, not in a later close()
        size = self.n_tokens * self.dtype.itemsize
        if self.file.seek(0, os.SEEK_END) < size:
            raise ValueError(f"{self.part()} is shorter than progress.json says: {size:,} bytes.\n"
                             f"  Delete {self.folder} and start again.")
        self.file.truncate(size)

    def write(self, ids):
        while len(ids):
            taken, ids = np.split(ids, [self.shard_tokens - self.n_tokens])
            write_all(self.file, taken.astype(self.dtype))
            self.n_tokens += len(taken)
            if self.n_tokens == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self):
        self.file.close()
        totals = {"documents": 0, "bytes": 0}

        def blocks():
            for ids in token_blocks(self.part(), self.dtype, offset=0):
                totals["documents"] += int(np.count_nonzero(ids == self.tokenizer.boundary_id))
                totals["bytes"] += int(self.lengths[ids].sum())
                yield ids
        entry = write_shard(self.part().with_suffix(".bin"), blocks(), fingerprint=self.tokenizer.fingerprint,
                            vocab_size=self.tokenizer.vocab_size)
        self.shards.append({**entry, **totals, **({"phase": self.phase} if self.phase else {})})
        self.n_tokens, self.finished = 0, True
        self.open_part()

    def sync(self):
        os.fsync(self.file.fileno())
        return {"shards": list(self.shards), "tokens": self.n_tokens}

    def forget_others(self):
        """Delete what the state does not speak of: parts that are shards by now, and what a kill left behind."""
        keep = {shard["file"] for shard in self.shards} | {self.part().name}
        for path in self.folder.glob(f"{self.name}_[0-9]*"):
            if path.name not in keep:
                path.unlink()
        self.finished = False


class Seen:
    """The hashes of the documents so far: in memory, and in a file to continue from."""

    LIMIT, RECENT = 1 << 25, 1 << 18

    def __init__(self, path, n, not_remembered):
        self.file, self.not_remembered = open(path, "ab", buffering=0), not_remembered
        self.file.truncate(8 * n)
        # one sorted array for all but the latest: a Python set of everything takes ten times as much
        self.old, self.recent, self.unsaved = np.sort(np.fromfile(path, "<u8", n)), set(), []

    def add(self, key: int) -> bool:
        """Whether this document is new."""
        at = int(np.searchsorted(self.old, np.uint64(key)))
        if key in self.recent or (at < len(self.old) and int(self.old[at]) == key):
            return False
        if len(self.old) + len(self.recent) >= self.LIMIT:
            self.not_remembered += 1
            return True
        self.recent.add(key)
        self.unsaved.append(key)
        if len(self.recent) == self.RECENT:
            self.old = np.concatenate([self.old, np.sort(np.fromiter(self.recent, "<u8", self.RECENT))])
            self.old.sort(kind="stable")  # merges two sorted runs in one pass
            self.recent = set()
        return True

    def sync(self):
        write_all(self.file, np.array(self.unsaved, "<u8"))
        os.fsync(self.file.fileno())
        self.unsaved = []
        return [len(self.old) + len(self.recent), self.not_remembered]


def write_all(file, array):
    data = memoryview(array.tobytes())
    while data:  # a raw file may take a part of it, and fail at the rest
        data = data[file.write(data):]


class Mixture:
    """How the training tokens of each source lie along the stream, in bins that double when there are too many."""

    BINS, FIRST_WIDTH = 1 << 12, 64
    POINTS = 2.0  # percentage points that are tolerated in any 1 %

    def __init__(self, weights, bins):
        self.weights = weights
        self.bins = bins or {"width": self.FIRST_WIDTH, "full": [], "open": [0] * len(weights or ()),
                             "length": 0, "longest": 0}  # in tokens: of the last document, of the longest

    def add(self, i, n, begins):
        """n tokens of source i; begins: a document does with them."""
        bins = self.bins
        bins["length"] = n if begins else bins["length"] + n
        bins["longest"] = max(bins["longest"], bins["length"])
        while self.weights and n:
            taken = min(n, bins["width"] - sum(bins["open"]))
            bins["open"][i] += taken
            n -= taken
            if sum(bins["open"]) == bins["width"]:
                bins["full"].append(bins["open"])
                bins["open"] = [0] * len(self.weights)
            if len(bins["full"]) == self.BINS:
                bins["full"] = np.array(bins["full"]).reshape(self.BINS // 2, 2, -1).sum(axis=1).tolist()
                bins["width"] *= 2

    def report(self, names, ends=(), phases=None):
        """Shares over all, and where one percent of the stream is farthest from the weights, in percentage points.

        phases: [(training token at which it begins, weights)]; None is one of all.
        certain_length: with no longer documents, POINTS would hold for sure.
        """
        if not self.weights or not self.bins["full"]:
            return None
        counts, width, phases = np.array(self.bins["full"]), self.bins["width"], phases or [(0, self.weights)]
        window, edges = max(1, round(len(counts) / 100)), np.arange(len(counts) + 1) * width
        ends_at = [start for start, _ in phases[1:]] + [np.inf]
        wanted = sum(np.outer(np.diff(np.clip(edges, start, end)), weights)
                     for (start, weights), end in zip(phases, ends_at, strict=True))  # tokens, as counts
        sums = np.cumsum(np.vstack([np.zeros_like(wanted[:1]), counts - wanted]), axis=0)
        off = np.abs(sums[window:] - sums[:-window]) / (window * width)
        at, i = np.unravel_index(np.argmax(off), off.shape)
        shares = np.round(counts.sum(axis=0) / counts.sum(), 4).tolist()
        most = max(max(weights) for _, weights in phases)
        certain = self.POINTS / 100 * window * width / (1 + most * max(0, len(self.weights) - 2))
        return {"shares": list(zip(names, shares, strict=True)), "window_tokens": window * width,
                "longest_document": self.bins["longest"], "certain_length": int(certain),
                "worst_points": round(100 * float(off[at, i]), 2), "worst_source": names[i],
                "worst_at_token": int(at) * width, "ended_with": list(ends),
                **({"phases": [start for start, _ in phases]} if len(phases) > 1 else {})}
