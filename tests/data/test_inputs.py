"""What people bring: every form makes the same shards, and messy inputs come out as the table says."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import tracemalloc
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forms import FORMS, archive, write
from test_sources import documents

import prepare
from stack.data import formats, packings, sources
from stack.data.sources import Reader, Source

CORPUS = [f"Text {i}: {'the river and the stone ' * (i % 7 + 1)}\r\n\u2028 \"quoted\", \té漢🙂\n" for i in range(40)]


@pytest.fixture(scope="module")
def prepared(vocabulary):
    """prepared(folder, form) -> {shard: bytes} of CORPUS in this form."""
    def make(folder, form):
        name, options = write(folder, form, CORPUS)
        flags = [word for key, value in options.items() for word in (f"--{key}", value)]
        assert prepare.main([name, "--out", str(folder / "out"), "--tokenizer", str(vocabulary), "--workers", "1",
                             "--val_fraction", "0.2", *flags]) == 0
        return {shard.name: shard.read_bytes() for shard in (folder / "out").glob("*.bin")}
    return make


@pytest.fixture(scope="module")
def shards(prepared, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("jsonl"), "jsonl")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_same_shards(tmp_path, prepared, shards, form):
    """One corpus is one data set, however it is stored and packed."""
    assert len(shards) == 2 and prepared(tmp_path, form) == shards


# ---- the table


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def table(to=".parquet", **columns):
    out = pa.BufferOutputStream()
    rows = pa.table(columns)
    if to == ".parquet":
        pq.write_table(rows, out)
    else:
        with pa.ipc.new_file(out, rows.schema) as file:
            file.write_table(rows)
    return out.getvalue().to_pybytes()


def tar(**files):
    """Of a_txt="..." as a.txt"""
    return archive("tar", {name.replace("_", "."): data if isinstance(data, bytes) else data.encode()
                           for name, data in files.items()})


def tar_with_a_link():
    out = io.BytesIO(tar(a_txt="A"))
    with tarfile.open(fileobj=out, mode="a") as file:
        entry = tarfile.TarInfo("b.txt")
        entry.type, entry.linkname = tarfile.SYMTYPE, "a.txt"
        file.addfile(entry)
    return out.getvalue()


def zip_with_a_link():
    out = io.BytesIO(archive("zip", {"a.txt": b"A"}))
    with zipfile.ZipFile(out, "a") as file:
        entry = zipfile.ZipInfo("b.txt")
        entry.external_attr = 0o120777 << 16
        file.writestr(entry, "a.txt")
    return out.getvalue()


def damaged(data: bytes) -> bytes:
    """A zip whose first member has another checksum than its headers say."""
    data, at = bytearray(data), data.index(b"PK\1\2")
    data[14] ^= 1
    data[at + 16] ^= 1
    return bytes(data)


def encrypted(data: bytes) -> bytes:
    """A zip whose headers say that its member is."""
    data, at = bytearray(data), data.index(b"PK\1\2")
    data[6] |= 1
    data[at + 8] |= 1
    return bytes(data)


TWO = archive("zip", {"a.txt": b"A", "b.txt": b"B"})
BAD_UTF8 = pa.array([b"ok", b"caf\xe9"]).view(pa.string())
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SKIP, REPLACE = {"skip_bad": True}, {"errors": "replace"}
# what it is: files {name: content, or Link(where to)}, source in that folder, settings, result: the documents, and what
# counts, read, passed or notes have to hold; or the error
Link = type("Link", (str,), {})
TABLE = {
    # folders
    "a folder of this and that": (
        {"a.txt": "A", "B.TXT": "B", "c.JSONL": lines("c", "d"), "t.csv": "id,text\n1,row\n", "photo.jpg": b"\xff\xd8",
         "notes": "n", ".env": "s", ".git/config": "s", "x.docx": b"PK\3\4", "__pycache__/x.py": "p", "e.md": ""},
        "", {},
        ["B", "A", "c", "d", "row"],
        {"read": {".txt whole": 2, ".jsonl by line": 1, ".csv by row": 1}, "counts": {"empty": 1},
         "passed": {".jpg (not known as text)": 1, "no ending (not known as text)": 1, "hidden": 3,
                    ".docx (not known as text)": 1}}),
    "settings of programs beside text": (
        {"a.md": "A", "package.json": '{\n  "name": "x"\n}', "list.json": "[1, 2]", "data.json": '[{"text": "d"}]'},
        "", {},
        ["A", "d"], {"passed": {".json (no key 'text')": 2}, "read": {".md whole": 1, ".json by record": 1}}),
    "a first record without the key": (
        {"a.json": '[{"n": 1}, {"text": "x"}]', "b.txt": "B"}, "", {}, "a.json: record 1 has no key 'text'"),
    "the same in lines": (
        {"a.json": '{"n": 1}\n{"text": "x"}\n', "b.txt": "B"}, "", SKIP, ["x", "B"],
        {"counts": {"bad": 1}, "notes": "a.json: record 1 has no key 'text'", "passed": {}}),
    "the same in a zip": ({"t.zip": archive("zip", {"a.json": b'[{"n": 1}, {"text": "x"}]'})}, "t.zip", {},
                          "t.zip: a.json: record 1 has no key 'text'"),
    "the same in a tar, packed": (
        {"t.tar": tar(a_json_gz=gzip.compress(b'[{"n": 1}, {"text": "x"}]'), b_json='[{"n": 1}]')}, "t.tar", SKIP,
        ["x"], {"counts": {"bad": 1}, "passed": {".json (no key 'text')": 1}}),
    "the same settings by name": (
        {"package.json": '{\n  "name": "x"\n}'}, "package.json", {}, "no key 'text'; .* are name"),
    "a table without the column beside text": (
        {"a.txt": "A", "t.csv": "id,body\n1,x\n"}, "", {}, "t.csv has no column 'text'; it has id, body"),
    "the same, to be skipped": ({"a.txt": "A", "t.csv": "id,body\n1,x\n"}, "", SKIP, ["A"],
                                {"counts": {"bad": 1}, "read": {".txt whole": 1}, "notes": "it has id, body"}),
    "a shard of tokens": ({"a.bin": (20240520).to_bytes(4, "little") + bytes(1020)}, "a.bin", {}, "a file of tokens"),
    "nothing but photos": ({"a.JPG": "x", "b.jpg": "y"}, "", {}, "no files to read; passed over: 2 .jpg"),
    "a Spark output": ({"d.parquet/part-0.parquet": table(text=["a"]), "d.parquet/_SUCCESS": "",
                        "d.parquet/.part-0.crc": "x"}, "d.parquet", {}, ["a"],
                       {"passed": {"no ending (not known as text)": 1, "hidden": 1}}),
    # what save_to_disk of Hugging Face's datasets writes
    "a saved data set with its caches": (
        {"s/a.arrow": table(".arrow", text=["a"]), "s/cache-0f.arrow": table(".arrow", indices=[0]),
         "s/old.arrow": table(".arrow", text=["b"]), "s/state.json": '{"_data_files": [{"filename": "a.arrow"}]}'},
        "s", {}, ["a"],
        {"passed": {".arrow (not of the data set saved there)": 2, ".json (no key 'text')": 1}}),
    "the same by a glob": (
        {"s/a.arrow": table(".arrow", text=["a"]), "s/cache-0f.arrow": table(".arrow", text=["b"]),
         "s/state.json": '{"_data_files": [{"filename": "a.arrow"}]}'}, "*/*.arrow", {}, ["a"],
        {"passed": {".arrow (not of the data set saved there)": 1}}),
    "a cache by its name": ({"s/cache-0f.arrow": table(".arrow", text=["b"]), "s/dataset_info.json": "{}"},
                            "s/cache-0f.arrow", {}, ["b"], {"passed": {}}),
    "the cache of a data set": (
        {"a-train.arrow": table(".arrow", text=["a"]), "cache-0f.arrow": table(".arrow", text=["b"]),
         "dataset_info.json": "{}"}, "", {}, ["a"],
        {"passed": {".arrow (not of the data set saved there)": 1, ".json (no key 'text')": 1}}),
    "caches of nobody's, state of another": (
        {"cache-1.arrow": table(".arrow", text=["a"]), "x/cache-2.arrow": table(".arrow", text=["b"]),
         "x/state.json": '{"_data_files": 7}'}, "", {}, ["a", "b"], {"passed": {".json (no key 'text')": 1}}),
    "nothing of the data set": (
        {"s/old.arrow": table(".arrow", text=["b"]), "s/state.json": '{"_data_files": [{"filename": "a.arrow"}]}'},
        "s/*.arrow", {}, "passed over: 1 .arrow .*when you name the file itself"),
    **{f"a damaged state, {i}": (
        {"s/a.arrow": table(".arrow", text=["a"]), "s/state.json": f'{{"_data_files": [{state}'}, "s", {},
        "state.json is damaged.*again") for i, state in enumerate(['{"filena', '"a.arrow"]}', "{}]}"])},
    "damaged splits": ({"in/d/dataset_dict.json": '{"splits": ["train", "te', "in/d/a.txt": "a"}, "in", {},
                       "dataset_dict.json is damaged"),
    "splits in a folder": (
        {"in/d/dataset_dict.json": '{"splits": ["train", "test"]}', "in/d/train/a.arrow": table(".arrow", text=["a"])},
        "in", {}, "in/d is a data set in 2 splits, train, test, .*in/d/train"),
    "one split in a folder": (
        {"dataset_dict.json": '{"splits": ["train"]}', "train/a.arrow": table(".arrow", text=["a"])}, "", {}, ["a"],
        {}),
    "spaces and umlauts": ({"Bücher und so/Über (1).txt": "ü", "a\nb.txt": "n"}, "", {}, ["ü", "n"], {}),
    "a line end in a name": ({"a\nb.txt": PNG, "c\n.jsonl": "5\n" + lines("x")}, "", SKIP, ["x"], {
        "counts": {"bad": 2}, "notes": r"a\\nb.txt is an image (PNG), which is no text"}),
    "links and loops": (
        {"own.txt": "o", "sub": Link("real"), "real/a.txt": "A", "real/up": Link(".."), "loop": Link("."),
         "dead.txt": Link("nowhere"), "self.txt": Link("self.txt"), "also.txt": Link("own.txt")},
        "", {}, ["o", "o", "A"],
        {"passed": {"folder met before (a link)": 3, "broken link": 2}}),
    "links across": ({"x/a.txt": "A", "y/b.txt": "B", "x/y": Link("../y"), "y/x": Link("../x")}, "", {}, ["A", "B"],
                     {"passed": {"folder met before (a link)": 2}}),
    "a link out of the folder": ({"in/l": Link("../out"), "out/a.txt": "A"}, "in", {}, ["A"], {}),
    "a link that leads nowhere": ({"l.txt": Link("nowhere")}, "l.txt", {}, r"l.txt \(a link to nowhere\) not found"),
    "a glob through everything": (
        {"a/b.txt": "1", "a/n.rst": "2", "l": Link("a"), "z/p.bin": "3"}, "**", {}, ["1", "2", "3"],
         {"passed": {"folder met before (a link)": 1}}),
    "a glob through two links in a circle": (
        {"m/a.txt": "A", "m/x": Link("."), "m/y": Link("."), "m/b/c.txt": "C", "m/b/up": Link("..")}, "m/**/*.txt", {},
        ["A", "C"], {"passed": {"folder met before (a link)": 3}}),
    "a glob through them twice": ({"m/a.txt": "A", "m/x": Link("."), "m/y": Link("."), "m/b/c/d.txt": "D"},
                                  "**/b/**/*.txt", {}, ["D"], {}),
    "a glob that matches a link upwards": (
        {"mine/a.txt": "A", "mine/up": Link(".."), "b.txt": "B"}, "mine/*", {}, ["A"],
        {"passed": {"folder met before (a link)": 1}}),
    "a folder with a link upwards": ({"mine/a.txt": "A", "mine/up": Link(".."), "b.txt": "B"}, "mine", {}, ["A"],
                                     {"passed": {"folder met before (a link)": 1}}),
    "a glob of folders": ({"x1/a.txt": "A", "x1/n.rst": "N", "y/x2/b/c.txt": "C", "x3": "3"}, "**/x*", {},
                          ["A", "3", "C"], {}),
    "Git LFS without its files": ({"d.parquet": LFS}, "d.parquet", {}, "d.parquet is a pointer of Git LFS"),
    "the same as text": ({"d.txt": LFS}, "", {}, "git lfs pull"),
    # names that do not fit
    "an image named .txt": ({"a.txt": PNG}, "a.txt", {}, r"a.txt is an image \(PNG\), which is no text"),
    "the same among others": ({"a.txt": PNG, "b.txt": "B"}, "", SKIP, ["B"],
                              {"counts": {"bad": 1}, "read": {".txt whole": 1}, "notes": "a.txt is an image"}),
    "a PDF without ending": ({"paper": b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"}, "paper", {}, "paper is a PDF"),
    "gzip named .txt": ({"a.txt": gzip.compress(b"x" * 99)}, "", {}, "packed by gzip"),
    "bzip2 named .md": ({"a.md": bz2.compress(b"x" * 99)}, "", {}, "packed by bzip2"),
    "xz named .jsonl": ({"a.jsonl": lzma.compress(b"x" * 99)}, "", {}, "packed by xz"),
    "tar named .txt": ({"a.txt": tar(a_txt="A")}, "", {}, "is a tar archive"),
    "tar.gz named .tar": ({"a.tar": gzip.compress(tar(a_txt="A"))}, "", {}, "packed by gzip, which is no .tar"),
    "a book in .epub": ({"b.epub": archive("zip", {"x.html": b"<p>"})}, "b.epub", {}, "b.epub is a zip archive"),
    "packed twice": ({"a.txt.gz": gzip.compress(gzip.compress(b"x"))}, "", {}, "is packed by gzip"),
    "unpacked by the browser": ({"a.jsonl.gz": lines("x")}, "", {}, "a.jsonl.gz cannot be unpacked"),
    "words that are signatures": ({"a.txt": "GIF89a, PAR1, %PDF-1.4, BZh91AY&SY and PK are formats."}, "", {},
                                  ["GIF89a, PAR1, %PDF-1.4, BZh91AY&SY and PK are formats."], {}),
    "JSON lines named .txt": ({"a.txt": lines("x")}, "", {}, "a.txt holds JSON, not text"),
    "a JSON array named .txt": ({"a.txt": '\n[\n {\n  "text": "x"}]'}, "", {}, "holds JSON"),
    "JSON in a .gz of no kind": ({"dump.gz": gzip.compress(lines("x").encode())}, "dump.gz", {}, "holds JSON"),
    "text in braces": ({"a.txt": "{hello} [world]"}, "", {}, ["{hello} [world]"], {}),
    "UTF-16 from a spreadsheet": ({"a.csv": "id\ttext\n1\tx\n".encode("utf-16")}, "", {}, "UTF-16 from byte 0"),
    **{f"{name} in {file}": ({file: (before + text).encode(name)}, file, REPLACE, f"{said or name.upper()} from byte "
                             rf"{len(before)} on; UTF-8 is needed.*iconv -f {said or name.upper()} -t UTF-8 OLD > NEW")
       for name, file, before, text, said in (
           ("iso-2022-jp", "a.txt", "plain English " * 99999, "日本語", ""),
           ("iso-2022-jp", "a.jsonl", '{"text": "', '日本語"}', ""), ("iso-2022-jp", "a.csv", "text\n", "日本語\n", ""),
           ("iso-2022-jp-2", "a.md", "", "한국", ""), ("iso-2022-kr", "a.txt", "", "한국어", ""))},
    "ISO-2022-CN": ({"a.txt": b"\33$)A\x0eVPND\x0f\n"}, "", {}, "ISO-2022-CN from byte 0"),
    "a terminal's log": ({"a.txt": "\33(B\33[mred\33(0lqk\33(B $B"}, "", {}, ["\33(B\33[mred\33(0lqk\33(B $B"], {}),
    # packings
    "several streams in one file": ({"a.txt.gz": gzip.compress(b"a") + gzip.compress(b"b") + b"\0" * 99,
                                     "b.txt.bz2": bz2.compress(b"a") + bz2.compress(b"b") + bytes(5000),
                                     "c.txt.xz": lzma.compress(b"a") + bytes(4) + lzma.compress(b"b") + bytes(4)},
                                    "", {}, ["ab"] * 3, {}),
    "a second stream that is damaged, .bz2": (
        {"a.txt.bz2": bz2.compress(b"one\n") + b"\0" + bz2.compress(b"two\n" * 100)[1:]}, "", {},
        "a.txt.bz2 cannot be unpacked"),
    "a second stream that is damaged, .xz": (
        {"a.txt.xz": lzma.compress(b"one\n") + b"\1" * 4 + lzma.compress(b"two\n" * 100)[4:]}, "", {},
        "a.txt.xz cannot be unpacked"),
    "a second stream that is cut short": (
        {"a.txt.bz2": bz2.compress(b"one\n") + bz2.compress(b"two\n" * 100)[:-9]}, "", SKIP, [],
        {"counts": {"bad": 1}, "notes": "it ends in the middle"}),
    "a .bz2 of much in little": ({"a.txt.bz2": bz2.compress(b"ab " * 10**6)}, "", {}, ["ab " * 10**6], {}),
    "words behind a .gz": ({"a.txt.gz": gzip.compress(b"a") + b"junk"}, "", {}, "a.txt.gz cannot be unpacked"),
    # JSON
    "a .json of lines": ({"a.json": lines("x", "y")}, "", {}, ["x", "y"], {}),
    "an array named .jsonl": ({"a.jsonl": '[{"text": "x"},\n {"text": "y"}]'}, "", {}, ["x", "y"], {}),
    "objects over several lines": ({"a.jsonl": '{\n"text": "x"\n}\n{\n"text": "y"\n}\n'}, "", {}, ["x", "y"], {}),
    "an array on each line": ({"a.jsonl": '[{"text": "x"}]\n[{"text": "y"}]\n'}, "", {}, ["x", "y"], {}),
    "an array cut short": (
        {"a.json": '[{"text": "x"}, {"text": "y'}, "a.json", {}, "record 2 is not JSON .* nothing behind it"),
    "the same, to be skipped, once": ({"a.json": '[{"text": "x"}, {"text": "y'}, "", SKIP, ["x"],
                                      {"counts": {"bad": 1}, "notes": "nothing behind it can be read"}),
    "an array without its end": ({"a.json": '[{"text": "x"}, {"text": "y"}'}, "a.json", {}, "the array has no end"),
    "an array of texts": ({"a.json": '["x", "y"]'}, "a.json", {}, "record 1 is not an object .* record 2"),
    "an empty array": ({"a.json": "[]"}, "", {}, [], {"counts": {"empty": 1}}),
    "columns instead of rows": ({"a.json": '{"text": ["x", "y"]}'}, "a.json", {}, "no text but list under 'text'"),
    "rows under a key": ({"a.json": '{"data": [{"text": "x"}]}'}, "a.json", {}, "no key 'text'; its keys are data"),
    "lists under the key": ({"a.jsonl": '{"text": ["x"]}\n{"text": "y"}\n'}, "", SKIP, ["y"], {"counts": {"bad": 1}}),
    "a key twice": ({"a.jsonl": lines("x") + '{"text": "first", "text": "second"}\n'}, "", {},
                    "line 2 has no text but several values under 'text'"),
    "the same in an array": ({"a.json": '[{"text": "first", "text": "second"}, {"text": "x"}]', "b.txt": "B"}, "", SKIP,
                             ["x", "B"], {"counts": {"bad": 1}, "notes": "several values under 'text'"}),
    "another key twice": ({"a.jsonl": '{"n": 1, "n": 2, "text": "x", "m": {"text": 1, "text": 2}}'}, "", {}, ["x"], {}),
    "a nested key": ({"a.jsonl": '{"doc": {"text": "x"}}\n'}, "", {"text_key": "doc.text"}, ["x"], {}),
    "a key with a dot in it": (
        {"a.jsonl": '{"doc.text": "x", "doc": {"text": "y"}}\n'}, "", {"text_key": "doc.text"}, ["x"], {}),
    "a nested key that is another": ({"a.jsonl": '{"doc": {"body": "x"}, "n": 1}\n'}, "", {"text_key": "doc.text"},
                                     "no key 'doc.text'; its keys are doc.body, n"),
    "halves of surrogate pairs": ({"a.jsonl": '{"text": "\\ud800 \\udc00\\ud800 \\ud83d\\ude42"}\n'}, "", {},
                                  ["\ufffd \ufffd\ufffd 🙂"], {"counts": {"replaced": 3}}),
    "halves in a key": ({"a.jsonl": '{"t\\udcff": 1}\n' + lines("x")}, "", SKIP, ["x"], {"counts": {"bad": 1}}),
    # CSV
    "a spreadsheet's CSV": (
        {"a.csv": '\ufeffid,text\r\n1,"a\r\nb, ""c"""\r\n\r\n2,d\r\n'}, "", {}, ['a\r\nb, "c"', "d"], {}),
    "semicolons": ({"a.csv": "id;text\n1;a, b\n"}, "", {}, ["a, b"], {}),
    "tabs": ({"a.tsv": "id\ttext\n1\ta, b; c\n"}, "", {}, ["a, b; c"], {}),
    "Excel's own first line": (
        {"a.csv": "sep=;\r\nid;text\r\n1;a, b\r\n", "b.csv": '"sep=#"\nid#text\n1#c;d\n', "c.csv": "sep=\ntext\n"}, "",
        SKIP, ["a, b", "c;d"], {"counts": {"bad": 1}, "notes": "c.csv has no column 'text'; it has sep="}),
    "the same with a broken row": ({"a.csv": 'sep=;\nid;text\n1;"a" b\n'}, "", {}, "row 1 is no CSV in lines 3 to 3"),
    "a comment above the columns": ({"a.csv": "# export of 2020, new\n\nid;text\n1;a\n"}, "", {},
                                    "no column 'text'.*COLUMN; or delete what is before line 3, if that one names"),
    "quotes that join rows": (
        {"a.tsv": 'id\ttext\n1\t"unbalanced start\n2\tmiddle\n3\tend with"\n4\tlast\n5\t"a\nb"\n'}, "", {},
        ["unbalanced start\n2\tmiddle\n3\tend with", "last", "a\nb"], {"counts": {"over_lines": 2}}),
    "another column": ({"a.csv": "text,body\nx,y\n"}, "", {"text_key": "body"}, ["y"], {}),
    "a column in other letters": ({"a.csv": "id,Text\n1,x\n"}, "", {}, "no column 'text'; it has id, Text"),
    "the column twice": ({"a.csv": "text,text\nx,y\n"}, "", {}, "several columns 'text'"),
    "commas without quotes": ({"a.csv": "id,text\n1,a, b\n2\n3,c\n"}, "", {},
                              "row 1 has .*\n  Broken too, for this reason or another, 1 after it: row 2.\n  Repair"),
    "the same, to be skipped too": ({"a.csv": "id,text\n1,a, b\n2\n3,c\n"}, "", SKIP, ["c"], {"counts": {"bad": 2}}),
    "a quote that never ends": ({"a.csv": 'id,text\n0,ok\n1,"abc\n2,def\n'}, "", {},
                               r"row 2 is no CSV \(a quote in it, from line 3 on, .* nothing behind it"),
    "the same, to be skipped as well": (
        {"a.csv": 'id,text\n0,ok\n1,"a\nb"\n2,"abc\n3,def\n4,g\n'}, "", SKIP, ["ok", "a\nb"],
        {"counts": {"bad": 1}, "notes": "row 3 is no CSV (a quote in it, from line 5 on, never ends), and nothing"}),
    "a quote that ends in another row": (
        {"a.csv": 'id,text\n1,"abc\n2,"def"\n3,g\n'}, "", SKIP, ["g"],
        {"counts": {"bad": 1}, "notes": "row 1 is no CSV in lines 2 to 3"}),
    "a table without its header": ({"a.csv": "1,a\n2,b\n"}, "", {}, "it has 1, a.*names none, put one before it"),
    "a quote inside of quotes": (
        {"a.csv": 'id,text\n1,"he said "hi" twice"\n2,b\n'}, "", SKIP, ["b"], {"counts": {"bad": 1}}),
    "a header and nothing else": (
        {"a.csv": "id,text\n", "b.csv": ""}, "", {}, [], {"counts": {"empty": 2}, "read": {}}),
    "long fields, old Macs": ({"a.csv": f"id,text\r1,{'x' * 200_000}\r2,a\r"}, "", {}, ["x" * 200_000, "a"], {}),
    "a NUL": ({"a.csv": "id,text\n1,a\0b\n2,c\n"}, "", {}, "row 1 has a NUL in it, .*\n  Repair it, or leave such"),
    "NULs everywhere": (
        {"a.csv": "id,text\n1,a\0b\n2,c\n", "b.jsonl": lines("d", "e\0"), "c.json": '[{"text": "\\u0000"}]',
         "d.parquet": table(text=["f\0", "g"]), "e.txt": "h\0"}, "", SKIP, ["c", "d", "g"], {"counts": {"bad": 5}}),
    "Latin-1 in a CSV": ({"a.csv": "id,text\n1,café\n".encode("latin-1")}, "", {},
                         "a.csv: row 1 has a byte that is no UTF-8 behind 'caf'.\n  Convert it \\(iconv -f CP1252 "),
    "Latin-1 in JSON lines": ({"a.jsonl": '{"text": "café"}\n'.encode("latin-1")}, "", {},
                              "line 1 has a byte .*\n  Convert it \\(iconv .* --errors replace, or leave"),
    "Latin-1 in a text": ({"a.txt": "café".encode("latin-1")}, "", {}, "byte 3 is no UTF-8.*Convert it \\(iconv -f "),
    "a text that is a number": ({"a.jsonl": '{"text": 1}'}, "", {}, "\n  Repair it, name another --text_key, or leave"),
    "conversations for text": ({"a.jsonl": '{"messages": []}'}, "", {}, "say --chat .*Else repair it, name"),
    "a table of conversations": ({"a.parquet": table(messages=["x"])}, "", {}, "say --chat .*Else name the one"),
    "the same, replaced": (
        {"a.csv": "id,text\n1,café\n".encode("latin-1")}, "", REPLACE, ["caf\ufffd"], {"counts": {"replaced": 1}}),
    "bytes that are no UTF-8, by record": (
        {"a.txt": b"x\xff#y\xe2\x82#z\xef\xbf\xbd", "b.json": b'[{"text": "\xff"}, {"text": "\xfe\xfe"}]'}, "",
        {"separator": "#", **REPLACE}, ["x\ufffd", "y\ufffd", "z\ufffd", "\ufffd", "\ufffd\ufffd"], {"counts": {
            "replaced": 5, "separators": 2}}),
    "the same, skipped by record": (
        {"a.txt": b"x\xff#y#z", "b.json": b'[{"text": "\xff"}, {"text": "1"}]',
         "c.jsonl": b'{"\xff": 1}\n{"text": "2"}\n',
         "d.csv": b"id,text\n1,\xff\n\xff,3\n", "e.parquet": table(text=BAD_UTF8), "f.json": b'[{"text": "\\udcff"}]'},
        "", {"separator": "#", **SKIP}, ["y", "z", "1", "2", "3", "ok", "\ufffd"],
        {"counts": {"bad": 5, "separators": 2, "replaced": 1}}),
    # tables
    "a column of lists": (
        {"a.parquet": table(text=[["x"]])}, "", {}, "column 'text' holds list<.*>; text is needed. Columns: text"),
    "lists are not skipped": ({"a.parquet": table(text=[["x"]])}, "", SKIP, "column 'text' holds list"),
    "a struct": ({"a.parquet": table(text=[{"a": "x"}])}, "", SKIP, "holds a struct of a; .* Columns: text.a"),
    "into the struct": (
        {"a.parquet": table(text=[{"a": "x"}, None])}, "", {"text_key": "text.a", **SKIP}, ["x"],
        {"counts": {"bad": 1}}),
    "conversations": ({"a.parquet": table(messages=[[{"role": "user", "content": "x"}]])}, "",
                      {"text_key": "messages.content"}, "no column 'messages.content'; it has messages"),
    "lists in Arrow": ({"a.arrow": table(".arrow", text=[["x"]], n=[1])}, "", SKIP, "holds list.* Columns: text, n"),
    "bytes": ({"a.parquet": table(text=[b"x"])}, "", {}, "holds binary"),
    "no rows": ({"a.parquet": table(text=pa.array([], pa.string()))}, "", {}, [], {"counts": {"empty": 1}}),
    "Latin-1 in parquet": ({"a.parquet": table(text=BAD_UTF8)}, "", {},
                           "row 2 has a byte that is no UTF-8 behind 'caf'"),
    "the same, replaced too": (
        {"a.parquet": table(text=BAD_UTF8)}, "", REPLACE, ["ok", "caf\ufffd"], {"counts": {"replaced": 1}}),
    "something else named .arrow": ({"a.arrow": "garbage"}, "", {}, "a.arrow cannot be read as arrow"),
    # archives
    "an archive of this and that": (
        {"t.tgz": gzip.compress(tar(a_txt="A", b_JSONL=lines("b"), p_jpg="x", c_tar="x", _a_txt="mac", e_txt="",
                                    j_json_gz=gzip.compress(b'[{"text": "j"}]'), c_csv="text\nrow\n",
                                    s_json='{"a": 1}'))},
        "", {}, ["A", "b", "j", "row"],
        {"counts": {"empty": 1}, "passed": {".jpg (not known as text)": 1, ".tar (in an archive)": 1, "hidden": 1,
                                            ".json (no key 'text')": 1},
         "read": {".tar.gz by member": 1, ".txt whole": 1, ".jsonl by line": 1, ".json.gz by record": 1,
                  ".csv by row": 1}}),
    "parquet in an archive": ({"t.tar": tar(a_parquet=table(text=["x"]), b_arrow=table(".arrow", text=["y"]),
                                            c_parquet=table(text=["z"]))}, "", {}, ["x", "y", "z"], {}),
    "a tar cut between members": (
        {"t.tar": tar(a_txt="A" * 512, b_txt="B")[:1024]}, "", {}, "t.tar cannot be unpacked"),
    "a tar cut in a header": (
        {"t.tar": tar(a_txt="A" * 512, b_txt="B")[:1300]}, "", SKIP, ["A" * 512], {"counts": {"bad": 1}}),
    "a tar with a damaged header": ({"t.tar": tar(a_txt="A" * 512, b_txt="B").replace(b"b.txt", b"?.txt")}, "", {},
                                    "no header at byte 1,024"),
    "two tars joined": ({"t.tar": tar(a_txt="A") + tar(b_txt="B"),
                         "u.tgz": gzip.compress(tar(c_txt="C")) + gzip.compress(tar(d_txt="D"))}, "", {},
                        ["A", "B", "C", "D"], {"read": {".tar by member": 1, ".tar.gz by member": 1, ".txt whole": 4}}),
    "a tar and the beginning of another": (
        {"t.tar": tar(a_txt="A") + tar(b_txt="B" * 900)[:700]}, "t.tar", {}, "t.tar.* cannot be unpacked"),
    "a tar and something else": ({"t.tar": tar(a_txt="A") + b"more " * 200}, "t.tar", {}, "no header at byte 10,240"),
    "two zips joined": ({"t.zip": TWO + archive("zip", {"c.txt": b"C"})}, "t.zip", {},
                        r"another zip archive, in the \d+ bytes before.*Take joined archives apart"),
    "a zip behind a program": ({"t.zip": b"#!/bin/sh\n" + TWO}, "t.zip", {}, ["A", "B"], {}),
    "an image in a tar": ({"t.tar": tar(a_txt=PNG, b_txt="B")}, "", {}, "t.tar: a.txt is an image"),
    "names that lead outside": (
        {"t.tar": archive("tar", {"../../a.txt": b"A", "/b.txt": b"B"})}, "", {}, ["A", "B"], {}),
    "a link in a tar": ({"t.tar": tar_with_a_link()}, "", {}, ["A"], {"passed": {"link or device (in an archive)": 1}}),
    "a link in a zip": ({"t.zip": zip_with_a_link()}, "", {}, ["A"],
                        {"passed": {"link or device (in an archive)": 1}}),
    "a damaged member": ({"t.zip": damaged(TWO)}, "", {}, "t.zip: a.txt cannot be unpacked"),
    "the same, without it": ({"t.zip": damaged(TWO)}, "", SKIP, ["B"],
                             {"counts": {"bad": 1}, "read": {".zip by member": 1, ".txt whole": 1}}),
    "a tar cut in a member": ({"t.tar": tar(a_txt="A" * 512, b_txt="B" * 512)[:1800]}, "", SKIP, ["A" * 512],
                              {"counts": {"bad": 2}, "notes": "from there to its end"}),
    "no text in a tar": ({"t.tar": tar(a_jpg="x")}, "", {}, [], {"passed": {".jpg (not known as text)": 1}}),
    "a Mac's zip": (
        {"t.zip": archive("zip", {"a.txt": b"A", "__MACOSX/._a.txt": b"x", "d/": b"", "d/b.md": b"B"})}, "", {},
         ["A", "B"], {"passed": {"hidden": 1}}),
    "a zip with a password": (
        {"t.zip": encrypted(archive("zip", {"a.txt": b"A"}))}, "", {}, [], {"passed": {"encrypted": 1}}),
    "a zip in a .gz": ({"t.zip.gz": gzip.compress(archive("zip", {"a.txt": b"A"}))}, "", {}, ["A"], {}),
    # separators
    "stories between lines": ({"a.txt": "one\n<|endoftext|>\ntwo\n<|endoftext|>\n"}, "", {"separator": "<|endoftext|>"},
                              ["one\n", "two\n"], {"read": {".txt by document": 1}, "counts": {"separators": 2}}),
    "the same without the flag": ({"a.txt": "one\n<|endoftext|>\ntwo\n<|endoftext|>"}, "", {},
                                  ["one\n<|endoftext|>\ntwo\n<|endoftext|>"], {"counts": {"boundary_lines": 2}}),
    "separators inside of lines": ({"a.txt": "<|x|>one<|x|>two<|x|><|x|>three"}, "", {"separator": "<|x|>"},
                                   ["one", "two", "three"], {"counts": {"separators": 4, "empty": 1}}),
    "separators with \\r\\n": ({"a.md": "one\r\n***\r\ntwo\r\n"}, "", {"separator": "***"}, ["one\r\n", "two\r\n"], {}),
    "a separator that is nowhere": ({"a.txt": "one"}, "", {"separator": "###"}, ["one"],
                                     {"counts": {"unseparated": 1}}),
    "line ends around a separator": (
        {"a.txt": "one\r\n---\r\ntwo\r\n---\r\n", "b.txt": "three\n---\nfour", "c.txt": "five"}, "",
        {"separator": "\n---\n"}, ["one", "two", "three", "four", "five"],
        {"counts": {"separators": 3, "unseparated": 1}}),
    # Hugging Face's names
    "a path that is not there": ({}, "hf:/missing/path", {}, "there is no folder /missing/path here"),
    "a folder that is not there": ({}, "hf:./missing", {}, r"there is no folder \./missing here"),
    "a path that leads nowhere": ({}, "hf:data/sets/mine", {}, "there is no folder data/sets/mine here"),
}


def source_of(folder, files, name, settings):
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            path.symlink_to(content)
        elif not file.endswith("/"):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    known = {key: settings[key] for key in ("text_key", "separator") if key in settings}
    source = Source(name if name.startswith("hf:") else str(folder / name), **known)
    return source, {key: value for key, value in settings.items() if key not in known}


@pytest.mark.parametrize("what", TABLE)
def test_the_table(tmp_path, what):
    """Read as what it is, refused by name, or counted; and reading goes on behind any document with the same counts."""
    files, name, settings, result, *more = TABLE[what]
    if isinstance(result, str):
        with pytest.raises((ValueError, OSError), match=f"(?s){result}") as error:
            source, settings = source_of(tmp_path, files, name, settings)
            documents(Reader(source, **settings))
        assert "\n  " in str(error.value), "it says what to do"
        return
    source, settings = source_of(tmp_path, files, name, settings)
    whole = Reader(source, **settings)
    found = documents(whole)
    assert [text for text, _, _ in found] == result
    for key, value in more[0].items():
        assert value in str(whole.notes) if key == "notes" else +getattr(whole, key) == value
    for i, (_, _, after) in enumerate(found):
        part = Reader(source, after=json.loads(json.dumps(after)), **settings)
        assert [text for text, _, _ in documents(part)] == result[i + 1:]
        assert (+part.read, +part.passed, +part.counts) == (+whole.read, +whole.passed, +whole.counts)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.tar"])
@pytest.mark.parametrize("change", ["longer", "shorter", "another of its size"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, name, change):
    """Is refused, whatever was read of it, and whatever is skipped: a log that grows, a file saved anew."""
    monkeypatch.setattr(sources, "HOLD", 100)  # longer ones are read twice
    data = {"a.txt": b"a b " * 200_000, "a.jsonl": lines(*"abc" * 50_000).encode(), "a.tar": tar(a_txt="A", b_txt="B"),
            "a.txt.gz": gzip.compress(b"a b " * 200_000)}[name]
    source, _ = source_of(tmp_path, {name: data, "b.txt": "B"}, "", {})
    pieces = iter(Reader(source, **SKIP))
    next(pieces)
    new = {"longer": data + data[-40:], "shorter": data[:len(data) // 2], "another of its size": data}[change]
    (tmp_path / name).write_bytes(new)
    os.utime(tmp_path / name, ns=(0, source.times[0] + (new == data)))
    with pytest.raises(ValueError, match=f"(?s){name} (changed while it was read.*again when nothing writes|"
                       "cannot be unpacked)"):
        list(pieces)


def test_fields_of_conversations_are_counted_once(tmp_path):
    """Those in a folder's .json too, whose beginning is looked at before."""
    talk = {"id": 1, "messages": [{"role": role, "content": role} for role in ("user", "assistant")]}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps([talk]))
    reader = Reader(Source(str(tmp_path), chat=True))
    assert len(documents(reader)) == 2 and +reader.counts == {"field id": 2}


def test_a_message_with_a_key_twice(tmp_path):
    """It is told as such, and as nothing of Python's."""
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}')
    with pytest.raises(ValueError, match='whose content is "several values"; text'):
        documents(Reader(Source(str(tmp_path / "a.jsonl"), chat=True)))


def test_records_too_long_to_be_parsed(tmp_path, monkeypatch):
    """They are bad records; what is behind them is read where the format shows where that begins."""
    for name, value in (("MAX_LINE", 100), ("CHUNK", 40)):
        monkeypatch.setattr(formats, name, value)
    long = "x" * 900
    for name, content, result in (
            ("a.json", json.dumps([{"text": "one"}, {"text": long}, {"text": "two"}]), ["one"]),
            ("a.jsonl", lines("one", long, "two"), ["one", "two"]), ("a.txt", f"one#{long}#two", ["one", "two"]),
            ("b.txt", f"one#{long}", ["one"]), ("a.csv", f"text\none\n{long}\ntwo\n", ["one"])):
        source, _ = source_of(tmp_path, {name: content}, name, {"separator": "#"})
        reader = Reader(source, **SKIP)
        assert [text for text, _, _ in documents(reader)] == result and reader.counts["bad"] == 1, name
        assert "longer than 100" in reader.notes[0]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs /dev/fd")
def test_pipes_and_devices(tmp_path):
    """prepare.py <(cat x.txt): refused as what it is; in a folder it is counted, and nothing waits for it."""
    read, write = os.pipe()
    for path in (f"/dev/fd/{read}", "/dev/zero"):
        with pytest.raises(ValueError, match="is a pipe or device, which can be read once.*\n.*Write it to a file"):
            Source(path)
    os.close(read)
    os.close(write)
    os.mkfifo(tmp_path / "p.txt")
    (tmp_path / "a.txt").write_text("A")
    source = Source(str(tmp_path))
    assert source.names == ["a.txt"] and source.passed == {"pipe or device": 1}


@pytest.mark.parametrize("form", ["json", "csv", "separated.txt", "tar.gz"])
def test_long_files_are_never_held(tmp_path, form, monkeypatch):
    """20 MB in many documents take no more memory than the first megabytes of them."""
    for file in (formats, packings):
        monkeypatch.setattr(file, "CHUNK", 1 << 16)
    name, options = write(tmp_path, form, [f"{i} " + "abc déf " * 2500 for i in range(1000)])
    tracemalloc.start()
    n = sum(len(piece.text) for piece in Reader(Source(name, **options)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n > 20e6 - 1e5 and peak < 3e6
