"""A corpus in every form that prepare.py reads: write(folder, form, docs) -> (name of the source, options for it).

A form is an ending, in letters of any case, of a file that holds all documents (csv.gz), of files with one each
(txt.zst), of an archive of those (tar.bz2); or one of the others in FORMS.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from itertools import product

PACKINGS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
FORMS = [*(kind + packing for kind, packing in product(
    ["txt", "md", "py", "json", "jsonl", "ndjson", "csv", "tsv", "parquet", "arrow", "tar"],
    ["", ".gz", ".zst", ".bz2", ".xz"])), "zip", "tgz", "TXT.GZ", "JSON", "CsV", "lines.json", "pretty.json",
    "stream.arrow", "nested.jsonl", "nested.parquet", "nested.arrow", "separated.txt", "zip of jsonl", "tar of parquet",
    "hf parquet", "hf txt", "hf txt.gz"]
SEPARATOR = "\n<|endoftext|>\n"


def pack(name: str, data: bytes) -> bytes:
    ending = name.lower().split(".")[-1]
    if ending == "zst":
        import zstandard
        return zstandard.ZstdCompressor().compress(data)
    return PACKINGS.get({"tgz": "gz"}.get(ending, ending), bytes)(data)


def table(kind: str, docs, nested=False) -> bytes:
    """The bytes of a file that holds all documents."""
    records = [{"id": i, "doc": {"n": i, "text": text}} if nested else {"id": i, "text": text}
               for i, text in enumerate(docs)]
    if kind in ("csv", "tsv"):
        out = io.StringIO(newline="")
        rows = csv.writer(out, delimiter={"csv": ",", "tsv": "\t"}[kind])
        rows.writerows([["id", "text"], *enumerate(docs)])
        return out.getvalue().encode()
    if kind in ("json", "pretty"):
        return json.dumps(records, indent=2 if kind == "pretty" else None).encode()
    if kind in ("jsonl", "ndjson", "lines"):
        return "".join(json.dumps(record) + "\n" for record in records).encode()
    import pyarrow as pa
    import pyarrow.parquet as pq
    rows, out = pa.Table.from_pylist(records), pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(rows, out, row_group_size=3)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(out, rows.schema) as file:
            file.write_table(rows, max_chunksize=4)
    return out.getvalue().to_pybytes()


def archive(kind: str, files: dict) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in files.items():
                file.writestr(name, data)
    else:
        with tarfile.open(fileobj=out, mode="w") as file:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def write(folder, form: str, docs) -> tuple[str, dict]:
    """The documents in a file or folder of this form."""
    before, _, form = form.rpartition(" ")  # "hf", "zip of"
    parts, options = form.lower().split("."), {}
    kind, nested = parts[0], parts[0] == "nested"
    names = [f"texts/{i:02}.{form if kind in ('txt', 'md', 'py') else 'txt'}" for i in range(len(docs))]
    files = {name: text.encode() for name, text in zip(names, docs, strict=True)}
    name = f"docs.{form}"
    if before.endswith(" of"):
        name = f"docs.{before.split()[0]}"
        data = archive(before.split()[0], {f"a.{kind}": table(kind, docs[:4]), f"b.{kind}": table(kind, docs[4:])})
    elif kind in ("tar", "tgz", "zip"):
        data = archive("zip" if kind == "zip" else "tar", files)
    elif kind == "separated":
        data, options = SEPARATOR.join(docs).encode(), {"separator": SEPARATOR}
    elif kind in ("txt", "md", "py"):
        (folder / "texts").mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(pack(name, data))
        return ("hf:" if before else "") + str(folder / "texts"), options
    else:
        data, options = table(parts[1] if nested else kind, docs, nested), {"text_key": "doc.text"} if nested else {}
    folder = folder / "hub" if before else folder
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pack(name, data))
    return (f"hf:{folder}" if before == "hf" else str(folder / name)), options
