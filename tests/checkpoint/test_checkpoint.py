"""Checkpoints: exact when loaded, refused by file name when damaged."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from written import FILES, fill, make_tokenizer, same, train, write

from stack.checkpoint import folder as on_disk
from stack.checkpoint import tensors
from stack.checkpoint.folder import read_state
from stack.checkpoint.tensors import load_model, load_optimizers, load_weights
from stack.data.tokenizer import SPECIALS
from stack.optim import make_optimizers
from stack.train_config import TrainConfig


def edit_weights(folder, change):
    """Rewrite model.safetensors and make state.json vouch for it: a file from elsewhere, not a damaged one."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file)
    state = json.loads((folder / "state.json").read_text())
    state["files"]["model.safetensors"] = {"bytes": file.stat().st_size, "sha256": on_disk._sha256(file)}
    del state["checksum"]
    (folder / "state.json").write_text(json.dumps(state))


# --- what is stored -------------------------------------------------------------------------------------------------


def test_round_trip(tiny, tmp_path):
    model = tiny(dropout=0.1)
    write(tmp_path / "run", model, optimizers=make_optimizers(model), state={"progress": {"step": 7}, "data": "f"})
    assert os.listdir(tmp_path / "run") == ["ckpt_last"] and sorted(os.listdir(tmp_path / "run/ckpt_last")) == FILES
    assert len({(tmp_path / "run/ckpt_last" / file).stat().st_mode for file in FILES}) == 1
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere", tmp_path / "elsewhere/ckpt_last", str(tmp_path / "elsewhere")):
        loaded, tokenizer, state = load_model(path)
        assert same(loaded, model) and not loaded.training and loaded.cfg == model.cfg
        assert tokenizer.encode("hé <|end|>") == make_tokenizer().encode("hé <|end|>")
        assert state["progress"]["step"] == 7 and state["data"] == "f" and state == read_state(path)
        assert state["train"] == dataclasses.asdict(TrainConfig()) and state["tokenizer"] == tokenizer.fingerprint
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids), model.eval()(ids))


@pytest.mark.parametrize("saved, wanted", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_dtype_converts_on_the_way(tiny, tmp_path, saved, wanted):
    model = tiny().to(saved)
    write(tmp_path, model)
    loaded, _, _ = load_model(tmp_path, dtype=wanted)
    assert {p.dtype for p in loaded.parameters()} == {wanted}
    assert all(torch.equal(a.to(wanted), b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_only_tensors_and_plain_values(tiny, tmp_path):
    model = tiny()
    state = {"progress": {"step": np.int64(3), "best_val": np.float64(2.5)}, "where": tmp_path,
             "loss": torch.tensor(1.5)}
    write(tmp_path, model, optimizers=make_optimizers(model), state=state)
    stored = read_state(tmp_path)
    assert stored["progress"] == {"step": 3, "best_val": 2.5}
    assert (stored["where"], stored["loss"]) == (str(tmp_path), 1.5)
    torch.load(tmp_path / "ckpt_last/optim.pt", weights_only=True)
    with pytest.raises(TypeError, match="plain values only, no set"):
        write(tmp_path, model, state={"progress": {"step": 4}, "seen": {1, 2}})
    assert read_state(tmp_path)["progress"]["step"] == 3


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "mixed"])
def test_wrapper_prefixes_are_stripped(tiny, tmp_path, prefix):
    model = tiny()
    write(tmp_path, model)
    prefixes = ["", "module.", "_orig_mod.module."] if prefix == "mixed" else [prefix]
    edit_weights(tmp_path / "ckpt_last", lambda tensors: {
        prefixes[i % len(prefixes)] + key: t for i, (key, t) in enumerate(tensors.items())})
    assert same(load_model(tmp_path)[0], model)


def test_only_leading_prefixes_are_stripped(tiny, tmp_path):
    for name in ("inner.module.weight", "module_norm.weight", "blocks.0.module"):
        assert tensors.plain_name(f"module.{name}") == tensors.plain_name(name) == name
    write(tmp_path, tiny())
    edit_weights(tmp_path / "ckpt_last", lambda t: {**t, "module.norm.weight": t["norm.weight"].clone()})
    with pytest.raises(ValueError, match="twice"):
        load_weights(tiny(), tmp_path)


def test_wrapped_models_save_plain_names(tiny, tmp_path):
    model, plain = tiny(), tiny()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        write(tmp_path, torch.compile(torch.nn.parallel.DistributedDataParallel(model)))
    finally:
        torch.distributed.destroy_process_group()
    model.blocks[0] = torch.compile(model.blocks[0])
    write(tmp_path, torch.compile(model), name="ckpt_best", optimizers=make_optimizers(model))
    for name in ("last", "best"):
        assert set(load_file(tmp_path / f"ckpt_{name}/model.safetensors")) == set(plain.state_dict())
    assert set(torch.load(tmp_path / "ckpt_best/optim.pt")["optimizers"]) == {n for n, _ in plain.named_parameters()}
    load_weights(torch.compile(fill(plain, 0)), tmp_path)
    assert same(plain, model)


def test_everything_that_does_not_fit_is_listed(tiny, tmp_path):
    model = tiny()
    write(tmp_path, model)
    edit_weights(tmp_path / "ckpt_last", lambda t: {
        "extra.weight": torch.zeros(1), "norm.weight": torch.zeros(65),
        **{k: v for k, v in t.items() if k not in ("norm.weight", "blocks.1.attn.wq.weight")}})
    before = fill(tiny(), 0.5)
    with pytest.raises(ValueError) as error:
        load_weights(before, tmp_path)
    for part in ("missing: blocks.1.attn.wq.weight", "unexpected: extra.weight",
                 "norm.weight is (65,), the model's (64,)"):
        assert part in str(error.value)
    assert same(before, fill(tiny(), 0.5))  # nothing was copied


# --- the tied table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"],
                                   ["module.head.weight"]])
def test_a_tied_table_is_stored_once_and_read_under_either_name(tiny, tmp_path, names):
    model = tiny()
    write(tmp_path, model)
    assert "head.weight" not in load_file(tmp_path / "ckpt_last/model.safetensors")
    edit_weights(tmp_path / "ckpt_last", lambda t: {**{k: v for k, v in t.items() if k != "embed.weight"},
                                                    **{name: t["embed.weight"].clone() for name in names}})
    loaded, _, _ = load_model(tmp_path)
    assert same(loaded, model) and loaded.head_weight is loaded.embed.weight


def test_tables_that_differ_cannot_be_tied_nor_one_be_split(tiny, tmp_path):
    write(tmp_path / "tied", tiny())
    with pytest.raises(ValueError, match=r"missing: head.weight \(the file's tables are tied"):
        load_weights(tiny(tie_embeddings=False), tmp_path / "tied")
    untied = tiny(tie_embeddings=False)
    write(tmp_path / "untied", untied)
    assert same(load_model(tmp_path / "untied")[0], untied)
    with pytest.raises(ValueError, match="embed.weight and head.weight differ"):
        load_weights(tiny(), tmp_path / "untied")


# --- optimizer state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resumed_steps_are_the_straight_run_s(tiny, tmp_path, optimizer):
    straight, resumed = tiny(), fill(tiny(), 9)
    opts = make_optimizers(straight, optimizer=optimizer)
    train(straight, opts, range(3))
    write(tmp_path, straight, optimizers=opts)
    train(straight, opts, range(3, 6))
    again = make_optimizers(resumed, optimizer=optimizer, adamw_lr=1.0)
    load_weights(resumed, tmp_path)
    assert load_optimizers(tmp_path, resumed, again) == []
    assert again[-1].param_groups[0]["lr"] == 1.0  # hyper-parameters are the new run's
    for new, old in zip(again, opts, strict=True):
        for group, wanted in zip(new.param_groups, old.param_groups, strict=True):
            group["lr"] = wanted["lr"]
    train(resumed, again, range(3, 6))
    assert same(straight, resumed)


@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_fused_and_plain_resume_each_other(tiny, tmp_path, first, second):
    straight, resumed = tiny(), tiny()
    opt = torch.optim.AdamW(straight.parameters(), lr=1e-3, fused=first)
    train(straight, [opt], range(3))
    write(tmp_path, straight, optimizers=[opt])
    again = torch.optim.AdamW(reversed(list(resumed.parameters())), lr=1e-3, fused=second)  # order does not matter
    load_weights(resumed, tmp_path)
    load_optimizers(tmp_path, resumed, [again])
    train(straight, [opt], range(3, 5))
    train(resumed, [again], range(3, 5))
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_state_goes_by_name_and_what_does_not_fit_is_listed(tiny, tmp_path):
    model = tiny()
    opts = make_optimizers(model)
    train(model, opts, range(2))
    write(tmp_path, model, optimizers=opts)
    untied = tiny(tie_embeddings=False, vocab_size=400)
    with pytest.raises(ValueError) as error:
        load_optimizers(tmp_path, untied, make_optimizers(untied))
    assert "head.weight is not there" in str(error.value) and "embed.weight is of another shape" in str(error.value)
    again = make_optimizers(untied)
    assert load_optimizers(tmp_path, untied, again, strict=False) == ["embed.weight", "head.weight"]
    name = "blocks.1.mlp.w_up.weight"
    new, old = (muon.state[m.get_parameter(name)]["momentum_buffer"]
                for muon, m in ((again[0], untied), (opts[0], model)))
    assert torch.equal(new, old) and untied.embed.weight not in again[1].state
    train(untied, again, range(2))  # fresh and restored state side by side
    with pytest.raises(ValueError, match="is Muon's, the run uses AdamW"):
        load_optimizers(tmp_path, model, make_optimizers(model, optimizer="adamw"))


def test_optimizers_that_never_stepped(tiny, tmp_path):
    model = tiny()
    write(tmp_path, model, optimizers=make_optimizers(model))
    assert load_optimizers(tmp_path, model, make_optimizers(model)) == []


def test_loss_scaler_is_kept_and_may_be_absent(tiny, tmp_path):
    model = tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 2})
    write(tmp_path / "with", model, optimizers=(), scaler=scaler)
    write(tmp_path / "without", model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    new = torch.amp.GradScaler("cpu")
    load_optimizers(tmp_path / "with", model, [], new)
    assert (new.get_scale(), new.state_dict()["_growth_tracker"]) == (1024.0, 2)
    for run, to in (("without", new), ("with", torch.amp.GradScaler("cpu", enabled=False)), ("with", None)):
        load_optimizers(tmp_path / run, model, [], to)
    assert new.get_scale() == 1024.0


# --- damage ---------------------------------------------------------------------------------------------------------


def damage(folder, file, how):
    path = folder / file
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    elif how == "cut":
        data = data[:len(data) // 2]
    path.unlink()
    if how != "remove":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named(tiny, tmp_path, file, how):
    model = tiny()
    write(tmp_path, model, optimizers=make_optimizers(model))
    damage(tmp_path / "ckpt_last", file, how)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_model(tmp_path)
        load_optimizers(tmp_path, model, make_optimizers(model))
    assert str(tmp_path / "ckpt_last" / file) in str(error.value)


def test_an_edited_state_is_refused_unless_meant(tiny, tmp_path):
    write(tmp_path, tiny(), step=1234)
    file = tmp_path / "ckpt_last/state.json"
    text = file.read_text()
    file.write_text(text.replace('"step": 1234', '"step": 1235'))
    with pytest.raises(ValueError, match="damaged or was edited.*\n.*checksum"):
        read_state(tmp_path)
    state = json.loads(text.replace('"step": 1234', '"step": 1235'))
    del state["checksum"]
    file.write_text(json.dumps(state))
    assert read_state(tmp_path)["progress"]["step"] == 1235


def test_another_tokenizer_in_the_folder_is_refused(tiny, tmp_path):
    write(tmp_path, tiny())
    make_tokenizer((*SPECIALS, "<|new|>")).save(tmp_path / "ckpt_last")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert "tokenizer.json" in str(error.value) and "state.json" in str(error.value)


def test_unknown_versions_and_settings_are_refused(tiny, tmp_path):
    write(tmp_path, tiny())
    file = tmp_path / "ckpt_last/state.json"
    state = json.loads(file.read_text())
    del state["checksum"]  # an edit on purpose
    for change, says in (({"format": 99}, "format 99"), ({"model": {**state["model"], "n_experts": 8}}, "n_experts")):
        file.write_text(json.dumps({**state, **change}))
        for read in (load_model, read_state):
            with pytest.raises(ValueError, match=says):
                read(tmp_path)


@pytest.mark.parametrize("key", ["model", "train", "tokenizer", "files"])
def test_a_state_that_lacks_something_is_damaged(tiny, tmp_path, key):
    write(tmp_path, tiny())
    file = tmp_path / "ckpt_last/state.json"
    state = json.loads(file.read_text())
    del state["checksum"], state[key]
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=f"state.json is damaged.*{key}"):
        read_state(tmp_path)
