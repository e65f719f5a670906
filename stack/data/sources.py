"""Where documents come from: files, folders, globs, the standard library, Hugging Face.

`for piece in Reader(Source("texts/"))` gives pieces of documents, in an order that depends on nothing but the input.
formats.py reads what is in a file.  One that is named, or matched by a glob, is text where FORMATS does not know its
ending; a folder is searched for the endings that it knows, links are followed, into no folder twice.  part_2 comes
before part_10.  Whatever is found and not read is counted, by ending and reason.

**Nothing is held whole.**  A document arrives in pieces of at most PIECE characters, cut where a word begins, so a file
of 1 GB on one line costs as much memory as any other.  Its hash is needed before its first token is written (is it a
duplicate? which split is it in?), so files above HOLD are read twice.  Pieces depend on the text alone.

**Positions.**  The last piece of a document carries what to continue from after it: (file, member, record) for files,
member being 0 outside of archives; the state of the stream and the rows since for Hugging Face.
"""

import glob
import hashlib
import io
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stack.data import chat, formats
from stack.data.filters import FILTERS
from stack.data.formats import ARCHIVES, FORMATS, WHOLE, File
from stack.data.packings import PACKINGS
from stack.data.shards import is_record, natural
from stack.data.signatures import BadFile
from stack.data.tokenizer import BOUNDARY, cut, to_bytes

UNKNOWN = 2**60  # bytes of a source, where only the far end knows
# bytes of text per byte of file, roughly
UNPACKED_FACTOR = {".gz": 4, ".zst": 4, ".bz2": 4, ".xz": 5, ".zip": 3, ".parquet": 2}
PIECE = 1 << 18  # characters in a piece: enough for the tokenizer's speed, few enough to share out among threads
HOLD = 1 << 24  # bytes of one file kept while its hash is taken; longer files are read a second time instead
NOTES = 10  # broken records named in the report of --skip_bad, per source; all are counted
HUB_SECONDS = 10  # to wait for the first answer of Hugging Face
RETRY_SECONDS = (1, 2, 4, 8, 16, 32)  # waits between attempts to go on with an interrupted stream
# of what is passed over told first
MAY_BE_DATA = ("data set", ".json", ".tar", ".zip", ".7z", ".rar", ".lz4", ".pdf", ".epub", ".htm", ".xhtml", ".xml",
               ".rtf", ".doc", ".odt", ".xls", ".tex", ".rst", ".org", ".log", ".srt", ".yaml", ".yml", ".ipynb",
               ".eml", ".mbox", ".sql", ".db", ".avro", ".orc", ".feather", ".h5", ".npy", ".pkl")
BESIDE = ".arrow (not of the data set saved there)"
# how what formats.text_of and read_table find wrong with a record begins
NO_RECORD = ("has no key", "is not an object")  # what the settings of some program look like
OTHER_KEY = ("has no key", "has no text but", "has nothing in")  # where another may be the one with the text
COMMIT = re.compile("[0-9a-f]{40}")
BOUNDARY_LINE = re.compile(rf"^{re.escape(BOUNDARY)}\r?$", re.MULTILINE)
STATE_ROWS = 1000  # rows between two copies of a stream's state: a copy per row costs more than reading the row


# ---- sources and their files


@dataclass
class Source:
    """One source, on the command line or in a recipe. Finds its files at once: a wrong name ends the run early."""

    source: str  # stdlib, a file, a folder, a glob, or hf:NAME[@REVISION][:CONFIG][:SPLIT]
    weight: float | list = 0.0  # share of the tokens, in a recipe; or one for each phase of it
    filter: str = ""  # web, code or math: which documents are kept
    text_key: str = "text"  # the key or column that holds the text
    data_dir: str = ""  # Hugging Face: the part of the repository to read
    separator: str = ""  # what stands between the documents of a text file
    chat: bool = False  # a record is a conversation (chat.py), a .py file some about what is in it (questions.py)

    def __post_init__(self):
        if self.filter not in FILTERS:
            raise ValueError(f"{self.source}: there is no filter {self.filter!r}.\n"
                             f"  Use {', '.join(filter(None, FILTERS))}, leave it out, or add yours to "
                             "stack/data/filters.py.")
        self.in_hub = self.source.startswith("hf:")
        self.text_key = formats.CONVERSATION if self.chat else self.text_key
        # passed: what was found and is not read: {".jpg (not known as text)": 3}
        self.root, self.names, self.passed = ("", [], {}) if self.in_hub else list_files(self.source)
        stats = [os.stat(os.path.join(self.root, name)) for name in self.names]
        self.sizes, self.times = ([getattr(stat, key) for stat in stats] for key in ("st_size", "st_mtime_ns"))
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
        return UNKNOWN if self.in_hub else sum(size * max(UNPACKED_FACTOR.get(kind, 1) for kind in formats.kinds(name))
                                               for size, name in zip(self.sizes, self.names, strict=True))


def list_files(source: str) -> tuple[str, list[str], Counter]:
    """(folder, names in it, what is there and not read) of a source; the names in natural order."""
    root, names, passed = "", [], {}  # passed: path -> why
    if source == "stdlib":
        root = sysconfig.get_path("stdlib")
        names = [name for name in _walk(root, {}) if _is_stdlib(name)]
    elif os.path.isdir(source):
        root, names = source, list(_walk(source, passed))
    elif os.path.exists(source):
        if why := _no_file(source):
            raise ValueError(f"{source} is a {why}, which can be read once; text is read several times.\n  Write it to "
                             "a file, and name that.")
        root, names = os.path.split(source)[0], [os.path.basename(source)]
    elif any(mark in source for mark in "*?["):
        matches = [match for match in _matches(source, passed) if "__pycache__" not in match]
        inside = [f"{match}/{name}" for match in matches if os.path.isdir(match) for name in _walk(match, passed, True)]
        passed |= {match: why for match in matches if not os.path.isdir(match) and (why := _no_file(match))}
        # by realpath: a folder may be matched and, once more, what is in it, and links lead to what is matched too
        found = {os.path.realpath(name): os.path.normpath(name)
                 for name in reversed([*filter(os.path.isfile, matches), *inside])}
        names = list(found.values())
        passed = {name: why for name, why in passed.items() if os.path.realpath(name) not in found}
    else:
        link = f" (a link to {os.readlink(source)})" if os.path.islink(source) else ""
        raise FileNotFoundError(f"{source or 'A source without a name'}{link} not found.\n  A source is a file, a "
                                "folder, a glob in quotes, stdlib, or hf:NAME[@REVISION][:CONFIG][:SPLIT] for a data "
                                "set on Hugging Face.")
    stale = set() if os.path.isfile(source) else beside_saved(root, names)
    names, counts = [name for name in names if name not in stale], Counter([*passed.values(), *[BESIDE] * len(stale)])
    if not names:
        advice = ("An .arrow file that is not of the data set is read when you name the file itself." if stale else
                  formats.REMEDY)
        raise FileNotFoundError(f"{source} has no files to read{listed(counts, '; passed over: ')}.\n  Looked for "
                                f"{' '.join([*FORMATS, *ARCHIVES])}, also with {' '.join(PACKINGS)} behind. {advice}")
    return root, sorted(names, key=natural), counts


def beside_saved(root, names) -> set[str]:
    """The .arrow files among these that are not of the data set which `datasets` saved in their folder: its caches, and
    what is left of a save before."""
    arrows = [name for name in names if name.endswith(".arrow")]
    saved = {folder: {*listed_in(Path(root, folder, "state.json"), "_data_files", lambda file: file["filename"])}
             for folder in {*map(os.path.dirname, arrows)}}
    cached = {folder for folder in saved if Path(root, folder, "dataset_info.json").exists()}
    return {name for name in arrows for folder, file in [os.path.split(name)]
            if (file not in saved[folder] if saved[folder] else folder in cached and file.startswith("cache-"))}


def listed_in(path, key, name=str) -> list[str]:
    """The names that a JSON file of `datasets` lists; [] where there is no such file, or it is another program's."""
    try:
        found = json.loads(Path(path).read_bytes())
        found = found.get(key) if isinstance(found, dict) else None
        return [name(each) for each in found] if isinstance(found, list) else []
    except (FileNotFoundError, IsADirectoryError):
        return []
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{path} is damaged: it does not say which files are of the data set.\n  Save the data set "
                         "again, or name the files to read one by one.") from None


def _no_file(path) -> str:
    return "" if os.path.isfile(path) else "pipe or device" if os.path.exists(path) else "broken link"


def listed(counts: dict, before="", most=12, where="") -> str:
    """3 .jpg (not known as text), 1 hidden: what may be data first, then the most frequent. where: the others are."""
    def order(item):
        return not (item[0].startswith(MAY_BE_DATA) and "(" in item[0] or item[0] == "encrypted"), -item[1]
    counts = sorted((+Counter(counts)).items(), key=order)
    more = [(f"of {len(counts) - most} other kinds{where}", sum(n for _, n in counts[most:]))] if counts[most:] else []
    return before + ", ".join(f"{n:,} {what}" for what, n in counts[:most] + more) if counts else ""


def _matches(pattern: str, passed: dict) -> list[str]:
    """What a glob matches; ** goes into the folders that _folders goes into."""
    before, *after = re.split(r"(?<![^/])(?:\*\*/+)*\*\*(?:/+|$)", pattern, maxsplit=1)
    if not after:
        return glob.glob(pattern)
    bases = [base for base in glob.glob(before) if os.path.isdir(base)] if before else [""]
    inner = [f"{glob.escape(root)}/" for base in bases for root, _ in _folders(base or ".", passed)]
    return [match for folder in inner for match in _matches(folder + (after[0] or "*"), passed)
            if after[0] or not os.path.isdir(match)]


def _walk(folder: str, passed: dict, matched=False):
    """The files in a folder that are read."""
    for root, names in _folders(folder, passed, matched):
        for name in sorted(names):
            path = f"{root}/{name}"
            if why := formats.passed_over(name, {**FORMATS, **ARCHIVES}) or _no_file(path):
                passed[path] = why
            else:
                yield os.path.relpath(path, folder).replace(os.sep, "/")


def _folders(folder: str, passed: dict, matched=False):
    """(path, names in it) of a folder and those in it that are read.  Links are followed, after what is no link, into
    no folder twice, nor into one that it lies in; matched: that it is no link to such a one itself."""
    def stop(error):  # os.walk says nothing about a folder that it may not enter
        raise error
    path = Path(os.path.abspath(folder))
    above = {*path.resolve().parents, *([path.parent.resolve(), *path.parent.resolve().parents] if matched else [])}
    met = {*map(_inode, above)}
    for root, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        ours = any(name in names and is_record(f"{root}/{name}") for name in ("progress.json", "meta.json"))
        if ours or _inode(root) in met:
            passed[root] = f"data set ({os.path.normpath(root)})" if ours else "folder met before (a link)"
            folders.clear()
            continue
        if len(splits := listed_in(f"{root}/dataset_dict.json", "splits")) > 1:
            raise ValueError(f"{root} is a data set in {len(splits)} splits, {', '.join(splits)}, which are no one "
                             f"text.\n  Name those to train on, as {os.path.join(root, splits[0])}, and with --val one "
                             "to validate on.")
        met.add(_inode(root))
        passed |= {f"{root}/{name}": "hidden" for name in folders if formats.passed_over(name, ()) == "hidden"}
        folders[:] = sorted((name for name in folders if f"{root}/{name}" not in passed),
                            key=lambda name: (os.path.islink(f"{root}/{name}"), name))
        yield root, names


def _inode(path) -> tuple:
    found = os.stat(path)
    return found.st_dev, found.st_ino


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


class Reader:
    """The documents of one source in pieces, from the state `after` on.

    counts says what was left out or changed so far: documents empty, filtered and bad, bytes replaced by U+FFFD.
    read says what was read as what, {".jsonl.gz by line": 2}, passed what was not.
    """

    def __init__(self, source: Source, *, errors="strict", skip_bad=False, after=None):
        self.source, self.errors, self.skip_bad = source, errors, skip_bad
        after = after or {"position": None, "counts": {}, "notes": [], "consumed": 0, "passed": source.passed}
        self.position, self.before, self.file = after["position"], after["consumed"], None
        self.counts, self.notes = Counter(after["counts"]), list(after["notes"])
        self.read, self.passed = Counter(after.get("read")), Counter(after.get("passed"))
        self.commit = after.get("commit", "")  # of a data set on Hugging Face

    def consumed(self) -> int:
        """Bytes of the source's files read so far, for progress bars."""
        return self.before + (self.file.consumed() if self.file else 0)

    def state(self) -> dict:
        return {"position": self.position, "counts": dict(self.counts), "notes": list(self.notes),
                "consumed": self.consumed(), "read": dict(self.read), "passed": dict(self.passed),
                **({"commit": self.commit} if self.source.in_hub else {})}

    def __iter__(self):
        keep = FILTERS[self.source.filter]
        for record in self._hub_rows() if self.source.in_hub else self._file_records():
            try:
                key, chunks = hash_text(record, self.counts) if isinstance(record, str) else hash_file(record)
            except BadFile as error:
                self._bad_file(error)
                self.read[record.label] -= 1
                continue
            pieces = iter(chunks) if self.source.chat else cut(chunks, PIECE)  # a conversation stays whole
            begin = next(pieces, "")
            if not begin:
                self.counts["empty"] += 1
            elif not keep(begin):  # of a document of several pieces the filters see the first, PIECE characters
                self.counts["filtered"] += 1
            else:
                pairs = itertools.pairwise(itertools.chain([begin], pieces, [None]))
                for n, (text, following) in enumerate(pairs):
                    if BOUNDARY in text and not isinstance(record, str):
                        self.counts["boundary_lines"] += len(BOUNDARY_LINE.findall(text))
                    yield Piece(text, key, n == 0, self.state() if following is None else None)

    def _file_records(self):
        """Text, or the File that is one document; self.position is that of the record after it."""
        start, *first, skip = self.position or (0, 0)
        first = first[0] if first else 0  # a run that was begun before archives were read knows of none
        self.before = sum(self.source.sizes[:start])
        for number in range(start, len(self.source.names)):
            for member, file in self._sound(self._files(number, first, skip)):
                unit, read = formats.TALKS.get(file.kind, formats.NO_TALK) if self.source.chat else FORMATS.get(
                    file.kind, WHOLE)
                found = not skip and file.kind == ".json" and not self.source.chat and self._is_found(file)
                if found and self._has_no_record(file, read):
                    self.passed[f".json (no key {self.source.text_key!r})"] += 1  # settings of a program, say
                    continue
                records, new, bad = self._sound(read(file, self.source.text_key, skip)), not skip, self.counts["bad"]
                for record, text, why in records if file.size else ():
                    if new:  # verify.py goes by " whole" and " by document"
                        self._count_read(file, "whole" if unit == "document" and not file.separator else f"by {unit}")
                    self.position, new = (number, member, record), False
                    if why:
                        self._bad(file.where, unit, record, why, (other for other, _, why in records if why))
                    else:
                        yield text
                if new and self.counts["bad"] == bad:
                    self.counts["empty"] += 1
                skip = 0
            self._check_unchanged(number)
            self.before, self.file, first, skip = self.before + self.source.sizes[number], None, 0, 0

    def _files(self, number, first, skip):
        """(member, File) of a file, which is member 0 of itself, or of the members of an archive from `first` on."""
        name, size = self.source.names[number], self.source.sizes[number]
        path = os.path.join(self.source.root, name)
        self.file = File(path, name, partial(open, path, "rb"), self.errors, self.counts, size=size,
                         separator=self.source.separator)
        if self.file.kind not in ARCHIVES or not size:
            yield 0, self.file
        else:
            if not first and not skip:
                self._count_read(self.file, "by member")
            yield from formats.members(self.file, first, self.passed)

    def _check_unchanged(self, number):
        """Refuse a file that is not what it was when the run began; it is read several times."""
        path = os.path.join(self.source.root, self.source.names[number])
        now = os.stat(path)
        if (now.st_size, now.st_mtime_ns) != (self.source.sizes[number], self.source.times[number]):
            raise ValueError(f"{path} changed while it was read.\n  Run the command again when nothing writes to it, "
                             "or name a copy of it.")

    def _is_found(self, file) -> bool:
        """Not named, but in a folder or an archive with others."""
        return len(self.source.names) > 1 or file is not self.file

    def _has_no_record(self, file, read) -> bool:
        """Whether there are objects in it and not one of them has the key."""
        why = ""
        with suppress(BadFile):  # which is told when it is read
            for _, _, why in read(file, self.source.text_key, 0) if file.size else ():
                if not why.startswith(NO_RECORD):
                    break
            else:
                return bool(why)
        return False

    def _count_read(self, file, how):
        file.label = f"{file.kind + file.packing or 'file'} {how}"
        self.read[file.label] += 1

    def _sound(self, records):
        """The records of a file, up to where it is damaged or turns out to be something else."""
        some = False
        try:
            for record in records:
                yield record
                some = True
        except BadFile as error:
            self._bad_file(error, ", from there to its end" * some)

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
                    text, why = formats.text_of(row, key, self.counts)
                    if not why:
                        self.read["rows"] += 1
                        yield text
                    elif "bytes" in row and "file" in row:  # of whole_files
                        file = File(row["file"], "", lambda: io.BufferedReader(io.BytesIO(row["bytes"])),  # noqa: B023
                                    self.errors, self.counts)
                        self._count_read(file, "whole")
                        yield file
                    else:
                        self._bad(self.source.source, "row with keys", ", ".join(row), why.partition("; its keys")[0])
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

    def _bad_file(self, error, part=""):
        if not self.skip_bad:
            raise error
        self.counts["bad"] += 1
        if len(self.notes) < NOTES:
            self.notes.append(str(error).partition("\n  ")[0].replace("\n", "\\n") + part)

    def _bad(self, path, unit, number, why, others=()):
        """A broken record: counted under skip_bad, otherwise the end of the run, with the next ones in the file."""
        if self.skip_bad:
            self.counts["bad"] += 1
            if len(self.notes) < NOTES:
                self.notes.append(f"{path}: {unit} {number} {why}".replace("\n", "\\n"))
            return
        more = list(itertools.islice(others, 1000))
        more = (f"\n  Broken too, for this reason or another, {len(more)}{' or more' * (len(more) == 1000)} after it: "
                f"{unit} {', '.join(map(str, more[:NOTES]))}{', ...' * (len(more) > NOTES)}.") if more else ""
        advice = f"{formats.CONVERT}, put U+FFFD there with --errors replace," if why.startswith(formats.NO_UTF8) else (
            "Repair it, name another --text_key," if why.startswith(OTHER_KEY) else "Repair it,")
        if not self.source.chat:
            advice = formats.or_chat(advice, why.partition("; its keys are ")[2].split(", "))
        form = f"\n  A conversation is {chat.FORM}." if self.source.chat else ""
        raise ValueError(f"{path}: {unit} {number} {why}.{more}{form}\n  {advice} or leave such records out with "
                         "--skip_bad.")


def hash_text(record: str, counts: Counter):
    """(64-bit hash, chunks) of a text in memory; what has no bytes in UTF-8 becomes U+FFFD, counted."""
    text, data = to_bytes(record)
    if text is not record:
        counts["replaced"] += text.count("\ufffd") - record.count("\ufffd")
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
    local = os.path.exists(name)
    if local and (more := beside_saved("", map(str, Path(name).rglob("*.arrow")))):
        raise ValueError(f"{source.source} would read {min(more)} too, which is not of the data set saved there "
                         f"({len(more)} such).\n  Name the folder itself, without hf:, or delete what is too much.")
    if not local and (name.startswith(("/", ".")) or name.count("/") > 1):
        raise FileNotFoundError(f"{source.source}: there is no folder {name} here.\n  On Hugging Face a data set is "
                                "called OWNER/NAME.")
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
        lines = builder.name == "text"  # it would make a document of each line, and other line ends: see whole_files
        stream = whole_files(builder, split or "train") if lines else builder.as_streaming_dataset(split or "train")
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
    if lines and source.separator:
        raise ValueError(f"{source.source} is a data set of text files, which are documents here.\n  To divide them by "
                         "--separator copy the files here, and name their folder without hf:.")
    if lines:
        return stream, found
    if stream.features:
        key = formats.check_column(source.source, stream.features.arrow_schema, source.text_key)[0]
        return stream.select_columns([key]), found
    return stream, found


def whole_files(builder, split):
    """Rows {"file", "bytes"} of a data set of text files, in the place of the lines that `datasets` would give."""
    import datasets
    from datasets.utils.file_utils import xopen
    files = builder.config.data_files[split]
    download = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    loader = datasets.StreamingDownloadManager(base_path=builder.base_path, download_config=download)

    def rows(files):
        for name in loader.iter_files(loader.extract(files)):
            with xopen(name, "rb", download_config=download) as file:
                yield {"file": name, "bytes": file.read()}
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": list(files)})
