"""Shards say what they hold or are refused: by header, size, checksum and meta.json; llm.c's are read as they are."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from stack.data import shards
from stack.data.batches import Batches, TokenData, iterate_windows
from stack.data.shards import how_to_make, open_shard, read_header, read_meta, verify_shard, write_meta, write_shard

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
    assert open_shard(tmp_path / "train_000000.bin").tolist() == ids.tolist()
    assert os.listdir(tmp_path) == ["train_000000.bin"]


def test_pieces_of_any_size_give_the_same_file(tmp_path):
    ids = np.random.default_rng(0).integers(0, 500, 10_000).astype(np.uint32)
    write_shard(tmp_path / "whole.bin", ids, fingerprint=FINGERPRINT, vocab_size=500)

    def pieces():
        for piece in np.split(ids, [0, 0, 1, 2, 900, 905, 7000]):
            yield piece.tolist() if len(piece) == 5 else piece
        assert not (tmp_path / "pieces.bin").exists()
    entry = write_shard(tmp_path / "pieces.bin", pieces(), fingerprint=FINGERPRINT, vocab_size=500)
    assert entry["tokens"] == len(ids)
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
        write_shard(tmp_path / "x.bin", iter([np.zeros(1, np.int64).view(Many)] * 2), fingerprint=FINGERPRINT,
                    vocab_size=500)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2, 3], fingerprint=FINGERPRINT, vocab_size=500)
    before = path.read_bytes()

    def interrupted():
        yield [4] * 10
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        write_shard(path, interrupted(), fingerprint=FINGERPRINT, vocab_size=500)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.bin"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_no_file(tmp_path, monkeypatch):
    def full(path, mode):
        path.touch()
        return open("/dev/full", mode)
    monkeypatch.setattr(shards, "open", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "x.bin", [1] * 100_000, fingerprint=FINGERPRINT, vocab_size=500)
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_no_shard_and_the_next_one_cleans_up(tmp_path):
    code = ("import os, signal, sys; sys.path.insert(0, sys.argv[1]); from stack.data import shards\n"
            "ids = ([1] * 100 if i == 0 else os.kill(os.getpid(), signal.SIGKILL) for i in range(2))\n"
            "shards.write_shard(sys.argv[2], ids, fingerprint='00' * 32, vocab_size=500)")
    path = tmp_path / "x.bin"
    subprocess.run([sys.executable, "-c", code, str(ROOT), str(path)], check=False)
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
    for fingerprint, n in ((OTHER, 37), (FINGERPRINT, 37), (FINGERPRINT, 36)):  # other tokenizer, content, length
        ids = np.arange(1000, 1000 + n) + (fingerprint == FINGERPRINT)
        write_shard(folder / "train_000001.bin", ids, fingerprint=fingerprint, vocab_size=5000)
        with pytest.raises(ValueError, match=r"(?s)train_000001\.bin has \(tokens, tokenizer, .*another data set"):
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
    assert (how_to_make("data/demo")  # its config's head says so
            == "python prepare.py stdlib --out data/demo --vocab_size 4096 --val_fraction 0.05")
    with pytest.raises(FileNotFoundError, match="prepare.py configs/data_anneal.py --out nowhere/anneal"):
        TokenData("nowhere/anneal", "train", seq_len=8)
    with pytest.raises(FileNotFoundError, match="nowhere not found.\n  Make it with: python prepare.py SOURCE"):
        TokenData(tmp_path / "nowhere", "train", seq_len=8)
    with pytest.raises(FileNotFoundError, match="has no meta.json(.|\n)*prepare.py SOURCE"):
        TokenData(tmp_path, "train", seq_len=8)
    (folder / "train_000001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="train_000001.bin not found"):
        TokenData(folder, "train", seq_len=8)
    (folder / "meta.json").unlink()  # prepare.py was killed: our shards alone are no data set
    with pytest.raises(FileNotFoundError, match="finish making it"):
        TokenData(folder, "train", seq_len=8)
    for argv, said in (({"argv": ["my notes/", "--out", "data/x"]}, "'my notes/' --out data/x"),
                       ({}, "command continues")):
        (folder / "progress.json").write_text(json.dumps({"command": {}, "splits": {}, **argv}))
        with pytest.raises(FileNotFoundError, match=f"did not finish it.*{said}"):
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


def test_an_id_beyond_the_vocabulary_stops_the_run_with_file_and_place(tmp_path):
    folder = make_set(tmp_path / "set", vocab_size=300, train=[50, 50])
    meta = read_meta(folder)
    meta["vocab_size"] = 98  # 50..99 are in the second shard, 98 is the last that a window has
    (folder / "meta.json").write_text(json.dumps(meta))
    data = TokenData(folder, "train", seq_len=8)
    message = r"train_000001\.bin has id 98 at token 48; the vocabulary has 98 ids"
    with pytest.raises(ValueError, match=message):
        batches = Batches(data, seed=0, micro_batch_size=4)
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
        next(Batches(TokenData(folder, "train", seq_len=8), seed=0, micro_batch_size=2))
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
    assert train.fingerprint == "" and train.window(0)[0].tolist() == list(range(50157, 50165))
    assert read_header(tmp_path / names[0]).checksum == "" and verify_shard(tmp_path / names[0]).n_tokens == 100
    with pytest.raises(ValueError, match="50257; the model's has only 4096"):
        TokenData(tmp_path, "train", seq_len=8, vocab_size=4096)
    before = train.data_fingerprint
    write_foreign(tmp_path / names[0], np.arange(50156, 50256))
    assert read_meta(tmp_path)["data_fingerprint"] != before
    write_foreign(tmp_path / names[0], [0] * 100_000)  # of a long one, both ends decide
    before = read_meta(tmp_path)["data_fingerprint"]
    write_foreign(tmp_path / names[0], [0] * 99_999 + [1])
    assert read_meta(tmp_path)["data_fingerprint"] != before
