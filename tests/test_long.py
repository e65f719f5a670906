"""A finetuned run may have a longer context and another theta than its source: as asked, kept, resumed, exported."""

import json

import pytest
import runs
import torch
import transformers
from exchange_models import run as convert
from gguf import GGUFReader
from safetensors.torch import load_file

import train
from model import ModelConfig
from stack.checkpoint.tensors import load_model
from stack.config import load
from stack.resume import lengthened
from stack.train_config import TrainConfig

LONGER = ["--max_seq_len=128", "--seq_len=128", "--batch_tokens=512", "--rope_theta=60000"]


@pytest.fixture(scope="module")
def short(data, tmp_path_factory):
    """A run of 32 tokens of context, with a theta that is nobody's default."""
    return runs.run(data, tmp_path_factory.mktemp("short") / "run", max_steps=4, rope_theta=5e4)


def tune(source, data, out, *flags):
    """`train.py --init_from=source`, with few settings, as typed."""
    train.run(*load((ModelConfig, TrainConfig), [
        f"--init_from={source}", f"--data_dir={data}", f"--out_dir={out}", "--seq_len=32", "--micro_batch_size=2",
        "--batch_tokens=256", "--max_steps=4", "--warmup_steps=1", "--eval_interval=0", "--save_interval=2", "--keep=2",
        "--sample_interval=0", "--compile=false", "--device=cpu", *flags]))
    return out


def context(out):
    config = json.loads((out / "config.json").read_text())
    return config["max_seq_len"], config["rope_theta"]


def test_a_longer_context(short, data, tmp_path, capsys):
    """What was typed counts, the rest stays the source's; the run resumes exactly, and exports say what it says."""
    out = tune(short, data, tmp_path / "long", *LONGER)
    assert "max_seq_len 32 -> 128, rope_theta 50000.0 -> 60000.0" in capsys.readouterr().out
    assert context(out) == (128, 6e4) and load_model(out)[0].cfg.rope_theta == 6e4
    stopped = tune(short, data, tmp_path / "stopped", *LONGER)
    train.run(*load((ModelConfig, TrainConfig), [str(stopped), "--init_from=resume:ckpt_step_0000002"]))
    runs.assert_same_checkpoint(out, stopped)
    convert("export", out, tmp_path / "hf")
    said = json.loads((tmp_path / "hf/config.json").read_text())
    assert said["max_position_embeddings"] == 128 and said["rope_parameters"]["rope_theta"] == 6e4
    ids = torch.randint(0, 320, (1, 128))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, load_model(out)[0].eval()(ids)[..., :320], rtol=0, atol=1e-4)
    convert("gguf", out, tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert fields["qwen3.context_length"] == 128 and fields["qwen3.rope.freq_base"] == 6e4


def test_what_is_not_asked_for_stays(short, data, tmp_path):
    """No default replaces a source's theta or context, and no shorter context either; theta alone may change."""
    assert context(tune(short, data, tmp_path / "plain")) == (32, 5e4)
    assert context(tune(short, data, tmp_path / "shorter", "--max_seq_len=16")) == (32, 5e4)
    assert context(tune(short, data, tmp_path / "theta", "--rope_theta=10000")) == (32, 1e4)
    with pytest.raises(ValueError, match="--max_seq_len"):
        tune(short, data, tmp_path / "too_long", "--seq_len=64")
    before, after = (load_file(out / "ckpt_last/model.safetensors") for out in (short, tune(
        short, data, tmp_path / "still", *LONGER, "--muon_lr=1e-12", "--adamw_lr=1e-12")))
    assert all(torch.allclose(before[key], after[key], rtol=0, atol=1e-8) for key in before)


def test_learned_positions_have_an_end(data, tmp_path):
    """A table of positions has no row for what it never saw: refused by name, and left alone where nothing is asked."""
    source = runs.run(data, tmp_path / "learned", max_steps=1, pos="learned", qk_norm=False)
    with pytest.raises(ValueError, match=r"max_seq_len \(128\) is more than the 32 positions .*--max_seq_len=32"):
        tune(source, data, tmp_path / "out", *LONGER)
    assert context(tune(source, data, tmp_path / "out")) == (32, 1e4)
    theirs = ModelConfig(pos="learned", max_seq_len=32, qk_norm=False)
    assert lengthened(theirs, ModelConfig(max_seq_len=2048), "x") == theirs  # a default was not asked for
