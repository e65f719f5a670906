"""The command: what its shards hold, that nothing but the input decides it, and that a run may die at any moment."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import prepare
from stack.data import sources, writer
from stack.data.batches import Batches, TokenData
from stack.data.tokenizer import Tokenizer, train_tokenizer

ROOT = Path(prepare.__file__).parent
WORDS = "the of and to in is was that for it with as his on be at by had are but from or have an they which one".split()


def prose(seed, n_words):
    words = random.Random(str(seed))
    return " ".join(words.choice(WORDS) + words.choice(["", "", "ing", ".\n", ","]) for _ in range(n_words))


def run(*args):
    return prepare.main([str(arg) for arg in args])


def read_shards(folder, split):
    """A reader that knows llm.c's layout and nothing of ours."""
    parts = []
    for path in sorted(Path(folder).glob(f"{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        assert header[0] == 20240520 and header[1] in (1, 2)
        ids = np.fromfile(path, {1: "<u2", 2: "<u4"}[header[1]], offset=1024)
        assert len(ids) == header[2]
        parts.append(ids.astype(np.int64))
    return np.concatenate(parts) if parts else np.array([], np.int64)


def documents(folder, split):
    """The texts of a split, in order."""
    tokenizer, ids = Tokenizer.load(folder), read_shards(folder, split)
    starts = np.flatnonzero(ids == tokenizer.boundary_id)
    assert not len(ids) or starts[0] == 0
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(ids, starts[1:])] if len(ids) else []


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def meta_of(folder):
    return json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A small tokenizer in a file: training one takes longer than all the rest, and rayon does not survive a fork."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([prose(0, 3000)], 400).save(path)
    return path


@pytest.fixture
def corpus(tmp_path):
    """300 short documents in one .jsonl and 30 files, one of them the duplicate of a line."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    docs = [prose(i, 5 + i % 40) for i in range(330)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in docs[:300]))
    for i, text in enumerate([*docs[300:329], docs[7]]):
        (folder / f"b_{i}.txt").write_text(text, newline="")
    return folder


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


# ---- a validation set of one's own


def lines(folder, name, texts):
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / name


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_killed_run_with_val_and_special(tmp_path, vocabulary):
    """A mixture, a validation set and special tokens are continued to the same bytes."""
    path = recipe(tmp_path, (2, 1), (20, 30), "max_tokens = 40_000\nspecial = ['<|end|>']")
    own = lines(tmp_path, "own.jsonl", [prose((0, n), 20) + "<|end|>" * (n % 2) for n in range(300)])
    argv = [str(path), "--val", str(own), "--tokenizer", str(vocabulary), "--shard_tokens", "9000", "--out"]
    assert run(*argv, tmp_path / "straight") == 0
    meta = meta_of(tmp_path / "straight")
    assert [source["specials"] for source in meta["sources"]] == [{}, {}, {"<|end|>": 150}]
    assert meta["sources"][0]["in_val"] > 20 and len(meta["mixture"]["shares"]) == 2
    assert len(documents(tmp_path / "straight", "val")) == 300
    for n in (2, 5, 9):
        assert killed_at("replace", n, [*argv, str(tmp_path / f"k{n}")])
        assert run(*argv, tmp_path / f"k{n}") == 0
        assert contents(tmp_path / f"k{n}") == contents(tmp_path / "straight")


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


# ---- death and continuation


def arguments(corpus, vocabulary, out):
    return [str(corpus), "--out", str(out), "--tokenizer", str(vocabulary), "--val_fraction", "0.1",
            "--shard_tokens", "1500"]


def killed_at(call, n, argv):
    """Run prepare in a process of its own that SIGKILLs itself before its n-th `call`; False if it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads: torch's and numpy's wait meanwhile
        pid = os.fork()
    if pid == 0:
        try:
            real, count = getattr(os, call), iter(range(1, 10**9))

            def counted(*args, **kwargs):
                if next(count) == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            setattr(os, call, counted)
            sys.stdout = sys.stderr = open(os.devnull, "w")
            os._exit(prepare.main(argv))
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_killed_at_any_moment(tmp_path, corpus, vocabulary, call, monkeypatch):
    """Killed before a sync, a rename, a removal, and again while continuing: the end is the same to the byte."""
    assert run(*arguments(corpus, vocabulary, tmp_path / "straight")) == 0
    want = contents(tmp_path / "straight")
    for n in range(1, 10**6, {"fsync": 5, "replace": 3, "unlink": 3}[call]):
        out = tmp_path / f"killed_{n}"
        argv = arguments(corpus, vocabulary, out)
        if not killed_at(call, n, argv):
            break
        killed_at(call, 1 + n % 5, argv)  # once more, soon after the start
        assert run(*argv) == 0
        assert contents(out) == want, f"killed before {call} {n}"
    assert n > 5


def test_killed_by_the_clock(tmp_path, corpus):
    """A real process, killed or interrupted while it trains the tokenizer or writes, a few times over."""
    common = [str(corpus), "--vocab_size", "600", "--shard_tokens", "1000"]
    assert run(*common, "--out", tmp_path / "straight") == 0
    kill_times = random.Random(5)
    for attempt in range(12):
        process = subprocess.Popen([sys.executable, ROOT / "prepare.py", *common, "--out", tmp_path / "killed"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(None if attempt == 11 else 0.5 + kill_times.random() * (0.8 if attempt < 4 else 20))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT if attempt % 2 else signal.SIGKILL)
            # 0: it ended just before; -SIGINT (a shell's 130): Python itself was still starting
            assert process.wait() in ((130, -signal.SIGINT, 0) if attempt % 2 else (-signal.SIGKILL, 0))
    assert process.returncode == 0
    killed, straight = contents(tmp_path / "killed"), contents(tmp_path / "straight")
    assert [name for name in straight if killed.get(name) != straight[name]] == [] and len(killed) == len(straight)


def test_finished_is_finished(tmp_path, corpus, vocabulary, capsys):
    """The same command again touches nothing; another one, or changed sources, is refused with the difference."""
    argv = arguments(corpus, vocabulary, tmp_path / "out")
    assert run(*argv) == 0
    before = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert run(*argv, "--workers", 3) == 0 and "nothing to do" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(*argv, "--max_tokens", 100) == 2
    assert "options max_tokens: not given then, 100 now" in capsys.readouterr().err
    (corpus / "b_0.txt").write_text("changed")
    assert run(*argv) == 2 and "names, sizes or dates" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "train_000000.bin").write_bytes(before["train_000000.bin"][:-2])
    os.utime(corpus / "b_0.txt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    assert run(corpus, "--out", tmp_path / "mine") == 2 and "notes" in capsys.readouterr().err


def test_what_made_a_set_is_part_of_it(tmp_path, corpus, vocabulary, capsys, monkeypatch):
    """Other code or another version of the tokenizer: never "nothing to do", and never half of a set of each; comments
    and docstrings are no code."""
    argv = arguments(corpus, vocabulary, tmp_path / "out")
    assert run(*argv) == 0
    before, real = contents(tmp_path / "out"), prepare.version
    source = (ROOT / "stack/data/filters.py").read_text(encoding="utf-8")
    same = [source.replace("def keep_web", "# more\n\n\ndef keep_web"), source + "\n# an end\n",
            source.replace('"""The quality filters', '"""Other words for them'), source.replace("Prose:", "Text:")]
    others = [source.replace("50 <= len(words)", "51 <= len(words)"), source.replace('"web": keep_web, ', ""),
              source.replace(r"\$", r"\$ ")]
    bare = prepare.bare_code(source)
    assert [prepare.bare_code(text) == bare for text in same] == [True, True, True, True]
    assert all(text != source for text in same + others)
    assert [prepare.bare_code(text) == bare for text in others] == [False, False, False]

    def other_version(name):
        return "0.0.1" if name == "tiktoken" else real(name)

    def other_code(source):
        return bare + "x"
    for name, function, words in (("version", other_version, rf"tiktoken {real('tiktoken')} then, 0\.0\.1 now"),
                                  ("bare_code", other_code, "the code in stack/data or prepare.py")):
        with monkeypatch.context() as patch:
            patch.setattr(prepare, name, function)
            capsys.readouterr()
            assert run(*argv) == 0
            said = capsys.readouterr().out
            assert "nothing to do" not in said and re.search(words, said) and f"delete {tmp_path / 'out'}" in said
            assert contents(tmp_path / "out") == before
        unfinished = arguments(corpus, vocabulary, tmp_path / name)
        if hasattr(os, "fork"):
            assert killed_at("fsync", 20, unfinished)
            half = contents(tmp_path / name)
            with monkeypatch.context() as patch:
                patch.setattr(prepare, name, function)
                assert run(*unfinished) == 2 and re.search(words, capsys.readouterr().err)
            assert contents(tmp_path / name) == half
            assert run(*unfinished) == 0 and contents(tmp_path / name) == before
    assert run(*argv) == 0 and "nothing to do" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_another_command_does_not_continue(tmp_path, corpus, vocabulary, capsys):
    """An unfinished folder is continued by its own command only, and by one process at a time."""
    argv = arguments(corpus, vocabulary, tmp_path / "out")
    assert killed_at("fsync", 20, argv)
    before = contents(tmp_path / "out")
    assert run(*argv, "--val_fraction", "0.2") == 2
    assert "options val_fraction: 0.1 then, 0.2 now" in capsys.readouterr().err and contents(tmp_path / "out") == before
    with writer.locked(tmp_path / "out"):
        assert run(*argv) == 2 and "by another process" in capsys.readouterr().err
    assert run(*argv) == 0


def test_full_disk(tmp_path, corpus, vocabulary):
    """No room for a file: a sentence with what is needed, exit code 2, and on with it when there is room."""
    argv = [sys.executable, str(ROOT / "prepare.py"), *arguments(corpus, vocabulary, tmp_path / "out")]

    def limit():  # the size of a file, as a stand-in for the size of a disk: it fails in the same calls
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    argv[-1] = "100000"
    done = subprocess.run(argv, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is full" in done.stderr and "needs about" in done.stderr and "same command again" in done.stderr
    assert subprocess.run(argv, capture_output=True).returncode == 0
    straight = arguments(corpus, vocabulary, tmp_path / "straight")
    assert run(*straight[:-1], "100000") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_too_small_a_disk_is_said_before(tmp_path, corpus, vocabulary, monkeypatch, capsys):
    """Where the size is known, so is what is needed."""
    import shutil
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert run(*arguments(corpus, vocabulary, tmp_path / "out")) == 2
    assert "1.0 kB are free" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


# ---- mixtures


def recipe(tmp_path, weights, sizes, extra=""):
    """A recipe over sources with documents of very different length."""
    lines = []
    for i, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        path = tmp_path / f"source_{i}.jsonl"
        path.write_text("".join(json.dumps({"text": prose((i, n), size)}) + "\n" for n in range(60_000 // size)))
        lines.append(f"    dict(source={str(path)!r}, weight={weight}),")
    path = tmp_path / "data_mix.py"
    path.write_text("sources = [\n" + "\n".join(lines) + f"\n]\n{extra}\n")
    return path


def test_tokens_follow_the_weights(tmp_path, vocabulary, capsys):
    """Not documents: in any one percent of the shards, whatever the lengths; reported, and true."""
    path = recipe(tmp_path, (60, 30, 10), (10, 40, 5), "val_fraction = 0.01")
    assert run(path, "--out", tmp_path / "out", "--tokenizer", vocabulary) == 0
    mixture = meta_of(tmp_path / "out")["mixture"]
    assert mixture["worst_points"] <= 4 and len(mixture["ended_with"]) == 1
    said = capsys.readouterr().out
    assert "points off the weights" in said and f"it ends here because {mixture['ended_with'][0]} does" in said
    assert [share for _, share in mixture["shares"]] == pytest.approx([0.6, 0.3, 0.1], abs=0.002)
    names = {}
    for i in range(3):
        for line in open(tmp_path / f"source_{i}.jsonl", encoding="utf-8"):
            names[json.loads(line)["text"]] = i
    ids, boundary = read_shards(tmp_path / "out", "train"), Tokenizer.load(tmp_path / "out").boundary_id
    starts = np.flatnonzero(ids == boundary)
    owners = np.repeat([names[text] for text in documents(tmp_path / "out", "train")], np.diff([*starts, len(ids)]))
    window, worst = mixture["window_tokens"], 0
    for i, weight in enumerate((0.6, 0.3, 0.1)):
        inside = np.cumsum(np.append(0, owners == i))
        worst = max(worst, np.abs((inside[window:] - inside[:-window]) / window - weight).max())
    assert abs(100 * worst - mixture["worst_points"]) < 2.5  # bins against every position
    records = meta_of(tmp_path / "out")["sources"]
    assert sum(record["tokens"] for record in records) == len(ids) + len(read_shards(tmp_path / "out", "val"))
    assert any(record["documents"] == 60_000 // size - record.get("duplicates", 0)
               for record, size in zip(records, (10, 40, 5), strict=True)), "it ends when a source does"


PHASES = "max_tokens = 40_000\nphases = [0.6, 0.9]\nval_fraction = 0.05"
SHARES = ([8, 1, 1], [2, 8, 0])  # of two sources, in three phases


def test_a_mixture_changes_by_phase(tmp_path, vocabulary, capsys):
    """Each phase begins after its share of the tokens, in a shard of its own, and has its own weights; training goes
    through them in their order, with shuffled windows only inside of each, and goes on alike from any position."""
    path = recipe(tmp_path, SHARES, (20, 30), PHASES)
    assert run(path, "--tokenizer", vocabulary, "--shard_tokens", 9000, "--out", tmp_path / "out") == 0
    assert "3 phases, from training tokens 0, " in capsys.readouterr().out
    meta, boundary = meta_of(tmp_path / "out"), Tokenizer.load(tmp_path / "out").boundary_id
    starts, total = meta["mixture"]["phases"], meta["splits"]["train"]["tokens"]
    assert starts == pytest.approx([0, 0.6 * total, 0.9 * total], abs=300) and meta["mixture"]["worst_points"] < 15
    shards = meta["splits"]["train"]["shards"]
    assert [shard.get("phase", 0) for shard in shards] == [0, 0, 0, 1, 1, 2]
    firsts = np.cumsum([0, *(shard["tokens"] for shard in shards)])
    assert [firsts[0], firsts[3], firsts[5]] == starts
    names = {json.loads(line)["text"]: i for i in range(2) for line in open(tmp_path / f"source_{i}.jsonl")}
    ids = read_shards(tmp_path / "out", "train")
    begins = np.flatnonzero(ids == boundary)
    owners = np.repeat([names.get(text, -1) for text in documents(tmp_path / "out", "train")],
                       np.diff([*begins, len(ids)]))
    for first, end, share in zip(starts, [*starts[1:], total], (0.8, 1 / 9, 1), strict=True):
        assert np.mean(owners[first:end] == 0) == pytest.approx(share, abs=0.03)
    for packing in ("stream", "best_fit"):
        data = TokenData(tmp_path / "out", "train", seq_len=32, packing=packing)
        a, b = data.phases[1:3]
        for epoch in (0, 1):
            order = data.order(epoch, seed=7)
            for part in (range(a), range(a, b), range(b, data.n_windows)):
                assert sorted(order[part.start:part.stop]) == list(part) != list(order[part.start:part.stop])
        assert "3 phases, of " in data.describe()
        made = Batches(data, seed=7, micro_batch_size=4)
        all_of_it = [next(made)[0] for _ in range(12)]
        later = Batches(TokenData(tmp_path / "out", "train", seq_len=32, packing=packing), seed=7, micro_batch_size=4,
                        start_seq=28)
        assert all((next(later)[0] == x).all() for x in all_of_it[7:])
    assert TokenData(tmp_path / "out", "val", seq_len=32).phases[0] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_phases_are_continued_exactly(tmp_path, vocabulary):
    """Killed before any rename, those at a change of phase among them, a run ends with the same bytes."""
    path = recipe(tmp_path, SHARES, (20, 30), PHASES)
    argv = [str(path), "--tokenizer", str(vocabulary), "--shard_tokens", "9000", "--out"]
    assert run(*argv, tmp_path / "straight") == 0
    for n in range(2, 100, 2):
        if not killed_at("replace", n, [*argv, str(tmp_path / f"k{n}")]):
            break
        assert run(*argv, tmp_path / f"k{n}") == 0
        assert contents(tmp_path / f"k{n}") == contents(tmp_path / "straight"), n
    assert n > 12


def test_phases_need_a_limit(tmp_path, vocabulary, capsys):
    path = recipe(tmp_path, SHARES, (20, 30), "phases = [0.6, 0.9]")
    with pytest.raises(SystemExit):
        prepare.parse_args([str(path), "--out", str(tmp_path / "out")])
    assert "--max_tokens" in capsys.readouterr().err
    assert prepare.parse_args([str(path), "--max_tokens", "1000", "--out", "x"]).mixtures == [
        (0, [0.8, 0.2]), (600, pytest.approx([1 / 9, 8 / 9])), (900, [1.0, 0.0])]


def test_long_mixture_keeps_within_two_points():
    """At the size of real windows the deviation is far below what is allowed, for documents of web-like lengths."""
    weights, lengths = [0.7, 0.15, 0.1, 0.05], random.Random(0)
    records, mixture = [{"train": 0, "done": False} for _ in weights], writer.Mixture(weights, None)
    for _ in range(40_000):
        i = writer.next_source(records, weights)
        n = min(5000, int(lengths.lognormvariate(6.5, 1)) + 1)
        records[i]["train"] += n
        mixture.add(i, n, True)
    report = mixture.report(list("abcd"))
    assert report["worst_points"] < 2 and report["window_tokens"] < 500_000 and len(mixture.bins["full"]) < mixture.BINS


@pytest.mark.parametrize("seed", range(12))
def test_how_far_a_mixture_strays_is_bounded_by_its_longest_document(seed):
    """For any weights and lengths, one source with books included: not by chance but by the rule writer.py states."""
    random, n = np.random.default_rng(seed), 2 + seed % 4
    weights = random.dirichlet(np.ones(n)).tolist()
    sizes = np.exp(random.uniform(3, 9, n))
    records, mixture = [{"train": 0, "done": False} for _ in weights], writer.Mixture(weights, None)
    while sum(record["train"] for record in records) < 2_000_000:
        i = writer.next_source(records, weights)
        pieces = [int(x) + 1 for x in random.lognormal(0, 1, random.integers(1, 4)) * sizes[i]]
        for at, length in enumerate(pieces):
            mixture.add(i, length, at == 0)
        records[i]["train"] += sum(pieces)
    report = mixture.report([str(i) for i in range(n)])
    assert report["worst_points"] <= 2 * report["longest_document"] / report["certain_length"] + 0.01


def test_a_mixture_that_cannot_hold_says_so(tmp_path, vocabulary, capsys):
    """Books in a small set: said, with the length that would hold; with documents of that length it does.  No warning:
    training draws windows from all of the set, or of a phase."""
    said = []
    for folder, size in (("long", 9000), ("short", 12)):
        (tmp_path / folder).mkdir()
        path = recipe(tmp_path / folder, (50, 50), (size, 12), "val_fraction = 0")
        assert run(path, "--out", tmp_path / folder / "out", "--tokenizer", vocabulary) == 0
        said.append((capsys.readouterr().out, meta_of(tmp_path / folder / "out")["mixture"]))
    (long, mixture), (short, short_mixture) = said
    assert mixture["worst_points"] > 10 and "shuffles windows" in long and "WARNING" not in long
    assert f"longest document has {mixture['longest_document']:,} tokens; with none above " in long
    assert f"above {mixture['certain_length']:,}, or a set " in long and mixture["longest_document"] > 9000
    assert short_mixture["longest_document"] <= short_mixture["certain_length"]
    assert short_mixture["worst_points"] <= 2 and "shuffles" not in short


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_killed_mixture(tmp_path, vocabulary):
    """Sources, their order and the report are the same after a kill."""
    path = recipe(tmp_path, (2, 1), (20, 30), "shard_tokens = 30000\nmax_tokens = 60_000\nerrors = 'replace'")
    argv = [str(path), "--tokenizer", str(vocabulary), "--out"]
    assert run(*argv, tmp_path / "straight") == 0
    for n in range(1, 100):
        killed = killed_at("replace", n, [*argv, str(tmp_path / f"k{n}")])
        if n == 4:
            with pytest.raises(FileNotFoundError, match=f"continues: python prepare.py {path} .* --out .*/k4$"):
                TokenData(tmp_path / "k4", "train", seq_len=8)
        assert run(*argv, tmp_path / f"k{n}") == 0
        assert contents(tmp_path / f"k{n}") == contents(tmp_path / "straight")
        if not killed:
            break
    assert n > 5


@pytest.mark.parametrize("text, words", [
    ("sources = [dict(source='a', weight=1)]\nmax_token = 5", "'max_token'.* Did you mean max_tokens?"),
    ("sources = [dict(source='a', wait=1)]", "source 1 has 'wait'.* Did you mean weight?"),
    ("sources = [dict(source='a')]", "a weight above 0"),
    ("sources = []", "a weight above 0"),
    ("sources = [dict(source='a', weight=[0, 0])]\nphases = [0.5]", "a weight above 0"),
    ("sources = [dict(source='a', weight=[1, 2])]", "one for each of 1 phase"),
    ("sources = [dict(source='a', weight=[1, 0])]\nphases = [0.5]", "in phase 2 no source has a weight"),
    ("sources = [dict(source='a', weight=1)]\nphases = [0.9, 0.5]", "a list of rising shares"),
    ("sources = [dict(source='a', weight=1)]\nphases = 0.5", "a list of rising shares"),
    ("sources = [dict(source='absent', weight=1)]", "absent not found"),
    ("sources = [dict(source='stdlib', weight=1, filter='poems')]", "no filter 'poems'"),
    ("sources = [dict(source='a', weight=1)]\nvocab_size = 'many'", "invalid count value: 'many'"),
    ("sources = [dict(source='a', weight=1)]\n1 / 0", "ZeroDivisionError"),
    ("sources = [dict(source='a', weight='3')]", "source 1 has weight='3'; a number above 0"),
    ("sources = [dict(source='a', weight=float('nan'))]", "source 1 has weight=nan; a number above 0"),
    ("sources = [dict(source='a', weight=1), dict(source=5, weight=1)]", "source 2 has source=5; a string"),
    ("sources = [dict(source='a', weight=1, chat='no')]", "source 1 has chat='no'; True or False"),
    ("sources = 7", "sources is 7; a list of dict"),
    ("sources = ['notes/']", r"sources is \['notes/'\]; a list of dict"),
    ("sources: list = 'notes/'", "sources is 'notes/'; a list of dict"),
    ("if 0: pass\nsources: list", "sources is None; a list of dict"),
    ("seed, sources = 1, 7", "sources is 7; a list of dict"),
    ("seed = 1\nsources = [dict(source='a', weight=1)\n", "data_x.py, line 2: .* never closed"),
    ("sources: list = [\n", "data_x.py, line 1: .* never closed"),
    ("seed, sources = 1, [\n", "data_x.py, line 1: .* never closed"),
])
def test_wrong_recipes(tmp_path, capsys, text, words):
    """A name that is not known, or a value of the wrong kind, is refused before anything is read."""
    (tmp_path / "data_x.py").write_text(text)
    try:
        code = run(tmp_path / "data_x.py", "--out", tmp_path / "out")
    except SystemExit as error:
        code = error.code
    import re
    assert code == 2 and re.search(words, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_recipe_or_text(tmp_path):
    """A .py file is a recipe if it assigns sources, and a document otherwise; flags win over what a recipe says."""
    (tmp_path / "data_x.py").write_text("sources = [dict(source='stdlib', weight=3)]\nval_fraction = 0.2\nseed = 5\n")
    args = prepare.parse_args([str(tmp_path / "data_x.py"), "--seed", "6"])
    assert args.val_fraction == 0.2 and args.seed == 6 and args.recipe == [dict(source="stdlib", weight=3)]
    assert args.out == "data/x"
    for text in ("def f(sources):\n    return sources\n", "x[sources] = 1\n", "print 'sources = 1'\n sources = 2\n"):
        (tmp_path / "code.py").write_text(text)
        assert prepare.parse_args([str(tmp_path / "code.py")]).recipe == [dict(source=str(tmp_path / "code.py"))]
    with pytest.raises(SystemExit):
        prepare.parse_args([str(tmp_path / "data_x.py"), "stdlib"])
    for path in (ROOT / "configs").glob("data_*.py"):
        args = prepare.parse_args([str(path)])
        assert all(source["source"] for source in args.recipe)
        assert "stack100m" not in path.name or args.max_tokens > 10**9


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
    (["stdlib", "--vocab_size", "2.5"], "invalid count value: '2.5'"),
    (["stdlib", "--vocab_size", "500", "--tokenizer", "gpt2"], "--tokenizer has its own"),
    (["stdlib", "--tokenizer", "no_such_encoding"], "no encoding 'no_such_encoding'"),
    (["stdlib", "--tokenizer", "no/such/file.json"], "no/such/file.json not found"),
    (["stdlib", "--val_fraction", "1"], "--val_fraction 1.0 must be"),
    (["stdlib", "--val", "b.txt", "--val_fraction", "0.1"], "--val names texts of its own"),
    (["stdlib", "--special", "<|no|>"], "has no such token"),
    (["stdlib", "--workers", "0"], "--workers 0 is out of range"),
    (["stdlib", "--shard_tokens", "4e9"], "--shard_tokens 4000000000 is out of range"),
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
