"""Where documents come from: files, folders, globs, the standard library, Hugging Face; and which of them are kept.

    source = Source("texts/")           also "stdlib", "a.txt", "logs/*.jsonl.gz", "hf:NAME[@REVISION][:CONFIG][:SPLIT]"
    for piece in Reader(source): ...    pieces of documents, in an order that depends on nothing but the input

A .txt, .md or .py file is one document, so is a line of .jsonl and a row of .parquet; .gz and .zst around any of them
are opened on the way.  A file that is named, or matched by a glob, is read as text whatever it is called; a folder is
searched for the names above, without hidden folders and __pycache__.  Files come in natural order, part_2 before
part_10.

**Bytes are kept.**  Text is read as bytes and decoded as UTF-8 here, never by open(): no line ending is translated, no
locale is asked.  A byte order mark is dropped, UTF-16 is refused, a byte that is no UTF-8 stops the run with its offset
(or becomes U+FFFD, counted).  JSON may hold half a surrogate pair, which has no bytes: that becomes U+FFFD too.

**Nothing is held whole.**  A document arrives in pieces of at most PIECE characters, cut where a word begins, so that a
file of 1 GB on one line costs as much memory as any other.  Its hash, needed before its first token may be written (is
it a duplicate? which split is it in?), then takes a pass of its own: files above HOLD are read twice.  Where pieces are
cut depends on the text alone, not on how it was stored.

**Positions.**  The last piece of a document carries what to continue from after it: (file, record) for files, the state
of the stream and the rows since for Hugging Face.  Records before it are skipped without being parsed.

The quality filters at the end are those of the Stack-100M recipe.  They look at one document each; near-duplicates are
another matter: run datatrove's MinHash pipeline first and name the folder of .jsonl.gz files that it writes.
"""

import codecs
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import re
import string
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from stack.data.shards import natural
from stack.data.tokenizer import CUT, replace_surrogates

KINDS = (".txt", ".md", ".py", ".jsonl", ".parquet")
PACKED = (".gz", ".zst")
UNPACKED_FACTOR = {".gz": 4, ".zst": 4, ".parquet": 2}  # bytes of text per byte of file, roughly
PIECE = 1 << 18  # characters in a piece: enough for the tokenizer's speed, few enough to share out among threads
CHUNK = 1 << 18  # bytes read from a file at a time
HOLD = 1 << 24  # bytes of one file kept while its hash is taken; longer files are read a second time instead
MAX_LINE = 1 << 26  # bytes of one JSON line: to be parsed it has to be in memory whole, and several times over
NOTES = 10  # broken records named in the report of --skip_bad, per source; all are counted
HUB_SECONDS = 10  # to wait for the first answer of Hugging Face
RETRY_SECONDS = (1, 2, 4, 8, 16, 32)  # waits between attempts to go on with an interrupted stream
COMMIT = re.compile("[0-9a-f]{40}")
STATE_ROWS = 1000  # rows between two copies of a stream's state: a copy per row costs more than reading the row


# ----------------------------------------------------------------------------------------------------------------------
# sources and their files


@dataclass
class Source:
    """One source, on the command line or in a recipe. Finds its files at once: a wrong name ends the run early."""

    source: str  # stdlib, a file, a folder, a glob, or hf:NAME[@REVISION][:CONFIG][:SPLIT]
    weight: float = 0.0  # share of the tokens, in a recipe
    filter: str = ""  # web, code or math: which documents are kept
    text_key: str = "text"  # the key or column that holds the text
    data_dir: str = ""  # Hugging Face: the part of the repository to read

    def __post_init__(self):
        if self.filter not in FILTERS:
            raise ValueError(f"{self.source}: there is no filter {self.filter!r}.\n"
                             f"  Use {', '.join(filter(None, FILTERS))}, or leave it out.")
        self.in_hub = self.source.startswith("hf:")
        self.root, self.names = ("", []) if self.in_hub else list_files(self.source)
        self.sizes, listing = [], hashlib.blake2b(digest_size=8)
        for name in self.names:
            stat = os.stat(os.path.join(self.root, name))
            self.sizes.append(stat.st_size)
            listing.update(os.fsencode(f"{name} {stat.st_size} {stat.st_mtime_ns}\n"))
        # What a second run of the same command must find unchanged, to continue or to call the work done.
        self.identity = {key: value for key, value in asdict(self).items() if value}
        if not self.in_hub:
            self.identity |= {"files": len(self.names), "bytes": sum(self.sizes)}
            self.identity["listing"] = listing.hexdigest()
        if self.source == "stdlib":
            self.identity["python"] = platform.python_version()

    def text_bytes(self) -> int | None:
        """About how much text this is; None where only the far end knows."""
        return None if self.in_hub else sum(size * UNPACKED_FACTOR.get(os.path.splitext(name)[1], 1)
                                            for size, name in zip(self.sizes, self.names, strict=True))


def list_files(source: str) -> tuple[str, list[str]]:
    """(folder, names in it) of the files of a source, in natural order."""
    root = "" if source != "stdlib" else sysconfig.get_path("stdlib")
    if source == "stdlib":
        names = [name for name in _walk(root) if _is_stdlib(name)]
    elif os.path.isdir(source):
        root, names = source, list(_walk(source))
    elif os.path.exists(source):
        root, names = os.path.split(source)[0], [os.path.basename(source)]
    elif any(mark in source for mark in "*?["):
        matches = [match for match in glob.glob(source, recursive=True) if "__pycache__" not in match]
        inside = [f"{match}/{name}" for match in matches if os.path.isdir(match) for name in _walk(match)]
        # normpath and dict: "**" matches a folder and, once more, what is in it
        names = list(dict.fromkeys(os.path.normpath(name) for name in [*filter(os.path.isfile, matches), *inside]))
    else:
        raise FileNotFoundError(f"{source} not found.\n  A source is a file, a folder, a glob in quotes, stdlib, or "
                                "hf:NAME[@REVISION][:CONFIG][:SPLIT] for a data set on Hugging Face.")
    if not names:
        raise FileNotFoundError(f"{source} has no files to read; looked for {' '.join(KINDS)}, also with "
                                f"{' or '.join(PACKED)} behind.\n  Text under other names is read when you name the "
                                "files, or give a glob that matches them.")
    return root, sorted(names, key=natural)


def _walk(folder: str):
    def stop(error):  # os.walk says nothing about a folder that it may not enter
        raise error
    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            if _kind(name) in KINDS and not name.startswith("."):
                yield os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")


def _kind(name) -> str:
    """.jsonl for a.jsonl and a.jsonl.gz"""
    stem, kind = os.path.splitext(name)
    return os.path.splitext(stem)[1] if kind in PACKED else kind


def _is_stdlib(name: str) -> bool:
    """Not what was installed later, not the tests (more than all the rest), nothing that differs between builds."""
    folders = name.split("/")[:-1]
    return (name.endswith(".py") and not name.startswith(("_sysconfigdata", "config-"))
            and not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(folders))


# ----------------------------------------------------------------------------------------------------------------------
# documents


class Piece(NamedTuple):
    text: str
    key: int  # 64-bit hash of the whole document, the same for every piece of it
    first: bool  # a document begins with this piece
    consumed: int  # bytes of the source's files read so far, for progress bars
    after: dict | None  # with the last piece of a document: the state of the reader behind it


class Reader:
    """The documents of one source in pieces, from the state `after` on.

    counts says what was left out or changed so far: documents empty, filtered and bad, bytes replaced by U+FFFD.
    """

    def __init__(self, source: Source, *, errors="strict", skip_bad=False, after=None):
        self.source, self.errors, self.skip_bad = source, errors, skip_bad
        after = after or {"position": None, "counts": {}, "notes": [], "consumed": 0}
        self.position, self.consumed = after["position"], after["consumed"]
        self.counts, self.notes = Counter(after["counts"]), list(after["notes"])
        self.commit = after.get("commit", "")  # of a data set on Hugging Face

    def state(self) -> dict:
        return {"position": self.position, "counts": dict(self.counts), "notes": list(self.notes),
                "consumed": self.consumed, **({"commit": self.commit} if self.source.in_hub else {})}

    def __iter__(self):
        keep = FILTERS[self.source.filter]
        for record in self._hub_rows() if self.source.in_hub else self._file_records():
            if isinstance(record, Path):
                (key, chunks), ahead = self._hash_file(record), record.stat().st_size
            else:
                (key, chunks), ahead = hash_text(record), 0
            pieces = cut(chunks)
            text = next(pieces, "")
            if not text:
                self.counts["empty"] += 1
            elif not keep(text):  # of a document of several pieces the filters see the first, PIECE characters
                self.counts["filtered"] += 1
            else:
                first = True
                for following in pieces:
                    ahead = max(0, ahead - len(text))
                    yield Piece(text, key, first, self.consumed - ahead, None)
                    text, first = following, False
                yield Piece(text, key, first, self.consumed, self.state())

    def _file_records(self):
        """Text, or the path of a file that is one document; self.position is that of the record after it."""
        start, skip = self.position or (0, 0)
        before = sum(self.source.sizes[:start])
        for number in range(start, len(self.source.names)):
            name, size = self.source.names[number], self.source.sizes[number]
            read = {".jsonl": self._json_lines, ".parquet": self._parquet_rows}.get(_kind(name), self._whole)
            for record, text, share in read(Path(self.source.root, name), skip):
                self.position, self.consumed = (number, record), before + int(share * size)
                yield text
            skip, before = 0, before + size

    def _whole(self, path, skip):
        if not skip:
            yield 1, path, 1.0

    def _hash_file(self, path):
        """The hash of a text file and its text, which is kept if it is short and read again if it is not."""
        hasher, held, size = hashlib.blake2b(digest_size=8), [], 0
        for text in read_text(path, self.errors, self.counts):
            data = text.encode()
            hasher.update(data)
            size += len(data)
            held.append(data)  # not text: one emoji makes Python keep four bytes for each character
            if size > HOLD:
                held = []
        again = read_text(path, self.errors, Counter()) if size > HOLD else (data.decode() for data in held)
        return int.from_bytes(hasher.digest()), again

    def _json_lines(self, path, skip):
        """(line number, text, share of the file read) of every record after line `skip`."""
        size = max(1, path.stat().st_size)
        with open_unpacked(path) as (file, raw):
            utf8 = Utf8(path, self.errors, self.counts)
            utf8.start(file)
            lines, share = _lines(file, utf8, skip), 0.0
            for number, line in lines:
                text, why = parse_json(line, self.source.text_key)
                if text is not None:
                    if number % 64 == 0:  # a system call
                        share = raw.tell() / size
                    yield number, text, share
                else:
                    others = (n for n, line in lines if parse_json(line, self.source.text_key)[0] is None)
                    self._bad(path, "line", number, why, others)

    def _parquet_rows(self, path, skip):
        """(row number, text, share of the file read) of every row after row `skip`."""
        import pyarrow
        import pyarrow.parquet as pq
        key = self.source.text_key
        try:
            with open_seekable(path) as file:
                parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK)  # else it holds whole row groups
                names = parquet.schema_arrow.names
                kind = str(parquet.schema_arrow.field(key).type) if key in names else "nothing"
                if "string" not in kind:  # string, large_string, string_view, dictionary<values=string ...>
                    raise ValueError(f"{path}: column {key!r} holds {kind}; text is needed. Columns: {', '.join(names)}"
                                     "\n  Name the one with the text: --text_key COLUMN")
                row, total = 0, max(1, parquet.metadata.num_rows)
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    if row + rows <= skip:
                        row += rows
                        continue
                    for batch in parquet.iter_batches(batch_size=64, row_groups=[group], columns=[key]):
                        for value in batch.column(0).to_pylist():
                            row += 1
                            if row > skip and value is None:
                                self._bad(path, "row", row, f"has nothing in column {key!r}")
                            elif row > skip:
                                yield row, value, row / total
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's own message names the file
                raise
            raise ValueError(f"{path} cannot be read as parquet: {error}\n  It was cut short, damaged, or is something "
                             "else: copy it again, or leave it out.") from None

    def _hub_rows(self):
        """Texts of a data set of Hugging Face; an interrupted stream is taken up where it broke, after a pause."""
        key, (state, rows), waits = self.source.text_key, self.position or (None, 0), list(RETRY_SECONDS)
        stream, self.commit = open_hub(self.source, self.commit)
        while True:
            try:
                if state:
                    stream.load_state_dict(state)
                for row in itertools.islice(stream, rows, None):
                    rows += 1
                    if rows == STATE_ROWS:
                        state, rows = stream.state_dict(), 0
                    self.position, waits = (state, rows), list(RETRY_SECONDS)
                    if isinstance(row.get(key), str):
                        yield row[key]
                    else:
                        self._bad(self.source.source, "row with keys", ", ".join(row), f"has no text under {key!r}")
                return
            except ValueError:
                raise
            except Exception as error:  # of requests, httpx, aiohttp or fsspec, which share no class but this
                what = f"{self.source.source} broke off: {type(error).__name__}: {error}"
                if not waits:
                    raise ConnectionError(f"{what}\n  It did not come back in {sum(RETRY_SECONDS)} seconds. Run the "
                                          "same command again later: it continues.") from None
                print(f"{what}\n  Trying again in {waits[0]} s.", file=sys.stderr)
                time.sleep(waits.pop(0))

    def _bad(self, path, unit, number, why, others=()):
        """A broken record: counted under skip_bad, otherwise the end of the run, with the next ones in the file."""
        if self.skip_bad:
            self.counts["bad"] += 1
            if len(self.notes) < NOTES:
                self.notes.append(f"{path}: {unit} {number} {why}")
            return
        more = list(itertools.islice(others, 1000))
        more = (f"\n  So are {len(more)}{' or more' * (len(more) == 1000)} after it: {unit} "
                f"{', '.join(map(str, more[:NOTES]))}{', ...' * (len(more) > NOTES)}.") if more else ""
        raise ValueError(f"{path}: {unit} {number} {why}.{more}\n  Repair it, name another --text_key, or leave such "
                         "records out with --skip_bad.")


def hash_text(text: str):
    """(64-bit hash, chunks) of a text in memory; what has no bytes in UTF-8 becomes U+FFFD."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        text = replace_surrogates(text)
        data = text.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()), [text]


def cut(chunks):
    """The same text in pieces of at most PIECE characters; where they end does not depend on the chunks."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > PIECE:
            end = start + PIECE
            if space := CUT.search(rest, max(end - 256, start), end):
                end = space.end()
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


# ----------------------------------------------------------------------------------------------------------------------
# bytes


@contextmanager
def open_unpacked(path: Path):
    """(buffered binary file, the file underneath, whose position tells how far along one is)."""
    with open(path, "rb") as raw:
        if path.suffix == ".gz":
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK)
        elif path.suffix == ".zst":
            file = io.BufferedReader(Zstd(raw), CHUNK)
        else:
            file = raw
        try:
            yield file, raw
        except Exception as error:
            if not isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) and type(error).__name__ != "ZstdError":
                raise
            raise ValueError(f"{path} cannot be unpacked: {error}\n  It was cut short or damaged: copy it again, or "
                             "leave it out.") from None


class Zstd(io.RawIOBase):
    """The unpacked bytes of a .zst file; zstandard's own reader takes a file that is cut short for a complete one."""

    FEED = 2048  # bytes; four of them can become 128 KiB, so this bounds what is unpacked at a time

    def __init__(self, raw):
        try:
            import zstandard
        except ImportError:
            raise ImportError(f"{raw.name} needs the package zstandard.\n  Install it with: pip install zstandard"
                              ) from None
        self.raw, self.packed, self.out = raw, b"", memoryview(b"")
        self.new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj  # `zstd --long` needs large windows
        self.frame = None

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.out:
            self.packed = self.packed or self.raw.read(self.FEED)
            if not self.packed:
                if self.frame:
                    raise EOFError("it ends in the middle")
                return 0
            self.frame = self.frame or self.new()
            self.out, self.packed = memoryview(self.frame.decompress(self.packed)), b""
            if self.frame.eof:  # another frame may follow
                self.packed, self.frame = self.frame.unused_data, None
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


@contextmanager
def open_seekable(path: Path):
    """A file to jump around in, as parquet needs; a packed one is unpacked to an unnamed file, gone when closed."""
    if path.suffix not in PACKED:
        with open(path, "rb") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as unpacked:
            with open_unpacked(path) as (file, _):
                while chunk := file.read(CHUNK):
                    unpacked.write(chunk)
            unpacked.seek(0)
            yield unpacked


class Utf8:
    """Bytes to text, chunk by chunk, with the offset of what is no UTF-8, or counts["replaced"] of it."""

    def __init__(self, path, errors, counts):
        self.path, self.errors, self.counts = path, errors, counts
        self.offset, self.pending = 0, b""  # pending: the beginning of a character whose end is in the next chunk

    def start(self, file):
        """Look at the first bytes: skip a byte order mark, refuse UTF-16."""
        head = file.peek(4096)[:4096]
        uneven = abs(head[0::2].count(0) - head[1::2].count(0))  # in UTF-16 every other byte of plain English is 0
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or uneven > max(8, len(head) / 5):
            raise ValueError(f"{self.path}: UTF-16 from byte 0 on; UTF-8 is needed.\n"
                             "  Convert it with: iconv -f UTF-16 -t UTF-8 OLD > NEW")
        if head.startswith(codecs.BOM_UTF8):
            self.offset = len(file.read(len(codecs.BOM_UTF8)))

    def decode(self, data: bytes, final: bool) -> str:
        data = self.pending + data
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            if self.errors == "strict":
                raise ValueError(f"{self.path}: byte {self.offset + error.start} is no UTF-8: "
                                 f"{error.reason}.\n  Convert the file (iconv -f LATIN1 -t UTF-8, if it is Latin-1), "
                                 "leave it out, or put U+FFFD there with --errors replace.") from None
            text, used = codecs.utf_8_decode(data, "replace", final)
            self.counts["replaced"] += text.count("\ufffd") - data[:used].count("\ufffd".encode())
        self.pending, self.offset = data[used:], self.offset + used
        return text


def read_text(path: Path, errors, counts):
    """The text of a file in chunks, byte for byte but for a byte order mark."""
    with open_unpacked(path) as (file, _):
        utf8 = Utf8(path, errors, counts)
        utf8.start(file)
        while chunk := file.read(CHUNK):
            yield utf8.decode(chunk, final=False)
        yield utf8.decode(b"", final=True)


def _lines(file, utf8: Utf8, skip: int):
    """(number, line) behind line `skip`, ended by \\n alone as JSON may hold U+2028; None for one above MAX_LINE."""
    for number in itertools.count(1):
        line = part = file.readline(MAX_LINE)
        if not line:
            return
        cut_off = False
        while len(part) == MAX_LINE and not part.endswith(b"\n"):
            part, cut_off = file.readline(MAX_LINE), True
            utf8.offset += len(part)
        if number > skip and not cut_off and line.strip():
            yield number, utf8.decode(line, final=True)
        else:
            utf8.offset += len(line)
            if number > skip and cut_off:
                yield number, None


def parse_json(line: str | None, key: str):
    """(text, None) of a JSON line, or (None, what is wrong with it)."""
    if line is None:
        return None, f"is longer than {MAX_LINE:,} bytes"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"is not JSON ({error})"
    if not isinstance(record, dict):
        return None, f"is not an object with the key {key!r}"
    if not isinstance(record.get(key), str):
        found = f"has no text under {key!r}" if key in record else f"has no key {key!r}"
        return None, f"{found}; its keys are {', '.join(record) or 'none'}"
    return record[key], None


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face


def open_hub(source: Source, commit: str = ""):
    """(rows of hf:NAME[@REVISION][:CONFIG][:SPLIT] as a stream, the commit they are of), or what to do, within seconds.

    commit: the one that a run began with, which is then the one to continue with, whatever the branch has now.
    """
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{source.source} needs the package datasets.\n  Install it with: pip install datasets"
                          ) from None
    name, config, split, *rest = [*source.source[3:].split(":"), "", ""]
    local = Path(name).exists()
    name, _, asked = (name, "", "") if local else name.partition("@")
    if not name or any(rest):
        raise ValueError(f"{source.source} is not hf:NAME[@REVISION][:CONFIG][:SPLIT].\n  For example: "
                         "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train")
    datasets.disable_progress_bars()
    constants, errors, revision = huggingface_hub.constants, huggingface_hub.errors, commit or asked or None
    offline = constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE  # the second also for HF_DATASETS_OFFLINE
    trouble = "offline by HF_HUB_OFFLINE or HF_DATASETS_OFFLINE" if offline else ""
    if not trouble and not local:
        try:  # load_dataset would find out as well, after half a minute of attempts, or never where nobody answers
            api = huggingface_hub.HfApi()
            info = api.dataset_info(name, revision=revision, timeout=HUB_SECONDS)
            revision = info.sha
            if info.gated:
                api.auth_check(name, repo_type="dataset")
        except errors.GatedRepoError:
            raise PermissionError(f"{source.source} is gated: its owner asks who reads it.\n  Accept the terms at "
                                  f"https://huggingface.co/datasets/{name}, then run: hf auth login") from None
        except errors.RevisionNotFoundError:
            raise FileNotFoundError(f"{source.source}: {name} has no revision {revision}.\n  A revision is a branch, a "
                                    "tag or a commit; leave it out for the latest.") from None
        except errors.RepositoryNotFoundError:
            raise FileNotFoundError(f"{source.source}: there is no data set {name} that you may read.\n  Check the "
                                    "name; for a private one run: hf auth login") from None
        except Exception as error:  # no network, but what was downloaded before may be enough
            trouble = f"no network: {error}"
    if trouble:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        builder = datasets.load_dataset_builder(name, config or None, data_dir=source.data_dir or None,
                                                revision=revision)
        stream = builder.as_streaming_dataset(split or "train")
    except Exception as error:
        if not trouble or local:
            raise ValueError(f"{source.source} cannot be read: {type(error).__name__}: {error}\n"
                             "  Check name, configuration and split.") from None
        load = f"datasets.load_dataset('{name}'{f', {config!r}' * bool(config)})"
        raise ConnectionError(f"{source.source} cannot be reached ({trouble}) and is not in the cache of datasets.\n"
                              f"  Where there is a network run: python -c \"import datasets; {load}\"\n  and copy "
                              "~/.cache/huggingface here; or download the files themselves and name their folder."
                              ) from None
    found = builder.hash  # the commit; of a folder here, a hash of names and dates
    if (commit and found != commit) or (trouble and COMMIT.fullmatch(asked) and found != asked):
        raise ValueError(f"{source.source} is {found} here; {commit or asked} is needed.\n  That is what the run began "
                         "with, or was asked for: bring it back, or start again in another folder.")
    columns = stream.column_names
    if columns and source.text_key not in columns:
        raise ValueError(f"{source.source} has no column {source.text_key!r}; it has {', '.join(columns)}.\n"
                         "  Name the one that holds the text: --text_key COLUMN")
    return (stream.select_columns([source.text_key]) if columns else stream), found


# ----------------------------------------------------------------------------------------------------------------------
# quality filters of the Stack-100M recipe


def keep_web(text: str) -> bool:
    """Prose: 50 to 100,000 words of 3 to 10 characters on average, mostly letters, few digits, few repeated lines."""
    words = text.split()
    lines = [line for line in text.split("\n") if line.strip()]
    return (50 <= len(words) <= 100_000 and 3 <= sum(map(len, words)) / len(words) <= 10
            and count_letters(text) >= 0.60 * len(text) and count_digits(text) <= 0.20 * len(text)
            and len(lines) - len(set(lines)) <= 0.30 * len(lines))


def keep_code(text: str) -> bool:
    """Source: 20 to 200,000 characters, none but white space making up more than 30 % (number tables, ASCII art)."""
    if not 20 <= len(text) <= 200_000:
        return False
    return max((n for char, n in Counter(text).items() if not char.isspace()), default=len(text)) <= 0.30 * len(text)


def keep_math(text: str) -> bool:
    """At least 20 words, and mathematics in it: 3 % digits or three marks of formulas."""
    return len(text.split()) >= 20 and (count_digits(text) >= 0.03 * len(text) or len(FORMULA.findall(text)) >= 3)


def count_letters(text: str) -> int:
    return _count(text, NO_LETTERS, str.isalpha)


def count_digits(text: str) -> int:
    return _count(text, NO_DIGITS, str.isdigit)


def _count(text, others, test):
    """How many characters pass the test; ASCII ones by deleting the others, thirty times faster than asking each."""
    plain = text.encode("ascii", "ignore")
    foreign = NOT_ASCII.findall(text) if len(plain) < len(text) else ()
    return len(plain.translate(None, others)) + sum(map(test, foreign))


NO_LETTERS = bytes(set(range(128)) - set(string.ascii_letters.encode()))
NO_DIGITS = bytes(set(range(128)) - set(string.digits.encode()))
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
FORMULA = re.compile(r"[=+^<>∑∫√≤≥≠±×÷]|\\[a-zA-Z]+|\$")
FILTERS = {"": lambda text: True, "web": keep_web, "code": keep_code, "math": keep_math}
