"""Batches cover an epoch once, for any ranks, and resume exactly."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, document_ids, resident
from test_model import GPT2
from test_shards import FINGERPRINT, make_set, write_foreign

from model import Attention
from stack import twins
from stack.cpu import kernels
from stack.data import batches as data_module
from stack.data.batches import Batches, TokenData, best_fit, iterate_windows
from stack.data.shards import write_meta, write_shard


@pytest.fixture
def folder(tmp_path):
    return make_set(tmp_path / "set", train=[1000, 37, 1001], val=[100])


def starts(x):
    """The first id of each row, which make_set makes unique for each window."""
    return x[:, 0].tolist()


# ---- windows and batches


def test_every_token_but_a_shards_first_is_a_target_once(folder):
    data = TokenData(folder, "train", seq_len=8)
    assert data.n_windows == (1000 - 1) // 8 + (37 - 1) // 8 + (1001 - 1) // 8
    windows = np.stack([np.append(x, y[-1:]) for x, y, _ in map(data.window, range(data.n_windows))])
    assert windows.shape == (data.n_windows, 9) and windows.dtype == np.int64
    assert (np.diff(windows) == 1).all()
    targets = windows[:, 1:].ravel().tolist()
    assert len(set(targets)) == len(targets)
    dropped = set(range(2038)) - set(targets)
    assert dropped == {0, *range(993, 1000), 1000, *range(1033, 1037), 1037}  # 1001 tokens leave no rest


def test_no_window_spans_two_shards(tmp_path):
    folder = make_set(tmp_path / "set", train=[20, 20])
    windows = [TokenData(folder, "train", seq_len=8).window(i)[0].tolist() for i in range(4)]
    assert windows == [list(range(first, first + 8)) for first in (0, 8, 20, 28)]


def test_targets_are_inputs_shifted_by_one(folder):
    data = TokenData(folder, "train", seq_len=8)
    x, y, _ = next(Batches(data, seed=0, micro_batch_size=4))
    assert x.shape == y.shape == (4, 8) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, x + 1)


def take(data, n, **settings):
    batches = Batches(data, **settings)
    out = [starts(next(batches)[0]) for _ in range(n)]
    batches.close()
    return out


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_is_every_window_once_over_all_ranks_and_the_next_is_another_order(folder, world_size):
    data = TokenData(folder, "train", seq_len=8)
    n, epochs = data.n_windows, 3
    steps = -(-n * epochs // 6)
    ranks = [take(data, steps * 3 // world_size, seed=5, micro_batch_size=2, rank=rank, world_size=world_size)
             for rank in range(world_size)]
    stream = [start for micro in zip(*ranks, strict=True) for rows in micro for start in rows]
    everything = sorted(int(data.window(i)[0][0]) for i in range(n))
    orders = [stream[epoch * n:(epoch + 1) * n] for epoch in range(epochs)]
    assert all(sorted(order) == everything for order in orders)
    assert len({tuple(order) for order in orders}) == epochs and everything not in orders


def test_a_step_is_the_same_set_for_every_world_size(folder):
    data = TokenData(folder, "train", seq_len=8)

    def steps(world_size, micro_batch_size):
        per_step = 24 // (world_size * micro_batch_size)
        ranks = [take(data, 30 * per_step, seed=1, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
                 for rank in range(world_size)]
        return [sorted(sum((sum(rank[step * per_step:(step + 1) * per_step], []) for rank in ranks), []))
                for step in range(30)]
    alone = steps(1, 24)
    assert all(len(step) == 24 for step in alone)
    for world_size, micro_batch_size in ((1, 4), (2, 4), (4, 2), (4, 6), (2, 12)):
        assert steps(world_size, micro_batch_size) == alone


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_gives_the_batches_of_the_straight_run(folder, world_size):
    data = TokenData(folder, "train", seq_len=8)
    for rank in range(world_size):
        common = dict(seed=3, micro_batch_size=2, rank=rank, world_size=world_size)
        per_step = 8 // (2 * world_size)
        straight = take(data, 80 * per_step, **common)  # 640 sequences: beyond two epochs
        pieces, done = [], 0
        for steps in (7, 6, 30, 37):
            fresh = TokenData(folder, "train", seq_len=8)
            pieces += take(fresh, steps * per_step, start_seq=done * 8, **common)
            for _ in iterate_windows(fresh, 4):  # an evaluation in between moves nothing
                pass
            done += steps
        assert pieces == straight


def test_a_changed_world_size_goes_on_without_repeating_or_skipping(folder):
    data = TokenData(folder, "train", seq_len=8)
    straight = sum(take(data, 30, seed=3, micro_batch_size=8), [])
    first = sum(take(data, 10, seed=3, micro_batch_size=8), [])
    ranks = [sum(take(data, 20, seed=3, micro_batch_size=4, rank=r, world_size=2, start_seq=80), [])
             for r in (0, 1)]
    assert sorted(first + ranks[0] + ranks[1]) == sorted(straight)


def test_seeds_differ_and_the_stream_is_fixed_for_good(folder):
    data = TokenData(folder, "val", seq_len=8)
    assert not np.array_equal(data.order(0, 1), data.order(0, 2))
    assert not np.array_equal(data.order(0, 1), data.order(1, 1))
    assert data.order(0, -1).size == data.order(0, 2**40).size == 12  # any whole number is a seed
    assert data.order(0, 1337).tolist() == [3, 4, 5, 11, 0, 1, 7, 6, 9, 8, 10, 2]  # a resume years later


def test_a_step_longer_than_an_epoch_goes_round(tmp_path):
    data = TokenData(make_set(tmp_path / "set", train=[17]), "train", seq_len=8)
    rows = sum(take(data, 2, seed=0, micro_batch_size=7), [])
    assert sorted(rows) == [0] * 7 + [8] * 7


def test_shards_are_in_natural_order_whatever_the_listing(tmp_path, monkeypatch):
    names = [f"edu_train_{i}.bin" for i in (1, 2, 10, 11, 100)]
    for i, name in enumerate(names):
        write_foreign(tmp_path / name, np.arange(9) + 100 * i)
    listed = [path for name in reversed(names) for path in [tmp_path / name]]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    data = TokenData(tmp_path, "train", seq_len=8)
    assert [int(data.window(i)[0][0]) for i in range(5)] == [0, 100, 200, 300, 400]
    assert [shard["file"] for shard in data.meta["splits"]["train"]["shards"]] == names


# ---- documents laid into windows


def make_documents(folder, lengths, shard_tokens=3000, vocab_size=60_000):
    """A training split of documents of these lengths, their boundaries included: 0 and then ids that never come again.
    Shards end amid documents, as those of prepare.py do.  Returns the folder and the ids of the split."""
    folder.mkdir()
    ids = np.arange(sum(lengths))
    ids[np.cumsum([0, *lengths[:-1]])] = 0
    entries = []
    for i in range(0, len(ids), shard_tokens):
        part = ids[i:i + shard_tokens]
        entry = write_shard(folder / f"train_{i // shard_tokens:06d}.bin", part, fingerprint=FINGERPRINT,
                            vocab_size=vocab_size)
        entries.append({**entry, "documents": int((part == 0).sum()), "bytes": 1})
    write_meta(folder, sources=[], fingerprint=FINGERPRINT, vocab_size=vocab_size, boundary_id=0,
               splits={"train": entries})
    return folder, ids


def webby(seed, n=600, median=30):
    """Many short documents and a few long ones, as on the web."""
    return [int(x) + 1 for x in np.random.default_rng(seed).lognormal(np.log(median), 1, n)]


CORPORA = {"web": webby(0), "long": [5000, 70, 2900, 640, 1, 3], "short": [3] * 900, "exact": [64] * 40, "one": [2],
           "many shards": webby(1, 300, 100)}


@pytest.mark.parametrize("corpus", CORPORA)
def test_best_fit_has_every_token_once_and_cuts_only_what_is_longer_than_a_window(tmp_path, corpus):
    folder, ids = make_documents(tmp_path / "set", CORPORA[corpus])
    T, at = 64, np.arange(len(ids))
    data = TokenData(folder, "train", seq_len=T, packing="best_fit")
    x, y, docs = (np.stack(part) for part in zip(*map(data.window, range(data.n_windows)), strict=True))
    padding = x.size - len(ids)
    assert np.array_equal(np.sort(x, axis=None), np.sort(np.append(ids, [0] * padding)))
    targets = ids[at % 3000 > 0]  # all but a shard's first
    assert np.array_equal(np.sort(y[y != -100]), np.sort(targets))
    assert data.empty_share == pytest.approx(padding / x.size)
    followed = (x > 0) & (y != -100)  # an id is its place in the split
    assert np.array_equal(y[followed], ids[x[followed] + 1])
    same = docs[:, 1:] == docs[:, :-1]  # a document goes on: its next id is beside it
    assert np.array_equal(x[:, 1:][same], y[:, :-1][same]) and (x[:, 1:][same] > 0).all()
    assert (docs[:, 0] == 1).all() and (np.diff(docs)[~same] == 1).all() and (~same | (y[:, :-1] != -100)).all()
    begin = np.maximum.accumulate(np.where(ids == 0, at, 0))
    assert data.cut_share() == pytest.approx(((begin // 3000 != at // 3000) | (at - begin >= T)).mean())
    if corpus in ("web", "many shards"):
        assert data.cut_share() < TokenData(folder, "train", seq_len=T).cut_share() - 0.1 and data.empty_share < 0.05


def test_the_share_cut_off_by_a_stream(tmp_path):
    folder, ids = make_documents(tmp_path / "set", webby(2))
    data = TokenData(folder, "train", seq_len=64)
    cut = slots = 0
    for i in range(data.n_windows):
        x = data.window(i)[0].tolist()
        cut += x.index(0) if 0 in x else 64
        slots += 64
    assert data.cut_share() == pytest.approx(cut / slots) and cut / slots > 0.2 and data.empty_share == 0


@pytest.mark.parametrize("size", [1, 7, 64])
def test_best_fit_fills_windows_and_never_overfills_them(size):
    random = np.random.default_rng(size)
    for n in (0, 1, 1000):
        lengths = np.minimum(random.lognormal(2.5, 1, n).astype(int) + 1, size)
        window = best_fit(lengths, size)
        loads = np.bincount(window, weights=lengths)
        assert len(window) == n and (n == 0 or loads.max() <= size) and (loads > 0).all()
        assert (np.sort(loads)[:2].sum() > size) or len(loads) < 2  # no two windows could be one
        assert np.array_equal(window, best_fit(lengths, size))


def test_packed_batches_are_the_same_for_all_ranks_and_after_a_stop(tmp_path):
    folder, _ = make_documents(tmp_path / "set", webby(3))

    def rows(start, steps, world_size, micro):
        data, found = TokenData(folder, "train", seq_len=64, packing="best_fit"), []
        ranks = [Batches(data, seed=5, micro_batch_size=micro, rank=rank, world_size=world_size, start_seq=16 * start)
                 for rank in range(world_size)]
        for _ in range(steps):
            step = [next(rank) for _ in range(16 // micro // world_size) for rank in ranks]
            found.append(sorted(zip(*(torch.cat(part).tolist() for part in zip(*step, strict=True)), strict=True)))
        return found
    straight = rows(0, 40, 1, 16)  # two epochs and more
    assert straight == rows(0, 40, 2, 4) == rows(0, 40, 4, 2)
    assert straight == rows(0, 7, 1, 8) + rows(7, 20, 2, 8) + rows(27, 13, 1, 4)
    assert len({str(row) for step in straight for row in step}) == TokenData(
        folder, "train", seq_len=64, packing="best_fit").n_windows


def test_packing_changes_where_the_shard_is_read_in_blocks(tmp_path, monkeypatch):
    folder, _ = make_documents(tmp_path / "set", webby(4))
    whole = TokenData(folder, "train", seq_len=64, packing="best_fit")
    monkeypatch.setattr(data_module.Layout, "BLOCK", 97)
    blocks = TokenData(folder, "train", seq_len=64, packing="best_fit")
    assert all(np.array_equal(a, b) for i in range(whole.n_windows)
               for a, b in zip(whole.window(i), blocks.window(i), strict=True))


@pytest.mark.parametrize("switches", [{}, GPT2], ids=["rope", "learned"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_masked_windows_equal_separate_forwards(tmp_path, tiny, switches, compiled, packing):
    """Each piece of a window has the logits that it has alone, whatever is beside it: eager, compiled, cut pieces."""
    folder, _ = make_documents(tmp_path / "set", [40, 200, 1, 30, 96, 50, 97, 20, 7], vocab_size=600)
    data = TokenData(folder, "train", seq_len=96, packing=packing)
    model = tiny(vocab_size=600, max_seq_len=96, **switches)
    if compiled:  # takes the plain matmuls from 64 tokens on
        twins.replace_attend(model, kernels.attention, kernels.serves)
    for block in model.blocks if compiled else ():
        block.compile(backend="eager")
    x, _, docs = next(Batches(data, seed=0, micro_batch_size=data.n_windows))
    with torch.no_grad():
        together = model(x, docs=docs)
        for block in model.blocks:
            block._compiled_call_impl = None
            block.attn.__class__ = Attention
        for row, numbers, logits in zip(x, docs, together, strict=True):
            for number in numbers.unique():
                alone = model(row[numbers == number][None])[0]
                torch.testing.assert_close(logits[numbers == number], alone, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


# ---- evaluation


@pytest.mark.parametrize("micro_batch_size", [1, 4, 7, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_each_window_once_in_order(folder, micro_batch_size, world_size):
    data = TokenData(folder, "train", seq_len=8)
    ranks = [[start for x, _, _ in iterate_windows(data, micro_batch_size, rank=rank, world_size=world_size)
              for start in starts(x)] for rank in range(world_size)]
    assert all(rank == sorted(rank) for rank in ranks)
    assert sorted(sum(ranks, [])) == [int(data.window(i)[0][0]) for i in range(data.n_windows)]


def test_evaluation_of_some_windows_takes_the_same_spread_for_all(folder):
    data = TokenData(folder, "train", seq_len=8)
    some = [start for x, _, _ in iterate_windows(data, 4, max_windows=10) for start in starts(x)]
    assert len(set(some)) == 10 and some == sorted(some) and some[-1] > 1700
    ranks = [start for r in (0, 1, 2) for x, _, _ in iterate_windows(data, 3, max_windows=10, rank=r, world_size=3)
             for start in starts(x)]
    assert sorted(ranks) == some
    assert sum(len(x) for x, _, _ in iterate_windows(data, 4, max_windows=10**6)) == data.n_windows
    assert list(iterate_windows(TokenData(folder, "val", seq_len=99), 4, rank=1, world_size=2)) == []


# ---- documents


def test_documents_begin_at_boundaries(data):
    """For training and evaluation alike; the rest of a document cut off before the window is one more."""
    data = TokenData(data, "train", seq_len=32)
    for x, _, docs in (*iterate_windows(data, 5), next(Batches(data, seed=0, micro_batch_size=16))):
        by_hand = document_ids(x, data.boundary_id)
        assert torch.equal(docs, by_hand + 1 - by_hand[:, :1])


# ---- the thread, and memory


def test_an_error_in_the_thread_reaches_the_consumer_and_closing_is_clean(folder, monkeypatch):
    data, before = TokenData(folder, "train", seq_len=8), set(threading.enumerate())  # other tests' may still be there
    batches = Batches(data, seed=0, micro_batch_size=1)
    next(batches)
    assert any(t.name.startswith("batches") for t in set(threading.enumerate()) - before)
    path = folder / "train_000002.bin"
    path.write_bytes(path.read_bytes()[:1100])  # cut while it is in use
    with pytest.raises(ValueError, match="train_000002.bin ends before token"):
        for _ in range(200):
            next(batches)
    batches.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("batches")]


def test_a_consumer_that_stops_early_leaves_no_thread(folder):
    data, before = TokenData(folder, "train", seq_len=8), set(threading.enumerate())
    for _ in range(3):
        for _batch in Batches(data, seed=0, micro_batch_size=1):
            break
    gc.collect()
    for thread in [t for t in set(threading.enumerate()) - before if t.name.startswith("batches")]:
        thread.join(600)
        assert not thread.is_alive()


def test_an_open_prefetch_does_not_keep_the_program(folder):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from stack.data.batches import Batches, TokenData\n"
            "b = Batches(TokenData(sys.argv[2], 'train', seq_len=8), seed=0, micro_batch_size=1)\n"
            "next(b); print('done')")
    run = subprocess.run([sys.executable, "-c", code, str(ROOT), str(folder)],
                         capture_output=True, text=True, timeout=900)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_memory_stays_flat_over_many_batches(tmp_path):
    ids = np.zeros(64 << 20, np.uint16)  # 128 MB on disk
    folder = tmp_path / "set"
    folder.mkdir()
    entry = write_shard(folder / "train_000000.bin", ids, fingerprint=FINGERPRINT, vocab_size=500)
    del ids
    write_meta(folder, sources=[], fingerprint=FINGERPRINT, vocab_size=500, boundary_id=0,
               splits={"train": [{**entry, "documents": 1, "bytes": 1}]})
    batches = Batches(TokenData(folder, "train", seq_len=2048), seed=0, micro_batch_size=16)
    next(batches)
    before = resident()
    for _ in range(2048):  # the whole file, once
        next(batches)
    assert resident() - before < 32 << 20
