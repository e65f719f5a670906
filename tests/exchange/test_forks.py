"""A model.py that somebody has changed: what leaves is that model, or nothing does and the change is named."""

import dataclasses
import types
from typing import Literal

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import tiny_config
from exchange_models import LEARNED, refused, run, save, sharp, trained_words

import model as original
from stack.checkpoint import folder
from stack.checkpoint import tensors as checkpoint
from stack.exchange import formulas, hf

pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")


@pytest.fixture(scope="module")
def words():
    return trained_words()


def parallel(monkeypatch):
    class Block(original.Block):
        def forward(self, x, rope, mask, cache=None):
            return x + self.attn(self.norm1(x), rope, mask, cache) + self.mlp(self.norm2(x))
    monkeypatch.setattr(original, "Block", Block)


def scalars(monkeypatch):
    class Block(original.Block):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x, rope, mask, cache=None):
            x = x + self.gain * self.attn(self.norm1(x), rope, mask, cache)
            return x + self.mlp(self.norm2(x))
    monkeypatch.setattr(original, "Block", Block)


def value_embeddings(monkeypatch):
    init = original.GPT.__init__

    def longer(self, cfg):
        init(self, cfg)
        for block in self.blocks[1::2]:
            block.attn.ve = nn.Embedding(cfg.padded_vocab_size, cfg.n_kv_heads * cfg.head_dim)
    monkeypatch.setattr(original.GPT, "__init__", longer)


def window(size):
    """Of `size` tokens in every second block."""
    def change(monkeypatch):
        init = original.GPT.__init__

        class Block(original.Block):
            seen = None

            def forward(self, x, rope, mask, cache=None):
                if self.seen and mask is None:
                    far = torch.arange(x.shape[1])
                    mask = ((far[:, None] - far >= 0) & (far[:, None] - far < self.seen))[None, None]
                return super().forward(x, rope, mask, cache)

        def numbered(self, cfg):
            init(self, cfg)
            for block in self.blocks[1::2]:
                block.seen = size
        monkeypatch.setattr(original, "Block", Block)
        monkeypatch.setattr(original.GPT, "__init__", numbered)
    return change


def scale(monkeypatch):
    def attention(*args, **settings):
        return F.scaled_dot_product_attention(*args, **settings, scale=0.5)
    monkeypatch.setattr(original, "F", types.SimpleNamespace(
        **vars(F) | {"scaled_dot_product_attention": attention}))


def buffer(persistent):
    def change(monkeypatch):
        class Attention(original.Attention):
            def __init__(self, cfg):
                super().__init__(cfg)
                self.register_buffer("bias", torch.ones(cfg.max_seq_len, cfg.max_seq_len).tril(), persistent=persistent)
        monkeypatch.setattr(original, "Attention", Attention)
    return change


def exact_gelu(monkeypatch):
    monkeypatch.setattr(original, "F", types.SimpleNamespace(**vars(F) | {"gelu": lambda x, approximate: F.gelu(x)}))


def no_norm(monkeypatch):
    class Block(original.Block):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.norm2 = nn.Identity()
    monkeypatch.setattr(original, "Block", Block)


def narrow(monkeypatch):
    class MLP(original.MLP):
        def __init__(self, cfg):
            super().__init__(dataclasses.replace(cfg, d_ff=cfg.d_ff // 2))
    monkeypatch.setattr(original, "MLP", MLP)


def one_bias(monkeypatch):
    class Attention(original.Attention):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.wq = nn.Linear(cfg.d_model, cfg.n_heads * cfg.head_dim, bias=True)
    monkeypatch.setattr(original, "Attention", Attention)


def scaled_logits(monkeypatch):
    forward = original.GPT.forward
    monkeypatch.setattr(original.GPT, "forward", lambda self, ids, *more, **options: (
        0.5 * forward(self, ids, *more, **options)))


def masked(monkeypatch):
    plain = original.GPT.mask
    monkeypatch.setattr(original.GPT, "mask", lambda self, where, size, docs: (
        plain(self, where, size, docs) & (torch.arange(size) > where[:, None] - 50)))


def left_nothing(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("change, settings, named", [
    (parallel, {}, "no Qwen3ForCausalLM: on 160 random tokens, from token 0 on"),
    (parallel, dict(qk_norm=False), "no LlamaForCausalLM"), (parallel, LEARNED, "no GPT2LMHeadModel"),
    (parallel, dict(qk_norm=False, nope_every=4), "no SmolLM3ForCausalLM"),
    (window(100), {}, "from token 100 on"), (window(33), LEARNED, "from token 3"), (window(159), {}, "token 159 on"),
    (masked, {}, "from token 50 on"), (scaled_logits, {}, "GPT.forward gives other logits"),
    (scale, {}, "logits differ"), (scale, LEARNED, "logits differ"), (exact_gelu, LEARNED, "logits differ"),
    (no_norm, {}, "model.layers.0.post_attention_layernorm.weight is missing"),
    (narrow, {}, "model.layers.0.mlp.gate_proj.weight is (48, 64), the settings need (96, 64)"),
    (one_bias, {}, "model.layers.0.self_attn.q_proj.bias (64,) has no place here"),
], ids=lambda value: getattr(value, "__name__", None))
def test_a_model_that_computes_something_else_does_not_leave(tmp_path, words, monkeypatch, capsys, change, settings,
                                                             named):
    """The same names, other arithmetic: one sentence that says what differs, exit code 2, nothing left behind."""
    change(monkeypatch)
    save(tmp_path / "run", sharp(words, **settings), words)
    for command in ("export", "gguf"):
        message = refused(capsys, command, tmp_path / "run", tmp_path / "out")
        assert named in message and "model.py was changed" in message
        assert left_nothing(tmp_path)
    with pytest.raises(ValueError, match="model.py was changed"):  # what eval.py --tasks hands to lm_eval
        hf.save_folder(checkpoint.load_model(tmp_path / "run")[0], words, tmp_path / "folder")


COMMANDS = {"export": [], "gguf": [], "resize": ["--add", "<|x|>"], "untie": []}


@pytest.mark.parametrize("change, named", [
    (scalars, "the parameter blocks.0.gain"), (value_embeddings, "the parameter blocks.1.attn.ve.weight")])
def test_parameters_that_nobody_knows_are_named(tmp_path, words, monkeypatch, capsys, change, named):
    """Whatever takes a model apart by name refuses one with names it was never told; a copy is none of these."""
    change(monkeypatch)
    save(tmp_path / "run", sharp(words), words)
    for command, flags in COMMANDS.items():
        assert named in refused(capsys, command, tmp_path / "run", tmp_path / "out", *flags)
        assert left_nothing(tmp_path)
    run("gather", tmp_path / "run", tmp_path / "again")
    one, two = (checkpoint.load_model(tmp_path / name)[0].state_dict() for name in ("run", "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ValueError, match=named):  # the way in
        hf.from_theirs({}, sharp(words).cfg)
    save(tmp_path / "untied", sharp(words, tie_embeddings=False), words)
    assert named in refused(capsys, "tie", tmp_path / "untied", tmp_path / "out")


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_are_named(tmp_path, words, monkeypatch, capsys, persistent):
    """nanoGPT's habit, saved with the model or not."""
    buffer(persistent)(monkeypatch)
    save(tmp_path / "run", sharp(words), words)
    for command, flags in COMMANDS.items():
        assert "the buffer blocks.0.attn.bias" in refused(capsys, command, tmp_path / "run", tmp_path / "out", *flags)
        assert left_nothing(tmp_path)


@pytest.fixture
def forked(monkeypatch):
    """ModelConfig with one setting more, which every second block obeys, and one choice more."""
    @dataclasses.dataclass
    class Forked(original.ModelConfig):
        mlp: Literal["swiglu", "gelu", "relu2"] = "swiglu"
        window: int = 0

    Forked.__annotations__ = original.ModelConfig.__annotations__ | Forked.__annotations__  # its problems() looks there

    class MLP(original.MLP):
        def forward(self, x):
            return self.w_down(F.relu(self.w_up(x)).square()) if self.w_gate is None else super().forward(x)
    for module in (original, folder, checkpoint):
        monkeypatch.setattr(module, "ModelConfig", Forked)
    monkeypatch.setattr(original, "MLP", MLP)
    return lambda **changes: Forked(**dataclasses.asdict(tiny_config(vocab_size=777)) | changes)


def test_a_new_setting_is_named_where_it_is_used(tmp_path, words, capsys, forked):
    """Away from its default a setting that nobody knows is in the way of everything; at its default of nothing."""
    save(tmp_path / "run", original.GPT(forked(window=4096)), words)
    for command, flags in COMMANDS.items():
        assert "the setting window=4096" in refused(capsys, command, tmp_path / "run", tmp_path / "out", *flags)
        assert left_nothing(tmp_path)
    save(tmp_path / "plain", original.GPT(forked()), words)
    for command, flags in COMMANDS.items():
        run(command, tmp_path / "plain", tmp_path / command, *flags)


def test_a_new_choice_is_named(tmp_path, words, capsys, forked):
    save(tmp_path / "run", original.GPT(forked(mlp="relu2")), words)
    for command in ("export", "gguf"):
        assert "mlp='swiglu' (here 'relu2')" in refused(capsys, command, tmp_path / "run", tmp_path / "out")
        assert left_nothing(tmp_path)


def test_an_export_is_compared_as_it_was_written(tmp_path, words, monkeypatch, capsys):
    """The folder is read back: one wrong number on its way to the disk and it is removed."""
    import safetensors.torch as safetensors

    def wrong(tensors, *args, **settings):
        tensors = {name: t.clone() for name, t in tensors.items()}
        tensors["model.layers.1.mlp.down_proj.weight"][3, 3] += 1
        return write(tensors, *args, **settings)
    save(tmp_path / "run", sharp(words), words)
    write = safetensors.save_file
    monkeypatch.setattr(safetensors, "save_file", wrong)
    assert "logits differ" in refused(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert left_nothing(tmp_path)


@pytest.mark.parametrize("settings", [{}, dict(qk_norm=False), LEARNED], ids=["qwen3", "llama", "gpt2"])
def test_a_window_is_seen_up_to_2047_tokens(words, monkeypatch, settings):
    """An untrained model's logits hardly depend on one token of 2,048, and only the last token's show it at all."""
    window(2047)(monkeypatch)
    torch.manual_seed(0)
    model = original.GPT(tiny_config(vocab_size=words.vocab_size, max_seq_len=2048, **settings))
    with pytest.raises(ValueError, match="on 2048 random tokens, from token 2047 on"):
        formulas.compare(model, hf.settings_to_hf(model.cfg), hf.to_theirs(model))


@pytest.mark.parametrize("settings", [{}, dict(qk_norm=False, bias=True), LEARNED], ids=str)
def test_rounding_is_no_difference(words, settings):
    """Far apart logits, deep and narrow, one huge activation, all zeros: the right model is not refused."""
    model = sharp(words, **{**settings, "n_layers": 12})
    for _ in range(3):
        formulas.compare(model, hf.settings_to_hf(model.cfg), hf.to_theirs(model))
        with torch.no_grad():
            model.blocks[0].mlp.w_down.weight[5] *= 1e3
    with torch.no_grad():
        model.embed.weight.zero_()
    formulas.compare(model, hf.settings_to_hf(model.cfg), hf.to_theirs(model))


@pytest.mark.parametrize("change", [parallel, window(33), masked, scaled_logits],
                         ids=["parallel", "window", "mask", "forward"])
@pytest.mark.parametrize("settings", [{}, LEARNED], ids=["qwen3", "gpt2"])
def test_a_model_from_elsewhere_does_not_become_another(tmp_path, words, monkeypatch, capsys, change, settings):
    """The way in is compared as well as the way out: of the same tensors a changed model.py makes another model."""
    save(tmp_path / "run", sharp(words, **settings), words)
    run("export", tmp_path / "run", tmp_path / "folder")
    change(monkeypatch)
    message = refused(capsys, "import", tmp_path / "folder", tmp_path / "in")
    assert "model.py was changed" in message and not (tmp_path / "in").exists()


def test_layers_that_are_one_leave_as_several(tmp_path, words, monkeypatch):
    """Elsewhere nothing is shared: each layer has its copy, and the whole is the same model."""
    init = original.GPT.__init__

    def shared(self, cfg):
        init(self, cfg)
        self.blocks = nn.ModuleList([self.blocks[0]] * len(self.blocks))
    monkeypatch.setattr(original.GPT, "__init__", shared)
    save(tmp_path / "run", sharp(words), words)
    run("export", tmp_path / "run", tmp_path / "folder")
    monkeypatch.setattr(original.GPT, "__init__", init)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        got = hf.load_folder(tmp_path / "folder")[0].eval()(ids)
        monkeypatch.setattr(original.GPT, "__init__", shared)
        torch.testing.assert_close(got, checkpoint.load_model(tmp_path / "run")[0](ids))
