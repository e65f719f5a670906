"""Packed files as streams of raw bytes, unpacked a little at a time: PACKINGS has a line for each packing.

What the bytes mean is not known here (formats.py).  Damage is BadFile, whatever a library raises for it; members of a
tar or zip are read inside of unpacking() too, hence their errors in UNPACK_ERRORS.
"""

import bz2
import errno
import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from contextlib import contextmanager

from stack.data.signatures import BadFile

CHUNK = 1 << 18  # bytes read from a file at a time


class Streams(io.RawIOBase):
    """The unpacked bytes of a file of one packed stream or several, with zeros between and behind them at most.

    The readers of bz2 and lzma take for the end what is no stream behind the first, zstandard's own one that is cut
    short.  new() -> what unpacks a stream; most: (), or (how much of it to give at a time,).
    """

    FEED = 2048  # bytes; four of them can become 128 KiB in .zst, so this bounds what is unpacked at a time

    def __init__(self, raw, new, *most):
        self.raw, self.new, self.most = raw, new, most
        self.stream, self.rest, self.out = None, b"", memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.out:
            packed, between = b"", self.stream is None or self.stream.eof
            if between or getattr(self.stream, "needs_input", True):
                packed, self.rest = self.rest or self.raw.read(self.FEED), b""
                if not packed and not between:
                    raise EOFError("it ends in the middle")
                if not packed:
                    return 0
            if between:
                if self.stream and not (packed := packed.lstrip(b"\0")):
                    continue
                self.stream = self.new()
            self.out = memoryview(self.stream.decompress(packed, *self.most))
            self.rest = self.stream.unused_data if self.stream.eof else b""
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


def unpack_zst(raw):
    try:
        import zstandard
    except ImportError:
        raise ImportError("A .zst file needs the package zstandard.\n  Install it with: pip install zstandard"
                          ) from None
    # `zstd --long` needs large windows
    return Streams(raw, zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj)


@contextmanager
def unpacking(where):
    """What the unpackers raise, as a sentence; the system's own OSErrors have a number."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, UNPACK_ERRORS) or type(error).__name__ == "ZstdError"
                or isinstance(error, OSError) and error.errno in (None, errno.EINVAL)):  # zipfile's seek below 0
            raise
        raise BadFile(f"{where} cannot be unpacked: {error}\n  It was cut short or damaged: copy it again, or leave it "
                      "out.") from None


def copy(stream, file, name):
    """All of a stream into a temporary file, which is then at its beginning; returns its size."""
    try:
        file.seek(0)
        file.truncate()
        shutil.copyfileobj(stream, file, CHUNK)
        size = file.tell()
        file.seek(0)
        return size
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(f"{name} does not fit into {tempfile.gettempdir()} unpacked: {error.strerror}.\n  Unpack it "
                         "yourself, or name a folder with more room: TMPDIR=FOLDER python prepare.py ...") from None


PACKINGS = {".gz": gzip.open, ".zst": unpack_zst,  # file of packed bytes -> of unpacked
            ".bz2": lambda raw: Streams(raw, bz2.BZ2Decompressor, CHUNK),
            ".xz": lambda raw: Streams(raw, lzma.LZMADecompressor, CHUNK)}
UNPACK_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile,
                 NotImplementedError)
