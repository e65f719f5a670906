"""eval.py: the loss over a split, whatever the batch; the embedding report finds the rows that never learned."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import document_ids, tiny_config

import eval as evaluation
from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.data.batches import Batches, TokenData
from stack.data.shards import open_shard, write_meta, write_shard
from stack.data.tokenizer import train_tokenizer
from stack.evaluation import embeddings
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

WORDS = ("apple river stone naïve café over 😀 under bread water seven green house night paper sugar table train "
         "light uncle voice wheel young brick cloud dance eagle flame grape horse index jelly knife lemon").split()
DOCS = [" ".join(WORDS[(i * i + i * j + j * j) % len(WORDS)] for j in range(16)) + "\n" for i in range(400)]
UNSEEN = " zebra quagga" * 200  # shaped the vocabulary, and is in no document
SEQ_LEN = 16


def write_data(folder, tokenizer, docs, val_docs):
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    splits = {}
    for split, texts in (("train", docs), ("val", val_docs)):
        half = len(texts) // 2
        splits[split] = []
        for n, part in enumerate((texts[:half], texts[half:])):  # two shards, so that windows must not span them
            ids = ([tokenizer.boundary_id, *tokenizer.encode(text)] for text in part)
            entry = write_shard(folder / f"{split}_{n:06d}.bin", ids, fingerprint=tokenizer.fingerprint,
                                vocab_size=tokenizer.vocab_size)
            splits[split].append({**entry, "documents": len(part), "bytes": sum(len(t.encode()) for t in part)})
    write_meta(folder, sources=["test"], fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
               boundary_id=tokenizer.boundary_id, splits=splits)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(run folder, data folder) of a model trained for a second, with dropout, document masks and padded rows."""
    base = tmp_path_factory.mktemp("eval")
    tokenizer = train_tokenizer([*DOCS, UNSEEN], 420)
    write_data(base / "data", tokenizer, DOCS[:360], DOCS[360:])
    torch.manual_seed(0)
    cfg = tiny_config(vocab_size=tokenizer.vocab_size, dropout=0.1)
    train = TrainConfig(data_dir=str(base / "data"), seq_len=SEQ_LEN, micro_batch_size=8, batch_tokens=16 * SEQ_LEN,
                        max_steps=150)
    model = GPT(cfg)
    optimizers = make_optimizers(model, muon_lr=6e-3, adamw_lr=3e-3)
    data = TokenData(base / "data", "train", seq_len=SEQ_LEN)
    batches = Batches(data, seed=0, micro_batch_size=16)
    for _ in range(train.max_steps):
        x, y, docs = next(batches)
        model(x, y, docs=docs).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    for name in ("ckpt_last", "ckpt_best"):
        checkpoint.save(base / "run", name, model=model, tokenizer=tokenizer, model_cfg=cfg, train_cfg=train,
                        state={"data": data.data_fingerprint})
    return base / "run", base / "data"


@pytest.fixture
def call(made, run_eval):
    """call(*flags) -> (exit code, stdout, stderr) of the command, run in this process."""
    def call(*flags, run=made[0]):
        return run_eval(run, *flags)
    return call


@pytest.fixture
def measure(call):
    def measure(*flags, **where):
        code, out, err = call(*flags, "--json", **where)
        assert code == 0, err
        return json.loads(out, parse_constant=pytest.fail)
    return measure


# the loss -----------------------------------------------------------------------------------------------------------

def by_hand(run, data, split="val", seq_len=SEQ_LEN):
    """Window by window, with full logits in float64."""
    model, tokenizer, _ = checkpoint.load_model(run)
    model, lengths = model.double(), tokenizer.token_bytes()
    nats = tokens = n_bytes = 0
    for path in sorted(data.glob(f"{split}_*.bin")):
        stream = torch.from_numpy(np.array(open_shard(path), np.int64))
        for start in range(0, len(stream) - seq_len, seq_len):
            x, y = stream[start:start + seq_len][None], stream[start + 1:start + seq_len + 1][None]
            logits = model(x, docs=document_ids(x, tokenizer.boundary_id))
            nats += F.cross_entropy(logits[0].double(), y[0], reduction="sum").item()
            tokens += seq_len
            n_bytes += int(lengths[y].sum())
    return {"loss": nats / tokens, "ppl": math.exp(nats / tokens), "bpb": nats / math.log(2) / n_bytes,
            "tokens": tokens, "bytes": n_bytes}


def test_loss_is_that_of_every_window_by_hand(made, measure):
    got, expected = measure(), by_hand(*made)
    assert set(got) == {"loss", "ppl", "bpb", "tokens", "bytes"}
    assert (got["tokens"], got["bytes"]) == (expected["tokens"], expected["bytes"])
    assert [got[k] for k in ("loss", "ppl", "bpb")] == pytest.approx([expected[k] for k in ("loss", "ppl", "bpb")],
                                                                     rel=1e-5)


def test_the_model_has_learned(made, measure):
    assert measure()["loss"] < 2 < math.log(300)  # or the tests below would hold for noise


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_loss_does_not_depend_on_the_batch_size(measure, batch):
    a, b = measure("--micro_batch_size", batch), measure()
    assert a == pytest.approx(b, rel=1e-6) and a["tokens"] == b["tokens"]


def test_options_choose_split_context_and_amount(made, measure):
    run, data = made
    assert measure("--split", "train")["tokens"] == TokenData(data, "train", seq_len=SEQ_LEN).n_windows * SEQ_LEN
    assert measure("--seq_len", 8)["loss"] == pytest.approx(by_hand(run, data, seq_len=8)["loss"], rel=1e-5)
    assert measure("--max_tokens", "100")["tokens"] == 96  # whole windows
    assert measure("--max_tokens", "1e9") == measure()
    assert measure(run=run / "ckpt_best") == measure()


@pytest.mark.parametrize("stride", [1, 5, SEQ_LEN - 1])
def test_a_stride_gives_each_token_its_context_and_counts_it_once(made, measure, stride):
    """Token by token: from the first multiple of the stride on that is less than a window away."""
    model, tokenizer, _ = checkpoint.load_model(made[0])
    lengths, nats, n_bytes, tokens = tokenizer.token_bytes(), 0, 0, 0
    for path in sorted(made[1].glob("val_*.bin")):
        stream = torch.from_numpy(np.array(open_shard(path), np.int64))
        for at in range(1, len(stream) - (len(stream) - 1 - SEQ_LEN) % stride):
            first = max(-(-(at - SEQ_LEN) // stride) * stride, 0)
            x = stream[first:at][None]
            assert x.shape[1] in range(min(at, SEQ_LEN - stride + 1), SEQ_LEN + 1)
            with torch.no_grad():
                logits = model(x, docs=document_ids(x, tokenizer.boundary_id))[0, -1]
            nats += F.cross_entropy(logits.double(), stream[at]).item()
            n_bytes, tokens = n_bytes + int(lengths[stream[at]]), tokens + 1
        assert len(stream) - 1 - at < stride  # what is left out at the end
    got = measure("--stride", stride)
    assert (got["tokens"], got["bytes"]) == (tokens, n_bytes)
    assert got["loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_a_stride_of_a_window_is_none_and_less_is_better(measure):
    assert measure("--stride", SEQ_LEN) == measure()
    assert measure("--stride", 4)["loss"] < measure()["loss"] - 0.01
    assert measure("--stride", 4, "--micro_batch_size", 3) == pytest.approx(measure("--stride", 4), rel=1e-6)
    for n in (SEQ_LEN, SEQ_LEN + 1, 100, 300):
        assert 0 <= n - measure("--stride", 5, "--max_tokens", n)["tokens"] < 2 * SEQ_LEN


def test_text_gives_the_numbers_of_the_json(call, measure):
    code, out, _ = call()
    r = measure()
    assert code == 0 and out.count("\n") == 1
    for number in (f"{r['loss']:.4f}", f"{r['ppl']:.2f}", f"{r['bpb']:.4f}", f"{r['tokens']:,}", f"{r['bytes']:,}"):
        assert number in out


def test_data_of_another_tokenizer_is_refused_naming_both_files(made, call, tmp_path):
    run, _ = made
    other = train_tokenizer([*DOCS, "xyzzy plugh " * 300], 420)
    write_data(tmp_path / "other", other, DOCS[:20], DOCS[20:40])
    for flags in ([], ["--embeddings"]):
        code, out, err = call("--data", tmp_path / "other", *flags)
        assert code == 2 and out == "" and "Traceback" not in err
        assert str(tmp_path / "other" / "tokenizer.json") in err and str(run / "ckpt_last" / "tokenizer.json") in err


def test_a_moved_data_folder_is_asked_for_and_found(made, measure, call, tmp_path):
    run, data = made
    before = measure()
    moved = shutil.move(data, tmp_path / "moved")
    try:
        code, _, err = call()
        assert code == 2 and str(data) in err and "--data" in err
        assert measure("--data", moved) == before
    finally:
        shutil.move(moved, data)


@pytest.mark.parametrize("flags, word", [
    (["--split", "test"], "test"), (["--seq_len", "64"], "--seq_len is 64"), (["--max_tokens", "nan"], "max_tokens"),
    (["--max_tokens", "1e400"], "inf; it must be 1 or more, and below 1e15"), (["--limit", "inf"], "--limit"),
    (["--max_tokens", "15"], "a window has 16 tokens"), (["--max_tokens", "9", "--answers"], "--limit"),
    (["--stride", "0"], "--stride is 0"), (["--stride", "17"], "--stride is 17"),
    (["--stride", "4", "--embeddings"], "--stride"), (["--max_token", "9"], "Did you mean --max_tokens?"),
    (["--batch_size", "9"], "--micro_batch_size"), (["--micro_batch_size", "0"], "micro_batch_size"),
    (["--words", "a"], "--embeddings"), (["--emb"], "--emb"),
    (["--embeddings", "--words", "incomprehensible"], "incomprehensible"), (["--data", "nowhere"], "nowhere")])
def test_wrong_flags_end_with_a_message(call, flags, word):
    code, out, err = call(*flags)
    assert code == 2 and out == "" and word in err and "Traceback" not in err


# the table ----------------------------------------------------------------------------------------------------------

def names(rows):
    return {row["token"] for row in rows}


@pytest.mark.parametrize("data_there", [True, False])
def test_rows_that_never_learned_are_named_and_no_others(made, measure, data_there):
    """By counting, and without the data by the rows alone."""
    run, data = made
    if not data_there:
        shutil.move(data, data.with_name("away"))
    try:
        r = measure("--embeddings")
    finally:
        if not data_there:
            shutil.move(data.with_name("away"), data)
    _, tokenizer, _ = checkpoint.load_model(run)
    reserved = set(tokenizer.special_ids) - {"<|endoftext|>"}
    assert {row["token"] for row in r["special_tokens"] if row["undertrained"]} == reserved
    found = names(r["undertrained"])
    assert reserved <= found and {" zebra", " quagga"} <= found
    seen = np.unique(tokenizer.encode("".join(DOCS[:360])))
    assert not {embeddings.show(tokenizer, int(i)) for i in seen} & found
    assert (r["never"] is None) == (not data_there)
    if data_there:
        assert r["never"] == tokenizer.vocab_size - len(seen) - 1  # 1: the boundary
        assert r["training_tokens"] == TokenData(data, "train", seq_len=SEQ_LEN).n_tokens


def test_counts_are_those_of_the_shards(made):
    data = TokenData(made[1], "train", seq_len=SEQ_LEN)
    stream = np.concatenate([open_shard(path) for path in sorted(made[1].glob("train_*.bin"))])
    for n in (None, 1, 1000, len(stream) - 1, 10 * len(stream)):
        expected = np.bincount(stream[:None if n is None else int(n)], minlength=data.vocab_size)
        assert (evaluation.count_ids(data, n) == expected).all()


def test_rows_touched_are_those_of_batches(made, measure):
    touched = measure("--embeddings")["rows_touched"]
    assert [b["tokens"] for b in touched] == [SEQ_LEN, 8 * SEQ_LEN, 16 * SEQ_LEN]
    data = TokenData(made[1], "train", seq_len=SEQ_LEN)
    inputs = [[len(np.unique(data.window(w)[0]))] for w in data.order(0, 0)[:50]]
    assert evaluation.rows_of_batches(data, 1, batches=50) == np.mean(inputs)
    first = np.unique([data.window(w)[0] for w in data.order(0, 0)[:16]])
    assert evaluation.rows_of_batches(data, 16, batches=1) == len(first)
    assert all(b["rows"] <= min(b["tokens"], data.vocab_size) for b in touched)


def test_zipf_expectation_of_rows_touched():
    p = embeddings.zipf(32768)
    for n, rows in ((2048, 1043), (32768, 8549), (65536, 13219), (524288, 30230)):
        assert embeddings.expected_rows(p, n) == pytest.approx(rows, abs=1)
    assert embeddings.expected_rows([1.0, 0.0], 5) == 1
    draws = np.random.default_rng(0).choice(50, size=(2000, 30), p=embeddings.zipf(50))
    seen = np.mean([len(np.unique(row)) for row in draws])
    assert embeddings.expected_rows(embeddings.zipf(50), 30) == pytest.approx(seen, rel=0.02)


def test_a_row_is_never_measured_against_itself():
    rows = F.normalize(torch.randn(10, 16), dim=1)
    distance = embeddings.unused_distance(rows, np.array([0, 1, 2]))
    without = 1 - F.cosine_similarity(rows[0].double(), (rows[1] + rows[2]).double(), dim=0)
    assert distance[0] == pytest.approx(float(without), abs=1e-6)
    assert embeddings.unused_distance(rows, np.array([0])) is None


def test_the_boundary_counts_as_used(made):
    """Without counts the other special tokens are the rows known to be unused; every document begins with this one."""
    model, tokenizer, _ = checkpoint.load_model(made[0])
    r, _ = embeddings.report(model, tokenizer)
    reserved = [i for i in tokenizer.special_ids.values() if i != tokenizer.boundary_id]
    expected = embeddings.unused_distance(model.head_weight.detach()[:tokenizer.vocab_size], np.array(reserved))
    assert [row["distance"] for row in r["special_tokens"]] == pytest.approx(
        [expected[row["id"]] for row in r["special_tokens"]])


def test_a_rare_row_is_named_wherever_it_points(made):
    model, tokenizer, _ = checkpoint.load_model(made[0])
    counts = evaluation.count_ids(TokenData(made[1], "train", seq_len=SEQ_LEN), None)
    common = int(counts.argmax())
    for n, named in ((embeddings.RARE, False), (embeddings.RARE - 1, True), (1, True)):
        counts[common] = n
        r, _ = embeddings.report(model, tokenizer, counts=counts)
        assert (common in [row["id"] for row in r["undertrained"]]) == named
        assert r["rare"] == named


@pytest.mark.parametrize("offset", [0, 50])
def test_the_nearest_row_is_the_nearest_whatever_all_rows_have_in_common(offset):
    rows = torch.randn(40, 8)
    rows[7] = rows[3] * 1.01  # a twin
    rows[9] = rows[3]  # no candidate
    rows[11] = -rows[3]
    found = embeddings.neighbours(rows + offset, [3], np.array([i for i in range(40) if i != 9]), k=4)[3]
    assert 11 not in [i for i, _ in found] and found[1][1] < 0.98
    assert found[0][0] == 7 and found[0][1] > 0.99
    assert 3 not in [i for i, _ in found] and 9 not in [i for i, _ in found]
    assert [c for _, c in found] == sorted((c for _, c in found), reverse=True)


def test_neighbours_are_of_the_words_asked_for(measure, call):
    [of] = measure("--embeddings", "--words", "river")["neighbours"]
    assert of["token"] in ("river", " river") and len(of["near"]) == 6
    assert measure("--embeddings")["neighbours"]


def test_the_table_is_described_as_it_is(made, measure):
    r, (model, _, _) = measure("--embeddings"), checkpoint.load_model(made[0])
    total = sum(p.numel() for p in model.parameters())
    assert r["table"]["share"] == pytest.approx(model.embed.weight.numel() / total)
    norms = model.embed.weight.detach()[:r["table"]["ids"]].norm(dim=1)
    assert r["norm_quantiles"]["0.5"] == pytest.approx(float(norms.quantile(0.5)), rel=1e-5)


def test_the_picture_is_drawn_and_a_read_only_run_does_without(made, call, measure, monkeypatch):
    from PIL import Image
    run, _ = made
    path = measure("--embeddings", run=run / "ckpt_last")["png"]
    with Image.open(path) as image:
        assert path == str(run / "embeddings.png") and image.width > 500 and len(image.getcolors(10**6)) > 10

    def full(*_):
        raise OSError("read-only file system")
    monkeypatch.setattr(embeddings, "plot", full)
    code, out, err = call("--embeddings")
    assert code == 0 and "Untrained special tokens: <|pad|>" in out and "read-only" in err


def test_an_untied_model_is_judged_by_its_head(made, tmp_path, measure, call):
    """Input rows that nothing moved tell nothing about direction; the head's do."""
    run, data = made
    model, tokenizer, state = checkpoint.load_model(run)
    untied = GPT(tiny_config(vocab_size=tokenizer.vocab_size, tie_embeddings=False))
    untied.load_state_dict({**model.state_dict(), "head.weight": model.embed.weight.clone()})
    with torch.no_grad():
        untied.embed.weight.normal_(std=0.02)
    checkpoint.save(tmp_path / "untied", "ckpt_last", model=untied, tokenizer=tokenizer, model_cfg=untied.cfg, state={})
    code, out, err = call("--embeddings", run=tmp_path / "untied")
    assert code == 0 and "untied" in out and "--data" in err  # it does not say what it was trained on: no counts
    r = measure("--embeddings", "--data", data, run=tmp_path / "untied")
    assert {"<|pad|>", " zebra"} <= names(r["undertrained"]) and r["unused_direction"]["rows"] == r["never"]
    total = sum(p.numel() for p in untied.parameters())
    assert r["table"]["share"] == pytest.approx(2 * untied.embed.weight.numel() / total)


@pytest.mark.parametrize("flags", [[], ["--json"], ["--embeddings"]])
def test_damaged_weights_are_no_result(made, tmp_path, call, flags):
    run, data = made
    model, tokenizer, state = checkpoint.load_model(run)
    model.embed.weight.data[5] = math.nan
    checkpoint.save(tmp_path / "run", "ckpt_last", model=model, tokenizer=tokenizer, model_cfg=model.cfg, state={})
    code, out, err = call("--data", data, *flags, run=tmp_path / "run")
    assert code == 2 and out == "" and "weights" in err and "damaged" in err


def test_int8_is_told_beside_the_saved_weights(call):
    """--quant int8: the same tokens, a loss that differs and is close, in text and JSON."""
    code, out, _ = call("--quant", "int8", "--json")
    saved = json.loads(out)
    int8 = saved.pop("quantized")
    assert code == 0 and int8["tokens"] == saved["tokens"]
    assert 0 < abs(int8["loss"] - saved["loss"]) < 0.05
    code, out, _ = call("--quant", "int8")
    assert [line.split(":")[0] for line in out.splitlines()] == ["val", "int8"]
    assert f"{int8['bpb']:.4f}" in out and f"{saved['bpb']:.4f}" in out
