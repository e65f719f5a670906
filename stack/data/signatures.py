"""What a file is by its first bytes, where its name says something else: an image named .txt, say, or UTF-16."""

import codecs
import re
from contextlib import suppress

CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\f\r\33"})
MOST_CONTROLS = 0.05  # of the first bytes of a text
JSON = re.compile(rb"\s*(\[\s*)?\{\s*\"[^\"\\\n]{0,200}\"\s*:")  # how JSON begins that holds records
EXPECTED = {".tar": "a tar archive", ".zip": "a zip archive", ".parquet": "a parquet file", ".arrow": "an Arrow file"}
CONVERT = "Convert it (iconv -f CP1252 -t UTF-8 OLD > NEW, if it is Latin-1 or Windows' own)"
SIGNATURES = {(257, b"ustar"): "a tar archive", (0, b"PK\3\4"): "a zip archive", (0, b"PK\5\6"): "a zip archive",
              (0, b"PAR1"): "a parquet file", (0, b"ARROW1"): "an Arrow file",
              (0, b"\x1f\x8b"): "packed by gzip", (0, b"\x28\xb5\x2f\xfd"): "packed by zstd",
              (0, b"\xfd7zXZ\0"): "packed by xz", (4, b"1AY&SY"): "packed by bzip2",
              (0, b"7z\xbc\xaf\x27\x1c"): "a 7z archive", (0, b"Rar!\x1a\7"): "a RAR archive",
              (0, b"\x89PNG\r\n\x1a\n"): "an image (PNG)", (0, b"\xff\xd8\xff"): "an image (JPEG)",
              (0, b"GIF8"): "an image (GIF)", (8, b"WEBP"): "an image (WebP)", (0, b"%PDF-"): "a PDF",
              (0, b"\xd0\xcf\x11\xe0"): "an Office document",
              (0, b"\x7fELF"): "a program", (0, b"\x89HDF"): "an HDF5 file", (0, b"\x93NUMPY"): "a NumPy array",
              (0, b"\x80\4\x95"): "a pickle", (0, b"Obj\1"): "an Avro file", (0, b"ORC"): "an ORC file",
              (0, b"\4\x22\x4d\x18"): "packed by lz4", (4, b"ftyp"): "a film", (8, b"WAVE"): "sound (WAV)",
              (0, b"ID3"): "sound (MP3)", (0, b"\x88\xd8\x34\1"): "a file of tokens, which prepare.py makes of text",
              (0, b"SQLite format 3\0"): "a SQLite database", (0, b"GGUF"): "a GGUF model"}
PLAIN_SIGNATURES = {(0, b"version https://git-lfs.github.com/spec"): "a pointer of Git LFS (run: git lfs pull)",
                    (0, b"{\\rtf1"): "a document (RTF)"}
# to other letters, which are 7-bit bytes from there on
SHIFTS = re.compile(rb"\x1b(?:\$[@B]|\(J|(\$A|\$\([CD])|(\$\)C)|(\$\)[AG]))")
SHIFTED = "ISO-2022-JP", "ISO-2022-JP-2", "ISO-2022-KR", "ISO-2022-CN"  # by the group that matched


class BadFile(ValueError):
    """A file that is damaged, no UTF-8, or something else than its name says: with --skip_bad it is left out."""


def check(head: bytes, where: str, kind: str, text: bool, plain: bool):
    """Refuse what the first bytes show to be something else than the name says: BadFile.

    kind: the ending of the name.  text: it is to be read as UTF-8; plain: as a text itself, not as records.
    """
    binary = b"\0" in head or len(head.decode("utf-8", "ignore").encode()) < len(head) - 3
    for (at, mark), what in {**PLAIN_SIGNATURES, **(SIGNATURES if binary else {})}.items():
        if head.startswith(mark, at) and what != EXPECTED.get(kind):
            raise BadFile(f"{where} is {what}, which is no {kind if kind in EXPECTED else 'text'}.\n"
                          "  Give it the name of what it is, if that is among what is read, or leave it out.")
    if text and (encoding := wide_encoding(head)):
        raise foreign(where, encoding, 0)
    if text:
        check_shifts(head, where, 0)
    if text and has_controls(head):
        raise BadFile(f"{where} begins with more than {100 * MOST_CONTROLS:g} % control characters; "
                      "text has next to none.\n  Leave it out, or convert it to UTF-8 if it is text of another "
                      "encoding.")
    if plain and JSON.match(head):
        raise BadFile(f"{where} holds JSON, not text.\n  Name it .json or .jsonl, and the records in it are "
                      "read, or leave it out.")


def foreign(where: str, encoding: str, at: int) -> BadFile:
    return BadFile(f"{where}: {encoding} from byte {at} on; UTF-8 is needed.\n"
                   f"  Convert it with: iconv -f {encoding} -t UTF-8 OLD > NEW")


def check_shifts(data: bytes, where: str, offset: int):
    """Refuse text that is valid UTF-8 and was meant as ISO-2022: BadFile.  offset: of the data in the file."""
    if b"\33" in data and (found := SHIFTS.search(data)):
        raise foreign(where, SHIFTED[found.lastindex or 0], offset + found.start())


def wide_encoding(head: bytes) -> str:
    """The name of UTF-16 or UTF-32, by a byte order mark, or by what only they look like."""
    for mark, name in ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
                       (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")):
        if head.startswith(mark):
            return name
    for name in ("UTF-32LE", "UTF-32BE"):
        with suppress(UnicodeDecodeError):  # no four letters of anything else are a character in it
            if (text := head[:len(head) & -4].decode(name)) and "\0" not in text:
                return name
    uneven = head[1::2].count(0) - head[0::2].count(0)  # in UTF-16 every other byte of plain English is 0
    if abs(uneven) > max(8, len(head) / 5):
        return "UTF-16LE" if uneven > 0 else "UTF-16BE"
    even, odd = len({*head[::2]}), len({*head[1::2]})  # of other alphabets it is one of a few, 4 in Cyrillic
    return "" if not has_controls(head) or 3 * min(even, odd) > max(even, odd) else (
        "UTF-16LE" if odd < even else "UTF-16BE")


def has_controls(head: bytes) -> bool:
    """Whether it is no text for the control characters in it; terminals' logs have many of two kinds."""
    return len(head) - len(head.translate(None, CONTROLS)) > max(2, len(head) * MOST_CONTROLS)
