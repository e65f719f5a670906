"""Where documents come from: files, folders, globs, the standard library, Hugging Face.

`for piece in Reader(Source("texts/"))` gives pieces of documents, in an order that depends on nothing but the input.  A
new kind of file is a line of FORMATS or PACKINGS and a function.  A file that is named, or matched by a glob, is text
whatever it is called; a folder is searched for the names in FORMATS.  part_2 comes before part_10.

**Bytes are kept.**  Text is read as bytes and decoded as UTF-8 here, never by open(): no line ending is translated, no
locale is asked.  A byte order mark is dropped, UTF-16 is refused, a byte that is no UTF-8 stops the run with its offset
(or becomes U+FFFD, counted, as does half a surrogate pair in JSON, which has no bytes).

**Nothing is held whole.**  A document arrives in pieces of at most PIECE characters, cut where a word begins, so a file
of 1 GB on one line costs as much memory as any other.  Its hash is needed before its first token is written (is it a
duplicate? which split is it in?), so files above HOLD are read twice.  Pieces depend on the text alone.

**Positions.**  The last piece of a document carries what to continue from after it: (file, record) for files, the state
of the stream and the rows since for Hugging Face.  Records before it are skipped without being parsed.
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
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stack.data.filters import FILTERS
from stack.data.shards import natural
from stack.data.tokenizer import cut, to_bytes

UNKNOWN = 2**60  # bytes of a source, where only the far end knows
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


# ---- sources and their files


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
        stats = [os.stat(os.path.join(self.root, name)) for name in self.names]
        self.sizes = [stat.st_size for stat in stats]
        # What a second run of the same command must find unchanged, to continue or to call the work done.
        self.identity = {key: value for key, value in asdict(self).items() if value}
        if not self.in_hub:
            listing = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n"
                              for name, stat in zip(self.names, stats, strict=True))
            self.identity |= {"files": len(self.names), "bytes": sum(self.sizes),
                              "listing": hashlib.blake2b(os.fsencode(listing), digest_size=8).hexdigest()}
        if self.source == "stdlib":
            self.identity["python"] = platform.python_version()

    def text_bytes(self) -> int:
        """About how much text this is, or UNKNOWN."""
        return UNKNOWN if self.in_hub else sum(size * UNPACKED_FACTOR.get(os.path.splitext(name)[1], 1)
                                               for size, name in zip(self.sizes, self.names, strict=True))


def list_files(source: str) -> tuple[str, list[str]]:
    """(folder, names in it) of the files of a source, in natural order."""
    root, names = "", []
    if source == "stdlib":
        root = sysconfig.get_path("stdlib")
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
        raise FileNotFoundError(f"{source} has no files to read; looked for {' '.join(FORMATS)}, also with "
                                f"{' or '.join(PACKINGS)} behind.\n  Text under other names is read when you name the "
                                "files, or give a glob that matches them.")
    return root, sorted(names, key=natural)


def _walk(folder: str):
    def stop(error):  # os.walk says nothing about a folder that it may not enter
        raise error
    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            if _kind(name) in FORMATS and not name.startswith("."):
                yield os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")


def _kind(name) -> str:
    """.jsonl for a.jsonl and a.jsonl.gz"""
    stem, kind = os.path.splitext(name)
    return os.path.splitext(stem)[1] if kind in PACKINGS else kind


def _is_stdlib(name: str) -> bool:
    """Not what was installed later, not the tests (more than all the rest), nothing that differs between builds."""
    folders = name.split("/")[:-1]
    return (name.endswith(".py") and not name.startswith(("_sysconfigdata", "config-"))
            and not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(folders))


# ---- documents


class Piece(NamedTuple):
    text: str
    key: int  # 64-bit hash of the whole document, the same for every piece of it
    first: bool  # a document begins with this piece
    after: dict | None  # with the last piece of a document: the state of the reader behind it
    ids: np.ndarray | None = None  # of the text, once it is encoded


class Reader:
    """The documents of one source in pieces, from the state `after` on.

    counts says what was left out or changed so far: documents empty, filtered and bad, bytes replaced by U+FFFD.
    """

    def __init__(self, source: Source, *, errors="strict", skip_bad=False, after=None):
        self.source, self.errors, self.skip_bad = source, errors, skip_bad
        after = after or {"position": None, "counts": {}, "notes": [], "consumed": 0}
        self.position, self.before, self.file = after["position"], after["consumed"], None
        self.counts, self.notes = Counter(after["counts"]), list(after["notes"])
        self.commit = after.get("commit", "")  # of a data set on Hugging Face

    def consumed(self) -> int:
        """Bytes of the source's files read so far, for progress bars."""
        return self.before + (self.file.consumed() if self.file else 0)

    def state(self) -> dict:
        return {"position": self.position, "counts": dict(self.counts), "notes": list(self.notes),
                "consumed": self.consumed(), **({"commit": self.commit} if self.source.in_hub else {})}

    def __iter__(self):
        keep = FILTERS[self.source.filter]
        for record in self._hub_rows() if self.source.in_hub else self._file_records():
            key, chunks = hash_text(record) if isinstance(record, str) else hash_file(record)
            pieces = cut(chunks, PIECE)
            begin = next(pieces, "")
            if not begin:
                self.counts["empty"] += 1
            elif not keep(begin):  # of a document of several pieces the filters see the first, PIECE characters
                self.counts["filtered"] += 1
            else:
                pairs = itertools.pairwise(itertools.chain([begin], pieces, [None]))
                for n, (text, following) in enumerate(pairs):
                    yield Piece(text, key, n == 0, self.state() if following is None else None)

    def _file_records(self):
        """Text, or the File that is one document; self.position is that of the record after it."""
        start, skip = self.position or (0, 0)
        self.before = sum(self.source.sizes[:start])
        for number in range(start, len(self.source.names)):
            path, size = Path(self.source.root, self.source.names[number]), self.source.sizes[number]
            self.file = File(path, size, self.errors, self.counts)
            unit, read = FORMATS.get(_kind(path.name), WHOLE)
            records = read(self.file, self.source.text_key, skip)
            for record, text, why in records:
                self.position = (number, record)
                if why:
                    self._bad(path, unit, record, why, (other for other, _, why in records if why))
                else:
                    yield text
            self.before, self.file, skip = self.before + size, None, 0

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
    text, data = to_bytes(text)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()), [text]


def hash_file(file: "File"):
    """The same of a whole file, whose text is kept if it is short and read again if it is not."""
    hasher, held, size = hashlib.blake2b(digest_size=8), [], 0
    for text in file.chunks():
        data = text.encode()
        hasher.update(data)
        size += len(data)
        held.append(data)  # not text: one emoji makes Python keep four bytes for each character
        if size > HOLD:
            held = []
    file.counts = Counter()  # what a second pass replaces is counted already
    return int.from_bytes(hasher.digest()), file.chunks() if size > HOLD else (data.decode() for data in held)


# ---- bytes


class File:
    """A file of a source: unpacked, and decoded as UTF-8 with the offset of what is none, or counts["replaced"] of it.

    size: of the file as it lies there.  offset: bytes of text decoded so far.
    """

    def __init__(self, path: Path, size: int, errors, counts):
        self.path, self.size, self.errors, self.counts = path, size, errors, counts
        self.raw, self.offset, self.pending = None, 0, b""  # pending: a character whose end is in the next chunk

    def consumed(self) -> int:
        """How much of it is read."""
        return 0 if self.raw is None else self.size if self.raw.closed else self.raw.tell()

    @contextmanager
    def open(self, text=True):
        """Its unpacked bytes, buffered; of a text those behind the byte order mark."""
        unpack = PACKINGS.get(self.path.suffix)
        with open(self.path, "rb") as self.raw:
            file = io.BufferedReader(unpack(self.raw), CHUNK) if unpack else self.raw
            try:
                if text:
                    self._start(file)
                yield file
            except Exception as error:
                if not isinstance(error, UNPACK_ERRORS) and type(error).__name__ != "ZstdError":
                    raise
                raise ValueError(f"{self.path} cannot be unpacked: {error}\n  It was cut short or damaged: copy it "
                                 "again, or leave it out.") from None

    def _start(self, file):
        """Look at the first bytes: skip a byte order mark, refuse UTF-16."""
        head, self.pending = file.peek(4096)[:4096], b""
        uneven = abs(head[0::2].count(0) - head[1::2].count(0))  # in UTF-16 every other byte of plain English is 0
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or uneven > max(8, len(head) / 5):
            raise ValueError(f"{self.path}: UTF-16 from byte 0 on; UTF-8 is needed.\n"
                             "  Convert it with: iconv -f UTF-16 -t UTF-8 OLD > NEW")
        self.offset = len(file.read(len(codecs.BOM_UTF8))) if head.startswith(codecs.BOM_UTF8) else 0

    def decode(self, data: bytes, final: bool) -> str:
        """The next bytes as text; final: a character that they do not complete is none."""
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

    def chunks(self):
        """The text, byte for byte but for a byte order mark."""
        with self.open() as file:
            while chunk := file.read(CHUNK):
                yield self.decode(chunk, final=False)
            yield self.decode(b"", final=True)


class Zstd(io.RawIOBase):
    """The unpacked bytes of a .zst file; zstandard's own reader takes a file that is cut short for a complete one."""

    FEED = 2048  # bytes; four of them can become 128 KiB, so this bounds what is unpacked at a time

    def __init__(self, raw):
        try:
            import zstandard
        except ImportError:
            raise ImportError(f"{raw.name} needs the package zstandard.\n  Install it with: pip install zstandard"
                              ) from None
        self.raw, self.out, self.frame = raw, memoryview(b""), None
        self.new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj  # `zstd --long` needs large windows

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.out:
            if packed := self.frame and self.frame.unused_data or self.raw.read(self.FEED):
                if self.frame is None or self.frame.eof:  # the first frame, or one that follows
                    self.frame = self.new()
                self.out = memoryview(self.frame.decompress(packed))
            elif self.frame and not self.frame.eof:
                raise EOFError("it ends in the middle")
            else:
                return 0
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


# ---- formats: (number, text or File, what is wrong with it or "") of the records behind the first `skip`


def read_whole(file: File, key: str, skip: int):
    """The file itself."""
    if not skip:
        yield 1, file, ""


def read_json_lines(file: File, key: str, skip: int):
    """Lines, which end by \\n alone as JSON may hold U+2028."""
    with file.open() as lines:
        for number, line in enumerate(iter(partial(lines.readline, MAX_LINE), b""), 1):
            part = line
            while len(part) == MAX_LINE and not part.endswith(b"\n"):
                part = lines.readline(MAX_LINE)
                file.offset += len(part)
            if number > skip and part is line and line.strip():
                yield number, *parse_json(file.decode(line, final=True), key)
            else:
                file.offset += len(line)
                if number > skip and part is not line:
                    yield number, "", f"is longer than {MAX_LINE:,} bytes"


def parse_json(line: str, key: str) -> tuple[str, str]:
    """(text of a JSON line, what is wrong with it)"""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON ({error})"
    if not isinstance(record, dict):
        return "", f"is not an object with the key {key!r}"
    if not isinstance(record.get(key), str):
        found = f"has no text under {key!r}" if key in record else f"has no key {key!r}"
        return "", f"{found}; its keys are {', '.join(record) or 'none'}"
    return record[key], ""


def read_parquet(file: File, key: str, skip: int):
    """Rows."""
    import pyarrow
    import pyarrow.parquet as pq
    path = file.path
    try:
        with file.open(text=False) as rows, tempfile.TemporaryFile() as unpacked:
            if path.suffix in PACKINGS:  # parquet is read from its end: unpack to an unnamed file, gone when closed
                shutil.copyfileobj(rows, unpacked, CHUNK)
                rows = unpacked
            parquet = pq.ParquetFile(rows, pre_buffer=False, buffer_size=CHUNK)  # else it holds whole row groups
            names = parquet.schema_arrow.names
            kind = str(parquet.schema_arrow.field(key).type) if key in names else "nothing"
            if "string" not in kind:  # string, large_string, string_view, dictionary<values=string ...>
                raise ValueError(f"{path}: column {key!r} holds {kind}; text is needed. Columns: {', '.join(names)}"
                                 "\n  Name the one with the text: --text_key COLUMN")
            row, groups = 0, list(range(parquet.num_row_groups))
            while groups and row + parquet.metadata.row_group(groups[0]).num_rows <= skip:
                row += parquet.metadata.row_group(groups.pop(0)).num_rows
            batches = parquet.iter_batches(batch_size=64, row_groups=groups, columns=[key])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, row + 1):
                if number > skip:
                    yield number, text, "" if text is not None else f"has nothing in column {key!r}"
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's own message names the file
            raise
        raise ValueError(f"{path} cannot be read as parquet: {error}\n  It was cut short, damaged, or is something "
                         "else: copy it again, or leave it out.") from None


WHOLE = ("file", read_whole)  # of any other name as well
FORMATS = {".txt": WHOLE, ".md": WHOLE, ".py": WHOLE,  # by extension: what a record is called, and who reads it
           ".jsonl": ("line", read_json_lines), ".parquet": ("row", read_parquet)}
PACKINGS = {".gz": gzip.open, ".zst": Zstd}  # around any of them: file of packed bytes -> file of the unpacked
UNPACK_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


# ---- Hugging Face


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
