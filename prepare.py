"""Turn text into a data set: train the tokenizer, encode, write shards.

    python prepare.py stdlib --out data/demo --vocab_size 4096
    python prepare.py books/ notes.txt "logs/*.jsonl.gz" --out data/mine
    python prepare.py hf:HuggingFaceFW/fineweb-edu:sample-10BT --max_tokens 10e9 --out data/edu
    python prepare.py configs/data_stack100m.py --out data/stack100m
    python prepare.py chat.jsonl --chat --tokenizer out/demo --out data/chat
    python prepare.py verify data/mine
    python prepare.py show data/mine --doc 17

A SOURCE is stdlib (the running Python's own library: 12 MB of text on every machine), a file, a folder, a glob in
quotes, or hf:NAME[@REVISION][:CONFIG][:SPLIT], streamed from Hugging Face (meta.json keeps the commit it came from).
Or the one SOURCE is a recipe: a .py file that assigns `sources`, a list of dict(source=..., weight=..., filter=...),
and any of the options below.  With phases = [0.9] the mixture changes after 0.9 of max_tokens, and a weight may be a
list, [70, 30], of one for each phase; training goes through the phases in their order.

A .txt, .md or .py file is one document, or several with --separator between them; so is an object in .json, .jsonl and
.ndjson, a row of .csv, .tsv, .parquet, .arrow and of a data set on Hugging Face.  .gz, .zst, .bz2 and .xz are unpacked,
.tar and .zip opened.  The summary says what was read as what, and what was found and passed over.
Between train and val a long document is divided into parts, and each part counts as a document of its split.
A killed run is continued by the same command; a finished one is left as it is.
verify checks every checksum of a set and prints its statistics; show decodes one document.

How it works
------------
Documents are read (sources.py), encoded by a pool of threads (tokenizer.py) and written by one loop (writer.py), which
decides everything, one document after the other.  The threads turn text into ids and nothing else, so their number
changes nothing, and nothing but a few pieces of text per thread is in memory.

Every document goes to train or val by the hash of its beginning, and a long one gives val a part of itself, so that
more text never moves any from val to train (parts.py).  --val names texts that are val instead.

Rejected: all ids in one array (nanoGPT's way; it ends where memory does); a pool of processes (they copy text in and
ids out, which tiktoken's threads share, and on Windows and macOS each starts Python anew).
"""

import argparse
import ast
import errno
import hashlib
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import tokenize
from importlib.metadata import version
from itertools import chain, tee
from pathlib import Path

from stack.config import Parser, expand, explain

try:
    from stack.data import chat
    from stack.data.parts import HELD, of_val, parts
    from stack.data.recipe import AS_TEXT, is_recipe, mixtures, read_recipe
    from stack.data.shards import read_header, read_meta, token_blocks, write_meta
    from stack.data.sources import UNKNOWN, Reader, Source
    from stack.data.tokenizer import BOUNDARY, SPECIALS, Tokenizer, special_pattern, train_tokenizer
    from stack.data.verify import human, left_out, said_of, show, summary, verify
    from stack.data.writer import Output, check_same, clean, fresh, interleaved, locked, start
except ModuleNotFoundError as error:
    from stack.config import not_installed
    not_installed(error)

OPTIONS = ("vocab_size", "tokenizer", "val_fraction", "max_bytes", "max_tokens", "errors", "skip_bad", "shard_tokens",
           "tokenizer_bytes", "seed", "special", "phases")  # what decides the bytes of the shards, beside the sources
MOST_BITS = {"vocab_size": 31, "shard_tokens": 31, "workers": 12, "tokenizer_bytes": 63, "max_tokens": 63,
             "max_bytes": 63}
BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN = 4, 8  # for guesses about disk space
LEFTOVERS = ("*.part", "progress.json*", "seen.bin")  # of a run, when meta.json is there
OURS = (*LEFTOVERS, "train_*.bin*", "val_*.bin*", "tokenizer.json*", "meta.json*")
ONLY_READ = ("batches.py", "verify.py", "__init__.py")  # of stack/data: they decide nothing that is written
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# ---- the command line


def parse_args(argv):
    parser = Parser(prog="prepare.py", usage="python prepare.py SOURCE... --out data/NAME [options]",
                    description=__doc__.split("How it works")[0])
    add, number = parser.add_argument, dict(type=count, metavar="N")
    add("source", nargs="+", metavar="SOURCE", help="stdlib, files, folders, globs, hf:..., or one recipe")
    add("--out", metavar="FOLDER", help="folder of the data set (default: data/ and the name of the source)")
    add("--vocab_size", **number, help="ids of the tokenizer to be trained, special ones included (default 32768)")
    add("--tokenizer", default="", metavar="NAME",
        help="use this one instead: gpt2 or another encoding of tiktoken; a data set, a run, or the tokenizer.json of "
             "one; hf:FOLDER with Hugging Face's tokenizer.json")
    add("--tokenizer_bytes", **number, default=200_000_000, help="train it on a sample of this size (200e6)")
    add("--val_fraction", type=float, metavar="X", help="share of the text held out for validation (0.01)")
    add("--val", nargs="+", default=[], metavar="SOURCE",
        help="validate on these instead; documents that stand in them are left out of training")
    add("--special", nargs="+", default=[], metavar="NAME",
        help="names of the tokenizer's special tokens, as '<|user|>', that are such in the text (none: all is text)")
    add("--max_tokens", **number, help="stop at so many tokens, for example 10e9 (default: all)")
    add("--max_bytes", **number, help="stop at so much text (default: all)")
    add("--text_key", default="text", metavar="KEY",
        help="the key or column with the text in .json, .csv, .parquet, hf: and the like; a.b is b inside of a (text)")
    add("--separator", default="", metavar="TEXT",
        help="what stands between the documents of a text file, as '<|endoftext|>'; \\n in it is a line end (none)")
    add("--chat", action="store_true", help='records are conversations, {"messages": [{"role", "content"}]} or '
        '{"conversations": [{"from", "value"}]}, to learn the assistant\'s part of; of stdlib and .py files: questions '
        "about what is in them")
    add("--errors", choices=("strict", "replace"), default="strict",
        help="at bytes that are no UTF-8 stop, or put U+FFFD there and count (strict)")
    add("--skip_bad", action="store_true", help="leave broken records and files out instead of stopping at them")
    add("--shard_tokens", **number, default=100_000_000, help="tokens per file (100e6)")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--workers", **number, default=cpus, help="threads that encode; changes only the speed (all CPUs)")
    add("--seed", type=int, metavar="N", default=1337, help="of the tokenizer's sample (1337)")
    parser.set_defaults(phases=[])
    argv = [re.sub("^--[a-z-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in argv]
    args = parser.parse_args(argv)
    args.source = list(map(expand, args.source))
    args.recipe = [dict(source=source) for source in args.source]
    alone = len(args.source) == 1
    if path := next((source for source in args.source if is_recipe(source, OPTIONS if alone else ())), None):
        if not alone:
            parser.error(f"{path} assigns sources, so it is a recipe, which stands alone. {AS_TEXT}")
        recipe, options = read_recipe(path, {action.dest: action for action in parser._actions
                                             if action.dest not in ("help", "source")})
        parser.set_defaults(**{key: value if isinstance(value, bool | list) else str(value)
                               for key, value in options.items()})
        args = parser.parse_args(argv, argparse.Namespace(recipe=recipe))  # once more: flags win over the recipe
        for number, source in enumerate(args.recipe, 1):
            if source.get("chat", args.chat) and (of_text := {"text_key", "separator"} & {*source}):
                raise ValueError(f"{path}: source {number} is of conversations (chat) and has {min(of_text)}, which is "
                                 "for text.\n  Leave it out, or give this source chat=False.")
    elif alone and not args.chat and args.source[0].endswith(".py") and os.path.isfile(args.source[0]):
        print(f"{args.source[0]} is read as text: it assigns no sources")
    if args.tokenizer and args.vocab_size:
        parser.error("--vocab_size is for a tokenizer that is trained; --tokenizer has its own")
    if not args.tokenizer and args.vocab_size is None:
        args.vocab_size = 32768
    if args.val and args.val_fraction:
        parser.error("--val_fraction is for text that is held out; --val names texts of its own")
    if args.chat and (args.text_key != "text" or args.separator or args.special):
        parser.error("--text_key, --separator and --special are for text; in a conversation all that is typed is text")
    if args.val_fraction is None:
        args.val_fraction = 0.0 if args.val else 0.01
    args.special, args.val = sorted(set(args.special)), list(map(expand, args.val))
    args.argv = argv
    args.out, args.tokenizer = args.out and expand(args.out), expand(args.tokenizer)
    args.recipe = [{**source, "source": expand(source["source"])} for source in args.recipe]
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction} must be from 0 to below 1; 0.01 is one percent")
    for key, bits in MOST_BITS.items():
        if (value := getattr(args, key)) is not None and not 1 <= value < 2**bits:
            parser.error(f"--{key} {value} is out of range: at least 1, and below 2**{bits}")
    if args.out is None:
        name = Path(args.source[0].removeprefix("hf:").split(":")[0]).name.split(".")[0].removeprefix("data_")
        args.out = f"data/{re.sub('[^A-Za-z0-9_-]+', '_', name).strip('_') or 'mine'}"
    args.folder = Path(args.out)
    if args.phases and not args.max_tokens:
        parser.error("phases are shares of max_tokens, which the recipe does not have; give --max_tokens")
    args.weights, args.mixtures = mixtures(args.recipe, args.phases, args.max_tokens)
    return args


def count(text: str) -> int:
    """100000, 100_000 or 1e5; argparse makes a message of the error."""
    try:
        if (number := float(text)).is_integer():
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is no whole number. 100000, 100_000 and 1e5 are one.")


# ---- the run


def made_by(job) -> dict:
    """What decides the set beside the command: this code, comments and docstrings aside, and packages' versions."""
    files = [Path(__file__), *sorted(Path(__file__).parent.glob("stack/data/*.py"))]
    code = "\n".join(bare_code(path.read_text(encoding="utf-8")) for path in files if path.name not in ONLY_READ)
    packages = ["tiktoken", *["rustbpe"] * (not job.tokenizer), *["datasets"] * any(s.in_hub for s in job.sources)]
    return {"code": hashlib.sha256(code.encode()).hexdigest()[:16], **{name: version(name) for name in packages}}


def bare_code(source: str) -> str:
    """Python without what changes nothing: comments, docstrings, empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][:token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1:text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def changed(then, now: dict) -> str:
    """What made_by() says otherwise now; sets of before something was noted count as they are."""
    then = then if isinstance(then, dict) else {} if then is None else {"code": then}
    other = [name for name, value in now.items() if then.get(name, value) != value]
    return ", ".join("the code in stack/data or prepare.py" if name == "code" else
                     f"{name} {then[name]} then, {now[name]} now" for name in other)


def make(job):
    """The whole run. job: what parse_args found; its sources become Source objects here."""
    # 1. What decides the bytes of the set
    job.sources = [Source(**{"text_key": job.text_key, "separator": job.separator.replace("\\n", "\n"),
                             "chat": job.chat, **source})
                   for source in [*job.recipe, *(dict(source=source) for source in job.val)]]
    identities = [source.identity for source in job.sources]
    command = {"sources": identities[:len(job.recipe)], **({"val": identities[len(job.recipe):]} if job.val else {}),
               "options": {key: value for key in OPTIONS if (value := getattr(job, key)) not in (None, "", [])}}
    if os.path.exists(job.tokenizer.removeprefix("hf:")):  # what is in the file counts, not where it lies
        command["options"]["tokenizer"] = load_tokenizer(job.tokenizer).fingerprint
    names = load_tokenizer(job.tokenizer).special_ids if job.special and job.tokenizer else SPECIALS
    if unknown := [name for name in job.special if name not in names]:
        raise ValueError(f"--special {' '.join(unknown)}: the tokenizer has no such token.\n"
                         f"  It has {', '.join(names)}.")
    # 2. Is it there already?
    if (job.folder / "meta.json").exists():
        meta = read_meta(job.folder)
        check_same(job.folder, meta.get("command", {}), command)
        for shard in chain.from_iterable(split["shards"] for split in meta["splits"].values()):
            read_header(job.folder / shard["file"])
        clean(job.folder, *LEFTOVERS)
        what = changed(meta.get("read_by"), made_by(job))
        return print(f"{summary(job.folder)}\nalready made by this command" + (": nothing to do" if not what else (
            f", but with something else: {what}.\n  Its text or ids may be others now: delete {job.folder} to make it "
            "anew, or use it as it is.")))
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job.folder):
        state = start(job.folder, command, OURS)
        what = changed(state.setdefault("read_by", made_by(job)), made_by(job))
        if what and state["tokens"]:
            raise ValueError(f"{job.folder} was begun with something else: {what}.\n  Go back to that to continue, "
                             f"choose another --out, or delete {job.folder} to make it anew.")
        if what:
            clean(job.folder, *OURS)
            state = {**start(job.folder, command, OURS), "read_by": made_by(job)}
        state["argv"] = job.argv
        try:
            write_set(job, command, state)
        except (ValueError, OSError, ImportError) as error:
            shards = any(split["shards"] for split in state["splits"].values())
            if not state["tokens"] or isinstance(error, ValueError) and not shards:
                clean(job.folder, *OURS)  # nothing worth continuing, so nothing for the next attempt to trip over
            if not isinstance(error, OSError) or error.errno not in FULL_DISK:
                raise
            raise OSError(f"The disk of {job.folder} is full ({error.strerror}), after {state['tokens']:,} tokens.\n  "
                          f"{disk_needs(job)[1]} Make space and run the same command again: it continues.") from None
        clean(job.folder, *LEFTOVERS)
    print(summary(job.folder))


def write_set(job, command, state):
    # 3. The tokenizer, and whether there is room
    tokenizer = get_tokenizer(job, state)
    missing, sentence = disk_needs(job)
    if missing > 0:
        raise OSError(f"{sentence}\n  Make space, choose --out on another disk, or take less with --max_tokens.")
    print(sentence)
    # 4. The shards
    encode(job, tokenizer, state)
    both = all(split["shards"] for split in state["splits"].values())
    if job.val_fraction and state["longest"] and not both and not state["share"]:
        share, least = math.ceil(100 * HELD / state["longest"]) / 100, HELD
        share, least = (share, least) if share <= 0.5 else (0.5, HELD // 16)
        if all(source.chat for source in job.sources):  # whole ones: as much as holds out one at least
            share = int(100 * state["lowest"] + 1) / 100
        print(f"{state['documents']} document(s) are too few, or too short, for --val_fraction {job.val_fraction:g}: "
              f"{share:g} of the text is held out.\n  If more text is to come, give --val_fraction {share:g} or more, "
              "or --val FILES; else what is held out now will be trained on then.")
        state.update(fresh(command), tokenizer=state["tokenizer"], share=[share, least])
        encode(job, tokenizer, state)
    splits = {name: split["shards"] for name, split in state["splits"].items() if split["shards"]}
    if len(splits) < 1 + bool(job.val_fraction or job.val):
        clean(job.folder, *OURS)
        sources = report(job, state)
        said = chain.from_iterable(said_of(source, "") for source in sources)
        why, what = f"{human(state['bytes'])} of text are too little for train and val", "Give more text."
        records = state["sources"][:len(job.recipe)]
        done = [record["done"] for record in records]
        limited = not any(done) if job.weights else not all(done)  # a mixture ends with its first source
        if (n := sum(record["in_val"] for record in records)) and "train" not in splits:
            why = f"{n:,} documents stand in --val too, and nothing else is left for train"
            what = "Give others."
        elif limited:
            limits = [f"--{key} {value}" for key in ("max_tokens", "max_bytes") if (value := getattr(job, key))]
            cut = "; a conversation is not cut" * any(source.chat for source in job.sources)
            why, what = f"{why}, and {' and '.join(limits)} ends it there{cut}", "Give a larger one."
        raise ValueError("\n".join([f"{' '.join(job.source)}: {why}{left_out(sources)}.", *said, f"  {what}"]))
    # 5. What they are, in meta.json
    extra = {}
    if any(source.chat for source in job.sources):
        ids, files = chat.marks_of(tokenizer), [entry["file"] for split in splits.values() for entry in split]
        paths = [job.folder / name for name in files]
        extra["chat"] = {"ids": ids, **chat.census(
            chain.from_iterable(token_blocks(path, read_header(path).dtype) for path in paths), ids)}
    write_meta(job.folder, sources=report(job, state), fingerprint=tokenizer.fingerprint,
               vocab_size=tokenizer.vocab_size, boundary_id=tokenizer.boundary_id, splits=splits, command=command,
               read_by=state["read_by"], tokenizer_sample=state["tokenizer"]["sample"], mixture=state["mixture"],
               split_rule="val" if job.val else "content", not_remembered=state["seen"][1], **extra)


def encode(job, tokenizer, state):
    """Read, encode and write, from `state` to the end of the sources or to a limit; `state` moves along."""
    if state["ended"]:
        return
    records, (val_keys, val_lines) = state["sources"], held(job)
    output = Output(job, tokenizer, state, val_keys)
    readers = [Reader(source, errors=job.errors, skip_bad=job.skip_bad, after=record["after"])
               for source, record in zip(job.sources, records, strict=True)]
    others = tuple(sorted({*tokenizer.special_ids} - {*job.special}))
    streams = [encoded(parts_of(job, reader, record["val"], state["share"], others=others, val_lines=val_lines),
                       tokenizer, job, reader.source.chat) for reader, record in zip(readers, records, strict=True)]
    output.save()
    in_tokens = job.max_tokens or any(source.in_hub for source in job.sources)

    def done():  # of what will end the run: tokens, bytes of text, or else bytes of the sources' files
        consumed = state["bytes"] if job.max_bytes else sum(reader.consumed() for reader in readers)
        return state["tokens"] if in_tokens else consumed
    total = job.max_tokens if in_tokens else job.max_bytes or sum(sum(source.sizes) for source in job.sources)
    with bar(total=total, initial=done(), unit="tok" if in_tokens else "B", desc="encoding") as shown:
        for i, piece in interleaved(readers, streams, records, output.weights):
            output.take(i, piece)
            shown.update(done() - shown.n)
            if output.full:
                break
            if piece.after:  # the end of a document: here a run can continue
                records[i]["after"] = piece.after
                output.turn()
                if output.is_due():
                    output.save()
    for stream in streams:
        stream.close()
    output.finish()


def parts_of(job, reader, val, share=None, **more):
    fraction, least = share or (job.val_fraction, HELD)
    if reader.source.chat:
        return parts(reader, fraction, least=least, val=val, whole=True)
    return parts(reader, fraction, least=least, val=val, whole=reader.source.source == "stdlib", begin=not share,
                 special=tuple(job.special), **more)


def held(job):
    """of_val() of the sources that --val names."""
    return of_val(Reader(source, errors=job.errors, skip_bad=job.skip_bad) for source in job.sources[len(job.recipe):])


def encoded(parts, tokenizer, job, talk: bool):
    """The parts with their ids; threads encode a little ahead."""
    parts, ahead = tee(parts)
    encode = (lambda text: chat.encode(tokenizer, json.loads(text))[1:]) if talk else None
    for ids in tokenizer.encode_documents((part.text for part in parts), job.workers, tuple(job.special), encode):
        yield next(ahead)._replace(text="", ids=ids)


def report(job, state):
    """What came of each source, for meta.json."""
    lines = []
    for source, record in zip(job.sources, state["sources"], strict=True):
        after = record["after"] or {"counts": {}, "notes": []}
        kept = ("documents", "tokens", "bytes", "duplicates", "in_val", "shared_lines", "specials", "looks",
                "divided", "parts")
        lines.append({**source.identity, "val": record["val"], **{key: record[key] for key in kept},
                      **after["counts"], **{key: after[key] for key in ("notes", "commit", "read", "passed")
                                            if key in after}})
        if BOUNDARY in job.special:  # then it does end documents
            lines[-1].pop("boundary_lines", None)
    return lines


def disk_needs(job):
    """(bytes that are certainly missing, a sentence for people)."""
    width = 2 if (job.vocab_size or 0) <= 1 << 16 else 4
    text = min(UNKNOWN if job.weights else sum(source.text_bytes() for source in job.sources), job.max_bytes or UNKNOWN)
    tokens, least = (min(job.max_tokens or UNKNOWN, text // each) for each in (BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN))
    there, free = sum(path.stat().st_size for path in job.folder.glob("*_*.*")), shutil.disk_usage(job.folder).free
    if text == UNKNOWN and not job.max_tokens:
        return 0, f"How much {job.folder} will need is not known; {human(free)} are free."
    needed = width * (tokens + min(tokens, job.shard_tokens))  # for a moment a shard is there twice, as .part and .bin
    return width * least - there - free, (f"{job.folder} needs about {human(needed)}"
                                          f"{f' and has {human(there)}' if there else ''}; {human(free)} are free.")


def bar(**settings):
    from tqdm import tqdm
    return tqdm(unit_scale=True, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30, **settings)


# ---- the tokenizer


def get_tokenizer(job, state):
    """The one this run began with, if it is being continued; the one asked for; or one trained on the sources."""
    if state["tokenizer"]:
        tokenizer = Tokenizer.load(job.folder)
        if tokenizer.fingerprint != state["tokenizer"]["fingerprint"]:
            raise OSError(f"{job.folder}/tokenizer.json is not the one that this run began with.\n"
                          f"  Delete {job.folder} and start again.")
        return tokenizer
    sample = None
    if job.tokenizer:
        tokenizer = load_tokenizer(job.tokenizer)
    else:
        sample = {"bytes": 0, "part": "all"}
        tokenizer = train_tokenizer(sample_texts(job, sample), job.vocab_size)
        print(f"tokenizer: {tokenizer.vocab_size:,} ids, trained on {human(sample['bytes'])}: {sample['part']} "
              "of the text")
        if all(source.chat for source in job.sources):
            print("  That is a new tokenizer, which no run has. To finetune a run on these conversations, name it: "
                  "--tokenizer out/RUN")
    if any(source.chat for source in job.sources):
        if missing := chat.lacking(tokenizer):
            raise ValueError(f"the tokenizer {job.tokenizer} has no {', '.join(missing)}, which conversations need.\n"
                             f"  Add them to a run that has it: python convert.py resize out/RUN out/NEW --add "
                             f"{' '.join(map(shlex.quote, missing))}")
        tokenizer.chat_template, tokenizer.chat_ends = chat.OWN, ()
    tokenizer.save(job.folder)
    state["tokenizer"] = {"fingerprint": tokenizer.fingerprint, "sample": sample}
    return tokenizer


def load_tokenizer(name):
    """From a file, a data set, a checkpoint, a run, hf: and a Hugging Face folder; or one of tiktoken's."""
    if name.startswith("hf:"):
        from stack.exchange.hf_tokenizers import tokenizer_from_hf
        return tokenizer_from_hf(name)
    if not os.path.exists(name) and "/" not in name and not name.endswith(".json"):
        return Tokenizer.from_tiktoken(name)
    runs = sorted(Path(name).glob("ckpt_*/tokenizer.json"))  # any checkpoint of a run will do: they share one
    return Tokenizer.load(runs[0] if runs else name)


def sample_texts(job, sample, without_val=True):
    """Text to train the tokenizer on: all of it, or about job.tokenizer_bytes picked with a fixed seed.

    Where the size of the text is known, pieces from all of it are picked; of a stream it is the beginning.  A mixture
    is sampled by its weights.  Validation documents and duplicates are left out.  `sample` says what it came to.
    """
    within = min(job.max_bytes or UNKNOWN, (job.max_tokens or UNKNOWN) * MOST_BYTES_PER_TOKEN)
    sources = job.sources[:len(job.recipe)]
    sizes = [source.text_bytes() or UNKNOWN for source in sources]
    sizes = sizes if job.weights else [min(UNKNOWN, sum(sizes))] * len(sizes)
    chances = [1.0 if size == UNKNOWN else min(1.0, job.tokenizer_bytes * share / max(1, min(size, within * share)))
               for size, share in zip(sizes, job.weights or [1.0] * len(sizes), strict=True)]
    if job.weights or min(chances) < 1:
        sample["part"] = "a sample by weight" if job.weights else f"a random {100 * chances[0]:.2g} %"
    readers = [Reader(source, errors=job.errors, skip_bad=job.skip_bad) for source in sources]
    streams = [parts_of(job, reader, val=False) for reader in readers]
    records, seen = [{"train": 0, "done": False, "val": False} for _ in readers], held(job)[0]
    pick, walked = random.Random(job.seed), 0
    end = min(within, UNKNOWN if job.weights else sizes[0], int(job.tokenizer_bytes / min(chances)))
    with bar(total=end, unit="B", desc="sampling") as shown:
        for i, part in interleaved(readers, streams, records, job.weights):
            size = len(part.text.encode())
            records[i]["train"] += size
            walked += size
            shown.update(size)
            if part.first:
                new = part.key not in seen
            if new and not (without_val and part.val) and pick.random() < chances[i]:
                if sample["bytes"] and sample["bytes"] + size > job.tokenizer_bytes:
                    sample["part"] = sample["part"].replace("all", "the beginning")
                    return
                seen.add(part.key)
                sample["bytes"] += size
                if job.sources[i].chat:
                    yield chat.typed(part.text)
                else:
                    yield from special_pattern(tuple(job.special)).split(part.text)[::2] if job.special else [part.text]
            if walked >= within:
                break
    if without_val and not sample["bytes"]:  # the only documents there are have hashes for val
        yield from sample_texts(job, sample, without_val=False)


def main(argv):
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter must not end the run
    try:
        if argv[:1] in (["verify"], ["show"]):
            parser = Parser(prog=f"prepare.py {argv[0]}", description={
                "verify": "Check every checksum, id, document and byte of a data set, and print its statistics.",
                "show": "Print a document. Special tokens stand reversed on a terminal, in a file or pipe in ⟦⟧;\n"
                        "a name without is text that looks like one."}[argv[0]])
            parser.add_argument("data", type=Path, help="a folder that prepare.py made, or one of llm.c's shards")
            if argv[0] == "show":
                parser.add_argument("--doc", type=int, default=0, help="which document, counted from 0 (0)")
                parser.add_argument("--split", default="train", help="train or val (train)")
            args = parser.parse_args(argv[1:])
            try:
                verify(args.data) if argv[0] == "verify" else show(args.data, args.split, args.doc)
                sys.stdout.flush()
            except BrokenPipeError:  # `| head`
                sys.stdout = open(os.devnull, "w")
        else:
            make(parse_args(argv))
    except KeyboardInterrupt:
        print("\nprepare.py: stopped; the same command continues", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        said = explain(error)
        if isinstance(error, OSError) and error.errno is not None:  # the system's: "[Errno 13] Permission denied: 'a'"
            said = f"{error.filename or 'a file'}: {error.strerror}.\n  Check that it is there and that you may use it."
        print(f"prepare.py: {said}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
