"""Recipes: what a mixture holds anywhere in it, its phases, and which files are recipes at all."""

import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from prepared import contents, documents, killed_at, meta_of, read_shards, recipe, run

import prepare
from stack.data import writer
from stack.data.batches import Batches, TokenData
from stack.data.tokenizer import Tokenizer

ROOT = Path(prepare.__file__).parent


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


def test_a_mixture_of_one_source(tmp_path, vocabulary):
    """It is the data set that the source makes without a recipe; in phases, which change nothing of its text, too."""
    path = recipe(tmp_path, (3,), (20,), "max_tokens = 20_000\nval_fraction = 0.05")
    argv = ["--out", tmp_path / "plain", "--tokenizer", vocabulary, "--max_tokens", "20_000", "--val_fraction", "0.05"]
    assert run(tmp_path / "source_0.jsonl", *argv) == 0
    assert run(path, "--out", tmp_path / "one", "--tokenizer", vocabulary) == 0
    path.write_text(path.read_text() + "phases = [0.5]\n")
    assert run(path, "--out", tmp_path / "phases", "--tokenizer", vocabulary) == 0
    for split in ("train", "val"):
        ids = read_shards(tmp_path / "plain", split).tolist()
        assert ids and ids == read_shards(tmp_path / "one", split).tolist()
        assert ids == read_shards(tmp_path / "phases", split).tolist()
    assert meta_of(tmp_path / "one")["mixture"] is None
    assert meta_of(tmp_path / "phases")["mixture"]["shares"] == [[str(tmp_path / "source_0.jsonl"), 1.0]]


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
    ("sources = [dict(source='a', weight=1), dict(source='b')]", "source 2 has no weight; a number above 0"),
    ("sources = [dict(source='a', weight=0)]", "source 1 has weight=0; a number above 0"),
    ("sources = [dict(weight=1)]", r"source 1 has no name: \{'weight': 1\}"),
    ("sources = []", r"sources is \[\]; a list of dict"),
    ("sources = [dict(source='a', weight=[0, 0])]\nphases = [0.5]", r"source 1 has weight=\[0, 0\]; a number above 0"),
    ("sources = [dict(source='a', weight=[])]", r"source 1 has weight=\[\]; a number above 0"),
    ("sources = [dict(source='a', weight=[1, 2])]", "one for each of 1 phase"),
    ("sources = [dict(source='a', weight=[1, 0])]\nphases = [0.5]", "in phase 2 no source has a weight"),
    ("sources = [dict(source='a', weight=1)]\nphases = [0.9, 0.5]", "a list of rising shares"),
    ("sources = [dict(source='a', weight=1)]\nphases = 0.5", "a list of rising shares"),
    ("sources = [dict(source='absent', weight=1)]", "absent not found"),
    ("sources = [dict(source='stdlib', weight=1, filter='poems')]", "no filter 'poems'.*\n.* math, .*filters.py"),
    ("sources = [dict(source='a', weight=1, filter=lambda text: True)]", "filter=<.* math or .*filters.py is needed"),
    *((f"sources = [dict(source='a', weight=1)]\n{given}", rf"data_x.py has {given[:9]}.*; {needed} is needed")
      for given, needed in [("vocab_size = 'many'", "a whole number"), ("vocab_size = '300'", "a whole number"),
                            ("vocab_size = 300.5", "a whole number"), ("max_tokens = float('inf')", "a whole number"),
                            ("workers = True", "a whole number"), ("seed = None", "a whole number"),
                            ("val_fraction = '0.1'", "a number"), ("val_fraction = float('nan')", "a number"),
                            ("skip_bad = 'False'", "True or False"), ("chat = 1", "True or False"),
                            ("errors = 'ignore'", "'strict' or 'replace'"), ("text_key = 3", "a string"),
                            ("val = 'own.txt'", r"a list of strings, as \['own.txt'\],"),
                            ("special = '<|user|>'", r"a list of strings, as \['<\|user\|>'\],"),
                            ("special = ['<|a|>', 5]", r"a list of strings, as \['<\|a\|>', '5'\],")]),
    ("sources = [dict(source='a', weight=1)]\n1 / 0", "ZeroDivisionError"),
    ("sources = [dict(source='a', weight='3')]", "source 1 has weight='3'; a number above 0"),
    ("sources = [dict(source='a', weight=float('nan'))]", "source 1 has weight=nan; a number above 0"),
    ("sources = [dict(source='a', weight=1), dict(source=5, weight=1)]", "source 2 has source=5; a string"),
    ("sources = [dict(source='a', weight=1, chat='no')]", "source 1 has chat='no'; True or False"),
    ("sources = [dict(source='a', weight=1, chat=True, text_key='talk')]", "1 is of conversations .* has text_key"),
    ("chat = True\nsources = [dict(source='a', weight=1, chat=False, text_key='x'), dict(source='b', weight=1, "
     "separator='x')]", "source 2 is of conversations .* has separator"),
    ("sources = 7", "sources is 7; a list of dict"),
    ("sources = ['notes/']", r"sources is \['notes/'\]; a list of dict"),
    ("sources: list = 'notes/'", "sources is 'notes/'; a list of dict"),
    ("if 0: pass\nsources: list", "sources is None; a list of dict"),
    ("seed, sources = 1, 7", "sources is 7; a list of dict"),
    ("seed = 1\nsources = [dict(source='a', weight=1)\n", "data_x.py, line 2: .* never closed"),
    ("sources: list = [\n", "data_x.py, line 1: .* never closed"),
    ("seed, sources = 1, [\n", "data_x.py, line 1: .* never closed"),
    ("source = [dict(source='a', weight=1)]", "assigns source as a recipe does, but no sources. Is source meant"),
    ("datasets = [dict(weight=1, source='a')]\nseed = 1", "Is datasets meant to be sources"),
    ("datasets: list = [dict(source=name) for name in 'ab']", "assigns datasets as"),
    ("val_fraction = 0.1\nvocab_size = 300", "assigns val_fraction, vocab_size as a recipe does, but no sources"),
])
def test_wrong_recipes(tmp_path, capsys, text, words):
    """A name that is not known, or a value of the wrong kind, is refused before anything is read."""
    (tmp_path / "data_x.py").write_text(text)
    try:
        code = run(tmp_path / "data_x.py", "--out", tmp_path / "out")
    except SystemExit as error:
        code = error.code
    assert code == 2 and re.search(words, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_recipe_or_text(tmp_path, capsys):
    """A .py file is a recipe if it assigns sources, and a document otherwise; flags win over what a recipe says."""
    (tmp_path / "data_x.py").write_text("sources = [dict(source='stdlib', weight=3)]\nval_fraction = 0.2\nseed = 5\n")
    args = prepare.parse_args([str(tmp_path / "data_x.py"), "--seed", "6"])
    assert args.val_fraction == 0.2 and args.seed == 6 and args.recipe == [dict(source="stdlib", weight=3)]
    assert args.out == "data/x"
    for text in ("def f(sources):\n    return sources\n", "x[sources] = 1\n", "print 'sources = 1'\n sources = 2\n"):
        (tmp_path / "code.py").write_text(text)
        assert prepare.parse_args([str(tmp_path / "code.py")]).recipe == [dict(source=str(tmp_path / "code.py"))]
    (tmp_path / "code.py").write_text("seed, out, errors = 1, 'x', []\nsource = 'text'\nval = dict(source=source)\n")
    assert prepare.parse_args([str(tmp_path / "code.py")]).recipe == [dict(source=str(tmp_path / "code.py"))]
    capsys.readouterr()
    for text in ("vocab_size = 50257\n", "resources = ['a']\n", "pairs = [{'source': 'a', 'target': 'b'}]\nseed = 1\n"):
        (tmp_path / "code.py").write_text(text)
        assert prepare.parse_args([str(tmp_path / "code.py")]).recipe == [dict(source=str(tmp_path / "code.py"))]
        assert capsys.readouterr().out == f"{tmp_path}/code.py is read as text: it assigns no sources\n"
    (tmp_path / "code.py").write_text("vocab_size = 50257\nmax_tokens = 5\n")
    assert len(prepare.parse_args([str(tmp_path / "code.py"), "stdlib"]).recipe) == 2
    (tmp_path / "data_y.py").write_text("sources = (dict(source='stdlib', weight=3),)\n"
                                        "max_tokens = 1e9\nseed = 5.0\nval = ('a.txt', 'b.txt')\nskip_bad = True\n")
    args = prepare.parse_args([str(tmp_path / "data_y.py")])
    assert (args.max_tokens, args.seed, args.val, args.skip_bad) == (10**9, 5, ["a.txt", "b.txt"], True)
    (tmp_path / "data_z.py").write_text("sources = [dict(source='stdlib', weight=3, text_key='body')]\n")
    assert not prepare.parse_args([str(tmp_path / "data_z.py")]).chat
    with pytest.raises(ValueError, match="source 1 is of conversations .* has text_key"):
        prepare.parse_args([str(tmp_path / "data_z.py"), "--chat"])
    with pytest.raises(SystemExit):
        prepare.parse_args(["stdlib", str(tmp_path / "data_x.py")])
    assert f"{tmp_path}/data_x.py assigns sources, so it is a recipe" in (said := capsys.readouterr().err)
    assert "To read it as text name its folder, or a glob" in said
    for text in ("sources = missing", "sources = 7"):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(ValueError, match="\n  .*To read it as text name its folder"):
            prepare.parse_args([str(tmp_path / "mine.py")])
    for path in (ROOT / "configs").glob("data_*.py"):
        args = prepare.parse_args([str(path)])
        assert all(source["source"] for source in args.recipe)
        assert "stack100m" not in path.name or args.max_tokens > 10**9
