"""The table's life: growing, untying and tying keep what was trained, and say so when they cannot."""

import json

import pytest
import torch
from conftest import tiny_config

import convert
from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.checkpoint.folder import find, read_state
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

REAL = 256 + 35 + len(SPECIALS)  # 300 ids in 320 rows, as in tiny_config


def tokenizer():
    letters = b"abcdefghijklmnopqrstuvwxyzABCDEFGHI"
    ranks = {bytes([b]): b for b in range(256)} | {b" " + bytes([b]): 256 + i for i, b in enumerate(letters)}
    return Tokenizer(PATTERN, ranks, {name: len(ranks) + i for i, name in enumerate(SPECIALS)})


def make_run(path, *, optimizer="muon", steps=3, **changes):
    """A run folder after a few real optimizer steps; pad rows hold values that no new row may inherit."""
    torch.manual_seed(0)
    model = GPT(tiny_config(vocab_size=REAL, **changes))
    with torch.no_grad():
        for table in {model.embed.weight, model.head_weight}:
            table[REAL:] = 100.0
    optimizers = make_optimizers(model, optimizer=optimizer)
    ids = torch.randint(0, REAL, (4, 17))
    for _ in range(steps):
        model(ids[:, :-1], ids[:, 1:]).backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    train = TrainConfig(out_dir=str(path), optimizer=optimizer)
    checkpoint.save(path, "ckpt_last", model=model, optimizers=optimizers, tokenizer=tokenizer(), model_cfg=model.cfg,
                    train_cfg=train, state=dict(progress={"step": steps, "seqs_seen": 12, "best_val": 2.5,
                                                          "wandb_id": "x"}, data="d" * 64))
    return path


def moments(path):
    saved = torch.load(find(path) / "optim.pt", weights_only=True)
    return {name: entry["state"] for name, entry in saved["optimizers"].items()}


def run(*argv):
    convert.main([str(a) for a in argv])


def ids_of(model, n=REAL):
    return torch.randint(0, n, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


@pytest.mark.parametrize("n", [1, 20, 21, 90])  # within the pad rows, filling them, past them, past two multiples
def test_old_tokens_keep_their_logits_to_the_bit(tmp_path, tied, n):
    """resize adds rows behind the trained ones and changes nothing else."""
    old = make_run(tmp_path / "a", tie_embeddings=tied)
    run("resize", old, tmp_path / "b", "--add", *(f"<|new_{i}|>" for i in range(n)))
    before, _, _ = checkpoint.load_model(old)
    after, words, state = checkpoint.load_model(tmp_path / "b")
    assert after.cfg.vocab_size == words.vocab_size == REAL + n
    assert after.embed.weight.shape[0] % 64 == 0 and 0 <= after.embed.weight.shape[0] - REAL - n < 64
    with torch.inference_mode():
        assert torch.equal(after(ids_of(after))[..., :REAL], before(ids_of(before)))
    assert (after.head is None) is tied
    for name, p in after.named_parameters():
        rows = REAL if name in ("embed.weight", "head.weight") else len(p)
        assert torch.equal(p[:rows], before.get_parameter(name)[:rows])


def test_new_rows_are_the_mean_but_no_twins(tmp_path, tied):
    """A new token starts with an average logit, is nobody's copy, and inherits nothing from a pad row."""
    old = make_run(tmp_path / "a", tie_embeddings=tied)
    run("resize", old, tmp_path / "b", "--add", "<|x|>", "<|y|>")
    run("resize", tmp_path / "b", tmp_path / "c", "--add", "<|z|>")
    model, words, _ = checkpoint.load_model(tmp_path / "c")
    for table in (model.embed.weight, model.head_weight):
        real, new = table[:REAL].detach(), table[REAL:REAL + 3].detach()
        assert (new - real.mean(0)).abs().max() < 0.06 * real.std()
        assert torch.pdist(new).min() > 0.005 * real.std() * 64**0.5
        assert table[REAL:].abs().max() < 1  # the pads' 100 is gone from every row, real or not
    with torch.inference_mode():
        logits = model(ids_of(model))
    mean = logits[..., :REAL].mean(-1, keepdim=True)
    assert (logits[..., REAL:] - mean).abs().max() < 0.1 * logits[..., :REAL].std()
    assert words.encode("a<|z|>b", special=True) == [97, REAL + 2, 98]
    assert words.encode("a<|z|>b") == tokenizer().encode("a<|z|>b")  # still text unless asked for


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_moments_are_carried(tmp_path, tied, optimizer):
    """Optimizer state follows its parameter by name; new rows start without moments; training goes on."""
    old = make_run(tmp_path / "a", tie_embeddings=tied, optimizer=optimizer)
    run("resize", old, tmp_path / "b", "--add", *(f"<|{i}|>" for i in range(30)))
    before, after = moments(old), moments(tmp_path / "b")
    assert before.keys() == after.keys()
    for name, entry in after.items():
        assert entry.keys() == before[name].keys() and entry
        for key, value in entry.items():
            if name in ("embed.weight", "head.weight") and value.ndim == 2:
                assert value.shape[0] == 384 and not value[REAL:].any()
                assert torch.equal(value[:REAL], before[name][key][:REAL]) and value[:REAL].any()
            else:
                assert torch.equal(value, before[name][key])
    model, _, state = checkpoint.load_model(tmp_path / "b")
    optimizers = make_optimizers(model, optimizer=optimizer)
    assert checkpoint.load_optimizers(tmp_path / "b", model, optimizers) == []
    assert state["progress"] == {"step": 3, "seqs_seen": 12, "best_val": None, "wandb_id": None}
    assert state["train"]["out_dir"] == str(tmp_path / "b") and state["data"] == "d" * 64
    assert json.loads((tmp_path / "b" / "config.json").read_text())["vocab_size"] == REAL + 30
    model(ids_of(model), ids_of(model)).backward()
    for opt in optimizers:
        opt.step()


def test_a_run_without_optimizer_state_is_resized_too(tmp_path):
    """Imported runs have none; the result has none either instead of invented zeros."""
    old = make_run(tmp_path / "a")
    model, words, state = checkpoint.load_model(old)
    checkpoint.save(tmp_path / "bare", "ckpt_last", model=model, tokenizer=words, model_cfg=model.cfg,
                    train_cfg=state["train"], state=dict(progress=state["progress"], data=None))
    run("resize", tmp_path / "bare", tmp_path / "b", "--add", "<|x|>")
    assert moments(tmp_path / "b") == {}


def test_untie_clones(tmp_path):
    """untie: same logits, two storages, moments with both, and one can change without the other."""
    old = make_run(tmp_path / "a")
    run("untie", old, tmp_path / "b")
    before, after = checkpoint.load_model(old)[0], checkpoint.load_model(tmp_path / "b")[0]
    assert after.head.weight.data_ptr() != after.embed.weight.data_ptr()
    with torch.inference_mode():
        assert torch.equal(before(ids_of(before)), after(ids_of(after)))
    saved = moments(tmp_path / "b")
    for key, value in saved["embed.weight"].items():
        assert torch.equal(value, saved["head.weight"][key])
        assert value.ndim == 0 or value.data_ptr() != saved["head.weight"][key].data_ptr()
    optimizers = make_optimizers(after)
    checkpoint.load_optimizers(tmp_path / "b", after, optimizers)
    after(ids_of(after), ids_of(after)).backward()
    for opt in optimizers:
        opt.step()
    assert not torch.equal(after.head.weight[:REAL], after.embed.weight[:REAL])


def test_tie_is_the_way_back(tmp_path):
    """tie after untie is the run it came from: weights, moments, one tensor on disk."""
    old = make_run(tmp_path / "a")
    run("untie", old, tmp_path / "b")
    run("tie", tmp_path / "b", tmp_path / "c")
    before, after = checkpoint.load_model(old)[0], checkpoint.load_model(tmp_path / "c")[0]
    assert after.head is None and after.cfg == before.cfg
    assert all(torch.equal(p, after.get_parameter(name)) for name, p in before.named_parameters())
    assert str(moments(old)) == str(moments(tmp_path / "c"))
    sizes = [(find(p) / "model.safetensors").stat().st_size for p in (old, tmp_path / "c")]
    assert sizes[0] == sizes[1]


def test_tie_chooses_only_when_told(tmp_path, capsys):
    """Tables that differ are not tied unless --keep says which one stays; its logits or its vectors then stay."""
    old = make_run(tmp_path / "a", tie_embeddings=False)
    with pytest.raises(SystemExit) as leave:
        run("tie", old, tmp_path / "b")
    error = capsys.readouterr().err
    assert leave.value.code == 2 and "differ" in error and "--keep" in error and not (tmp_path / "b").exists()
    before = checkpoint.load_model(old)[0]
    for keep, kept in (("embed", before.embed.weight), ("head", before.head.weight)):
        run("tie", old, tmp_path / keep, "--keep", keep)
        after = checkpoint.load_model(tmp_path / keep)[0]
        assert torch.equal(after.embed.weight, kept) and after.head is None
        source = moments(old)[f"{keep}.weight"]
        assert all(torch.equal(v, source[k]) for k, v in moments(tmp_path / keep)["embed.weight"].items())
    # only pad rows differ: that is no difference
    run("untie", make_run(tmp_path / "t"), tmp_path / "u")
    model, words, state = checkpoint.load_model(tmp_path / "u")
    with torch.no_grad():
        model.head.weight[REAL:] += 1
    checkpoint.save(tmp_path / "u", "ckpt_last", model=model, tokenizer=words, model_cfg=model.cfg,
                    train_cfg=state["train"], state=dict(progress=state["progress"], data=None))
    run("tie", tmp_path / "u", tmp_path / "v")


@pytest.mark.parametrize("argv, words", [
    (("resize", "{run}", "{new}", "--add", "<|pad|>"), "<|pad|>"),
    (("resize", "{run}", "{new}", "--add", "<|x|>", "<|x|>"), "twice"),
    (("resize", "{run}", "{run}", "--add", "<|x|>"), "exists"),
    (("resize", "{new}", "{new}2", "--add", "<|x|>"), "not found"),
    (("tie", "{run}", "{new}"), "tied already"),
    (("untie", "{untied}", "{new}"), "untied already"),
])
def test_refusals_leave_nothing_behind(tmp_path, capsys, argv, words):
    """What cannot be done is one message on stderr, exit code 2 and no folder."""
    places = {"run": make_run(tmp_path / "run", steps=0), "new": tmp_path / "new", "untied": tmp_path / "untied"}
    if "{untied}" in argv:
        make_run(places["untied"], steps=0, tie_embeddings=False)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as leave:
        run(*(a.format(**places) for a in argv))
    assert leave.value.code == 2 and words in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == there


def test_a_newer_best_can_be_named(tmp_path):
    """A checkpoint folder stands for itself, a run folder for its last one."""
    old = make_run(tmp_path / "a")
    best = make_run(tmp_path / "other", steps=1)
    (best / "ckpt_last").rename(old / "ckpt_best")
    for source, step in ((old, 3), (old / "ckpt_best", 1)):
        run("untie", source, tmp_path / f"from_{step}")
        assert read_state(tmp_path / f"from_{step}")["progress"]["step"] == step
