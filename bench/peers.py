"""The same model from other hands, to compare with: in plain PyTorch, transformers, litgpt, llama.cpp.

The packages are used the way their documentation does, with random weights in our shape, and are imported only where a
row needs them.
"""

import functools
import importlib.util
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from bench.measure import reset_peak
from model import GPT, ModelConfig, generate
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.exchange import gguf, hf
from stack.quantize import quantize_int8
from stack.twins import fast_decoding


def installed(*packages: str) -> list[str]:
    """Those of the packages that are."""
    return [package for package in packages if importlib.util.find_spec(package)]


class PlainGPT(nn.Module):
    """Ours said with PyTorch's own modules, nothing fused or split by hand, and full logits, as nanoGPT would.

    Parameters have our names without the attn and mlp between, so that tests can give both the same weights."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        C, D, q, kv = cfg.d_model, cfg.head_dim, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        shapes = {"wq": (C, q), "wk": (C, kv), "wv": (C, kv), "wo": (q, C), "w_up": (C, cfg.d_ff),
                  "w_down": (cfg.d_ff, C)} | ({"w_gate": (C, cfg.d_ff)} if cfg.mlp == "swiglu" else {})
        norm = functools.partial(nn.RMSNorm, C, cfg.norm_eps) if cfg.norm == "rmsnorm" else functools.partial(
            nn.LayerNorm, C, cfg.norm_eps, bias=cfg.bias)
        self.embed = nn.Embedding(cfg.padded_vocab_size, C)
        self.pos_embed = nn.Embedding(cfg.max_seq_len, C) if cfg.pos == "learned" else None
        self.blocks, self.norm = nn.ModuleList(nn.ModuleDict({
            "norm1": norm(), "norm2": norm(),
            **{name: nn.RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity() for name in ("q_norm", "k_norm")},
            **{name: nn.Linear(*shape, bias=cfg.bias) for name, shape in shapes.items()},
        }) for _ in range(cfg.n_layers)), norm()
        frequencies = cfg.rope_theta ** (-torch.arange(0, D, 2) / D)
        angles = torch.outer(torch.arange(cfg.max_seq_len), frequencies).repeat(1, 2)  # (S, D)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)  # (2, S, D)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def rotated(self, x):
        """x (B, H, T, D) by position, where positions are not in the stream already."""
        if self.pos_embed is not None:
            return x
        (a, b), (cos, sin) = x.chunk(2, dim=-1), self.rope[:, :x.shape[2]]
        return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)

    def forward(self, ids, targets, docs=None):
        """ids, targets, docs (B, T), docs or None -> loss ()."""
        x, D = self.embed(ids), self.rope.shape[2]  # (B, T, C)
        if self.pos_embed is not None:
            x = x + self.pos_embed.weight[:ids.shape[1]]
        mask = None if docs is None else (docs[:, :, None] == docs[:, None]).tril()[:, None]  # (B, 1, T, T)
        for block in self.blocks:
            h = block["norm1"](x)
            q, k, v = (block[w](h).unflatten(-1, (-1, D)).transpose(1, 2) for w in ("wq", "wk", "wv"))  # (B, ., T, D)
            q, k = self.rotated(block["q_norm"](q)), self.rotated(block["k_norm"](k))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                               enable_gqa=q.shape[1] != k.shape[1])
            x = x + block["wo"](y.transpose(1, 2).flatten(2))
            h = block["norm2"](x)
            up = block["w_up"](h)
            h = F.silu(block["w_gate"](h)) * up if "w_gate" in block else F.gelu(up, approximate="tanh")
            x = x + block["w_down"](h)
        logits = F.linear(self.norm(x), self.embed.weight)  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def gpt2_shape(cfg: ModelConfig) -> ModelConfig:
    """GPT-2's architecture in this width, depth and vocabulary."""
    return replace(cfg, pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, nope_every=0,
                   n_kv_heads=cfg.n_heads, d_ff=4 * cfg.d_model)


def transformers_model(cfg: ModelConfig):
    from transformers import AutoConfig, AutoModelForCausalLM
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf.settings_to_hf(cfg)))


def trained(peer: str, cfg: ModelConfig, device):
    """(model, loss_of(x, y, docs)) of plain, GPT-2, transformers or litgpt; only plain takes docs (B, T)."""
    if peer in ("plain", "GPT-2"):
        loss_of = model = PlainGPT(gpt2_shape(cfg) if peer == "GPT-2" else cfg)
    elif peer == "transformers":
        model = transformers_model(cfg)

        def loss_of(x, y, docs):
            return model(input_ids=x, labels=x, use_cache=False).loss  # shifts the labels itself
    else:
        import litgpt
        from litgpt.utils import chunked_cross_entropy
        model = litgpt.GPT(litgpt.Config(
            block_size=cfg.max_seq_len, vocab_size=cfg.vocab_size, padded_vocab_size=cfg.padded_vocab_size,
            n_layer=cfg.n_layers, n_head=cfg.n_heads, n_query_groups=cfg.n_kv_heads, n_embd=cfg.d_model,
            head_size=cfg.head_dim, intermediate_size=cfg.d_ff, rotary_percentage=1.0, parallel_residual=False,
            bias=cfg.bias, norm_class_name="RMSNorm", norm_eps=cfg.norm_eps, mlp_class_name="LLaMAMLP",
            norm_qk=cfg.qk_norm, rope_base=int(cfg.rope_theta)))
        model.apply(model._init_weights)
        model.lm_head.weight = model.transformer.wte.weight

        def loss_of(x, y, docs):
            return chunked_cross_entropy(model(x), y, chunk_size=0)
    return model.to(device), loss_of


def decoder(who: str, precision: str, cfg: ModelConfig, device, compile: bool):
    """(decode(prompts, n_new) -> the first row's new ids, greedily; bytes of weights read per token; reset_peak's
    function, from before the weights).  ours decodes as sample.py does; llama_cpp takes one prompt at a time."""
    path = write_gguf(cfg, Path(tempfile.mkdtemp()), precision) if who == "llama_cpp" else None
    peak = reset_peak(device)
    if who == "llama_cpp":
        import llama_cpp
        threads = torch.get_num_threads()
        other = llama_cpp.Llama(str(path), n_ctx=cfg.max_seq_len, n_batch=512, n_threads=threads, verbose=False,
                                n_threads_batch=threads, n_gpu_layers=-1 if device.type == "cuda" else 0)

        def decode(prompts, n_new):
            other.reset()  # else it keeps what it has read of an equal prompt
            return list(itertools.islice(other.generate(prompts[0], temp=0.0, repeat_penalty=1.0), n_new))
        return decode, path.stat().st_size, peak
    model = (GPT if who == "ours" else transformers_model)(cfg)
    model.to(device, torch.float32 if precision == "fp32" else torch.bfloat16).eval()
    if precision == "int8":
        quantize_int8(model)
    if who == "ours":
        if compile:
            fast_decoding(model)

        def decode(prompts, n_new):
            return generate(model, prompts, max_new_tokens=n_new)[0]
    else:
        from transformers import GenerationConfig

        def decode(prompts, n_new):
            ids, greedy = torch.tensor(prompts, device=device), GenerationConfig(max_new_tokens=n_new, pad_token_id=0)
            rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            return rows[0, -n_new:].tolist()
    return decode, sum(t.nbytes for t in (*model.parameters(), *model.buffers())), peak  # int8 weights are buffers


def made_tokenizer(vocab_size: int) -> Tokenizer:
    """A vocabulary of bytes, pairs and triples, behind them the special tokens."""
    tokens = itertools.chain(*(itertools.product(range(256), repeat=n) for n in (1, 2, 3)))
    n = max(vocab_size - len(SPECIALS), 0)
    return Tokenizer(PATTERN, {bytes(token): i for i, token in enumerate(itertools.islice(tokens, n))},
                     {name: n + i for i, name in enumerate(SPECIALS)})


def write_gguf(cfg: ModelConfig, folder: Path, kind: str) -> Path:
    """A random model as llama.cpp reads it."""
    gguf.write(folder / "model.gguf", GPT(cfg), made_tokenizer(cfg.vocab_size), kind, folder)
    return folder / "model.gguf"
