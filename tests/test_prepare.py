"""The command: what its shards hold, and that nothing but the input decides it."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prepared import arguments, contents, documents, lines, meta_of, prose, read_shards, run

import prepare
from stack.data import sources, writer
from stack.data.batches import TokenData
from stack.data.tokenizer import Tokenizer

ROOT = Path(prepare.__file__).parent


# ---- what the shards hold


def test_every_document_once_byte_for_byte(tmp_path, vocabulary):
    """Each document once, whole and unchanged, behind one boundary, in train or val; all of it counted."""
    docs = [prose(i, 30) for i in range(60)] + ["CRLF\r\n\r lines\r\n", "\u2028 \x85 \x0c\n", "bell\a and ESC\33[0m",
                                                "é漢🙂",
                                                " " * 700, "<|endoftext|> and <|pad|>", "x" * 700, "1" * 700,
                                                prose(3, 30)]
    for i, text in enumerate(docs):
        (tmp_path / f"in_{i}.txt").write_bytes(("\ufeff" * (i == 0) + text).encode())
    (tmp_path / "in_empty.txt").write_bytes(b"")
    assert run(f"{tmp_path}/in_*.txt", "--out", tmp_path / "out", "--tokenizer", vocabulary, "--val_fraction", "0.3",
               "--shard_tokens", 1000) == 0
    found = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert Counter(found[0] + found[1]) == Counter(docs[:-1]) and min(map(len, found)) > 5
    meta = meta_of(tmp_path / "out")
    assert meta["sources"][0]["duplicates"] == meta["sources"][0]["empty"] == 1
    for split, texts in zip(("train", "val"), found, strict=True):
        totals = meta["splits"][split]
        assert totals["documents"] == len(texts) and totals["bytes"] == sum(len(text.encode()) for text in texts)
        assert totals["tokens"] == len(read_shards(tmp_path / "out", split))
        assert all(shard["tokens"] == 1000 for shard in totals["shards"][:-1])


def test_huge_documents(tmp_path, vocabulary):
    """A million spaces, one letter a million times, a million digits: text like any other."""
    docs = [" " * 70_000, "x" * 9000, "1" * 3000]
    docs += [" " * 1_100_000, "a" * 1_000_000, "7" * 1_000_000, "\n" * 1_000_000, "é🙂" * 300_000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in docs))
    assert run(tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", vocabulary, "--val_fraction", 0) == 0
    assert documents(tmp_path / "out", "train") == docs


def test_threads_and_shards_change_nothing(tmp_path, corpus, vocabulary):
    """The same tokens for any number of threads and any size of shards."""
    common = ["--tokenizer", vocabulary, "--val_fraction", "0.1"]
    for name, extra in {"one": ["--workers", 1], "five": ["--workers", 5], "small": ["--shard_tokens", 77]}.items():
        assert run(corpus, "--out", tmp_path / name, *common, *extra) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "five")
    for split in ("train", "val"):
        assert np.array_equal(read_shards(tmp_path / "one", split), read_shards(tmp_path / "small", split))


def test_more_text_moves_no_document(tmp_path, corpus, vocabulary):
    """What was in val stays in val when documents are added, in whatever order."""
    common = ["--tokenizer", vocabulary, "--val_fraction", "0.1"]
    assert run(corpus / "a.jsonl", "--out", tmp_path / "less", *common) == 0
    assert run(corpus / "b_1.txt", corpus, corpus / "a.jsonl", "--out", tmp_path / "more", *common) == 0
    for split in ("train", "val"):
        assert set(documents(tmp_path / "less", split)) < set(documents(tmp_path / "more", split))


def test_a_trained_tokenizer(tmp_path, corpus, capsys):
    """Trained on the documents of train only, the same each time; the real size is what meta.json has."""
    for name in ("one", "two"):
        assert run(corpus, "--out", tmp_path / name, "--vocab_size", "350", "--workers", 1 + (name == "two")) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert "tokenizer: 350 ids, trained on" in capsys.readouterr().out
    assert meta_of(tmp_path / "one")["vocab_size"] == 350
    train_bytes = sum(len(text.encode()) for text in documents(tmp_path / "one", "train"))
    assert meta_of(tmp_path / "one")["tokenizer_sample"] == {"bytes": train_bytes, "part": "all"}


def test_the_tokenizers_sample(tmp_path, corpus):
    """Of more text than asked for, a sample from all of it, about as large as asked, by a seed; and it is told."""
    job = prepare.parse_args([str(corpus), "--tokenizer_bytes", "3000", "--out", "x"])
    job.sources = [prepare.Source(str(corpus))]

    def sample(seed, **changes):
        job.seed, told = seed, {"bytes": 0, "part": "all"}
        for key, value in changes.items():
            setattr(job, key, value)
        texts = list(prepare.sample_texts(job, told, True))
        assert told["bytes"] == sum(len(text.encode()) for text in texts)
        return texts, told
    texts, told = sample(1)
    assert 1500 < told["bytes"] <= 3000 and told["part"].startswith("a random ")
    assert sample(1)[0] == texts != sample(2)[0]
    lines = [json.loads(line)["text"] for line in open(corpus / "a.jsonl", encoding="utf-8")]
    places = [lines.index(text) for text in texts if text in lines]
    assert min(places) < 100 and max(places) > 200
    assert sample(1, max_bytes=2000)[1]["bytes"] <= 2300


def test_a_sample_where_all_is_held_out(tmp_path):
    """The only document there is trains the tokenizer even if its hash puts it in val."""
    (tmp_path / "a.txt").write_text(prose(1, 50), newline="")
    job = prepare.parse_args([str(tmp_path / "a.txt"), "--val_fraction", "0.999999999", "--out", "x"])
    job.sources, told = [prepare.Source(str(tmp_path / "a.txt"))], {"bytes": 0, "part": "all"}
    assert list(prepare.sample_texts(job, told)) == [prose(1, 50)] and told["part"] == "all"


def test_limits(tmp_path, corpus, vocabulary):
    """max_tokens is reached exactly, max_bytes never passed; what is there is the beginning of the whole."""
    common = ["--tokenizer", vocabulary, "--val_fraction", "0"]
    assert run(corpus, "--out", tmp_path / "all", *common) == 0
    whole = read_shards(tmp_path / "all", "train")
    for n in (1, 2, 999, 1000):
        assert run(corpus, "--out", tmp_path / f"t{n}", *common, "--max_tokens", n) == (0 if n > 1 else 2)
        if n > 1:
            assert np.array_equal(read_shards(tmp_path / f"t{n}", "train"), whole[:n])
    first = len(documents(tmp_path / "all", "train")[0].encode())
    for n in (first - 1, first, first + 1, 5000):
        assert run(corpus, "--out", tmp_path / f"b{n}", *common, "--max_bytes", n) == 0
        totals, part = meta_of(tmp_path / f"b{n}")["splits"]["train"], read_shards(tmp_path / f"b{n}", "train")
        assert n - 10 < totals["bytes"] <= n and np.array_equal(part, whole[:len(part)])
        assert totals["documents"] == 1 or n == 5000
    assert meta_of(tmp_path / f"b{first}")["splits"]["train"]["bytes"] == first


# ---- small corpora


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.4])
def test_one_file_is_cut_into_train_and_val(tmp_path, vocabulary, capsys, fraction):
    """A single document: nothing of it is lost or comes twice, about val_fraction of it is val, whole lines of it."""
    text = prose(1, 20_000)
    (tmp_path / "book.txt").write_text(text, newline="")
    out = tmp_path / "out"
    assert run(tmp_path / "book.txt", "--out", out, "--tokenizer", vocabulary, "--val_fraction", fraction,
               "--shard_tokens", 5000) == 0
    train, val = documents(out, "train"), documents(out, "val")
    assert train.pop(0) + "".join(a + b for a, b in zip(val, train, strict=True)) == text  # by turns
    assert all(part.endswith("\n") for part in val)
    assert 0.6 * fraction < len("".join(val)) / len(text) < 1.2 * fraction
    assert meta_of(out)["split_rule"] == "content"
    (source,) = meta_of(out)["sources"]
    assert (source["documents"], source["divided"], source["parts"]) == (1, 1, len(val) + len(train) + 1)
    assert f": 1 of 1 documents, into {source['parts']:,} parts," in capsys.readouterr().out


def test_short_val(tmp_path, vocabulary, capsys):
    """Too little held-out text for a window of the usual length: the longest possible one is said, and is possible."""
    (tmp_path / "a.txt").write_text(prose(1, 3000))
    run(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", vocabulary, "--val_fraction", 0.1)
    seq_len = int(re.search(r"val is short: seq_len can be (\d+) at most", capsys.readouterr().out)[1])
    assert TokenData(tmp_path / "out", "val", seq_len=seq_len).n_windows == 1
    with pytest.raises(ValueError, match="val_fraction"):
        TokenData(tmp_path / "out", "val", seq_len=seq_len + 1)


def book(name, n_words):
    """Lines of six words, none of which comes twice."""
    lines = [prose((name, n), 6).replace("\n", " ") for n in range(n_words // 6)]
    return "".join(f"{name} {n} {line}\n" for n, line in enumerate(lines))


def held_and_trained(out):
    return documents(out, "val"), documents(out, "train")


@pytest.mark.parametrize("sizes, fraction", [((12_000, 15_000, 20_000, 14_000), 0.005),
                                             ((4000, 300, 60, 9000, 40), 0.1), ((3000, 200_000, 900, 2000), 0.03)])
def test_what_is_held_out_of_few_documents_stays_held_out(tmp_path, corpus, sizes, fraction):
    """Books, one more each time, then hundreds of short documents, then more behind the end of the first: nothing of
    an earlier val is in a later train, whatever the tokenizer, and the share stays about what was asked for."""
    books, before = tmp_path / "books", []
    books.mkdir()

    def check(*more):
        run(books, *more, "--out", out, "--vocab_size", 300 + 20 * len(before), "--val_fraction", fraction)
        val, train = held_and_trained(out)
        assert val and sum(map(len, val)) < 3 * fraction * sum(map(len, val + train))
        trained = "\n\n".join(train)
        for text in before:
            assert text not in trained
            assert not [line for line in text.splitlines() if len(line) > 30 and line in trained]
        before.extend(text for text in val if len(text) > 60)
    for i, size in enumerate(sizes):
        out = tmp_path / f"out_{i}"
        (books / f"{i}.txt").write_text(book(i, size), newline="")
        if i or size * 6 * fraction > 400:
            check()
    out = tmp_path / "with_many"
    check(corpus)
    with open(books / "0.txt", "a", newline="") as file:
        file.write(book("end", 40_000))
    out = tmp_path / "longer"
    check(corpus)
    assert len(before) > 4


def test_documents_below_the_length_stay_whole(tmp_path, vocabulary):
    """What is too short to give a part goes as a whole, by its hash alone."""
    docs = [prose(i, 200)[:1000] for i in range(60)]
    for i, text in enumerate(docs):
        (tmp_path / f"{i}.md").write_text(text, newline="")
    assert run(tmp_path, "--out", tmp_path / "out", "--tokenizer", vocabulary, "--val_fraction", 0.25) == 0
    assert not any(source["divided"] for source in meta_of(tmp_path / "out")["sources"])
    val, train = held_and_trained(tmp_path / "out")
    assert {*val} | {*train} == {*docs} and 5 < len(val) < 30
    assert run(tmp_path, "--out", tmp_path / "no_val", "--tokenizer", vocabulary, "--val_fraction", 0) == 0
    assert {*documents(tmp_path / "no_val", "train")} == {*docs}
    assert "val" not in meta_of(tmp_path / "no_val")["splits"]


@pytest.mark.parametrize("n, words, fraction", [(1, 9, 0.01), (1, 50, 0.1), (1, 250, 0.001), (5, 200, 1e-9),
                                                (4, 1500, 0.01)])
def test_too_little_for_its_share(tmp_path, vocabulary, capsys, n, words, fraction):
    """Where nothing would be held out, or all: another share is, it is said; given by hand it holds all that out."""
    for i in range(n):
        (tmp_path / f"{i}.md").write_text(prose(i, words), newline="")
    argv = [tmp_path, "--tokenizer", vocabulary, "--val_fraction"]
    assert run(*argv, fraction, "--out", tmp_path / "out") == 0
    val, train = held_and_trained(tmp_path / "out")
    assert val and train and sorted("".join(val + train)) == sorted("".join(prose(i, words) for i in range(n)))
    share = re.search(r"too few, or too short, .*: ([0-9.]+) of the text.*\n.*--val_fraction ([0-9.]+) or",
                      capsys.readouterr().out)
    if share[1] != "0.5":
        assert run(*argv, share[2], "--out", tmp_path / "again") == 0
        assert "too few" not in capsys.readouterr().out
        again, trained = held_and_trained(tmp_path / "again")
        assert trained and all(any(text in more for more in again) for text in val)


@pytest.mark.parametrize("data", [b"", b"a"])
def test_too_little_text(tmp_path, vocabulary, capsys, data):
    """Nothing, or one byte: a sentence, and no folder full of remains."""
    (tmp_path / "a.txt").write_bytes(data)
    for tokenizer in (["--tokenizer", vocabulary], ["--vocab_size", 300]):
        assert run(tmp_path / "a.txt", "--out", tmp_path / "out", *tokenizer) == 2
        assert "too little for train and val" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("flags, says", [
    (["--val", "a.jsonl"], "3 documents stand in --val too, and nothing else is left for train.\n"),
    (["--max_tokens", "2"], "train and val, and --max_tokens 2 ends it there.\n"),
    (["--max_bytes", "1", "--max_tokens", "900"], "and --max_tokens 900 and --max_bytes 1 ends it there.\n"),
    (["mix.py", "--max_tokens", "2"], "and --max_tokens 2 ends it there.\n"),
    (["talk.jsonl", "--chat", "--max_tokens", "5"], "--max_tokens 5 ends it there; a conversation is not cut.\n"),
    (["b.jsonl", "--max_tokens", "900"], "val.\n  b.jsonl: read 1 .jsonl by line\n  Give more text.\n"),
])
def test_too_little_text_says_why(tmp_path, vocabulary, capsys, monkeypatch, flags, says):
    """The reason is the true one: a limit, or documents that are val's."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, "a.jsonl", [prose(i, 20) for i in range(3)])
    lines(tmp_path, "b.jsonl", ["b"])
    talk = [{"role": "user", "content": prose(1, 9)}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    (tmp_path / "mix.py").write_text("sources = [dict(source=name, weight=1) for name in ('a.jsonl', 'b.jsonl')]")
    source = [] if flags[0].endswith((".py", ".jsonl")) else ["a.jsonl"]
    assert run(*source, *flags, "--out", "out", "--tokenizer", vocabulary) == 2
    assert says in (said := capsys.readouterr().err), said
    assert not list((tmp_path / "out").iterdir())


# ---- a validation set of one's own


def test_a_validation_set_of_ones_own(tmp_path, vocabulary, capsys):
    """val is what --val names and nothing else; its documents are left out of training, its lines there are counted."""
    docs, common = [prose(i, 40) for i in range(50)], "a line of forty characters that comes in both sets\n"
    own = [*docs[:7], prose("own", 30), common + "x", prose("own", 30)]
    argv = [lines(tmp_path, "a.jsonl", [*docs, common + "y"]), "--val", lines(tmp_path, "own.jsonl", own[:5]),
            lines(tmp_path, "more.jsonl", own[5:]), "--tokenizer", vocabulary, "--out", tmp_path / "out"]
    assert run(*argv) == 0
    said, meta = capsys.readouterr().out, meta_of(tmp_path / "out")
    assert documents(tmp_path / "out", "val") == own[:-1]
    assert documents(tmp_path / "out", "train") == [*docs[7:], common + "y"]
    assert "7 documents stand in val as well and are left out of train" in said
    assert "1 lines of train, 40 characters or longer, stand in val too" in said
    train, *vals = meta["sources"]
    assert (train["val"], train["in_val"], train["duplicates"], train["shared_lines"]) == (False, 7, 0, 1)
    assert [(val["val"], val["in_val"], val["duplicates"]) for val in vals] == [(True, 0, 0), (True, 0, 1)]
    assert meta["split_rule"] == "val"
    assert run(*argv) == 0 and "nothing to do" in capsys.readouterr().out
    lines(tmp_path, "own.jsonl", own[:4])
    assert run(*argv) == 2 and "names, sizes or dates" in capsys.readouterr().err


def test_the_tokenizer_learns_nothing_of_val(tmp_path):
    """Neither of the validation set nor of what stands in it."""
    strange, docs = " ".join(["zq" * 9] * 40), [prose(i, 40) for i in range(30)]
    for name, own, rest in (("with", [strange], [*docs, strange]), ("without", [prose("own", 5)], docs)):
        assert run(lines(tmp_path, "a.jsonl", rest), "--val", lines(tmp_path, "own.jsonl", own), "--vocab_size", 300,
                   "--out", tmp_path / name) == 0
    assert (tmp_path / "with/tokenizer.json").read_bytes() == (tmp_path / "without/tokenizer.json").read_bytes()


# ---- special tokens


def test_special_tokens_by_consent(tmp_path, vocabulary, capsys, monkeypatch):
    """Those that are named are read as tokens, also over the ends of pieces; the others are text; all are counted."""
    monkeypatch.setattr(sources, "PIECE", 50)
    text = "".join(f"<|user|>question {i}<|end|><|assistant|>answer<|end|>" for i in range(30))
    (tmp_path / "a.txt").write_text(text)
    tokenizer, argv = Tokenizer.load(vocabulary), [tmp_path / "a.txt", "--tokenizer", vocabulary, "--val_fraction", 0]
    assert run(*argv, "--special", "<|user|>", "<|end|>", "--out", tmp_path / "some") == 0
    said, ids = capsys.readouterr().out, read_shards(tmp_path / "some", "train")
    assert "special tokens in the text: 60 <|end|>, 30 <|user|>" in said
    assert "30 strings look like special tokens and are text: 30 <|assistant|>\n" in said
    assert "--special '<|assistant|>'" in said
    counts = {name: int(np.count_nonzero(ids == i)) for name, i in tokenizer.special_ids.items()}
    assert {name: n for name, n in counts.items() if n} == {"<|endoftext|>": 1, "<|user|>": 30, "<|end|>": 60}
    assert documents(tmp_path / "some", "train") == [text]
    assert meta_of(tmp_path / "some")["splits"]["train"]["bytes"] == len(text) - 30 * len("<|user|><|end|><|end|>")
    assert run("verify", tmp_path / "some") == 0
    assert run(*argv, "--out", tmp_path / "none") == 0
    assert "strings look like special tokens and are text: " in capsys.readouterr().out
    assert np.count_nonzero(read_shards(tmp_path / "none", "train") >= tokenizer.boundary_id) == 1
    (tmp_path / "b.txt").write_text("one\n<|endoftext|>\ntwo\n")
    for flags, said in ([], True), (["--special", "<|endoftext|>"], False):
        assert run(tmp_path / "b.txt", *argv[1:], *flags, "--out", tmp_path / f"ends{len(flags)}") == 0
        assert ("which is text here" in capsys.readouterr().out) == said
    assert run(*argv, "--special", "<|usr|>", "--out", tmp_path / "wrong") == 2
    assert "--special <|usr|>: the tokenizer has no such token.\n  It has <|endoftext|>" in capsys.readouterr().err
    assert run(*argv, "--special", "<|user|>", "--out", tmp_path / "some") == 2
    assert "options special" in capsys.readouterr().err


def test_shown_apart_from_text_that_looks_so(tmp_path, vocabulary, capsys, monkeypatch):
    """show marks what is a special token, on a terminal by what no text can do there; all else is as it was typed."""
    (tmp_path / "a.txt").write_text("<|user|>\33[7m<|end|>\33[0m<|end|>é<|pad|><|user|><|user|>", newline="")
    assert run(tmp_path / "a.txt", "--tokenizer", vocabulary, "--val_fraction", 0, "--special", "<|user|>", "--out",
               tmp_path / "out") == 0
    for terminal, mark, typed in ((False, "⟦{}⟧", "\33[7m<|end|>\33[0m<|end|>é<|pad|>"),
                                  (True, "\33[7m{}\33[0m", "\\x1b[7m<|end|>\\x1b[0m<|end|>é<|pad|>")):
        capsys.readouterr()
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert run("show", tmp_path / "out") == 0
        user = mark.format("<|user|>")
        assert capsys.readouterr().out == f"{user}{typed}{user}{user}\n"


def test_a_trained_tokenizer_does_not_learn_the_names(tmp_path):
    """What is read as a token is no text to learn merges from."""
    text = "".join(f"<|user|>a{i % 7}<|end|>" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    for name, extra in (("read", ["--special", "<|user|>", "<|end|>"]), ("text", [])):
        assert run(tmp_path / "a.txt", "--vocab_size", 270, "--val_fraction", 0, "--out", tmp_path / name, *extra) == 0
    assert b"<|" not in Tokenizer.load(tmp_path / "read").ranks and b"<|" in Tokenizer.load(tmp_path / "text").ranks


# ---- duplicates


def test_seen_is_a_set(tmp_path, monkeypatch):
    """Like a Python set of 64-bit numbers, continued from its file, up to the limit."""
    monkeypatch.setattr(writer.Seen, "RECENT", 50)
    reference, draw, seen = set(), random.Random(3), writer.Seen(tmp_path / "seen", 0, 0)
    for i in range(4000):
        key = draw.randrange(700) * (2**64 // 700)
        assert seen.add(key) == (key not in reference)
        reference.add(key)
        if i % 333 == 0:
            saved = seen.sync()
            seen.add(2**63 + i)
            seen.sync()  # killed before progress.json had this: forgotten
            seen = writer.Seen(tmp_path / "seen", *saved)
            assert saved[0] == len(reference)
    monkeypatch.setattr(writer.Seen, "LIMIT", len(reference))
    assert seen.add(12345) and seen.add(12345) and seen.sync() == [len(reference), 2]
    assert not seen.add(next(iter(reference)))


# ---- looking at what was made


def test_show_and_verify(tmp_path, corpus, vocabulary, capsys, monkeypatch):
    """show prints any document, also over the ends of blocks and shards; verify finds any changed byte."""
    out = tmp_path / "out"
    assert run(*arguments(corpus, vocabulary, out)) == 0
    for split in ("train", "val"):
        texts = documents(out, split)
        for i in (0, 1, 2, 17, len(texts) - 1):
            capsys.readouterr()
            assert run("show", out, "--doc", i, "--split", split) == 0
            assert capsys.readouterr().out == texts[i] + "\n"
        for i in (-1, len(texts)):
            assert run("show", out, "--doc", i, "--split", split) == 2
            assert f"It has {len(texts)}" in capsys.readouterr().err
    assert run("verify", out) == 0 and "as it should be" in capsys.readouterr().out
    for name in ("train_000001.bin", "val_000000.bin", "meta.json", "tokenizer.json"):
        whole = (out / name).read_bytes()
        at = len(whole) * 3 // 4
        (out / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        assert run("verify", out) == 2, name
        assert str(out) in capsys.readouterr().err
        (out / name).write_bytes(whole)
    for name in ("train_000001.bin", "val_000000.bin"):  # in the header, at the borders, anywhere
        whole = (out / name).read_bytes()
        for at in (0, 4, 8, 12, 16, 47, 48, 55, 56, 1023, 1024, len(whole) - 1, random.Random(name).randrange(1024)):
            (out / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
            assert run("verify", out) == 2 and name in capsys.readouterr().err, at
        for cut in (whole[:-1], whole + b"\0", whole[:700]):
            (out / name).write_bytes(cut)
            assert run("verify", out) == 2 and name in capsys.readouterr().err
        (out / name).write_bytes(whole)
    meta = meta_of(out)
    meta["splits"]["train"]["shards"] = meta["splits"]["train"]["shards"][:-1]  # sound files, but not all of them
    whole = (out / "meta.json").read_bytes()
    (out / "meta.json").write_text(json.dumps(meta))
    assert run("verify", out) == 2 and "lists other shards" in capsys.readouterr().err
    (out / "meta.json").write_bytes(whole)
    assert run("verify", out) == 0 and run("verify", tmp_path / "absent") == 2
    assert "tokens per document" in capsys.readouterr().out
    assert run("show", out, "--split", "test") == 2 and "It has train, val" in capsys.readouterr().err
    for look in ("show", "verify"):
        process = subprocess.Popen([sys.executable, prepare.__file__, look, out], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)  # `| head`
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, b"")


# ---- the command line


@pytest.mark.parametrize("argv, words", [
    (["absent.txt"], "absent.txt not found"),
    (["stdlib", "--vocab_size", "100"], "vocab_size 100 is too small"),
    (["stdlib", "--vocab_size", "2.5"], "argument --vocab_size: 2.5 is no whole number. 100000, 100_000 and"),
    (["stdlib", "--vocab_size", "500", "--tokenizer", "gpt2"], "--tokenizer has its own"),
    (["stdlib", "--tokenizer", "no_such_encoding"], "no encoding 'no_such_encoding'"),
    (["stdlib", "--tokenizer", "no/such/file.json"], "no/such/file.json not found"),
    (["stdlib", "--val_fraction", "1"], "--val_fraction 1.0 must be"),
    (["stdlib", "--val", "b.txt", "--val_fraction", "0.1"], "--val names texts of its own"),
    (["stdlib", "--special", "<|no|>"], "has no such token"),
    (["stdlib", "--workers", "0"], "--workers 0 is out of range: at least 1, and below 2**12\n"),
    (["stdlib", "--shard_tokens", "4e9"], "--shard_tokens 4000000000 is out of range: at least 1, and below 2**31\n"),
    (["stdlib", "--vocab_size", "5e9"], "--vocab_size 5000000000 is out of range"),
    *((["stdlib", f"--{flag}", value], f"argument --{flag}: ") for value in ("inf", "nan", "1e400", "many")
      for flag in ("vocab_size", "tokenizer_bytes", "max_tokens", "max_bytes", "shard_tokens", "workers", "seed")),
    (["stdlib", "--val_fraction", "nan"], "--val_fraction nan must be"),
    (["stdlib", "--separator", "---"], "one argument. A value that begins with a dash is written --separator=V"),
    ([""], "A source without a name not found.\n  A source is a file, "),
    (["stdlib", "--max_token", "5"], "unrecognized arguments: --max_token"),
    ([], "required: SOURCE"),
])
def test_mistakes_on_the_command_line(tmp_path, capsys, monkeypatch, argv, words):
    """One message on stderr, exit code 2, nothing left in the folder."""
    monkeypatch.chdir(tmp_path)
    try:
        code = run(*argv, "--out", tmp_path / "out")
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err
    assert code == 2 and words in said and "Traceback" not in said
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_home_folder(tmp_path, vocabulary, monkeypatch):
    """~ is the user's home in every path, as a shell expands it where it can."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a", "own"):
        lines(tmp_path, f"{name}.jsonl", [prose((name, i), 20) for i in range(9)])
    os.rename(vocabulary, tmp_path / "words.json")
    try:
        assert run("~/a.jsonl", "--val", "~/own.jsonl", "--tokenizer=~/words.json", "--out=~/data/x") == 0
    finally:
        os.rename(tmp_path / "words.json", vocabulary)
    assert len(documents(tmp_path / "data/x", "train")) == len(documents(tmp_path / "data/x", "val")) == 9
    (tmp_path / "data_mix.py").write_text("sources = [dict(source='hf:~/texts', weight=1)]\nval = ['~/own.jsonl']")
    args = prepare.parse_args(["~/data_mix.py"])
    assert args.recipe[0]["source"] == f"hf:{tmp_path}/texts" and args.val == [f"{tmp_path}/own.jsonl"]
    assert not (tmp_path / "~").exists()


def test_a_bad_byte_leaves_nothing_in_the_way(tmp_path, vocabulary, capsys):
    """Bad input stops the run; repaired, or with --errors replace, the next command goes through in the same folder."""
    (tmp_path / "a.txt").write_bytes(prose(1, 500).encode() + b"\xff" + prose(2, 50).encode())
    argv = [tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", vocabulary]
    assert run(*argv) == 2 and "a.txt: byte" in capsys.readouterr().err
    assert run(*argv, "--errors", "replace") == 0
    assert "1 times U+FFFD" in capsys.readouterr().out and meta_of(tmp_path / "out")["sources"][0]["replaced"] == 1


@pytest.mark.skipif(os.name != "posix", reason="locales of POSIX")
def test_in_any_locale(tmp_path, vocabulary):
    """UTF-8 is read as UTF-8 and printed as well as the terminal can, whatever the locale says."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} é漢🙂"}) + "\n" for i in range(50)))
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252", "PYTHONCOERCECLOCALE": "0"}
    for argv in ([tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", vocabulary, "--val_fraction", "0.5"],
                 ["show", tmp_path / "out"]):
        done = subprocess.run([sys.executable, ROOT / "prepare.py", *argv], env=env, capture_output=True)
        assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0), done.stderr
    assert "é漢🙂" in documents(tmp_path / "out", "train")[0] and b"\\u6f22" in done.stdout


def test_help_names_everything_and_nothing_needs_torch(tmp_path, vocabulary):
    """--help describes every option; making, verifying and showing a set go without torch, most of the memory."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(i, 20)}) + "\n" for i in range(200)))
    code = ("import sys, prepare\nfor argv in (sys.argv[1:], ['verify', 'made'], ['show', 'made']):\n"
            "    assert prepare.main(argv) == 0\nassert 'torch' not in sys.modules\nprepare.main(['--help'])")
    done = subprocess.run([sys.executable, "-c", code, "a.jsonl", "--out", "made", "--tokenizer", str(vocabulary)],
                          capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for option in (*prepare.OPTIONS, "out", "workers", "text_key", "verify data/", "show data/", "hf:NAME"):
        assert option in done.stdout
