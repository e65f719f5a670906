"""Token shards on disk: a data set is a folder that prepare.py writes and training never changes.

    data/NAME/tokenizer.json  meta.json  train_000000.bin ...  val_000000.bin ...

**Shards** have llm.c's layout, so its pretokenized GPT-2 files (and modded-nanogpt's) are read here as they are, and
ours there: a header of 256 little-endian int32, then the tokens.

    [0] 20240520   [1] version: 1 = uint16, 2 = uint32   [2] number of tokens
    [3] bytes per token   [4:12] sha256 fingerprint of the tokenizer   [12:14] 64-bit checksum of the token bytes

Words from 3 on are ours, and zero in foreign files. So is version 2: ids above 65,535 do not fit uint16, and a reader
that knows only version 1 has to stop there instead of reading halves of ids. A file with a name in .bin is complete.
meta.json holds what headers cannot: sources, vocabulary, documents, and the bytes of text that bits per byte needs. A
folder of llm.c's shards has no meta.json and is read by its file names.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stack.config import ROOT

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
META_VERSION = 1
GPT2_VOCAB_SIZE, GPT2_BOUNDARY_ID = 50257, 50256  # of llm.c's and modded-nanogpt's shards
AGAIN = "copy it again, or make the data set again with prepare.py."


@dataclass(frozen=True)
class Header:
    n_tokens: int
    dtype: np.dtype
    fingerprint: str  # of the tokenizer, hex; "" in foreign files
    checksum: str  # of the token bytes, hex; "" in foreign files


def write_shard(path: str | Path, tokens, *, fingerprint: str, vocab_size: int) -> dict:
    """Write a shard; returns its entry for meta.json: {"file", "tokens", "checksum"}.

    tokens: ids (a list or an array of whole numbers), or an iterator over several of these, held one at a time.
    """
    path, version = Path(path), 1 if vocab_size <= 1 << 16 else 2
    n_tokens, digest, header = 0, hashlib.blake2b(digest_size=8), np.zeros(256, "<i4")
    with whole_file(path, "wb") as file:
        file.write(header)
        for ids in tokens if isinstance(tokens, Iterator) else [tokens]:
            n_tokens += len(ids)
            if n_tokens > MAX_SHARD_TOKENS:
                raise ValueError(f"{path} would hold {n_tokens:,} tokens; a shard holds {MAX_SHARD_TOKENS:,}.\n"
                                 "  Write several shards.")
            ids = np.asarray(ids)
            for bad in (ids.min(initial=0), ids.max(initial=0)):
                if not 0 <= bad < vocab_size:  # the cast below would turn it into another, valid id
                    raise ValueError(f"{path}: id {bad} is outside the vocabulary of {vocab_size} ids.\n"
                                     "  Give the vocab_size of the tokenizer that made the ids.")
            data = ids.astype(DTYPES[version])
            digest.update(data)
            file.write(data)
        header[:4] = MAGIC, version, n_tokens, DTYPES[version].itemsize
        header[4:12] = np.frombuffer(bytes.fromhex(fingerprint), "<i4")
        header[12:14] = np.frombuffer(digest.digest(), "<i4")
        file.seek(0)
        file.write(header)
    return {"file": path.name, "tokens": n_tokens, "checksum": digest.hexdigest()}


@contextlib.contextmanager
def whole_file(path: Path, mode="w"):
    """A file to write that has its name when the block ends, and never exists if that ends by an exception.

    Content, name and folder reach the disk in this order, so that no crash leaves half a file under its name. A kill
    leaves PATH.tmp, which the next writer of PATH overwrites.
    """
    temporary, text = path.with_name(path.name + ".tmp"), {"encoding": "utf-8", "newline": "\n",
                                                           "errors": "backslashreplace"}  # \udcff: as JSON has it
    text = {} if "b" in mode else text
    try:
        with open(temporary, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    with contextlib.suppress(OSError):  # Windows opens no folder, some network drives sync none
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_header(path: str | Path) -> Header:
    """The header of a shard, after checking that it is one and that the file is as long as it says."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found.\n  Copy the missing shard, or make the data set again: prepare.py.")
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path} has {len(raw)} bytes; the header of a shard alone has {HEADER_BYTES}.\n"
                         f"  It was cut short: {AGAIN}")
    words = np.frombuffer(raw, "<i4")
    magic, version, n_tokens, width = (int(word) for word in words[:4])
    if magic != MAGIC:
        raise ValueError(f"{path} starts with {magic}; a shard starts with {MAGIC}.\n  Bare tokens (nanoGPT's) and "
                         "other layouts are not read: make shards from the text with prepare.py.")
    if version not in DTYPES or width not in (0, DTYPES[version].itemsize):
        raise ValueError(f"{path} has version {version} and {width} bytes per token; known are version 1 with 2 "
                         f"(uint16) and version 2 with 4 (uint32).\n  If it should be one of these, {AGAIN}")
    size, needed = path.stat().st_size, HEADER_BYTES + n_tokens * DTYPES[version].itemsize
    if size != needed:
        raise ValueError(f"{path} has {size:,} bytes; the {n_tokens:,} tokens of its header need {needed:,}.\n"
                         f"  It was cut short or damaged: {AGAIN}")
    fingerprint, checksum = (words[4:12].tobytes().hex(), words[12:14].tobytes().hex()) if width else ("", "")
    return Header(n_tokens, DTYPES[version], fingerprint, checksum)


def open_shard(path: str | Path) -> np.ndarray:
    """All tokens of a shard as a read-only memory map; the header is checked."""
    header = read_header(path)
    if not header.n_tokens:  # nothing to map is an error to mmap
        return np.empty(0, header.dtype)
    return np.memmap(path, header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))


def token_blocks(path: str | Path, dtype: np.dtype, *, offset=HEADER_BYTES, size=1 << 20) -> Iterator[np.ndarray]:
    """The tokens of a file from byte `offset` on, `size` at a time."""
    while len(ids := np.fromfile(path, dtype, size, offset=offset)):
        yield ids
        offset += ids.nbytes


def read_listed(folder: Path, entry: dict, fingerprint: str) -> tuple[Path, Header]:
    """Path and header of a shard, which have to be what meta.json says of it: its entry, the set's tokenizer."""
    path = folder / entry["file"]
    header = read_header(path)
    found = (header.n_tokens, header.fingerprint, header.checksum or entry["checksum"])
    if found != (said := (entry["tokens"], fingerprint, entry["checksum"])):
        raise ValueError(f"{path} has (tokens, tokenizer, checksum) {found}; meta.json says {said}.\n  It was damaged "
                         "or is of another data set: copy the right one, or make the set again with prepare.py.")
    return path, header


def verify_shard(path: str | Path) -> Header:
    """Read a whole shard and compare it with its checksum (foreign shards have none); returns the header."""
    header, digest = read_header(path), hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        unused = np.frombuffer(file.read(HEADER_BYTES), "<i4")[14 if header.fingerprint else 3:]
        if unused.any():
            raise ValueError(f"{path} has words in its header that no shard has.\n  They were damaged, or a later "
                             f"version wrote them: {AGAIN}")
        while block := file.read(1 << 24):
            digest.update(block)
    if header.checksum not in ("", digest.hexdigest()):
        raise ValueError(f"{path} has checksum {digest.hexdigest()}; its header says {header.checksum}.\n  Tokens were "
                         f"damaged on disk or on the way: {AGAIN}")
    return header


def write_meta(data_dir: str | Path, *, sources, fingerprint: str, vocab_size: int, boundary_id: int,
               splits: dict[str, list[dict]], **extra) -> dict:
    """Write data_dir/meta.json, the last file of a data set, and return what it holds.

    splits: {"train": entries, "val": entries}; an entry is a shard's {"file", "tokens", "checksum"} from its writer
    plus "documents" and "bytes" (of their text). sources and extra: whatever JSON a reader may want to know.
    """
    totals = {split: {key: sum(int(entry[key]) for entry in entries) for key in ("tokens", "documents", "bytes")}
              for split, entries in splits.items()}
    meta = {"version": META_VERSION, "sources": sources, "tokenizer": fingerprint, "vocab_size": vocab_size,
            "boundary_id": boundary_id, "data_fingerprint": fingerprint_data(fingerprint, splits), **extra,
            "splits": {split: {**totals[split], "shards": entries} for split, entries in splits.items()}}
    meta["checksum"] = checksum_of(meta)
    with whole_file(Path(data_dir) / "meta.json") as file:
        json.dump(meta, file, indent=1, ensure_ascii=False)
    return meta


def checksum_of(meta: dict) -> str:
    """Of all else that meta.json says; sets made before this was written have none."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def how_to_make(folder: str | Path) -> str:
    """The command that makes a data set: what a config's head says that it needs, or the recipe of that name there."""
    folder = Path(folder)
    out = re.escape(folder.as_posix())
    command = re.compile(rf"# Needs: .*?(python prepare\.py [^,\n]*--out {out}(?![^\s,])[^,\n]*)")
    for path in sorted((ROOT / "configs").glob("*.py")):
        if needs := command.search(path.read_text(encoding="utf-8")):
            return needs[1]
    recipe = f"configs/data_{folder.name}.py"
    if (ROOT / recipe).is_file():
        return f"python prepare.py {recipe} --out {folder}"
    return f"python prepare.py SOURCE... --out {folder} (for a model that is there: --tokenizer out/RUN)"


def read_meta(data_dir: str | Path) -> dict:
    """What data_dir/meta.json holds; for a folder of llm.c's GPT-2 shards, the same without documents and bytes."""
    path = Path(data_dir) / "meta.json"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{data_dir} not found.\n  Make it with: {how_to_make(data_dir)}")
    if not path.is_file():
        return _foreign_meta(path.parent)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["version"] != META_VERSION:
            raise ValueError(f"version {meta['version']}; {META_VERSION} is needed")
        [meta[key] for key in ("tokenizer", "vocab_size", "boundary_id", "data_fingerprint")]
        [(entry["file"], entry["tokens"], entry["checksum"]) for split in meta["splits"].values()
         for entry in split["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a data set ({type(error).__name__}: {error}).\n"
                         "  Make the data set again with prepare.py.") from None
    return meta


def is_record(path: str | Path) -> bool:
    """Whether a meta.json or progress.json is that of a data set, made or in the making; others have such names too."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "splits" in found and bool({"data_fingerprint", "command"} & set(found))


def foreign_shards(folder: Path) -> Iterator[tuple[Path, str, Header]]:
    """(path, split, header) of llm.c's shards, in a folder without meta.json; bare tokens (nanoGPT's) are refused."""
    if (folder / "meta.json").exists():
        return
    for path in sorted(folder.glob("*.bin"), key=lambda path: natural(path.name)):
        match = re.search(r"(?:^|_)(train|val)(?:_\d+)?\.bin$", path.name)
        if match and not (header := read_header(path)).fingerprint:  # else ours: prepare.py did not finish
            yield path, match[1], header


def _foreign_meta(folder):
    splits = {}
    for path, split, header in foreign_shards(folder):
        raw, end = np.memmap(path, mode="r"), 1 << 16  # no checksum: both ends tell files apart, all would take minutes
        ends = bytes(raw[:end]) + bytes(raw[max(HEADER_BYTES, len(raw) - end):])
        checksum = hashlib.blake2b(ends, digest_size=8).hexdigest()
        splits.setdefault(split, []).append({"file": path.name, "tokens": header.n_tokens, "checksum": checksum})
    if not splits:
        make = f"Make it, or finish making it: {how_to_make(folder)}"
        if is_record(folder / "progress.json"):
            words = json.loads((folder / "progress.json").read_text(encoding="utf-8")).get("argv")
            make = "prepare.py did not finish it. The same command continues" + (
                f": python prepare.py {shlex.join(words)}" if words else ".")
        raise FileNotFoundError(f"{folder} has no meta.json, and no llm.c shards (*_train_*.bin, *_val_*.bin) either.\n"
                                f"  {make}")
    return {"version": META_VERSION, "sources": ["llm.c shards"], "tokenizer": "", "vocab_size": GPT2_VOCAB_SIZE,
            "boundary_id": GPT2_BOUNDARY_ID, "data_fingerprint": fingerprint_data("", splits),
            "splits": {split: {"tokens": sum(entry["tokens"] for entry in entries), "shards": entries}
                       for split, entries in splits.items()}}


def fingerprint_data(fingerprint: str, splits: dict[str, list[dict]]) -> str:
    """One sha256 for tokenizer and contents: the same value, seed and position give the same batch."""
    shards = [[split, entry["file"], entry["tokens"], entry["checksum"]] for split in sorted(splits)
              for entry in sorted(splits[split], key=lambda entry: natural(entry["file"]))]
    return hashlib.sha256(json.dumps([fingerprint, shards]).encode()).hexdigest()


def natural(name: str):
    """A sort key by which part_2 precedes part_10, in whatever order a file system lists them."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))], name
