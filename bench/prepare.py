"""Encoding and tokenizer training, over what prepare.py would read: `python -m bench prepare`."""

import contextlib
import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from bench.measure import choose, reset_peak, run_rows, seconds, spread
from stack.config import ROOT
from stack.data.sources import Reader, Source
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer, train_tokenizer

FLAGS = {
    "--text": dict(nargs="+", default=["stdlib"], help="files, folders, globs (the interpreter's standard library)"),
    "--vocab": dict(type=int, default=32768, help="ids of the tokenizer (32768)"),
    "--spaceless": dict(type=float, default=200, help="MB of text without spaces in the last row (200)"),
}
POOL, RUST, SPACELESS = "tiktoken in a bare pool", "bare rustbpe", "ours: train_tokenizer spaceless"
ROWS = {POOL: POOL, "ours: encode_documents": POOL, "ours: prepare.py, whole": POOL,  # row -> what it is held against
        RUST: RUST, "ours: train_tokenizer": RUST, SPACELESS: SPACELESS}  # nothing bare can train on that


def documents(args) -> list[str]:
    return [piece.text for name in args.text for piece in Reader(Source(name), errors="replace", skip_bad=True)]


def spaceless(mb):
    """Documents of random Chinese characters, a comma after every 5 to 20: hardly a piece comes twice."""
    draw, size = random.Random(0), 0
    while size < mb * 1e6:
        runs = (draw.choices(range(0x4E00, 0x4E00 + 3000), k=draw.randint(5, 20)) for _ in range(400))
        text = "\uff0c".join("".join(map(chr, run)) for run in runs)
        size += len(text.encode())
        yield text


def row(args, device) -> dict:
    """All of the documents are held in memory (but for the command, and for the row without spaces)."""
    import rustbpe
    import tiktoken
    if args.row == SPACELESS:
        peak, start = reset_peak(device), time.perf_counter()
        train_tokenizer(spaceless(args.spaceless), args.vocab)  # once: it is there for its memory
        return result(args, [time.perf_counter() - start], args.spaceless, peak_mib=peak())
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
    calls = dict(zip(ROWS, (pool, ours, command, rust, lambda: train_tokenizer(texts, args.vocab)), strict=False))
    with contextlib.redirect_stderr(io.StringIO()):  # a small text has too few pairs, and says so every time
        peak = reset_peak(device)
        times = seconds(calls[args.row], device, args.repeats)
    mb = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    # the command's memory is another process's
    return result(args, times, mb, **({} if "whole" in args.row else {"peak_mib": peak()}))


def result(args, times, mb, **more) -> dict:
    return dict(row=args.row, **spread(times), mb=mb, mb_per_s=mb / statistics.median(times), **more)


def run(args, device) -> bool:
    rows, speeds = choose(args, list(ROWS)), {}

    def derive(x):
        speeds[x["row"]] = x["mb_per_s"]
        x["ratio"] = x["mb_per_s"] / speeds.get(ROWS[x["row"]], x["mb_per_s"])

    def table(results):
        return f"Text to ids, then to {args.vocab} ids, of {' '.join(args.text)}, median of {args.repeats}", {
            "": "row", "seconds": "seconds", "MB": "mb", "MB/s": "mb_per_s", "x the bare one": "ratio",
            "peak MiB": "peak_mib"}, results
    train_tokenizer(documents(args), args.vocab).save(args.folder)
    return run_rows(args, device, rows, table, derive, vocab=args.vocab)
