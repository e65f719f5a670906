"""What people bring: every form makes the same shards; messy inputs come out as the table says."""

import pytest
from forms import FORMS, write

import prepare
from stack.data.tokenizer import train_tokenizer

CORPUS = [f"Text {i}: {'the river and the stone ' * (i % 7 + 1)}\r\n\u2028 \"quoted\", \té漢🙂\n" for i in range(40)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """prepared(folder, form) -> {shard: bytes} of CORPUS in this form."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(CORPUS, 300).save(path)

    def make(folder, form):
        name, options = write(folder, form, CORPUS)
        flags = [word for key, value in options.items() for word in (f"--{key}", value)]
        assert prepare.main([name, "--out", str(folder / "out"), "--tokenizer", str(path), "--val_fraction", "0.2",
                             "--workers", "1", *flags]) == 0
        return {shard.name: shard.read_bytes() for shard in (folder / "out").glob("*.bin")}
    return make


@pytest.fixture(scope="module")
def shards(prepared, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("jsonl"), "jsonl")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_same_shards(tmp_path, prepared, shards, form):
    """One corpus is one data set, however it is stored and packed."""
    assert len(shards) == 2 and prepared(tmp_path, form) == shards
