"""What a data set holds: a summary for people, every checksum, one document."""

import shlex
import sys
from collections import Counter
from itertools import groupby

import numpy as np

from stack.data.formats import NOT_KNOWN, REMEDY
from stack.data.parts import SHORT_LINE
from stack.data.shards import (
    checksum_of,
    fingerprint_data,
    read_header,
    read_listed,
    read_meta,
    token_blocks,
    verify_shard,
)
from stack.data.sources import listed
from stack.data.tokenizer import BOUNDARY, Tokenizer
from stack.data.writer import Mixture
from stack.log import on_terminal

SHORT_VAL = 8192  # tokens; below it the summary suggests more
ANEW = "\n  Copy the set again, or delete it and make it anew."


def human(n):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


def left_out(sources):
    """"; left out: 3 duplicates, 1 empty" over all sources."""
    kinds = ("duplicates", "empty", "filtered", "bad")
    said = ", ".join(f"{n:,} {kind}" for kind in kinds if (n := sum(source.get(kind, 0) for source in sources)))
    return f"; left out: {said}" if said else ""


def said_of_text(sources) -> list[str]:
    """What of the text stands in val as well, and what became of the names of special tokens in it."""
    total, special, text = Counter(), Counter(), Counter()
    for source in sources:
        total.update({key: source.get(key, 0) for key in ("in_val", "shared_lines")})
        special.update(source.get("specials", {}))
        text.update(source.get("looks", {}))
    lines = []
    if total["in_val"]:
        lines.append(f"  {total['in_val']:,} documents stand in val as well and are left out of train")
    if total["shared_lines"]:
        lines.append(f"  {total['shared_lines']:,} lines of train, {SHORT_LINE} characters or longer, stand in val too")
    if special:
        lines.append(f"  special tokens in the text: {', '.join(f'{n:,} {name}' for name, n in special.most_common())}")
    if text:
        lines.append(f"  {text.total():,} strings look like special tokens and are text: "
                     f"{', '.join(f'{n:,} {name}' for name, n in text.most_common())}")
        lines.append(f"    to have them read as such: --special {' '.join(map(shlex.quote, text))}")
    return lines


def said_of(source: dict, where=" (meta.json lists them)") -> list[str]:
    """What was read of a source as what, and what was not."""
    read, passed = (listed(source.get(key, {}), before, where=where)
                    for key, before in (("read", "read "), ("passed", "passed over: ")))
    if any(NOT_KNOWN in why for why in source.get("passed", {})):
        passed += f". {REMEDY}"
    said = ["; ".join(filter(None, (read, passed)))] if read or passed else []
    if fields := Counter({key.removeprefix("field "): n for key, n in source.items() if key.startswith("field ")}):
        said.append(f"fields not read: {', '.join(f'{key} ({n:,})' for key, n in fields.most_common(20))}")
    if lines := source.get("boundary_lines"):
        said.append(f"{lines:,} lines are {BOUNDARY}, which is text here; with --separator '{BOUNDARY}' documents end "
                    "there")
    # as Reader and FORMATS have them
    texts = any(how.endswith((" whole", " by document")) for how in source.get("read", {}))
    if source.get("separator") and not texts:
        said.append(f"--separator {source['separator']!r} is for text files; what was read has records of its own")
    elif source.get("separator") and not source.get("separators"):
        said.append(f"--separator {source['separator']!r} is nowhere in it")
    elif n := source.get("unseparated"):
        said.append(f"{n:,} file(s) have no --separator {source['separator']!r} in them and are one document each")
    if n := source.get("over_lines"):
        said.append(f"{n:,} row(s) of .tsv go over several lines, as a field of theirs begins with a quote; where "
                    "quotes are text, rows were joined")
    if replaced := source.get("replaced"):
        said.append(f"{replaced:,} times U+FFFD for bytes that were no UTF-8, or half a surrogate pair")
    return [f"  {source['source']}: {line}" for line in said] + [f"  left out: {note}" for note in source["notes"]]


def summary(folder):
    meta = read_meta(folder)
    lines = [f"{folder}: {meta['vocab_size']:,} ids, tokenizer {meta['tokenizer'][:12] or 'gpt2'}"]
    for name, split in meta["splits"].items():
        text = (f", {split['documents']:,} documents, {human(split['bytes'])}, "
                f"{split['bytes'] / max(1, split['tokens']):.2f} bytes per token") if "bytes" in split else ""
        lines.append(f"  {name:5s} {split['tokens']:,} tokens in {len(split['shards'])} file(s){text}")
    if "command" not in meta:  # shards of llm.c, or another program's meta.json
        return "\n".join(lines)
    lines[0] += left_out(meta["sources"])
    lines += [line for source in meta["sources"] for line in said_of(source)]
    if mixture := meta["mixture"]:
        lines += ["  mixture " + ", ".join(f"{100 * share:.1f} % {name}" for name, share in mixture["shares"]),
                  f"  at most {mixture['worst_points']} points off the weights in any 1 % of it "
                  f"({mixture['window_tokens']:,} tokens), at {mixture['worst_source']}"]
        if starts := mixture.get("phases"):
            lines.append(f"  {len(starts)} phases, from training tokens {', '.join(f'{n:,}' for n in starts)} on")
        if mixture["worst_points"] > Mixture.POINTS:
            longest, certain = mixture["longest_document"], mixture["certain_length"]
            lines += ["    train.py shuffles windows and does not see that; for whoever reads the shards in order:",
                      f"    the longest document has {longest:,} tokens; with none above {certain:,}, or a set "
                      f"{longest / max(1, certain):.1f} times as large, it would be {Mixture.POINTS:g} points at most"]
        lines += [f"  it ends here because {name} does: more of that source, or less weight, makes more"
                  for name in mixture["ended_with"]]
    if divided := sum(source.get("divided", 0) for source in meta["sources"]):
        documents, parts = (sum(source[key] for source in meta["sources"]) for key in ("documents", "parts"))
        lines.append(f"  divided between train and val: {divided:,} of {documents:,} documents, into {parts:,} parts, "
                     "which count as documents above")
    lines += said_of_text(meta["sources"])
    if meta["not_remembered"]:
        lines.append(f"  {meta['not_remembered']:,} documents were too many to be remembered as possible duplicates")
    if chat := meta.get("chat"):
        turns = ", ".join(f"{n:,} {role}" for role, n in chat["turns"].items() if n)
        longer = ", ".join(f"of {int(size):,}: {n:,}" for size, n in chat["longer"].items())
        lines += [f"  {chat['conversations']:,} conversations; turns: {turns}; {chat['learned_tokens']:,} tokens of "
                  "the assistant's", f"  the longest has {chat['longest']:,} tokens; longer than a window {longer}"]
    elif "val" in meta["splits"] and meta["splits"]["val"]["tokens"] < SHORT_VAL:
        longest = max((shard["tokens"] for shard in meta["splits"]["val"]["shards"]), default=0)
        lines.append(f"  val is short: seq_len can be {max(longest - 1, 0)} at most; with a larger --val_fraction "
                     f"it can be more, and the loss is steadier. That takes a new set: delete {folder} first")
    return "\n".join(lines)


def open_set(folder):
    meta, tokenizer = read_meta(folder), Tokenizer.load(folder)
    if meta["tokenizer"] not in ("", tokenizer.fingerprint):  # "": shards of llm.c, which name none
        raise ValueError(f"{folder}/tokenizer.json is not the tokenizer that meta.json names.{ANEW}")
    return meta, tokenizer


def blocks(folder, meta, split):
    for shard in meta["splits"][split]["shards"]:
        path = folder / shard["file"]
        yield from token_blocks(path, read_header(path).dtype)


def verify(folder):
    """Every checksum, id, document and byte of a set against headers, meta.json and tokenizer."""
    meta, tokenizer = open_set(folder)
    print(summary(folder))
    listed = {name: split["shards"] for name, split in meta["splits"].items()}
    if fingerprint_data(meta["tokenizer"], listed) != meta["data_fingerprint"]:
        raise ValueError(f"{folder}/meta.json lists other shards than those it was written for.{ANEW}")
    for name, split in meta["splits"].items():
        for shard in split["shards"]:
            verify_shard(read_listed(folder, shard, meta["tokenizer"])[0])
        used, longest, last, at = np.zeros(meta["vocab_size"], np.int64), 0, 0, 0
        for ids in blocks(folder, meta, name):
            if ids.max() >= len(used):
                raise ValueError(f"{folder}: {name} holds id {ids.max()}; there are {len(used)} ids.{ANEW}")
            used += np.bincount(ids, minlength=len(used))
            starts = [last, *(at + np.flatnonzero(ids == meta["boundary_id"])), at + len(ids)]
            longest, last, at = max(longest, int(np.diff(starts).max())), int(starts[-2]), at + len(ids)
        found = {"tokens": at, "documents": int(used[meta["boundary_id"]]),
                 "bytes": int(used @ tokenizer.token_bytes())}
        for key, n in found.items():
            if split.get(key, n) != n:
                raise ValueError(f"{folder}: {name} has {n:,} {key}; meta.json says {split[key]:,}.{ANEW}")
        print(f"  {name}: {at // max(1, found['documents']):,} tokens per document, {longest:,} in the longest; "
              f"{np.count_nonzero(used == 0):,} of {len(used):,} ids never occur")
    if meta.get("checksum", now := checksum_of(meta)) != now:
        raise ValueError(f"{folder}/meta.json was changed since it was written.{ANEW}")
    print("every checksum, id, document and byte is as it should be")


def show(folder, split, number):
    """Print one document of a split, counted from 0."""
    meta, tokenizer = open_set(folder)
    if split not in meta["splits"]:
        raise ValueError(f"{folder} has no split {split!r}.\n  It has {', '.join(meta['splits'])}.")
    parts, n = [], 0  # n: how many documents begin before this block
    for ids in blocks(folder, meta, split):
        of = n - 1 + np.cumsum(ids == meta["boundary_id"])  # the document that each token is of
        parts.append(ids[of == number])
        n = of[-1] + 1
        if 0 <= number < n - 1:
            break
    if not 0 <= number < n:
        raise ValueError(f"{folder}: {split} has no document {number}.\n  It has {n:,}, counted from 0.")
    print(readable(tokenizer, np.concatenate(parts)[1:].tolist()))


def readable(tokenizer, ids) -> str:
    """The text of ids, special tokens reversed on a terminal and in brackets elsewhere: their names may be text too."""
    names = {i: on_terminal(name) for name, i in tokenizer.special_ids.items()}
    before, after = ("\33[7m", "\33[0m") if sys.stdout.isatty() else "⟦⟧"
    return "".join("".join(f"{before}{names[i]}{after}" for i in run) if special else on_terminal(tokenizer.decode(run))
                   for special, run in groupby(ids, key=names.__contains__))
