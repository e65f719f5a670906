"""The command may die at any moment, or find a full disk: called again it goes on, to the same bytes."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prepared import arguments, contents, documents, killed_at, lines, meta_of, prose, recipe, run

import prepare
from stack.data import writer

ROOT = Path(prepare.__file__).parent


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


def test_what_is_there_is_what_was_written(tmp_path, monkeypatch):
    """Shards, whole and begun, count as there; the tokenizer, which is written first, is none of the data."""
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    job = SimpleNamespace(folder=tmp_path, vocab_size=320, weights=None, max_bytes=None, max_tokens=None,
                          sources=[SimpleNamespace(text_bytes=lambda: 10**6)], shard_tokens=10**4)
    (tmp_path / "tokenizer.json").write_bytes(bytes(5000))
    missing, said = prepare.disk_needs(job)
    assert "and has" not in said
    (tmp_path / "train_000000.bin").write_bytes(bytes(2000))
    (tmp_path / "train_000001.part").write_bytes(bytes(1000))
    less, said = prepare.disk_needs(job)
    assert missing - less == 3000 and "and has 3.0 kB;" in said


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
