"""Data: shards say what they hold or are refused; batches cover an epoch once, for any ranks, and resume exactly."""

import gc
import json
import os
import resource
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import data as data_module
from data import (
    Batches,
    ShardWriter,
    TokenData,
    document_ids,
    iterate_windows,
    open_shard,
    read_header,
    read_meta,
    verify_shard,
    write_meta,
    write_shard,
)

FINGERPRINT = "0123456789abcdef" * 4
OTHER = "f" * 64


def make_set(folder, vocab_size=5000, **splits):
    """A data set with shards of the given lengths, every token of the set different where the vocabulary allows."""
    folder.mkdir(exist_ok=True)
    entries, first = {}, 0
    for split, lengths in splits.items():
        entries[split] = []
        for i, n in enumerate(lengths):
            ids = np.arange(first, first + n) % vocab_size
            first += n
            entry = write_shard(folder / f"{split}_{i:06d}.bin", ids, fingerprint=FINGERPRINT, vocab_size=vocab_size)
            entries[split].append({**entry, "documents": 1, "bytes": 3 * n})
    write_meta(folder, sources=["test"], fingerprint=FINGERPRINT, vocab_size=vocab_size, boundary_id=0, splits=entries)
    return folder


@pytest.fixture
def folder(tmp_path):
    return make_set(tmp_path / "set", train=[1000, 37, 1001], val=[100])


def starts(x):
    """The first id of each row, which make_set makes unique for each window."""
    return x[:, 0].tolist()


# ---- shards


def read_by_header_only(path):
    """A reader that knows llm.c's three words and nothing of ours."""
    raw = Path(path).read_bytes()
    magic, version, n = struct.unpack("<3i", raw[:12])
    assert (magic, version) == (20240520, 1)
    return list(struct.unpack(f"<{n}H", raw[1024:1024 + 2 * n]))


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_a_shard_is_what_llm_c_reads(tmp_path, n):
    ids = np.random.default_rng(0).integers(0, 65536, n)
    entry = write_shard(tmp_path / "train_000000.bin", ids, fingerprint=FINGERPRINT, vocab_size=65536)
    assert read_by_header_only(tmp_path / "train_000000.bin") == ids.tolist()
    header = read_header(tmp_path / "train_000000.bin")
    assert (header.n_tokens, header.fingerprint, header.checksum) == (n, FINGERPRINT, entry["checksum"])
    assert open_shard(tmp_path / "train_000000.bin", fingerprint=FINGERPRINT).tolist() == ids.tolist()
    assert os.listdir(tmp_path) == ["train_000000.bin"]


def test_pieces_of_any_size_give_the_same_file(tmp_path, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 500, 10_000).astype(np.uint32)
    write_shard(tmp_path / "whole.bin", ids, fingerprint=FINGERPRINT, vocab_size=500)
    monkeypatch.setattr(ShardWriter, "FLUSH", 777)
    with ShardWriter(tmp_path / "pieces.bin", fingerprint=FINGERPRINT, vocab_size=500) as shard:
        for piece in np.split(ids, [0, 0, 1, 2, 900, 905, 7000]):
            shard.write(piece.tolist() if len(piece) == 5 else piece)
        assert shard.n_tokens == len(ids) and not (tmp_path / "pieces.bin").exists()
    assert (tmp_path / "pieces.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_ids_above_65535_take_32_bits_and_come_back(tmp_path):
    ids = [0, 65_535, 65_536, 69_999]
    write_shard(tmp_path / "big.bin", ids, fingerprint=FINGERPRINT, vocab_size=70_000)
    assert open_shard(tmp_path / "big.bin").tolist() == ids
    with pytest.raises(AssertionError):
        read_by_header_only(tmp_path / "big.bin")
    raw = bytearray((tmp_path / "big.bin").read_bytes())
    raw[4] = 1  # reading the same file as uint16
    (tmp_path / "big.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="big.bin has version 1 and 4 bytes per token"):
        read_header(tmp_path / "big.bin")


@pytest.mark.parametrize("vocab_size, bad", [(500, 500), (500, 65536 + 3), (70_000, 2**32 + 1), (500, -1)])
def test_an_id_outside_the_vocabulary_is_refused_not_wrapped(tmp_path, vocab_size, bad):
    with pytest.raises(ValueError, match=rf"x\.bin: id {bad} is outside the vocabulary of {vocab_size}"):
        write_shard(tmp_path / "x.bin", [1, 2, bad, 3], fingerprint=FINGERPRINT, vocab_size=vocab_size)
    assert os.listdir(tmp_path) == []


def test_more_tokens_than_a_header_can_count_are_refused(tmp_path):
    class Many(np.ndarray):
        def __len__(self):
            return 2**30
    with pytest.raises(ValueError, match="2,147,483,648 tokens; a shard holds 2,147,483,647"):
        with ShardWriter(tmp_path / "x.bin", fingerprint=FINGERPRINT, vocab_size=500) as shard:
            shard.FLUSH = 2**40
            shard.write(np.zeros(1, np.int64).view(Many))
            shard.write(np.zeros(1, np.int64).view(Many))
    assert os.listdir(tmp_path) == []


def test_an_interrupted_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2, 3], fingerprint=FINGERPRINT, vocab_size=500)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        with ShardWriter(path, fingerprint=FINGERPRINT, vocab_size=500) as shard:
            shard.write([4] * 10)
            raise KeyboardInterrupt
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.bin"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_no_file(tmp_path):
    shard = ShardWriter(tmp_path / "x.bin", fingerprint=FINGERPRINT, vocab_size=500)
    shard._file.close()
    with pytest.raises(OSError, match="No space left"):
        with shard:
            shard._file = open("/dev/full", "wb")
            shard.write([1] * 100_000)
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_no_shard_and_the_next_one_cleans_up(tmp_path):
    code = ("import os, signal, sys; sys.path.insert(0, sys.argv[1]); import data\n"
            "shard = data.ShardWriter(sys.argv[2], fingerprint='00' * 32, vocab_size=500)\n"
            "shard.FLUSH = 1; shard.write([1] * 100); os.kill(os.getpid(), signal.SIGKILL)")
    path = tmp_path / "x.bin"
    subprocess.run([sys.executable, "-c", code, str(Path(data_module.__file__).parent), str(path)], check=False)
    assert os.listdir(tmp_path) == ["x.bin.tmp"]
    write_shard(path, [7, 8], fingerprint=FINGERPRINT, vocab_size=500)
    assert os.listdir(tmp_path) == ["x.bin"] and open_shard(path).tolist() == [7, 8]


@pytest.mark.parametrize("damage, message", [
    (lambda raw: raw[:-1], "has 1,223 bytes; the 100 tokens of its header need 1,224"),
    (lambda raw: raw[:1100], "has 1,100 bytes"), (lambda raw: raw + b"\0", "has 1,225 bytes"),
    (lambda raw: raw[:500], "has 500 bytes; the header of a shard alone has 1024"), (lambda raw: b"", "has 0 bytes"),
    (lambda raw: raw[1024:] * 20, "starts with .* a shard starts with 20240520"),
    (lambda raw: struct.pack("<2i", 20240801, 7) + raw[8:], "starts with 20240801"),
    (lambda raw: raw[:4] + struct.pack("<i", 7) + raw[8:], "has version 7"),
    (lambda raw: raw[:8] + struct.pack("<i", -5) + raw[12:], "has 1,224 bytes; the -5 tokens"),
])
def test_damaged_and_foreign_files_are_refused_by_name(folder, damage, message):
    path = folder / "val_000000.bin"
    path.write_bytes(damage(path.read_bytes()))
    for refuse in (lambda: read_header(path), lambda: open_shard(path), lambda: TokenData(folder, "val", seq_len=8)):
        with pytest.raises(ValueError, match=rf"(?s)val_000000\.bin {message}.*\n  \w"):
            refuse()
    TokenData(folder, "train", seq_len=8)  # the other split is still whole


def test_a_flipped_bit_is_found_by_its_checksum(folder):
    path = folder / "val_000000.bin"
    assert verify_shard(path).n_tokens == 100
    raw = bytearray(path.read_bytes())
    raw[1024 + 77] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="val_000000.bin has checksum .*its header says"):
        verify_shard(path)


def test_a_shard_of_another_tokenizer_or_set_is_refused(folder, tmp_path):
    good = (folder / "train_000001.bin").read_bytes()
    with pytest.raises(ValueError, match="train_000001.bin holds ids of tokenizer 0123456789ab; ids of ffffffffffff"):
        open_shard(folder / "train_000001.bin", fingerprint=OTHER)
    for fingerprint, n in ((OTHER, 37), (FINGERPRINT, 37), (FINGERPRINT, 36)):  # other tokenizer, content, length
        ids = np.arange(1000, 1000 + n) + (fingerprint == FINGERPRINT)
        write_shard(folder / "train_000001.bin", ids, fingerprint=fingerprint, vocab_size=5000)
        with pytest.raises(ValueError, match=r"(?s)train_000001\.bin has \(tokens, tokenizer, .*of another data set"):
            TokenData(folder, "train", seq_len=8)
    (folder / "train_000001.bin").write_bytes(good)
    TokenData(folder, "train", seq_len=8)


# ---- meta.json and what TokenData refuses


def test_meta_holds_the_facts_and_their_sums(folder):
    meta = read_meta(folder)
    assert meta == json.loads((folder / "meta.json").read_text())
    assert (meta["version"], meta["tokenizer"], meta["vocab_size"], meta["boundary_id"]) == (1, FINGERPRINT, 5000, 0)
    train = meta["splits"]["train"]
    assert (train["tokens"], train["documents"], train["bytes"]) == (2038, 3, 6114)
    assert [(s["file"], s["tokens"]) for s in train["shards"]] == [
        ("train_000000.bin", 1000), ("train_000001.bin", 37), ("train_000002.bin", 1001)]
    data = TokenData(folder, "train", seq_len=8, fingerprint=FINGERPRINT, vocab_size=6000)
    assert (data.n_tokens, data.vocab_size, data.boundary_id, data.fingerprint) == (2038, 5000, 0, FINGERPRINT)


def test_the_data_fingerprint_follows_the_contents(tmp_path, folder):
    value = TokenData(folder, "train", seq_len=8).data_fingerprint
    assert TokenData(folder, "val", seq_len=8).data_fingerprint == value
    assert read_meta(make_set(tmp_path / "same", train=[1000, 37, 1001], val=[100]))["data_fingerprint"] == value
    assert read_meta(make_set(tmp_path / "other", train=[1000, 37, 1001], val=[101]))["data_fingerprint"] != value


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 2, "splits": {}}',
                                     '"splits": []', '"splits": {"train": []}',
                                     '"splits": {"train": {"shards": [{"file": "a"}]}}'])
def test_a_broken_meta_is_refused(folder, content):
    if content.startswith('"'):  # one wrong entry in a whole file
        content = json.dumps(read_meta(folder) | json.loads(f"{{{content}}}"))
    (folder / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta\.json .*\n  Make the data set again"):
        TokenData(folder, "train", seq_len=8)


def test_what_is_missing_is_named_with_the_command_that_makes_it(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere not found.\n  Make it with: python prepare.py stdlib --out"):
        TokenData(tmp_path / "nowhere", "train", seq_len=8)
    with pytest.raises(FileNotFoundError, match="has no meta.json(.|\n)*prepare.py stdlib"):
        TokenData(tmp_path, "train", seq_len=8)
    (folder / "train_000001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="train_000001.bin not found"):
        TokenData(folder, "train", seq_len=8)
    (folder / "meta.json").unlink()  # prepare.py was killed: our shards alone are no data set
    with pytest.raises(FileNotFoundError, match="finish making it"):
        TokenData(folder, "train", seq_len=8)


def test_a_short_or_empty_split_is_refused_with_the_three_numbers(tmp_path):
    folder = make_set(tmp_path / "set", train=[10, 8], val=[0], empty=[])
    assert TokenData(folder, "train", seq_len=9).n_windows == 1
    for split, seq_len, message in (
            ("train", 1024, "18 tokens, 10 in its .* needs 1,025.\n  Set --seq_len=9 or less, or"),
            ("train", 10, "18 tokens, 10 in its longest shard; one .* needs 11.\n  Set --seq_len=9 or less"),
            ("val", 8, "0 tokens, .* needs 9.\n  Prepare more text.*--val_fraction"), ("empty", 8, "0 tokens"),
            ("test", 8, "0 tokens")):
        with pytest.raises(ValueError, match=rf"Split '{split}' of .*set has {message}"):
            TokenData(folder, split, seq_len=seq_len)


def test_another_tokenizer_or_a_smaller_vocabulary_is_refused(folder):
    with pytest.raises(ValueError, match="set holds ids of tokenizer 0123456789ab; the model's is ffffffffffff.\n"):
        TokenData(folder, "train", seq_len=8, fingerprint=OTHER)
    with pytest.raises(ValueError, match="a vocabulary of 5000; the model's has only 256.\n  Set --vocab_size=5000"):
        TokenData(folder, "train", seq_len=8, vocab_size=256)


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_id_beyond_the_vocabulary_stops_the_run_with_file_and_place(tmp_path, prefetch):
    folder = make_set(tmp_path / "set", vocab_size=300, train=[50, 50])
    meta = read_meta(folder)
    meta["vocab_size"] = 98  # 50..99 are in the second shard, 98 is the last that a window has
    (folder / "meta.json").write_text(json.dumps(meta))
    data = TokenData(folder, "train", seq_len=8)
    message = r"train_000001\.bin has id 98 at token 48; the vocabulary has 98 ids"
    with pytest.raises(ValueError, match=message):
        batches = Batches(data, seed=0, micro_batch_size=4, batch_seqs=4, prefetch=prefetch)
        for _ in range(3):
            next(batches)
    with pytest.raises(ValueError, match=message):
        list(iterate_windows(data, 4))


def test_a_read_only_folder_serves_and_stays_untouched(folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        next(Batches(TokenData(folder, "train", seq_len=8), seed=0, micro_batch_size=2, batch_seqs=2))
        assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    finally:
        folder.chmod(0o755)


# ---- foreign shards


def write_foreign(path, ids):
    """As llm.c's data scripts do: three words, zeros, uint16."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, np.uint16).tobytes())


@pytest.mark.parametrize("names", [("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
                                   ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin")])
def test_a_folder_of_llm_c_shards_is_a_data_set(tmp_path, names):
    write_foreign(tmp_path / names[0], np.arange(50157, 50257))
    write_foreign(tmp_path / names[1], np.arange(40))
    (tmp_path / "notes.bin").write_bytes(b"something else")
    train, val = TokenData(tmp_path, "train", seq_len=8), TokenData(tmp_path, "val", seq_len=8, fingerprint=OTHER)
    assert (train.n_tokens, val.n_tokens, train.vocab_size, train.boundary_id) == (100, 40, 50257, 50256)
    assert train.fingerprint == "" and train.window(0).tolist() == list(range(50157, 50166))
    assert read_header(tmp_path / names[0]).checksum == "" and verify_shard(tmp_path / names[0]).n_tokens == 100
    with pytest.raises(ValueError, match="50257; the model's has only 4096"):
        TokenData(tmp_path, "train", seq_len=8, vocab_size=4096)
    before = train.data_fingerprint
    write_foreign(tmp_path / names[0], np.arange(50156, 50256))
    assert read_meta(tmp_path)["data_fingerprint"] != before


# ---- windows and batches


def test_every_token_but_a_shards_first_is_a_target_once(folder):
    data = TokenData(folder, "train", seq_len=8)
    assert data.n_windows == (1000 - 1) // 8 + (37 - 1) // 8 + (1001 - 1) // 8
    windows = np.stack([data.window(i) for i in range(data.n_windows)])
    assert windows.shape == (data.n_windows, 9) and windows.dtype == np.int64
    assert (np.diff(windows) == 1).all()
    targets = windows[:, 1:].ravel().tolist()
    assert len(set(targets)) == len(targets)
    dropped = set(range(2038)) - set(targets)
    assert dropped == {0, *range(993, 1000), 1000, *range(1033, 1037), 1037}  # 1001 tokens leave no rest


def test_no_window_spans_two_shards(tmp_path):
    folder = make_set(tmp_path / "set", train=[20, 20])
    windows = [TokenData(folder, "train", seq_len=8).window(i).tolist() for i in range(4)]
    assert windows == [list(range(first, first + 9)) for first in (0, 8, 20, 28)]


def test_targets_are_inputs_shifted_by_one(folder):
    data = TokenData(folder, "train", seq_len=8)
    x, y = next(Batches(data, seed=0, micro_batch_size=4, batch_seqs=4))
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
    ranks = [take(data, steps * 3 // world_size, seed=5, micro_batch_size=2, batch_seqs=6, rank=rank,
                  world_size=world_size) for rank in range(world_size)]
    stream = [start for micro in zip(*ranks, strict=True) for rows in micro for start in rows]
    everything = sorted(int(data.window(i)[0]) for i in range(n))
    orders = [stream[epoch * n:(epoch + 1) * n] for epoch in range(epochs)]
    assert all(sorted(order) == everything for order in orders)
    assert len({tuple(order) for order in orders}) == epochs and everything not in orders


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_step_is_the_same_set_for_every_world_size(folder, prefetch):
    data = TokenData(folder, "train", seq_len=8)

    def steps(world_size, micro_batch_size):
        per_step = 24 // (world_size * micro_batch_size)
        ranks = [take(data, 30 * per_step, seed=1, micro_batch_size=micro_batch_size, batch_seqs=24, rank=rank,
                      world_size=world_size, prefetch=prefetch) for rank in range(world_size)]
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
        common = dict(seed=3, micro_batch_size=2, batch_seqs=8, rank=rank, world_size=world_size)
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
    straight = sum(take(data, 30, seed=3, micro_batch_size=8, batch_seqs=8), [])
    first = sum(take(data, 10, seed=3, micro_batch_size=8, batch_seqs=8), [])
    ranks = [sum(take(data, 20, seed=3, micro_batch_size=4, batch_seqs=8, rank=r, world_size=2, start_seq=80), [])
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
    rows = sum(take(data, 2, seed=0, micro_batch_size=7, batch_seqs=7), [])
    assert sorted(rows) == [0] * 7 + [8] * 7


@pytest.mark.parametrize("batch_seqs, world_size, micro, near", [
    (10, 2, 4, "have 8 or 16: set --batch_tokens=64 or 128"), (3, 1, 4, "have 4: set --batch_tokens=32"),
    (0, 1, 4, "have 4"), (12, 8, 1, "have 8 or 16"),
])
def test_a_step_that_does_not_divide_is_refused_with_the_nearest_that_do(folder, batch_seqs, world_size, micro, near):
    data = TokenData(folder, "train", seq_len=8)
    with pytest.raises(ValueError, match=rf"(?s){batch_seqs} sequences .*{world_size} rank.*of {micro}.*{near}"):
        Batches(data, seed=0, micro_batch_size=micro, batch_seqs=batch_seqs, world_size=world_size)


def test_shards_are_in_natural_order_whatever_the_listing(tmp_path, monkeypatch):
    names = [f"edu_train_{i}.bin" for i in (1, 2, 10, 11, 100)]
    for i, name in enumerate(names):
        write_foreign(tmp_path / name, np.arange(9) + 100 * i)
    listed = [path for name in reversed(names) for path in [tmp_path / name]]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    data = TokenData(tmp_path, "train", seq_len=8)
    assert [int(data.window(i)[0]) for i in range(5)] == [0, 100, 200, 300, 400]
    assert [shard["file"] for shard in data.meta["splits"]["train"]["shards"]] == names


# ---- evaluation


@pytest.mark.parametrize("micro_batch_size", [1, 4, 7, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_each_window_once_in_order(folder, micro_batch_size, world_size):
    data = TokenData(folder, "train", seq_len=8)
    ranks = [[start for x, y in iterate_windows(data, micro_batch_size, rank=rank, world_size=world_size)
              for start in starts(x)] for rank in range(world_size)]
    assert all(rank == sorted(rank) for rank in ranks)
    assert sorted(sum(ranks, [])) == [int(data.window(i)[0]) for i in range(data.n_windows)]


def test_evaluation_of_some_windows_takes_the_same_spread_for_all(folder):
    data = TokenData(folder, "train", seq_len=8)
    some = [start for x, _ in iterate_windows(data, 4, max_windows=10) for start in starts(x)]
    assert len(set(some)) == 10 and some == sorted(some) and some[-1] > 1700
    ranks = [start for r in (0, 1, 2) for x, _ in iterate_windows(data, 3, max_windows=10, rank=r, world_size=3)
             for start in starts(x)]
    assert sorted(ranks) == some
    assert sum(len(x) for x, _ in iterate_windows(data, 4, max_windows=10**6)) == data.n_windows
    assert list(iterate_windows(TokenData(folder, "val", seq_len=99), 4, rank=1, world_size=2)) == []


# ---- documents


def test_document_ids_count_boundaries():
    x = torch.tensor([[9, 1, 2, 9, 3, 9], [1, 2, 3, 4, 5, 6], [9, 9, 9, 1, 1, 9]])
    assert document_ids(x, 9).tolist() == [[1, 1, 1, 2, 2, 3], [0] * 6, [1, 2, 3, 3, 3, 4]]
    assert document_ids(x, 9).dtype == torch.int32


# ---- the thread, and memory


def test_an_error_in_the_thread_reaches_the_consumer_and_closing_is_clean(folder, monkeypatch):
    data, before = TokenData(folder, "train", seq_len=8), set(threading.enumerate())  # other tests' may still be there
    batches = Batches(data, seed=0, micro_batch_size=1, batch_seqs=1)
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
        for _batch in Batches(data, seed=0, micro_batch_size=1, batch_seqs=1):
            break
    gc.collect()
    for thread in [t for t in set(threading.enumerate()) - before if t.name.startswith("batches")]:
        thread.join(5)
        assert not thread.is_alive()


def test_an_open_prefetch_does_not_keep_the_program(folder):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from data import Batches, TokenData\n"
            "b = Batches(TokenData(sys.argv[2], 'train', seq_len=8), seed=0, micro_batch_size=1, batch_seqs=1)\n"
            "next(b); print('done')")
    run = subprocess.run([sys.executable, "-c", code, str(Path(data_module.__file__).parent), str(folder)],
                         capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_memory_stays_flat_over_many_batches(tmp_path):
    ids = np.zeros(64 << 20, np.uint16)  # 128 MB on disk
    folder = tmp_path / "set"
    folder.mkdir()
    entry = write_shard(folder / "train_000000.bin", ids, fingerprint=FINGERPRINT, vocab_size=500)
    del ids
    write_meta(folder, sources=[], fingerprint=FINGERPRINT, vocab_size=500, boundary_id=0,
               splits={"train": [{**entry, "documents": 1, "bytes": 1}]})
    batches = Batches(TokenData(folder, "train", seq_len=2048), seed=0, micro_batch_size=16, batch_seqs=16)
    next(batches)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    before = resident()
    for _ in range(2048):  # the whole file, once
        next(batches)
    assert resident() - before < 32 << 20
