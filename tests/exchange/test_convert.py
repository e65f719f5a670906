"""Models leave and come back unchanged: Hugging Face folders of each family, nanoGPT's checkpoints."""

import json
import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from conftest import ROOT, tiny_config
from exchange_models import LEARNED, refused, run, save, sharp, texts, trained_words
from safetensors.torch import load_file, save_file

import prepare
import sample
import train
from model import GPT, ModelConfig, generate
from stack.checkpoint import tensors as checkpoint
from stack.data.shards import write_meta, write_shard
from stack.data.tokenizer import Tokenizer
from stack.exchange import formulas, hf, hf_files, hf_tokenizers
from stack.log import read_log
from stack.train_config import TrainConfig

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

OURS = {  # what our switches make of a model elsewhere
    "Qwen3ForCausalLM": dict(),
    "LlamaForCausalLM": dict(qk_norm=False),
    "SmolLM3ForCausalLM": dict(qk_norm=False, nope_every=2),
    "GPT2LMHeadModel": LEARNED,
}


@pytest.fixture(scope="module")
def words():
    return trained_words()


# ---------------------------------------------------------------------------------------------------------------------
# Out


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "n_kv_heads": 4}, {"embed_constant": 3.0}],
                         ids=["tied", "untied", "constant"])
@pytest.mark.parametrize("architecture", OURS)
def test_export_is_the_same_model_elsewhere(tmp_path, words, architecture, changes):
    """transformers loads the folder without a missing or unknown tensor: same logits, same greedy tokens, no pad rows;
    import gives the run back to the bit."""
    model = sharp(words, **{**OURS[architecture], **changes})
    save(tmp_path / "run", model, words)
    run("export", tmp_path / "run", tmp_path / "hf")
    other, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(other).__name__ == architecture
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1  # who may read one may read all
    n, tied = words.vocab_size, model.cfg.tie_embeddings
    assert n % 64 and other.config.vocab_size == n == len(other.get_input_embeddings().weight)
    assert other.config.tie_word_embeddings is tied and ("lm_head.weight" in load_file(
        tmp_path / "hf" / "model.safetensors")) is not tied
    ids = torch.randint(0, n, (2, 100))
    with torch.inference_mode():
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4
        stated, head, problems = formulas.hidden(json.loads((tmp_path / "hf" / "config.json").read_text()), load_file(
            tmp_path / "hf" / "model.safetensors"), ids)
        assert (stated @ head.t() - other(ids).logits).abs().max() < 1e-4 and problems == []
    lengths = []
    for text in ("def main(argv):", "class Xenu:", "import"):
        prompt = [words.boundary_id, *words.encode(text)]
        ours = generate(model, [prompt], max_new_tokens=100, stop_ids=[words.boundary_id])[0]
        theirs = other.generate(torch.tensor([prompt]), max_new_tokens=100)[0, len(prompt):].tolist()
        assert theirs[:len(ours)] == ours and theirs[len(ours):] in ([], [words.boundary_id])  # both stop there
        lengths.append(len(set(ours)) > 10 and len(ours))
    assert max(lengths) > 50

    run("import", tmp_path / "hf", tmp_path / "back")
    back, back_words, _ = checkpoint.load_model(tmp_path / "back")
    assert back.cfg == replace(model.cfg, embed_constant=0.0) and back_words.fingerprint == words.fingerprint
    for name, p in model.named_parameters():
        rows = n if name in ("embed.weight", "head.weight") else len(p)
        assert torch.equal(p[:rows], back.get_parameter(name)[:rows]), name


def test_every_setting_is_known():
    """A setting of ours that is not listed would be refused as a stranger's, by export, gguf, resize, tie and untie."""
    assert {field.name for field in fields(ModelConfig)} == hf.KNOWN


@pytest.mark.parametrize("changes", [
    dict(qk_norm=False, bias=True),  # Llama with attention_bias and mlp_bias
    dict(qk_norm=False, head_dim=8), dict(head_dim=24, n_heads=3, n_kv_heads=1),  # heads that do not add up to d_model
    dict(qk_norm=False, nope_every=3, n_layers=4, head_dim=32, rope_theta=5e5, norm_eps=1e-3),
    {**LEARNED, "bias": False},  # nanoGPT's way; elsewhere the biases are zeros
], ids=str)
def test_switches_survive(tmp_path, words, changes):
    """Every setting that changes the function arrives in the folder."""
    model = sharp(words, **changes)
    hf.save_folder(model, words, tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, words.vocab_size, (2, 60))
    with torch.inference_mode():
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4
        assert (model(ids) - hf.load_folder(tmp_path)[0](ids)).abs().max() < 1e-4


@pytest.mark.parametrize("changes, named", [
    (dict(nope_every=2), "nope_every"), (dict(logit_softcap=30.0), "logit_softcap"), (dict(mlp="gelu"), "mlp"),
    (dict(embed_scale=True), "embed_scale"), (dict(norm="layernorm"), "norm='rmsnorm' (here 'layernorm')"),
    (dict(bias=True), "bias"),
    ({**LEARNED, "n_kv_heads": 2}, "n_kv_heads"), ({**LEARNED, "qk_norm": True}, "qk_norm"),
    (dict(qk_norm=False, n_heads=3, n_kv_heads=1), "d_model"),
], ids=str)
def test_what_cannot_be_said_is_refused_by_name(tmp_path, words, capsys, changes, named):
    """No architecture is bent to fit: the switch in the way is named, and no folder is left."""
    save(tmp_path / "run", GPT(tiny_config(vocab_size=words.vocab_size, **changes)), words)
    for command in ("export", "gguf"):
        assert named in refused(capsys, command, tmp_path / "run", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command, new", [("export", "mine"), ("gguf", "mine.gguf")])
def test_what_lies_where_the_work_is_done_stays(tmp_path, words, capsys, command, new):
    """NEW is written as NEW.new first: someone's own file or folder of that name is neither taken in nor removed."""
    save(tmp_path / "run", sharp(words), words)
    theirs = tmp_path / f"{new}.new"
    if command == "export":
        theirs.mkdir()
    thesis = theirs / "thesis" if command == "export" else theirs
    thesis.write_text("years of work")
    assert str(theirs) in refused(capsys, command, tmp_path / "run", tmp_path / new)
    assert thesis.read_text() == "years of work" and not (tmp_path / new).exists()


def test_model_card_has_the_runs_facts(tmp_path, words, capsys):
    """README.md of an export tells what was trained on what, from the run's own files, and invents nothing."""
    model = sharp(words)
    (tmp_path / "books").mkdir()
    shard = write_shard(tmp_path / "books" / "train_0.bin", [words.boundary_id] * 9, vocab_size=words.vocab_size,
                        fingerprint=words.fingerprint)
    meta = write_meta(tmp_path / "books", sources=[{"source": "hf:org/web:sample"}, {"source": "me/private/novels"}],
                      fingerprint=words.fingerprint, vocab_size=words.vocab_size, boundary_id=words.boundary_id,
                      splits={"train": [{**shard, "documents": 9, "bytes": 0}]})
    knobs = TrainConfig(data_dir=str(tmp_path / "books"), out_dir="me/run", seq_len=64, batch_tokens=640, seed=5,
                        muon_lr=6e-3, adamw_lr=3e-3)
    save(tmp_path / "run", model, words, train=knobs, step=1200, data=meta["data_fingerprint"], tokens=543_210)
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (
        {"step": 1000, "val_loss": 2.5, "val_bpb": 1.25}, {"step": 1200, "loss": 2.0},
        {"step": 1200, "val_loss": 2.25, "val_bpb": 1.125}, {"step": 1200, "val_loss": None, "val_bpb": None},
        {"step": 1300, "val_loss": 1.0, "val_bpb": 0.5})))
    with open(tmp_path / "run" / "log.jsonl", "a") as log:
        log.write('{"step": 1400, "val_lo')  # a run that was killed
    run("export", tmp_path / "run", tmp_path / "card", "--license", "cc0-1.0")
    card = (tmp_path / "card" / "README.md").read_text()
    n = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "card").parameters())
    for fact in (f"{n:,}", "1,200 steps of 640 tokens, 543,210 learned in all", "books: hf:org/web:sample, novels",
                 meta["data_fingerprint"][:16], "trained from scratch", '"beta2": 0.95', "2.2500 nats", "1.1250 bits",
                 "Qwen3ForCausalLM", words.fingerprint[:16], "0.006 (Muon"):
        assert fact in card, fact
    assert "0.5000" not in card  # a step this checkpoint has not seen
    assert "me/" not in card and str(tmp_path) not in card  # nor what a machine's folders are called
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "cc0-1.0" and head["datasets"] == ["org/web"]
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1).replace('"card"', repr(str(tmp_path / "card")))
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.startswith("<|endoftext|>Once upon a time")
    run("import", tmp_path / "card", tmp_path / "back")
    run("export", tmp_path / "back", tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "model converted from card with" in card and "Training" not in card.replace("training data", "")
    assert yaml.safe_load(card.split("---")[1])["license"] == "unknown"


def test_model_card_names_the_optimizers_that_there_are(tmp_path, words, monkeypatch):
    """A fork's own optimizer stands on the card with its rate, and no other."""
    class Lion(torch.optim.SGD):
        pass

    def make_optimizers(model, *, optimizer, lion_lr):
        assert optimizer == "lion"
        made = Lion(model.parameters(), lr=lion_lr)
        made.param_groups[0]["peak_lr"] = lion_lr
        return [made]
    monkeypatch.setattr("stack.exchange.card.make_optimizers", make_optimizers)
    save(tmp_path / "run", sharp(words), words, train=vars(TrainConfig(optimizer="lion")) | {"lion_lr": 3e-4}, step=9,
         data="d" * 64)
    run("export", tmp_path / "run", tmp_path / "hf")
    said = (tmp_path / "hf" / "README.md").read_text()
    assert f"{9 * 10 * 2048:,} learned" in said  # of a checkpoint from before they were counted: those seen
    assert "| Learning rate | 0.0003 (Lion), " in said and "AdamW" not in said and "Muon" not in said


# ---------------------------------------------------------------------------------------------------------------------
# In

SHAPE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64)
THEIRS = {
    "gpt2": (transformers.GPT2Config, dict(n_embd=48, n_layer=3, n_head=4, n_positions=64)),
    "gpt2_untied": (transformers.GPT2Config, dict(n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=100,
                                                  layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    "llama": (transformers.LlamaConfig, SHAPE),
    "llama_tied": (transformers.LlamaConfig, dict(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-3,
                                                  rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
    "llama_biased": (transformers.LlamaConfig, dict(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=20)),
    "qwen3": (transformers.Qwen3Config, dict(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "mistral": (transformers.MistralConfig, dict(**SHAPE, sliding_window=None)),
    "smollm3": (transformers.SmolLM3Config, dict(**SHAPE, no_rope_layer_interval=2)),
}


def their_folder(path, kind, words, *, rows=None, dtype=torch.float32, shard="5GB", **changes):
    """A randomly initialised model of another family with our tokenizer beside it, as save_pretrained writes it."""
    torch.manual_seed(0)
    cls, settings = THEIRS[kind]
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(cls(**{**settings, **ends, **changes}, vocab_size=rows
                                                              or words.vocab_size)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text(json.dumps(hf_tokenizers.tokenizer_to_hf(words)))
    return model


def edit(path, **changes):
    """Change keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("kind", THEIRS)
def test_import_computes_the_same(tmp_path, words, kind):
    """Logits of a model of each family equal transformers' within 1e-4 in fp32."""
    other = their_folder(tmp_path / "hf", kind, words)
    run("import", tmp_path / "hf", tmp_path / "run")
    model, _, _ = checkpoint.load_model(tmp_path / "run")
    ids = torch.randint(0, words.vocab_size, (2, 64))
    with torch.inference_mode():
        ours, theirs = model(ids), other(ids).logits
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-4 and theirs.std() > 0.1


def test_import_takes_shards_half_precision_and_more_rows_than_ids(tmp_path, words):
    """Several files with an index, bf16 tensors, and a table whose last rows no token uses."""
    other = their_folder(tmp_path / "hf", "qwen3", words, rows=1024, dtype=torch.bfloat16, shard="60KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    run("import", tmp_path / "hf", tmp_path / "run")
    model, _, _ = checkpoint.load_model(tmp_path / "run")
    n, table = words.vocab_size, other.get_input_embeddings().weight
    assert model.cfg.vocab_size == n and model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight[:n], table[:n].float())
    ids = torch.randint(0, words.vocab_size, (2, 64))
    with torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(ids).logits
        assert (model(ids) - theirs[..., :n]).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["embedding only", "head only", "both"])
@pytest.mark.parametrize("kind", ["gpt2", "llama_tied"])
def test_a_tied_table_is_found_under_either_name(tmp_path, words, kind, layout):
    """A file may hold the tied table once, under either name, or twice; twice and different is refused."""
    their_folder(tmp_path, kind, words)
    tensors = load_file(tmp_path / "model.safetensors")
    embed = next(name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight")))
    want = tensors[embed].clone()
    if layout != "embedding only":
        tensors["lm_head.weight"] = want.clone()
    if layout == "head only":
        del tensors[embed]
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = hf.load_folder(tmp_path)
    assert torch.equal(model.embed.weight[:words.vocab_size], want) and model.head is None
    if layout == "both":
        tensors["lm_head.weight"][3, 3] += 1
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="differ"):
            hf.load_folder(tmp_path)


def test_gpt2_with_and_without_prefix_and_old_buffers(tmp_path, words):
    """The mask buffers that older versions saved are left aside, and names may lack their first word."""
    other = their_folder(tmp_path, "gpt2", words)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    for i in range(3):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = hf.load_folder(tmp_path)
    ids = torch.randint(0, words.vocab_size, (1, 64))
    with torch.inference_mode():
        assert (model.eval()(ids) - other(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("kind, changes, named", [
    ("mistral", dict(sliding_window=32), "sliding_window is 32"),
    ("mistral", dict(sliding_window=None), "sliding_window is 4096"),  # left out: that is its default
    ("qwen3", dict(use_sliding_window=True), "use_sliding_window"),
    ("qwen3", dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types"),
    ("qwen3", dict(attention_bias=True), "attention_bias"),
    ("llama", dict(attention_bias=True), "attention_bias is True, mlp_bias False"),
    ("llama", dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ("llama", dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "'linear'"),
    ("llama", dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}), "'llama3'"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    ("llama", dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
    ("llama", dict(quantization_config={"bits": 4}), "quantization_config"),
    ("llama", dict(model_type="gemma3"), "model_type is 'gemma3'"),
    ("llama", dict(num_hidden_layers=None), "num_hidden_layers is missing"),
    ("llama", dict(num_key_value_heads=3), "n_kv_heads"),
    ("smollm3", dict(no_rope_layers=[0, 1, 1]), "no_rope_layers"),
    ("gpt2", dict(activation_function="gelu"), "activation_function is 'gelu'"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("gpt2", dict(n_embd="48"), "n_embd is '48'; it must be of type int"),
    ("llama", dict(hidden_size=32.5), "hidden_size is 32.5; it must be of type int"),
    ("llama", dict(tie_word_embeddings=1), "tie_word_embeddings is 1; it must be of type bool"),
    ("smollm3", dict(num_hidden_layers=[2]), "num_hidden_layers is [2]; it must be of type int"),
])
def test_settings_without_a_place_here_are_refused_by_name(tmp_path, words, capsys, kind, changes, named):
    """Nothing that changes the function is dropped in silence."""
    their_folder(tmp_path / "hf", kind, words)
    edit(tmp_path / "hf", **changes)
    assert named in refused(capsys, "import", tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "smollm3"])
def test_what_a_config_leaves_unsaid_means_what_transformers_means(kind):
    """A config.json with the sizes only is read with the same defaults as transformers'."""
    cls, settings = THEIRS[kind]
    sizes = {key: value for key, value in settings.items() if key not in ("no_rope_layer_interval", "head_dim")}
    whole = json.loads(cls(**sizes).to_json_string(use_diff=False))
    assert whole["model_type"] == kind and len(whole) > 2 * len(sizes)
    assert hf.settings_from_hf({"model_type": kind, **sizes}, 100) == hf.settings_from_hf(whole, 100)


def test_tensors_that_do_not_fit_are_named(tmp_path, words):
    """A missing tensor, one too many, a wrong shape, a lost file and a pickle each say so."""
    their_folder(tmp_path, "llama", words)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    for change, named in (
            ({name: None}, "layers.1.self_attn.q_proj.weight is missing"),
            ({name: torch.zeros(48, 40)}, r"q_proj.weight is \(48, 40\), the settings need \(48, 48\)"),
            ({"model.layers.1.self_attn.q_proj.bias": torch.zeros(48)}, r"q_proj.bias \(48,\) has no place"),
            ({"lm_head.weight": None}, "lm_head.weight is missing"),
            ({"model.embed_tokens.weight": torch.zeros(500, 48)}, r"embed_tokens.weight is \(500, 48\)")):
        save_file({k: v for k, v in (whole | change).items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=named):
            hf.load_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="pickle"):
        hf.load_folder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: "model-00001-of-00001.safetensors", "ghost": "b.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="b.safetensors"):
        hf.load_folder(tmp_path)
    save_file(whole, tmp_path / "b.safetensors")
    save_file({name: whole[name]}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="ghost"):
        hf.load_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff\xfe{}", b'{"model', b"cut"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
                                  "model.safetensors.index.json"])
def test_a_damaged_file_is_named(tmp_path, words, capsys, name, content):
    """A download that was cut short, or an error page in its place: one message, which names the file."""
    their_folder(tmp_path / "hf", "llama", words)
    whole = tmp_path / "hf" / "model.safetensors"
    if content == b"cut":
        content = (tmp_path / "hf" / name).read_bytes()[:-9] if (tmp_path / "hf" / name).exists() else b"{"
    if "index" in name:
        whole.unlink()
    (tmp_path / "hf" / name).write_bytes(content)
    assert f"{tmp_path / 'hf' / name} is damaged" in refused(capsys, "import", tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_a_run_already(tmp_path, words, capsys):
    """Imported, or behind hf:, as a run folder or a checkpoint."""
    save(tmp_path / "run", sharp(words), words)
    for source in (tmp_path / "run", tmp_path / "run" / "ckpt_last", f"hf:{tmp_path / 'run'}"):
        assert "is a run already" in refused(capsys, "import", source, tmp_path / "new")
    with pytest.raises(ValueError, match="run already.*\n.*without hf:"):
        hf_tokenizers.tokenizer_from_hf(f"hf:{tmp_path / 'run' / 'ckpt_last'}")
    for state in ('{"_data_files": []}', "[]", "{"):  # of a data set that was saved, or nobody's
        (tmp_path / "state.json").write_text(state)
        assert hf_files.local(f"hf:{tmp_path}") == tmp_path


def test_hugging_faces_file_is_sent_where_it_is_read(tmp_path, words):
    """By the name that works, and only that: a folder with nothing but this file."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(hf_tokenizers.tokenizer_to_hf(words)))
    with pytest.raises(ValueError, match=f"Hugging Face's .*\n  .* --tokenizer hf:{tmp_path}$"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert hf_tokenizers.tokenizer_from_hf(f"hf:{tmp_path}").fingerprint == words.fingerprint
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    with pytest.raises(ValueError, match=f"\n  Rename it tokenizer.json; then .* --tokenizer hf:{tmp_path}$"):
        Tokenizer.load(tmp_path / "other.json")
    words.save(tmp_path)
    with pytest.raises(ValueError, match="without hf:"):
        hf_tokenizers.tokenizer_from_hf(f"hf:{tmp_path}")


def test_a_tokenizer_can_be_named(tmp_path, words):
    """--tokenizer takes the place of the folder's own, if the table has its ids."""
    their_folder(tmp_path / "hf", "llama", words)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    words.save(tmp_path / "tokenizer.json")
    run("import", tmp_path / "hf", tmp_path / "run", "--tokenizer", tmp_path)
    assert checkpoint.load_model(tmp_path / "run")[1].fingerprint == words.fingerprint


def test_a_folder_from_elsewhere_is_finetuned_and_leaves_again(tmp_path, words, monkeypatch, capsys):
    """prepare.py --tokenizer hf:FOLDER, train.py --init_from=hf:FOLDER, sample.py, export: the weights that training
    starts from are the folder's, and transformers continues a prompt as sample.py does."""
    def command(module, *argv):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
        module.main()
        return capsys.readouterr().out

    nfc = Tokenizer(words.pattern.replace("{1,3}", ""), words.ranks, words.special_ids, nfc=True)  # as Qwen's
    folder = tmp_path / "qwen3"
    their_folder(folder, "qwen3", nfc, rows=896, dtype=torch.bfloat16, max_position_embeddings=128)
    (tmp_path / "text.txt").write_text("\n".join(texts(8)))
    prepare.main([str(a) for a in (tmp_path / "text.txt", "--tokenizer", f"hf:{folder}", "--val_fraction", 0.1, "--out",
                                   tmp_path / "data")])
    train_it = [f"--init_from=hf:{folder}", f"--data_dir={tmp_path / 'data'}", "--seq_len=64", "--micro_batch_size=2",
                "--batch_tokens=256", "--max_seq_len=16", "--warmup_steps=0", "--sample_interval=0", "--compile=false",
                "--device=cpu", "--dtype=float32"]
    command(train, *train_it, f"--out_dir={tmp_path / 'still'}", "--max_steps=1", "--muon_lr=1e-12", "--adamw_lr=1e-12")
    still, before = checkpoint.load_model(tmp_path / "still")[0], hf.load_folder(folder)[0]
    for name, p in before.named_parameters():
        torch.testing.assert_close(still.get_parameter(name), p, rtol=0, atol=1e-8)
    told = command(train, *train_it, f"--out_dir={tmp_path / 'run'}", "--max_steps=20", "--adamw_lr=1e-2")
    assert f"the architecture is that of hf:{folder}" in told and "max_seq_len 16 -> 128" in told
    losses = [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]
    ids = command(sample, tmp_path / "run", "--prompt", "de\u0301f main(", "--ids", "--temperature", 0,
                  "--max_new_tokens", 20, "--device", "cpu", "--dtype", "float32")
    run("export", tmp_path / "run", tmp_path / "tuned")
    assert "finetuned from qwen3 with" in (tmp_path / "tuned" / "README.md").read_text()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    prompt = words(words.bos_token + "de\u0301f main(", return_tensors="pt")
    theirs = other.generate(**prompt, max_new_tokens=20)[0, prompt["input_ids"].shape[1]:]
    assert theirs.tolist() == [int(i) for i in ids.split()] and len(theirs) == 20
    for source, named in ((f"hf:{tmp_path / 'nowhere'}", "hf download"), (folder, "convert.py import"),
                          (f"hf:{tmp_path}", "config.json not found")):
        with pytest.raises(SystemExit) as leave:
            command(train, *train_it, f"--init_from={source}")
        assert leave.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("changes, name, named", [
    ({}, "blocks.1.mlp.w_up.weight", "blocks.1.mlp.w_up.weight has 1 values"),
    (LEARNED, "blocks.0.attn.wk.bias", "blocks.0.attn.wk.bias")])
def test_damaged_weights_do_not_leave(tmp_path, words, capsys, value, changes, name, named):
    """NaN or infinity in any tensor: the tensor is named and nothing is written."""
    model = sharp(words, **changes)
    with torch.no_grad():
        model.get_parameter(name).flatten()[7] = value
    save(tmp_path / "run", model, words)
    for command, out in (("export", "out"), ("gguf", "out.gguf")):
        assert named in refused(capsys, command, tmp_path / "run", tmp_path / out)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("place", ["convert.py", "docs/exchange.md", "README.md"])
def test_documented_commands_are_commands(place, tmp_path, monkeypatch, capsys):
    """Every convert.py line that is written down is one the parser takes; here it only misses its run."""
    lines = re.findall(r"^ *python convert\.py (.*?)(?:  .*|#.*)?$", (ROOT / place).read_text(), re.MULTILINE)
    assert lines
    monkeypatch.chdir(tmp_path)
    for line in lines:
        message = refused(capsys, *shlex.split(line.replace("[", "").replace("]", "")))
        assert "not found" in message, line


# ---------------------------------------------------------------------------------------------------------------------
# nanoGPT


class NanoGPT(torch.nn.Module):
    """The forward pass of a nanoGPT checkpoint, from its tensors; it has had two kinds of GELU."""

    def __init__(self, tensors, n_head, gelu):
        super().__init__()
        self.t, self.n_head, self.gelu = tensors, n_head, gelu

    def forward(self, ids):
        t, T = self.t, ids.shape[1]

        def linear(x, name):
            return F.linear(x, t[name + ".weight"], t.get(name + ".bias"))

        def norm(x, name):
            return F.layer_norm(x, x.shape[-1:], t[name + ".weight"], t.get(name + ".bias"), 1e-5)

        x = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][:T]
        for i in range(2):
            h = f"transformer.h.{i}."
            q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                       for y in linear(norm(x, h + "ln_1"), h + "attn.c_attn").chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(y.transpose(1, 2).flatten(2), h + "attn.c_proj")
            x = x + linear(F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate=self.gelu), h + "mlp.c_proj")
        return linear(norm(x, "transformer.ln_f"), "lm_head")


def nanogpt_checkpoint(path, rows, *, bias, prefix):
    C, block, g = 32, 24, torch.Generator().manual_seed(0)
    shapes = {"transformer.wte": (rows, C), "transformer.wpe": (block, C), "transformer.ln_f": (C,)}
    for i in range(2):
        h = f"transformer.h.{i}."
        shapes |= {h + "ln_1": (C,), h + "ln_2": (C,), h + "attn.c_attn": (3 * C, C), h + "attn.c_proj": (C, C),
                   h + "mlp.c_fc": (4 * C, C), h + "mlp.c_proj": (C, 4 * C)}
    tensors = {name + ".weight": 0.2 * torch.randn(shape, generator=g) for name, shape in shapes.items()}
    if bias:
        tensors |= {name + ".bias": torch.randn(shape[0], generator=g) for name, shape in shapes.items()
                    if not name.endswith(("wte", "wpe"))}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    buffers = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, block, block).tril() for i in range(2)}  # before SDPA
    torch.save({"model": {prefix + name: t for name, t in (tensors | buffers).items()}, "iter_num": 5, "config": {},
                "optimizer": {}, "best_val_loss": torch.tensor(3.0), "model_args": dict(
                    n_layer=2, n_head=4, n_embd=C, block_size=block, bias=bias, vocab_size=rows, dropout=0.1)}, path)
    return tensors


@pytest.mark.parametrize("bias, prefix", [(True, "_orig_mod."), (False, "")])
def test_nanogpt_checkpoints_become_runs(tmp_path, words, capsys, bias, prefix):
    """ckpt.pt, compiled or not: the same function up to the GELU that nanoGPT changed, which is said."""
    tensors = nanogpt_checkpoint(tmp_path / "ckpt.pt", 832, bias=bias, prefix=prefix)
    words.save(tmp_path / "tokenizer.json")
    run("import", tmp_path / "ckpt.pt", tmp_path / "run", "--tokenizer", tmp_path)
    assert "GELU" in capsys.readouterr().err
    model, _, _ = checkpoint.load_model(tmp_path / "run")
    assert (model.cfg.pos, model.cfg.bias, model.cfg.dropout, model.cfg.max_seq_len) == ("learned", bias, 0.1, 24)
    ids = torch.randint(0, words.vocab_size, (2, 24))
    with torch.inference_mode():
        ours = model(ids)
        for gelu, most in (("tanh", 1e-4), ("none", 2e-2)):
            theirs = NanoGPT(tensors, 4, gelu)(ids)[..., :words.vocab_size]
            assert (ours - theirs).abs().max() < most
    assert "no tokenizer" in refused(capsys, "import", tmp_path / "ckpt.pt", tmp_path / "other")


def test_a_foreign_or_wicked_checkpoint_is_not_run(tmp_path, words, capsys):
    """Loading unpickles nothing but tensors and plain values."""
    class Wicked:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "pwned",))

    for content in ({"model": {}, "model_args": Wicked()}, {"weights": 1}, [1, 2]):
        torch.save(content, tmp_path / "ckpt.pt")
        assert "nanoGPT" in refused(capsys, "import", tmp_path / "ckpt.pt", tmp_path / "run")
    assert not (tmp_path / "pwned").exists()


