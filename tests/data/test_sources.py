"""Reading: every format gives the same documents byte for byte, broken input is named, reading can start anywhere."""

import codecs
import json
import os
import random
import shutil
import socket
import sys
import time
import tracemalloc
import types
from collections import Counter

import pytest
from forms import FORMS, write
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.data import formats, sources
from stack.data.sources import Reader, Source, list_files
from stack.data.tokenizer import cut, train_tokenizer

HARD = ["plain\n", "CRLF\r\nand\rold Mac\r\n", "line\u2028and\u2029separators\x0b\x0c\x85\n", "BEL \x07 inside",
        " ", "\n\n", "<|endoftext|> is text here", "é漢字🙂 \ufeff in the middle", "\ufffd already there", "a" * 5000,
        " " * 5000]


def documents(reader):
    """[(text, key, state after it)] of a reader, pieces joined."""
    found, held = [], []
    for piece in reader:
        assert piece.first == (not held)
        held.append(piece.text)
        if piece.after:
            found.append(("".join(held), piece.key, piece.after))
            held = []
    assert not held
    return found


def texts(source, **settings):
    return [text for text, _, _ in documents(Reader(source, **settings))]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_documents(tmp_path, monkeypatch, form):
    """Formats and packings only differ in how the bytes are stored; a reader continues after any document."""
    name, options = write(tmp_path, form, HARD)
    source = Source(name, **options)
    found = documents(Reader(source))
    assert [text for text, _, _ in found] == HARD
    assert [key for _, key, _ in found] == [sources.hash_text(text, Counter())[0] for text in HARD]
    for i, (_, _, after) in enumerate(found):
        after = json.loads(json.dumps(after))  # as progress.json keeps it
        assert texts(source, after=after) == HARD[i + 1:]
    monkeypatch.setattr(sources, "HOLD", 3)  # so that files are read a second time, those in archives too
    assert [found[:2] for found in documents(Reader(source))] == [found[:2] for found in found]
    if "hf" not in form:
        whole, part = Reader(source), Reader(source, after=json.loads(json.dumps(found[4][2])))
        assert len(documents(whole)) == len(documents(part)) + 5 == len(HARD)
        assert (part.read, part.passed, part.counts) == (whole.read, whole.passed, whole.counts)


def test_states_of_before_archives_were_read(tmp_path):
    """A run that was begun with positions (file, record) goes on."""
    source = Source(write(tmp_path, "jsonl", HARD)[0])
    state = {"position": [0, 3], "counts": {"empty": 2}, "notes": [], "consumed": 0}
    reader = Reader(source, after=state)
    assert [text for text, _, _ in documents(reader)] == HARD[3:] and reader.counts["empty"] == 2


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n\té🙂", max_size=400), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_pieces_depend_on_the_text_alone(text, sizes):
    """However a text arrives in chunks, its pieces are the same, are short, and join to the text."""
    chunks, at, i = [], 0, 0
    while at < len(text):
        chunks.append(text[at:at + sizes[i % len(sizes)]])
        at, i = at + sizes[i % len(sizes)], i + 1
    pieces = list(cut(chunks, 40))
    assert pieces == list(cut([text], 40)) and "".join(pieces) == text and max(map(len, pieces), default=0) <= 40


def test_pieces_change_no_token():
    """Text with spaces in it has the same ids in pieces as whole."""
    words = random.Random(0)
    text = "".join(words.choice(["the ", "cat\n", "  sat", ", ", "12345 ", "été ", "\n\n", "x=y"]) for _ in range(9999))
    tokenizer = train_tokenizer([text[:5000]], 400)
    assert sum((tokenizer.encode(piece) for piece in cut([text], 3000)), []) == tokenizer.encode(text)


def test_long_files_are_never_held(tmp_path):
    """40 MB on one line go through in pieces; the second read gives the same text as the first hashed."""
    text = "abc déf " * 5_000_000
    (tmp_path / "long.txt").write_bytes(text.encode())
    key, size = sources.hash_text(text, Counter())[0], len(text)
    del text
    tracemalloc.start()
    got = 0
    for piece in Reader(Source(str(tmp_path / "long.txt"))):
        got += len(piece.text)
        assert piece.key == key
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got == size and peak < 30e6  # HOLD bytes of it while it might still be a short one


def test_natural_order_and_what_a_folder_gives(tmp_path, monkeypatch):
    """part_2 before part_10 whatever the file system says; hidden and unknown files are left out of folders only."""
    for name in ("part_10.txt", "part_2.txt", "b/c.md", "notes.rst", ".hidden.txt", ".git/x.txt", "__pycache__/y.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((r, d, f[::-1]) for r, d, f in walk(*a, **k)))
    assert list_files(str(tmp_path))[1] == ["b/c.md", "part_2.txt", "part_10.txt"]
    assert texts(Source(str(tmp_path / "notes.rst"))) == ["notes.rst"]
    assert texts(Source(f"{tmp_path}/*.rst")) == ["notes.rst"]
    assert texts(Source(f"{tmp_path}/[ab]")) == ["b/c.md"]
    assert texts(Source(f"{tmp_path}/**")) == ["b/c.md", "notes.rst", "part_2.txt", "part_10.txt"]
    for name in (str(tmp_path / "absent.txt"), f"{tmp_path}/*.csv", str(tmp_path / ".git" / "..") + "/b/*.py"):
        with pytest.raises(FileNotFoundError, match="\n  "):
            Source(name)


def test_stdlib_is_the_library_without_its_tests():
    """About 12 MB of text, no tests, nothing installed, the same names for the same Python."""
    source = Source("stdlib")
    assert 8e6 < sum(source.sizes) < 20e6
    assert "argparse.py" in source.names and source.identity == Source("stdlib").identity
    assert not [name for name in source.names if "site-packages" in name or "/test" in name or "_sysconfigdata" in name]


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_undecodable_bytes(tmp_path, monkeypatch, chunk):
    """Strict: the file and the offset, also across chunks. Replace: U+FFFD, counted, and those of the text kept."""
    monkeypatch.setattr(formats, "CHUNK", chunk)
    path, data = tmp_path / "latin.txt", "abcé\ufffd".encode() + b"caf\xe9 \xff" + "é".encode()[:1]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"latin\.txt: byte 11 is no UTF-8"):
        texts(Source(str(path)))
    reader = Reader(Source(str(path)), errors="replace")
    assert documents(reader)[0][0] == data.decode("utf-8", "replace") and reader.counts["replaced"] == 3
    with monkeypatch.context() as patch:
        patch.setattr(sources, "HOLD", 3)  # so it is read twice, and counted once
        reader = Reader(Source(str(path)), errors="replace")
        assert documents(reader)[0][0] == data.decode("utf-8", "replace") and reader.counts["replaced"] == 3
    lines = tmp_path / "latin.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "ok"}\n\n{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl: line 3 has a byte that is no UTF-8 behind .*caf'"):
        texts(Source(str(lines)))
    reader = Reader(Source(str(lines)), errors="replace")
    assert [text for text, _, _ in documents(reader)] == ["ok", "caf\ufffd"] and reader.counts["replaced"] == 1


def test_marks_and_utf16(tmp_path):
    """A byte order mark goes, UTF-16 is refused with or without one, so are NULs and controls."""
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffhello".encode())
    assert texts(Source(str(path))) == ["hello"]
    english = "hello world, long enough"
    for name, data in (("UTF-16", "hello".encode("utf-16")), ("UTF-16BE", english.encode("utf-16-be")),
                       ("UTF-16LE", "Привет, мир".encode("utf-16-le")), ("UTF-16BE", "Привет".encode("utf-16-be")),
                       ("UTF-32", "hello".encode("utf-32")), ("UTF-32BE", english.encode("utf-32-be")),
                       ("UTF-32LE", "漢字".encode("utf-32-le")), ("UTF-32", codecs.BOM_UTF32_BE + b"\0\0\0a")):
        path.write_bytes(data)
        for errors in ("strict", "replace"):
            with pytest.raises(ValueError, match=rf"a\.txt: {name} from byte 0"):
                texts(Source(str(path)), errors=errors)
    for said, data in (("control characters", bytes(100)), ("control characters", b"abc\1\2 d" * 9),
                       ("byte 600000 is NUL", b"word " * 120_000 + b"\0"), ("is NUL", b"long enough a line \0\n")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"a\.txt.* {said}"):
            texts(Source(str(path)))
        reader = Reader(Source(str(path)), skip_bad=True)
        assert not documents(reader) and reader.counts["bad"] == 1
    path.write_bytes(log := b"\33[1mred\33[0m b\bba\ba\n" * 50)
    assert texts(Source(str(path))) == [log.decode()]


def test_broken_json_lines(tmp_path, monkeypatch):
    """Stops at the first with the next ones in the file, or leaves them out, counted and named."""
    monkeypatch.setattr(formats, "MAX_LINE", 100)
    path = tmp_path / "d.jsonl"
    lines = ['{"text": "one"}', "{broken", '["text"]', '{"txt": 1}', '{"text": null}', "", '{"text": ""}',
             json.dumps({"text": "x" * 300}), "[" * 50, '{"text": "' + "\u2028" + '"}', '{"text": "two"}']
    path.write_bytes("\n".join(lines).encode())
    with pytest.raises(ValueError) as error:
        texts(Source(str(path)))
    assert "d.jsonl: line 2 is not JSON" in str(error.value) and "5 after it: line 3, 4, 5, 8, 9." in str(error.value)
    reader = Reader(Source(str(path)), skip_bad=True)
    assert [text for text, _, _ in documents(reader)] == ["one", "\u2028", "two"]
    assert reader.counts == {"bad": 6, "empty": 1} and len(reader.notes) == 6
    assert "line 4 has no key 'text'; its keys are txt" in reader.notes[2]
    assert texts(Source(str(path), text_key="txt"), skip_bad=True) == []


def test_half_surrogates_become_replacement_characters(tmp_path):
    """JSON may escape what UTF-8 cannot hold; whole pairs are what they spell."""
    (tmp_path / "s.jsonl").write_text(r'{"text": "a\ud800b \ud83d\ude42"}')
    assert texts(Source(str(tmp_path / "s.jsonl"))) == ["a\ufffdb 🙂"]


@pytest.mark.parametrize("form", ["txt.gz", "txt.zst", "txt.bz2", "txt.xz", "jsonl.gz", "jsonl.zst", "json.xz",
                                  "csv.bz2", "parquet", "parquet.gz", "arrow", "tar", "tar.gz", "tar.zst", "zip"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_files_are_named(tmp_path, form, damage):
    """A packed file that is cut short, or no packed file at all, is an error with its name, never a short document."""
    noise = random.Random(1)
    docs = ["".join(noise.choice("abcdefgh 123\n") for _ in range(4000)) for _ in range(5)]
    write(tmp_path, form, docs)
    path = sorted(path for path in tmp_path.rglob("*") if path.is_file())[-1]
    data = path.read_bytes()
    path.write_bytes(data[:len(data) * 2 // 3] if damage == "cut" else b"????" + data[4:-4] + b"????")
    with pytest.raises(ValueError, match=f"{path.name}.* cannot be"):
        texts(Source(str(path)))


def test_parquet_columns(tmp_path):
    """A missing or numeric column is named with those there are; empty cells are bad records."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"body": pa.array(["a", None, "b"]).dictionary_encode(), "n": [1, 2, 3]}), path)
    with pytest.raises(ValueError, match="no column 'text'; it has body, n"):
        texts(Source(str(path)))
    with pytest.raises(ValueError, match="column 'n' holds int64"):
        texts(Source(str(path), text_key="n"))
    with pytest.raises(ValueError, match="row 2 has nothing in column 'body'"):
        texts(Source(str(path), text_key="body"))
    assert texts(Source(str(path), text_key="body"), skip_bad=True) == ["a", "b"]


def test_packages_that_are_missing(tmp_path, monkeypatch):
    """What an optional package is needed for, and how to get it."""
    source = Source(write(tmp_path, "txt.zst", ["a"])[0])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="pip install zstandard"):
        texts(source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        texts(Source("hf:some/thing"))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_no_permission(tmp_path, monkeypatch):
    """A folder or file that may not be read stops the run; os.walk alone would pass it over."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir(mode=0)
    if os.geteuid() == 0:  # root may read anything: say no in its place
        scandir = os.scandir

        def refuse(path):
            if str(path).endswith("closed"):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)
        monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        Source(str(tmp_path))


# ---- Hugging Face, on data sets that lie here


@pytest.fixture
def hub(tmp_path):
    """A data set of two parquet files with 2,500 rows each."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    rows = [f"row {i} " + "word " * (i % 7) for i in range(5000)]
    for part in range(2):
        pq.write_table(pa.table({"text": rows[part * 2500:][:2500], "n": list(range(2500))}),
                       tmp_path / f"train-0000{part}-of-00002.parquet", row_group_size=700)
    return f"hf:{tmp_path}", rows


def test_hub_streams_and_continues_anywhere(hub):
    """All rows in order; from the state after any row, the rest."""
    name, rows = hub
    found = documents(Reader(Source(name)))
    assert [text for text, _, _ in found] == rows
    for i in (0, 698, 699, 999, 1000, 2499, 2500, 3100, 4999):
        assert texts(Source(name), after=json.loads(json.dumps(found[i][2]))) == rows[i + 1:]
    assert texts(Source(f"{name}::train"))[:3] == rows[:3]


def test_hub_comes_back_after_a_break(hub, monkeypatch, capsys):
    """A stream that fails is taken up at the same row; one that keeps failing ends with what to do."""
    import datasets
    name, rows = hub
    monkeypatch.setattr(sources, "RETRY_SECONDS", (0, 0, 0))
    breaks, iterate = [700, 1, 2200, 10], datasets.IterableDataset.__iter__

    def fragile(self):
        for n, row in enumerate(iterate(self)):
            if breaks and n == breaks[0]:
                breaks.pop(0)
                raise TimeoutError("the far end is silent")
            yield row
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", fragile)
    assert texts(Source(name)) == rows and not breaks
    assert capsys.readouterr().err.count("TimeoutError") == 4
    breaks += [5] + [0] * 9
    with pytest.raises(ConnectionError, match="broke off.*\n.*same command again"):
        texts(Source(name))


def test_hub_mistakes(hub, tmp_path):
    """Wrong column, split or spelling: a sentence that says what there is."""
    name, _ = hub
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        texts(Source(name, text_key="body"))
    with pytest.raises(ValueError, match="Check name, configuration and split"):
        texts(Source(f"{name}::nosuchsplit"))
    with pytest.raises(ValueError, match="NAME"):
        texts(Source("hf:a:b:c:d"))


def test_what_datasets_saved(tmp_path):
    """Its rows and not its caches; of several splits the one that is named."""
    import datasets
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(20)]})
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="2 splits, train, test, .*\n.*both/train"):
        Source(str(tmp_path / "both"))
    one, name = tmp_path / "both/train", f"hf:{tmp_path}/both"
    assert texts(Source(str(one))) == texts(Source(name)) == texts(Source(f"hf:{one}")) == rows["text"][:]
    assert texts(Source(f"{name}::test")) == ["row 0"]
    datasets.load_from_disk(one).map(lambda row: {"text": row["text"] + "!"})
    assert len(list(one.glob("*.arrow"))) == 2 and texts(Source(str(one))) == rows["text"][:]
    with pytest.raises(ValueError, match="cache-.*\n.*without hf:"):
        texts(Source(f"hf:{one}"))


@pytest.mark.parametrize("offline", [True, False])
def test_hub_that_cannot_be_reached(monkeypatch, offline):
    """Seconds, not minutes, and a sentence on how to bring the data here."""
    import datasets
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)

    def refuse(*args, **kwargs):
        raise OSError("Connection refused")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(ConnectionError, match="(?s)cannot be reached .* is not in the cache .* copy"):
        texts(Source("hf:nobody/nothing:here"))
    assert sum(slept) < 5


def test_hub_that_does_not_answer(monkeypatch):
    """A far end that takes the call and stays silent is given up as well."""
    import datasets
    import huggingface_hub
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        slept, calls = [], []
        monkeypatch.setattr(time, "sleep", slept.append)
        with pytest.raises(ConnectionError, match="(?s)cannot be reached .*timed out.* is not in the cache"):
            texts(Source("hf:nobody/nothing"))
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                calls.append(silent.accept())
        assert len(calls) <= 3 and sum(slept) < 5  # each call is given up after HUB_SECONDS


@pytest.fixture
def answers(monkeypatch):
    """answers(sha=...), answers(error=...): what Hugging Face says of a data set from now on; gives what was asked."""
    import datasets
    import huggingface_hub
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    asked = []

    def error_of(kind):  # their constructors want a response of whichever library they use
        kind = getattr(huggingface_hub.errors, kind)
        return kind.__new__(kind)

    def answer(error="", gated=False, **info):
        def dataset_info(self, name, *, revision, timeout):
            asked.append(revision)
            if error:
                raise error_of(error)
            return types.SimpleNamespace(gated=gated, sha=info["sha"] if revision in (None, "main") else revision)

        def auth_check(self, name, repo_type):
            raise error_of("GatedRepoError")
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", auth_check)
        return asked
    return answer


def test_hub_that_is_gated_or_absent(answers):
    """What to do about it, said at once."""
    for answer, error, words in ((dict(gated="auto", sha="a" * 40), PermissionError, "Accept the terms"),
                                 (dict(error="RepositoryNotFoundError"), FileNotFoundError, "Check the name"),
                                 (dict(error="RevisionNotFoundError"), FileNotFoundError, "has no revision v9")):
        answers(**answer)
        with pytest.raises(error, match=words):
            texts(Source("hf:some/set@v9"))


def test_hub_is_read_at_one_commit(hub, answers, monkeypatch):
    """The commit that a branch has when the run begins is the one that is read, recorded and continued with."""
    import datasets
    load, loaded = datasets.load_dataset_builder, []

    def load_dataset_builder(name, config, *, data_dir, revision):
        loaded.append(revision)
        builder = load(hub[0][3:], config)
        builder.hash = revision
        return builder
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    old, new = "a" * 40, "b" * 40
    asked = answers(sha=old)
    found = documents(Reader(Source("hf:some/set@main::train")))
    assert [text for text, _, _ in found] == hub[1] and {after["commit"] for _, _, after in found} == {old}
    answers(sha=new)
    assert texts(Source("hf:some/set@main::train"), after=found[99][2]) == hub[1][100:]
    assert documents(Reader(Source("hf:some/set")))[0][2]["commit"] == new
    assert asked == ["main", old, None] and loaded == [old, old, new]
    asked[:] = loaded[:] = []
    texts(Source(f"hf:some/set@{old}"))
    assert asked == loaded == [old]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_hub_offline_reads_what_is_cached(hub, tmp_path, monkeypatch, variable):
    """With either variable nothing is asked of the network; the cached commit is read, recorded, and checked."""
    import datasets
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", variable == "HF_HUB_OFFLINE")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # set by both
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: pytest.fail("asked"))
    datasets.load_dataset("parquet", data_dir=hub[0][3:], cache_dir=str(tmp_path / "made"))
    made, commit = next((tmp_path / "made").glob("parquet/*/*/*/dataset_info.json")).parent, "c" * 40
    cached = tmp_path / "cache" / "nobody___set" / "default" / "0.0.0" / commit
    shutil.copytree(made, cached)
    (cached / "parquet-train.arrow").rename(cached / "set-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text()) | {"config_name": "default", "dataset_name": "set"}
    (cached / "dataset_info.json").write_text(json.dumps(info))
    found = documents(Reader(Source("hf:nobody/set")))
    assert [text for text, _, _ in found] == hub[1] and found[0][2]["commit"] == commit
    assert texts(Source("hf:nobody/set"), after=found[1234][2]) == hub[1][1235:]
    assert texts(Source(f"hf:nobody/set@{commit}"))[:1] == hub[1][:1]
    with pytest.raises(ValueError, match="is c{40} here; d{40} is needed"):
        texts(Source(f"hf:nobody/set@{'d' * 40}"))
    with pytest.raises(ValueError, match="is c{40} here; e{40} is needed"):
        texts(Source("hf:nobody/set"), after=found[0][2] | {"commit": "e" * 40})


# ---- filters


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen across the whole of the old town.\n"


@pytest.mark.parametrize("name, text, kept", [
    ("web", "".join(f"{PROSE[:-1]} {chr(97 + i)}\n" for i in range(5)), True),
    ("web", PROSE, False),  # under 50 words
    ("web", PROSE * 5, False),  # the same line again and again
    ("web", "ab " * 60, False),  # words of two letters
    ("web", "12345 " * 60, False),  # digits
    ("web", "слово и ещё слова " * 20, True),  # letters are not only ASCII
    ("code", "def f(x):\n    return x + 1\n", True),
    ("code", "x = 1\n", False),
    ("code", "#" * 70 + "\ndef f(): pass\n", False),  # mostly one character
    ("code", "ab" * 100_001, False),
    ("math", "We add the terms and find that " * 4 + "x^2 + y^2 = z^2", True),
    ("math", "the value is 12345678 and then " * 4, True),
    ("math", "no mathematics at all in these words " * 5, False),
    ("", "", True),
])
def test_filters(name, text, kept):
    """Each rule of the recipe keeps what it is for and drops what it names."""
    assert sources.FILTERS[name](text) is kept


def test_filters_are_counted(tmp_path):
    """What a filter drops is counted, and an unknown filter is refused."""
    source = Source(write(tmp_path, "jsonl", ["x", "def f(x):\n    return x + 1\n", ""])[0], filter="code")
    reader = Reader(source)
    assert len(documents(reader)) == 1 and reader.counts == {"filtered": 1, "empty": 1}
    with pytest.raises(ValueError, match="web, code, math"):
        Source(str(tmp_path), filter="prose")
