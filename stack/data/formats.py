"""What is in a file: its bytes unpacked (packings.py), checked, decoded, and taken apart into records.

A name says what a file is, in letters of any case: FORMATS has who reads it, PACKINGS what may be around it, ARCHIVES
what holds several.  Content that is something else is refused as what it is (signatures.py).

**Bytes are kept.**  Text is read as bytes and decoded as UTF-8 here, never by open(): no line ending is translated, no
locale is asked.  A byte order mark is dropped, UTF-16 and ISO-2022 are refused, so is a text with a NUL or many control
characters, a byte that is no UTF-8 is an error with its offset (or becomes U+FFFD, counted).

**Nothing is held whole**, but for one record (of MAX_LINE at most), a batch of rows (64 of parquet; in Arrow as many as
were written at a time), and on disk a member of an archive, or a packed file that has to be read from its end.

Rejected: the readers of `datasets` for JSON and CSV, which guess types (a date becomes a number, "NA" nothing at all),
translate line endings, and take a file whole where an array is in it.
"""

import codecs
import csv
import io
import itertools
import json
import os
import re
import stat
import tarfile
import tempfile
import zipfile
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial

from stack.data import chat, questions
from stack.data.packings import CHUNK, PACKINGS, copy, unpacking
from stack.data.signatures import CONVERT, BadFile, check, check_shifts

CONVERSATION = " or ".join(chat.LISTS)  # for a key: the record is one, and its text the messages as JSON
MAX_LINE = 1 << 26  # bytes of one JSON line or CSV field: it has to be in memory whole, and several times over
LINK = "link or device (in an archive)"
BATCH = 64  # rows of a table in memory
MARK = "\udcff"  # stands for bytes that are no UTF-8 in text that is still to be divided
# reasons to refuse a record; sources.py goes by how the first begins
NO_UTF8, NUL = "has a byte that is no UTF-8", "has a NUL in it, which no text has"
codecs.register_error("stack.data.mark", lambda error: (MARK, error.end))
SPACE = re.compile(r"[\s,]*")


class File:
    """Bytes with the name of what they are: unpacked, and decoded as UTF-8, counts["replaced"] of it with errors.

    where: for messages.  name: its ending says what it is.  open_raw() -> the file as it lies there, for `with`.
    offset: bytes of text decoded so far.
    """

    def __init__(self, where, name, open_raw, errors="strict", counts=None, *, separator="", size=0):
        self.where, self.open_raw, self.errors, self.counts = where, open_raw, errors, counts
        self.name, self.separator, self.size = name, separator, size
        self.kind, self.packing = kinds(name)
        self.raw, self.offset, self.pending = None, 0, b""  # pending: a character whose end is in the next chunk

    def consumed(self) -> int:
        """How much of it is read."""
        return 0 if self.raw is None else self.size if self.raw.closed else self.raw.tell()

    @contextmanager
    def open(self, text=True):
        """Its unpacked bytes, buffered; of a text those behind the byte order mark."""
        unpack = PACKINGS.get(self.packing)
        with self.open_raw() as self.raw:
            file = io.BufferedReader(unpack(self.raw), CHUNK) if unpack else self.raw
            with unpacking(self.where):
                head, self.offset, self.pending = file.peek(4096)[:4096], 0, b""
                check(head, self.where, self.kind, text=text,
                      plain=text and FORMATS.get(self.kind, WHOLE) is WHOLE)
                if text and head.startswith(codecs.BOM_UTF8):
                    self.offset = len(file.read(len(codecs.BOM_UTF8)))
                yield file

    def decode(self, data: bytes, final: bool, mark=False) -> str:
        """The next bytes as text; final: a character that they do not complete is none.

        mark: put MARK where bytes are no UTF-8.  Which record they are in shows later; there they are a reason to leave
        it out, or are replaced and counted as half a surrogate pair is.
        """
        data = self.pending + data
        check_shifts(data, self.where, self.offset)
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            if self.errors == "strict" and not mark:
                raise BadFile(f"{self.where}: byte {self.offset + error.start} is no UTF-8: "
                              f"{error.reason}.\n  {CONVERT}, leave it out, or put U+FFFD there with --errors replace."
                              ) from None
            text, used = codecs.utf_8_decode(data, "stack.data.mark" if mark else "replace", final)
            if not mark:
                self.counts["replaced"] += text.count("\ufffd") - data[:used].count("\ufffd".encode())
        self.pending, self.offset = data[used:], self.offset + used
        return text

    def spoiled(self, text: str) -> str:
        """What is wrong with a record for what is in its text: MARK or a NUL; or nothing."""
        if MARK not in text or self.errors != "strict":
            return NUL if "\0" in text else ""
        return f"{NO_UTF8} behind {text[:text.index(MARK)][-20:]!r}"

    def chunks(self, mark=False):
        """The text, byte for byte but for a byte order mark."""
        with self.open() as file:
            while chunk := file.read(CHUNK):
                if b"\0" in chunk and FORMATS.get(self.kind, WHOLE) is WHOLE:
                    at = self.offset + len(self.pending) + chunk.index(0)
                    raise BadFile(f"{self.where}: byte {at} is NUL, which no text has.\n  Repair the file (tr -d '\\0' "
                                  "< OLD > NEW takes NULs out), or leave it out.")
                yield self.decode(chunk, final=False, mark=mark)
            yield self.decode(b"", final=True, mark=mark)


def kinds(name: str) -> tuple[str, str]:
    """(kind, packing): (".jsonl", ".gz") for A.JSONL.GZ, (".tar", ".gz") for a.tgz, (".txt", "") for a.txt"""
    stem, last = os.path.splitext(os.path.basename(name).lower())
    return (os.path.splitext(stem)[1], last) if last in PACKINGS else SHORT.get(last, (last, ""))


NOT_KNOWN = "not known as text"
REMEDY = "Text under other names is read when you name the files, or give a glob in quotes that matches them."


def passed_over(name: str, known) -> str:
    """Why a file found in a folder or an archive is not read, or nothing."""
    hidden = [part for part in name.split("/") if part.startswith(".") and part.strip(".")]
    if hidden or {"__pycache__", "__MACOSX"} & set(name.split("/")):
        return "hidden"
    if kinds(name)[0] in known:
        return ""
    ending = "".join(kinds(name)) or "no ending"
    return f"{ending} ({'in an archive' if kinds(name)[0] in ARCHIVES else NOT_KNOWN})"


@contextmanager
def seekable(file: File):
    """What is in a file that is read from its end: packed, it is unpacked to an unnamed file, gone when closed."""
    with file.open(text=False) as stream:
        if not file.packing:
            yield stream
            return
        with tempfile.TemporaryFile() as unpacked:
            copy(stream, unpacked, file.where)
            yield unpacked


# ---- archives: (name, "" or why it cannot be read, function that opens it) of the members, in the archive's order


class Entry(tarfile.TarInfo):
    """A header of a tar archive; tarfile takes one that is damaged or missing for the end, or with ignore_zeros for
    nothing.  Zeros are an archive's end, and another one may follow."""

    @classmethod
    def fromtarfile(cls, tar):
        try:
            entry, tar.ended = super().fromtarfile(tar), False
            return entry
        except tarfile.EOFHeaderError:
            tar.ended = True
            raise
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EmptyHeaderError) and getattr(tar, "ended", False):
                raise
            raise tarfile.ReadError(f"no header at byte {tar.offset:,} ({error})") from None


def read_tar(file: File):
    how = dict(mode="r|", tarinfo=Entry, ignore_zeros=True)
    with file.open(text=False) as stream, tarfile.open(fileobj=stream, **how) as tar:
        while entry := tar.next():
            tar.members.clear()  # it would keep all of them
            if not entry.isdir():
                yield entry.name, "" if entry.isfile() else LINK, partial(tar.extractfile, entry)


def read_zip(file: File):
    with seekable(file) as stream, zipfile.ZipFile(stream) as archive:
        first = min((entry.header_offset for entry in archive.infolist()), default=archive.start_dir)
        stream.seek(0)
        if first and stream.read(4) == b"PK\3\4":
            raise BadFile(f"{file.where} has other members, or another zip archive, in the {first:,} bytes before those"
                          " that it lists.\n  Take joined archives apart, or unpack it and pack it anew.")
        for entry in archive.infolist():
            if not entry.is_dir():
                why = LINK if stat.S_ISLNK(entry.external_attr >> 16) else "encrypted" if entry.flag_bits & 1 else ""
                yield entry.filename, why, partial(archive.open, entry)


def members(file: File, first: int, passed):
    """(number, File) of the members of an archive that can be read, from `first` on; passed counts the others."""
    with tempfile.TemporaryFile() as held:
        for number, (name, why, open_member) in enumerate(ARCHIVES[file.kind](file)):
            if number < first:
                continue
            if why := why or passed_over(name, FORMATS):
                passed[why] += 1
                continue
            size, damage = 1, None
            try:
                with unpacking(f"{file.where}: {name}"), open_member() as stream:
                    size = copy(stream, held, file.where)
            except BadFile as error:  # of this member: told when it is read, so that those behind it can be
                damage = error
            yield number, File(f"{file.where}: {name}", name, partial(_again, held, damage), file.errors, file.counts,
                               separator=file.separator, size=size)


def _again(file, damage):
    if damage:
        raise damage
    file.seek(0)
    return nullcontext(file)


# ---- formats: (number, text or File, what is wrong with it or "") of the records behind the first `skip`


def read_whole(file: File, key: str, skip: int):
    """The file itself, or what is between the separators in it."""
    if not file.separator:
        if not skip:
            yield 1, file, ""
        return
    mark = re.escape(file.separator).replace("\\\n", r"\r?\n")
    mark = re.compile(rf"^{mark}(?:\r?\n|\Z)|{mark}", re.MULTILINE)  # the end of a separator's own line goes with it
    rest, number, start, long, near = "", 0, 0, "", len(file.separator.replace("\n", "\r\n")) + 2
    for chunk in itertools.chain(file.chunks(mark=True), [None]):
        rest += chunk or ""
        while (found := mark.search(rest, start)) and (chunk is None or found.start() + near <= len(rest)):
            number += 1
            file.counts["separators"] += number > skip
            if number > skip and (number > 1 or found.start()):
                yield number, rest[:found.start()], long or file.spoiled(rest[:found.start()])
            rest, start, long = rest[found.end():], 0, ""
        start = max(0, len(rest) - near)
        if len(rest) > MAX_LINE:
            rest, start, long = rest[start:], 0, f"is longer than {MAX_LINE:,} characters"
    file.counts["unseparated"] += not number and not skip
    if (rest or long) and number >= skip:
        yield number + 1, rest, long or file.spoiled(rest)


def read_json(file: File, key: str, skip: int):
    """Objects: one on each line, or in an array, or over several lines."""
    with file.open() as lines:
        head = lines.peek(4096).lstrip()
        yield from (read_values if re.match(rb"\[|\{\s*[\r\n]", head) else read_lines)(file, lines, key, skip)


def read_lines(file, lines, key, skip):
    """Lines, which end by \\n alone as JSON may hold U+2028."""
    for number, line in enumerate(iter(partial(lines.readline, MAX_LINE), b""), 1):
        part = line
        while len(part) == MAX_LINE and not part.endswith(b"\n"):
            part = lines.readline(MAX_LINE)
            file.offset += len(part)
        if number > skip and part is line and line.strip():
            yield number, *parse_json(file, file.decode(line, final=True, mark=True), key)
        else:
            file.offset += len(line)
            if number > skip and part is not line:
                yield number, "", f"is longer than {MAX_LINE:,} bytes"


def read_values(file, stream, key, skip):
    """The elements of an array, or values one behind the other, each as soon as it is in memory whole."""
    decode, text, at, number, in_array, final = DECODER.raw_decode, "", 0, 0, False, False
    while True:
        at = SPACE.match(text, at).end()
        if text[at:at + 1] == "[]"[in_array]:
            in_array, at = not in_array, at + 1
            continue
        try:
            value, end = decode(text, at)
            trouble = ""
        except (ValueError, RecursionError) as error:
            trouble = f"is not JSON ({getattr(error, 'msg', error)})"
        if not trouble and (final or end < len(text)):
            number, at, spoiled = number + 1, end, file.spoiled(text[at:end])
            if number > skip:
                yield number, *(("", spoiled) if spoiled else text_of(value, key, file.counts))
        elif not final and len(text) - at <= MAX_LINE:
            data = stream.read(max(CHUNK, len(text) - at))  # as much again: what is long is not looked at too often
            final = not data
            text, at = text[at:] + file.decode(data, final, mark=True), 0
        else:
            if not final:
                trouble = f"is longer than {MAX_LINE:,} characters"
            elif at == len(text):
                trouble = "is missing: the array has no end" if in_array else ""
            if trouble:
                yield number + 1, "", f"{trouble}, and nothing behind it can be read"
            return


def parse_json(file, line: str, key: str) -> tuple[str, str]:
    """(text of a JSON line, what is wrong with it)"""
    try:
        return ("", spoiled) if (spoiled := file.spoiled(line)) else text_of(DECODER.decode(line), key, file.counts)
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON ({error})"


def once(pairs) -> dict:
    """A JSON object.  The last value of a key that is there twice is not what was meant: such a key has SEVERAL."""
    found = dict(pairs)
    if len(found) < len(pairs):
        found |= {key: SEVERAL for key, n in Counter(key for key, _ in pairs).items() if n > 1}
    return found


class Several:
    """What a key has that is there twice."""

    def __repr__(self):
        return "several values"


SEVERAL = Several()
DECODER = json.JSONDecoder(object_pairs_hook=once)


def text_of(record, key: str, counts) -> tuple[str, str]:
    """(what is under the key, what is wrong with it); counts: of the Reader, for fields of conversations.  How the
    second begins is gone by in sources.py: NO_RECORD, OTHER_KEY."""
    if key == CONVERSATION:
        try:
            return json.dumps(chat.read(record, counts=counts), ensure_ascii=False), ""
        except ValueError as error:
            return "", str(error)
    if not isinstance(record, dict):
        return "", f"is not an object with the key {key!r}"
    if isinstance(text := dig(record, key), str):
        return text, NUL if "\0" in text else ""
    kind = text if text is SEVERAL else type(text).__name__
    found = "no key" if text is None and key not in record else f"no text but {kind} under"
    return "", (f"has {found} {key!r}; its keys are {', '.join(itertools.islice(paths(record), 30)) or 'none'}")


def dig(tree: dict, key: str):
    """What is in a tree of dicts under a key "a.b", or else under "b" of what is under "a"; None if nothing is."""
    if key in tree:
        return tree[key]
    first, _, rest = key.partition(".")
    return dig(tree[first], rest) if rest and isinstance(tree.get(first), dict) else None


def paths(tree: dict, before=""):
    """The keys that dig takes: a, b.c, b.d"""
    for key, value in tree.items():
        yield from paths(value, f"{before}{key}.") if value and isinstance(value, dict) else [f"{before}{key}"]


def read_csv(file: File, key: str, skip: int):
    """Rows; the first line names the columns."""
    csv.field_size_limit(MAX_LINE)
    lines = split_lines(file)
    first, above, marks = next(lines, ""), 0, DELIMITERS[file.kind]
    if named := re.fullmatch(r'"?sep=(.)"?[\r\n]*', first, re.IGNORECASE):  # for Excel, which writes and obeys it
        first, above, marks = next(lines, ""), 1, named[1]
    likely = [mark for mark in marks if key in next(csv.reader([first], delimiter=mark), ())]
    rows = csv.reader(itertools.chain([first], lines), delimiter=(likely or marks)[0], strict=True)
    number, names = -1, []
    while True:
        begin = rows.line_num + 1 + above
        try:
            row, why = next(rows), ""
        except StopIteration:
            return
        except csv.Error as error:
            row, why = [""], f"is no CSV in lines {begin} to {rows.line_num + above} ({error})"
            if "unexpected end" in str(error):
                why = f"is no CSV (a quote in it, from line {begin} on, never ends), and nothing behind it can be read"
        if not row:  # an empty line
            continue
        number += 1
        if not number:
            names = row
            if names.count(key) != 1:
                at = next((at for at, line in enumerate(itertools.islice(lines, 20), rows.line_num + above + 1)
                           if any(key in next(csv.reader([line], delimiter=mark), ()) for mark in marks)), 0)
                raise no_column(file.where, key, names, f"; or delete what is before line {at}, if that one names them"
                                if at else "; where the first line names none, put one before it that does")
        elif number > skip:
            file.counts["over_lines"] += file.kind == ".tsv" and rows.line_num + above > begin
            if len(row) != len(names):
                why = why or f"has {len(row)} fields, not the {len(names)} that the first line names"
            text = "" if why else row[names.index(key)]
            yield number, text, why or file.spoiled(text)


def split_lines(file):
    """Lines with their ends, \\n, \\r or \\r\\n, as csv takes them; the last one may have none."""
    rest = ""
    for chunk in file.chunks(mark=True):
        *lines, rest = io.StringIO(rest + chunk, newline="").readlines() or [""]
        yield from lines
        if len(rest) > MAX_LINE:
            raise BadFile(f"{file.where} has a line longer than {MAX_LINE:,} characters.\n  Leave it out.")
    yield from io.StringIO(rest, newline="")


def read_table(file: File, key: str, skip: int):
    """Rows of parquet and Arrow, without the other columns."""
    import pyarrow
    try:
        with seekable(file) as rows:
            schema, before, batches = TABLES[file.kind](rows, key, skip)
            path = check_column(file.where, schema, key)
            parts = (batch.slice(at, BATCH) for batch in batches for at in range(0, batch.num_rows, BATCH))
            texts = (text for part in parts for text in column_texts(part.column(path[0]), path[1:]))
            for number, text in enumerate(texts, before + 1):
                if number > skip and key == CONVERSATION:
                    yield number, *text_of({path[0]: text}, key, file.counts)
                elif number > skip:
                    text = file.decode(text, final=True, mark=True) if isinstance(text, bytes) else text
                    why = f"has nothing in column {key!r}" if text is None else file.spoiled(text)  # OTHER_KEY too
                    yield number, text, why
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's own message names the file
            raise
        raise BadFile(f"{file.where} cannot be read as {file.kind[1:]}: {error}\n  It was cut short, damaged, or is "
                      "something else: copy it again, or leave it out.") from None


def open_parquet(rows, key, skip):
    """(schema, rows that need not be read, batches of the others)"""
    import pyarrow.parquet as pq
    parquet = pq.ParquetFile(rows, pre_buffer=False, buffer_size=CHUNK)  # else it holds whole row groups
    row, groups = 0, list(range(parquet.num_row_groups))
    while groups and row + parquet.metadata.row_group(groups[0]).num_rows <= skip:
        row += parquet.metadata.row_group(groups.pop(0)).num_rows
    columns = _talking(parquet.schema_arrow.names) if key == CONVERSATION else [key]
    return parquet.schema_arrow, row, parquet.iter_batches(batch_size=BATCH, row_groups=groups, columns=columns)


def _talking(names) -> list[str]:
    """The column that has conversations; none, or one."""
    return [name for name in chat.LISTS if name in names][:1]


def open_arrow(rows, key, skip):
    """The same of Arrow's file format and of its streams, which `datasets` writes."""
    from pyarrow import ipc
    open_rows = ipc.open_file if rows.peek(6).startswith(b"ARROW1") else ipc.open_stream
    schema = open_rows(rows).schema
    rows.seek(0)
    wanted = [i for i, name in enumerate(schema.names) if name in (key, key.split(".")[0])]
    arrow = open_rows(rows, options=ipc.IpcReadOptions(included_fields=wanted))
    batches = arrow if open_rows is ipc.open_stream else map(arrow.get_batch, range(arrow.num_record_batches))
    return schema, 0, batches


def check_column(where, schema, key: str) -> list[str]:
    """The path to a column of text in an Arrow schema, or what the schema has instead."""
    from pyarrow import types

    if key == CONVERSATION and _talking(schema.names):
        return _talking(schema.names)

    def tree(fields):
        return {field.name: tree(field.type) if types.is_struct(field.type) else field.type for field in fields}
    columns = tree(schema)
    kind = dig(columns, key)
    if kind is None or schema.names.count(key.split(".")[0]) > 1:
        raise no_column(where, key, paths(columns))
    value = kind.value_type if not isinstance(kind, dict) and types.is_dictionary(kind) else kind
    if isinstance(value, dict) or not (types.is_string(value) or types.is_large_string(value)
                                       or types.is_string_view(value)):
        kind = f"a struct of {', '.join(kind)}" if isinstance(kind, dict) else kind
        raise ValueError(f"{where}: column {key!r} holds {kind}; text is needed. Columns: "
                         f"{', '.join(paths(columns))}\n  Name the one with the text: --text_key COLUMN")
    return [key] if key in columns else key.split(".")


def no_column(where, key, names, more=""):
    names = list(names)
    found = "several columns" if key in names else "no column"
    needed = (f"A conversation is {chat.FORM}" if key == CONVERSATION else
              or_chat(f"Name the one that holds the text: --text_key COLUMN{more}", names))
    return BadFile(f"{where} has {found} {key!r}; it has {', '.join(names[:30])}.\n  {needed}.")


def or_chat(advice: str, names: list[str]) -> str:
    """Advice where there is no text under these keys or columns; first a question, if a conversation has such."""
    if not {*chat.LISTS} & {*names}:
        return advice
    return f"Are these conversations? Then say --chat (--help). Else {advice[0].lower()}{advice[1:]}"


def column_texts(column, path):
    """Python strings, or bytes where one of them is no UTF-8."""
    import pyarrow
    import pyarrow.compute as pc
    for name in path:
        column = pc.struct_field(column, name)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pyarrow.large_binary()).to_pylist()


def read_questions(file: File, key: str, skip: int):
    """Conversations about what is in a Python file."""
    module = file.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    talks = questions.conversations("".join(file.chunks()), module)
    for number, messages in enumerate(talks, 1):
        if number > skip:
            yield number, json.dumps(messages, ensure_ascii=False), ""


def read_no_talk(file: File, key: str, skip: int):
    """A file of a kind that has no conversations."""
    yield 1, "", f"has no conversations; they are in {', '.join(TALKS)}"


# ---- the tables


WHOLE = ("document", read_whole)  # of any other name as well
FORMATS = {".txt": WHOLE, ".md": WHOLE, ".py": WHOLE,  # by ending: what a record is called, and who reads it
           ".json": ("record", read_json), ".jsonl": ("line", read_json), ".ndjson": ("line", read_json),
           ".csv": ("row", read_csv), ".tsv": ("row", read_csv),
           ".parquet": ("row", read_table), ".arrow": ("row", read_table)}
TALKS = {kind: FORMATS[kind] for kind in (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")} | {
    ".py": ("object", read_questions)}  # the same with --chat
NO_TALK = ("file", read_no_talk)
DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}  # the first of them that gives the column asked for
TABLES = {".parquet": open_parquet, ".arrow": open_arrow}
ARCHIVES = {".tar": read_tar, ".zip": read_zip}
SHORT = {".tgz": (".tar", ".gz"), ".tbz2": (".tar", ".bz2"), ".txz": (".tar", ".xz")}
