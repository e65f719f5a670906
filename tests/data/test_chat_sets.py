"""prepare.py --chat: conversations of either form from any kind of file, whole, counted, or refused by name."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_models import conversations, trained_words

import prepare
from stack.data import chat, questions
from stack.data.batches import TokenData
from stack.data.shards import open_shard, read_meta
from stack.data.tokenizer import Tokenizer


@pytest.fixture
def words(tmp_path):
    """A folder with a tokenizer, to be named with --tokenizer."""
    (tmp_path / "words").mkdir()
    trained_words().save(tmp_path / "words")
    return tmp_path / "words"


def write(path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make(words, out, *sources, code=0):
    assert prepare.main([*map(str, sources), "--tokenizer", str(words), "--out", str(out)]) == code
    return read_meta(out) if not code else None


def documents(folder) -> list[list[int]]:
    """The ids of every document of a set, split after split."""
    meta, found = read_meta(folder), []
    for split in meta["splits"].values():
        for shard in split["shards"]:
            ids = np.array(open_shard(folder / shard["file"])).astype(int)
            assert ids[0] == meta["boundary_id"], "a shard begins amid a document"
            found += [[meta["boundary_id"], *part] for part in
                      np.split(ids, np.flatnonzero(ids == meta["boundary_id"]))[1:] for part in [part[1:].tolist()]]
    return found


def as_shared(talk):
    roles = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": roles.get(m["role"], m["role"]), "value": m["content"]} for m in talk]}


def test_every_form_and_file_gives_the_same_set(tmp_path, words, capsys):
    """Lines of both forms, parquet, a data set of Hugging Face's: the same conversations, ids as chat.encode's."""
    talks = [[{key: m[key] for key in ("role", "content")} for m in talk] for talk in conversations(60)
             if not any("tool_calls" in m for m in talk)]
    ours = write(tmp_path / "ours.jsonl", [{"messages": talk, "id": i} for i, talk in enumerate(talks)])
    theirs = write(tmp_path / "theirs.jsonl", [as_shared(talk) for talk in talks])
    pq.write_table(pa.table({"id": range(len(talks)), "messages": talks}), tmp_path / "t.parquet", row_group_size=7)
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.table({"source": ["x"] * len(talks), "messages": talks}), tmp_path / "hub" / "train.parquet")
    want = sorted(chat.encode(trained_words(), talk).tolist() for talk in talks)
    for i, source in enumerate((ours, theirs, tmp_path / "t.parquet", f"hf:{tmp_path / 'hub'}")):
        out = tmp_path / f"out{i}"
        meta = make(words, out, source, "--chat", "--val_fraction", "0.2")
        assert sorted(documents(out)) == want
        assert meta["chat"]["conversations"] == len(talks)
        assert Tokenizer.load(out).chat_template == chat.OWN
    counts = meta["chat"]
    roles = [m["role"] for talk in talks for m in talk if m["content"] or m["role"] != "system"]
    assert counts["turns"] == {role: roles.count(role) for role in chat.OPENINGS}
    marks = chat.Marks(counts["ids"])
    assert counts["learned_tokens"] == sum(int(marks.learned(np.array([*ids, 0])).sum()) for ids in want)
    assert counts["longest"] == max(map(len, want)) > 129
    assert counts["longer"]["256"] == sum(len(ids) > 257 for ids in want)
    said = capsys.readouterr().out
    assert f"{len(talks)} conversations; turns: " in said and said.count(f"fields not read: id ({len(talks)})\n") == 1
    assert TokenData(out, "train", seq_len=64).loss_on == "assistant"


def test_what_is_no_conversation_is_named_or_counted(tmp_path, words, capsys):
    good = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    records = [good, {"messages": [{"role": "bot", "content": "x"}]}, {"text": "plain"},
               {"messages": [{"role": "user", "content": "x"}]},
               {"messages": [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]}]
    file = write(tmp_path / "c.jsonl", records)
    make(words, tmp_path / "out", file, "--chat", code=2)
    said = capsys.readouterr().err
    assert "c.jsonl: line 2 has a message (1) of role 'bot'" in said and "line 3, 4" in said
    meta = make(words, tmp_path / "out", file, "--chat", "--skip_bad", "--val_fraction", "0.3")
    assert meta["sources"][0]["bad"] == 3 and "no message of the assistant" in str(meta["sources"][0]["notes"])
    assert meta["chat"]["conversations"] == 2 and len(meta["splits"]) == 2  # the last one is held out whole
    for name, keys in (("alpaca", ("instruction", "input", "output")), ("pairs", ("prompt", "completion"))):
        file = write(tmp_path / f"{name}.jsonl", [dict.fromkeys(keys, "x")])
        make(words, tmp_path / "no", file, "--chat", code=2)
        said = capsys.readouterr().err
        assert f"its keys are {', '.join(keys)}" in said and chat.FORM in said and "--text_key" not in said
        pq.write_table(pa.table({key: ["x"] for key in keys}), file.with_suffix(".parquet"))
        make(words, tmp_path / "no", file.with_suffix(".parquet"), "--chat", code=2)
        said = capsys.readouterr().err
        assert f"it has {', '.join(keys)}" in said and chat.FORM in said and "--text_key" not in said
    (tmp_path / "notes.txt").write_text("just text")
    make(words, tmp_path / "out2", tmp_path / "notes.txt", "--chat", code=2)
    assert "has no conversations; they are in .jsonl" in capsys.readouterr().err
    few = Tokenizer(trained_words().pattern, trained_words().ranks, {"<|endoftext|>": 999})
    (tmp_path / "few").mkdir()
    few.save(tmp_path / "few")
    make(tmp_path / "few", tmp_path / "out3", write(tmp_path / "g.jsonl", [good]), "--chat", code=2)
    assert "convert.py resize" in capsys.readouterr().err


def test_limits_shards_and_the_tail_cut_no_conversation(tmp_path, words):
    talks = conversations(30, seed=5)
    want = {tuple(chat.encode(trained_words(), talk).tolist()) for talk in talks}
    file = write(tmp_path / "c.jsonl", [{"messages": talk} for talk in talks])
    meta = make(words, tmp_path / "a", file, "--chat", "--shard_tokens", "700", "--val_fraction", "0.2")
    assert {tuple(ids) for ids in documents(tmp_path / "a")} == want and len(meta["splits"]["train"]["shards"]) > 3
    make(words, tmp_path / "b", file, "--chat", "--max_tokens", "1500", "--val_fraction", "0.2")
    assert {tuple(ids) for ids in documents(tmp_path / "b")} < want
    few = write(tmp_path / "few.jsonl", [{"messages": talk} for talk in talks[:3]])
    make(words, tmp_path / "c", few, "--chat")  # too few to share out by hash
    assert len(documents(tmp_path / "c")) == 3 and {tuple(ids) for ids in documents(tmp_path / "c")} < want


def test_a_tokenizer_of_its_own_is_said(tmp_path, words, capsys):
    """Conversations alone are mostly to finetune a run on, which a tokenizer trained on them shares no ids with."""
    file = write(tmp_path / "c.jsonl", [{"messages": talk} for talk in conversations(30, seed=5)])
    (tmp_path / "mix.py").write_text(f"sources = [dict(source={str(file)!r}, weight=1, chat=True),\n"
                                     f"           dict(source={__file__!r}, weight=1)]\n")
    own = ["--vocab_size", "300"]
    for name, says, argv in (("own", True, [file, "--chat", *own]), ("mixed", False, [tmp_path / "mix.py", *own]),
                             ("theirs", False, [file, "--chat", "--tokenizer", words])):
        assert prepare.main([*map(str, argv), "--out", str(tmp_path / name)]) == 0
        assert ("which no run has" in capsys.readouterr().out) == says, name


def test_conversations_stand_beside_text_in_a_recipe(tmp_path, words):
    """A source says for itself what it is; all of a text's tokens are learned, and of a conversation its answers."""
    write(tmp_path / "c.jsonl", [{"messages": talk} for talk in conversations(40, seed=6)])
    (tmp_path / "books").mkdir()
    for i in range(40):
        (tmp_path / "books" / f"{i}.txt").write_text(f"Book {i}. <|user|> is a name.\n" + "word " * 60)
    (tmp_path / "mix.py").write_text(
        f"sources = [dict(source={str(tmp_path / 'c.jsonl')!r}, weight=1, chat=True),\n"
        f"           dict(source={str(tmp_path / 'books')!r}, weight=1)]\nval_fraction = 0.1\n")
    meta = make(words, tmp_path / "out", tmp_path / "mix.py")
    marks, kinds = chat.Marks(meta["chat"]["ids"]), set()
    for ids in documents(tmp_path / "out"):
        talks = ids[1] in marks.openings
        assert marks.learned(np.array([*ids, marks.boundary])).all() != talks
        kinds.add(talks)
    assert kinds == {True, False}
    data = TokenData(tmp_path / "out", "train", seq_len=64)
    assert 0 < sum(int((data.window(i)[1] >= 0).sum()) for i in range(data.n_windows)) < data.n_tokens


def test_questions_about_a_library_are_answered_by_its_source(tmp_path, words):
    """What is public and has a docstring, with its signature; nothing is imported, and what is held out is asked of
    nowhere else."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shelf.py").write_text('''"""Shelves for many books.  More of them."""
raise SystemExit("imported")

class Shelf:
    """A shelf with a limit."""

    def put(self, book, /, at=0, *, safe=True):
        """Put a book on the shelf."""

    @staticmethod
    def size(shelf):
        """Say how large a shelf is."""

    @property
    def full(self):
        """Whether nothing fits any more."""

    def _hidden(self):
        """Nobody should see this one."""

def find(name, *where, **how) -> list[str]:
    """Find a book
    by its name."""

def silent():
    pass
''')
    talks = list(questions.conversations((tmp_path / "lib" / "shelf.py").read_text(), "shelf"))
    said = {talk[0]["content"].split("shelf", 1)[1].rstrip("?.").split(" ")[0]: [m["content"] for m in talk[1::2]]
            for talk in talks}
    assert said == {"": ["Shelves for many books.", "Shelf, find, silent."],
                    ".Shelf": ["A shelf with a limit.", "put, size, full."],
                    ".Shelf.put": ["Put a book on the shelf.", "put(book, /, at=0, *, safe=True)"],
                    ".Shelf.size": ["Say how large a shelf is.", "size(shelf)"],
                    ".Shelf.full": ["Whether nothing fits any more."],
                    ".find": ["Find a book by its name.", "find(name, *where, **how)"]}
    meta = make(words, tmp_path / "out", tmp_path / "lib", "--chat", "--val_fraction", "0.2")
    assert meta["chat"]["conversations"] == len(talks) == 6 and meta["sources"][0]["read"] == {".py by object": 1}
