"""What tests of prepare.py share: text, the command in this process or killed in one of its own, and what it made."""

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

import prepare
from stack.data.tokenizer import Tokenizer

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


def lines(folder, name, texts):
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / name


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
