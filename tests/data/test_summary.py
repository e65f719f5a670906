"""What prepare.py says of what it read: as what, what it passed over or left out and why, and what it then leaves."""

import json
import os

import pytest
from prepared import run
from test_inputs import CORPUS, PNG, TABLE, source_of, table

import prepare
from stack.data.sources import Source, listed
from stack.data.verify import said_of
from stack.data.writer import fresh, start


def test_the_summary_says_what_became_of_it(tmp_path, vocabulary, capsys):
    """For each source: read as what, passed over why, lines that look like separators, characters replaced."""
    files, more = TABLE["a folder of this and that"][0], tmp_path / "more"
    source_of(tmp_path / "mixed", files, "", {})
    more.mkdir()
    (more / "a.txt").write_bytes("\n<|endoftext|>\n".join(CORPUS).encode())
    (more / "b.jsonl").write_text('{"text": "a \\ud800"}\n[]\n')
    argv = [tmp_path / "mixed", more, "--tokenizer", vocabulary, "--val_fraction", "0.3", "--skip_bad"]
    assert run(*argv, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    for line in (f"{tmp_path}/mixed: read 2 .txt whole, 1 .jsonl by line, 1 .csv by row; passed over: 1 .docx (not ",
                 "1 .docx (not known as text), 3 hidden, ",
                 "1 .jpg (not known as text)", "1 no ending (not known as text)", "or give a glob in quotes",
                 f"{more}: read 1 .txt whole, 1 .jsonl",
                 f"{more}: 39 lines are <|endoftext|>, which is text here", f"{more}: 1 times U+FFFD",
                 "left out: 1 empty, 1 bad", f"left out: {more}/b.jsonl: line 2 is not an object"):
        assert line in said, said
    assert run(*argv, "--out", tmp_path / "out") == 0 and "nothing to do" in capsys.readouterr().out
    assert run(*argv, "--out", tmp_path / "split", "--separator", "\\n<|endoftext|>\\n") == 0
    said = capsys.readouterr().out
    assert f"{more}: read 1 .txt by document, 1 .jsonl by line\n" in said and "which is text" not in said
    assert f"{tmp_path}/mixed: --separator '\\n<|endoftext|>\\n' is nowhere in it" in said


@pytest.mark.parametrize("read, more, line", [
    ({".jsonl by line": 2}, {}, "--separator '#' is for text files; what was read has records of its own"),
    ({".txt by document": 1, ".csv by row": 1}, {}, "--separator '#' is nowhere in it"),
    ({".txt by document": 2}, {"separators": 3, "unseparated": 1}, "1 file(s) have no --separator '#' in them and "),
    ({".tsv by row": 1}, {"separators": 1, "over_lines": 2}, "2 row(s) of .tsv go over several lines")])
def test_the_summary_of_what_was_divided(read, more, line):
    said = said_of({"source": "a", "separator": "#", "read": read, "notes": [], **more})
    assert sum(f"a: {line}" in each for each in said) == 1, said


def test_a_data_set_inside_of_its_source(tmp_path, vocabulary, capsys):
    """prepare.py . --out data/x, again, and into another folder: sets are no text."""
    for i, text in enumerate(CORPUS):
        (tmp_path / f"{i}.txt").write_text(text)
    argv = [tmp_path, "--tokenizer", vocabulary, "--val_fraction", "0.2", "--out"]
    assert run(*argv, tmp_path / "data/x") == 0 and run(*argv, tmp_path / "data/x") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run(*argv, tmp_path / "data/y") == 0
    assert f"read 40 .txt whole; passed over: 1 data set ({tmp_path}/data/x)" in capsys.readouterr().out
    (tmp_path / "data/x/meta.json").rename(tmp_path / "data/x/progress.json")
    assert Source(str(tmp_path)).passed == {f"data set ({tmp_path}/data/{name})": 1 for name in "xy"}


@pytest.mark.parametrize("content", ['{"progress": 3, "splits": []}', "[]", "no JSON", '{"splits": 1, "text": "t"}'])
def test_a_folder_with_names_as_ours_is_no_data_set(tmp_path, content):
    """progress.json, meta.json and tokenizer.json of somebody else, beside text."""
    names = ("progress.json", "meta.json", "tokenizer.json")
    source, _ = source_of(tmp_path, {**{f"course/{name}": content for name in names}, "course/a.txt": "A"}, "", {})
    assert not source.passed and source.names[0] == "course/a.txt" and len(source.names) == 4


def test_what_may_be_data_is_told_first():
    """Of many kinds that are passed over; how many are not told, and where they are."""
    counts = {f".x{i} (not known as text)": 9 for i in range(14)} | {".xml.gz (not known as text)": 1, "encrypted": 2}
    said = listed(counts, where=" (meta.json lists them)")
    assert said.startswith("2 encrypted, 1 .xml.gz (not known as text), 9 .x0 ")
    assert said.endswith(", 36 of 4 other kinds (meta.json lists them)")
    assert listed({".txt whole": 3, ".json by record": 2}) == "3 .txt whole, 2 .json by record"


def test_nothing_to_read_is_told_with_what_was_there(tmp_path, vocabulary, capsys):
    source, _ = source_of(tmp_path, {"x/a.json": '{"a": 1}', "x/b.json": "[]", "x/c.png": PNG}, "x", {})
    assert run(source.source, "--tokenizer", vocabulary, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "too little" in said and "passed over: 1 .json (no key 'text'), 1 .png (not known as text)" in said


def test_what_was_refused_is_in_nobodys_way(tmp_path, vocabulary, capsys):
    """A folder without a token in it takes the corrected command, whatever ended the one before."""
    source_of(tmp_path, {"a.parquet": table(text=[["x"]] * 60, body=CORPUS + CORPUS[:20])}, "a.parquet", {})
    argv = [tmp_path / "a.parquet", "--tokenizer", vocabulary, "--out", tmp_path / "out", "--val_fraction", "0.2"]
    for flags in ([], ["--skip_bad"], ["--text_key", "nobody"]):
        assert run(*argv, *flags) == 2
        assert "Columns: text, body" in (said := capsys.readouterr().err) or "it has text, body" in said
    start(tmp_path / "out", {"sources": [{"source": "killed"}], "options": {}}, prepare.OURS)  # before its first token
    (tmp_path / "out" / "tokenizer.json").write_text("half")
    assert run(*argv, "--text_key", "body") == 0
    state = fresh({"sources": [{"source": "b"}], "options": {}}) | {"tokens": 5}
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "progress.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="another command"):
        start(tmp_path / "busy", {"sources": [{"source": "c"}], "options": {}}, prepare.OURS)


@pytest.mark.skipif(os.name != "posix", reason="names of POSIX are bytes")
def test_names_that_are_no_utf8(tmp_path, vocabulary, capsys):
    """Files, folders and notes: made, taken for done by the same command, verified.  Data that training could not open
    are not made."""
    folder, odd, out = (os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/caf\xe9", b"/out\xff", b"/out"))
    os.mkdir(folder)
    for i, text in enumerate(CORPUS):
        with open(os.path.join(folder, os.fsdecode(b"\xe9_%d.txt" % i)), "wb") as file:
            file.write(text.encode() if i else b"\xff")
    argv = [folder, "--tokenizer", vocabulary, "--val_fraction", "0.2", "--skip_bad", "--out"]
    with pytest.raises(SystemExit):
        run(*argv, odd)
    assert "is no UTF-8" in capsys.readouterr().err and not os.path.exists(odd)
    argv.append(out)
    assert run(*argv) == 0 and "read 39 .txt whole" in (said := capsys.readouterr().out)
    assert r"caf\udce9/\udce9_0.txt: byte 0 is no UTF-8" in said
    assert run(*argv) == 0 and "nothing to do" in capsys.readouterr().out
    assert run("verify", out) == 0
