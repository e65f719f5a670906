"""Encoding and tokenizer training, over what prepare.py would read: `python -m bench prepare`."""

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from bench.measure import ROOT, choose, run_rows, seconds, spread
from stack.data.sources import Reader, Source
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer, train_tokenizer

FLAGS = {
    "--text": dict(nargs="+", default=["stdlib"], help="files, folders, globs (the interpreter's standard library)"),
    "--vocab": dict(type=int, default=32768, help="ids of the tokenizer (32768)"),
}
POOL, RUST = "tiktoken in a bare pool", "bare rustbpe"
ROWS = {POOL: POOL, "ours: encode_documents": POOL, "ours: prepare.py, whole": POOL,  # row -> what it is held against
        RUST: RUST, "ours: train_tokenizer": RUST}


def documents(args) -> list[str]:
    return [piece.text for name in args.text for piece in Reader(Source(name), errors="replace", skip_bad=True)]


def row(args, device) -> dict:
    """All of the documents are held in memory (but for the command)."""
    import rustbpe
    import tiktoken
    words, workers, texts = Tokenizer.load(args.folder), os.cpu_count(), documents(args)
    bare = tiktoken.Encoding("bare", pat_str=words.pattern, mergeable_ranks=words.ranks, special_tokens={})

    def pool():
        with ThreadPoolExecutor(workers) as threads:
            for _ in threads.map(lambda text: bare.encode_to_numpy(text, disallowed_special=()), texts):
                pass

    def ours():
        for _ in words.encode_documents(texts, workers):
            pass

    def command():
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([sys.executable, ROOT / "prepare.py", *args.text, "--tokenizer", args.folder, "--errors",
                            "replace", "--skip_bad", "--out", f"{out}/data"], check=True, capture_output=True)

    def rust():
        rustbpe.Tokenizer().train_from_iterator(iter(texts), args.vocab - len(SPECIALS), pattern=PATTERN)
    calls = dict(zip(ROWS, (pool, ours, command, rust, lambda: train_tokenizer(texts, args.vocab)), strict=True))
    with contextlib.redirect_stderr(io.StringIO()):  # a small text has too few pairs, and says so every time
        times = seconds(calls[args.row], device, args.repeats)
    mb = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    return dict(row=args.row, **spread(times), mb=mb, mb_per_s=mb / statistics.median(times))


def run(args, device) -> bool:
    rows, speeds = choose(args, list(ROWS)), {}

    def derive(x):
        speeds[x["row"]] = x["mb_per_s"]
        x["ratio"] = x["mb_per_s"] / speeds.get(ROWS[x["row"]], x["mb_per_s"])

    def table(results):
        return (f"Text to ids, then text to {args.vocab} ids, {results[0]['mb']:.1f} MB of {' '.join(args.text)}, "
                f"median of {args.repeats}"), {
            "": "row", "seconds": "seconds", "MB/s": "mb_per_s", "x the bare one": "ratio"}, results
    train_tokenizer(documents(args), args.vocab).save(args.folder)
    return run_rows(args, device, rows, table, derive, vocab=args.vocab)
