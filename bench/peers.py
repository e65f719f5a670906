"""The same model from other hands, for the benches to compare with: in plain PyTorch, transformers, litgpt, llama.cpp.

The plain model is ours said with PyTorch's own modules and full logits, as nanoGPT would; its parameters have our
names without the attn and mlp between, so that tests can give both the same weights.  The packages are used the way
their documentation does, with random weights in our shape, and are imported only where a row needs them.
"""

import functools
import importlib.util
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, ModelConfig
from stack.checkpoint import tensors as checkpoint
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.exchange import hf

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def installed(*packages: str) -> list[str]:
    """Those of the packages that are."""
    return [package for package in packages if importlib.util.find_spec(package)]


class PlainBlock(nn.Module):
    """The block in PyTorch's own modules, nothing fused or split by hand.  x (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        C, q, kv, self.head_dim = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim, cfg.head_dim
        linear = functools.partial(nn.Linear, bias=cfg.bias)
        self.norm1, self.norm2 = plain_norm(cfg), plain_norm(cfg)
        self.wq, self.wk, self.wv, self.wo = linear(C, q), linear(C, kv), linear(C, kv), linear(q, C)
        self.q_norm, self.k_norm = (nn.RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
                                    for _ in range(2))
        self.w_gate = linear(C, cfg.d_ff) if cfg.mlp == "swiglu" else None
        self.w_up, self.w_down = linear(C, cfg.d_ff), linear(cfg.d_ff, C)

    def forward(self, x, rope, mask):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = plain_rope(q, *rope), plain_rope(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        h = F.gelu(self.w_up(h), approximate="tanh") if self.w_gate is None else F.silu(self.w_gate(h)) * self.w_up(h)
        return x + self.w_down(h)


def plain_norm(cfg: ModelConfig):
    return nn.RMSNorm(cfg.d_model, cfg.norm_eps) if cfg.norm == "rmsnorm" else nn.LayerNorm(
        cfg.d_model, cfg.norm_eps, bias=cfg.bias)


def plain_rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class PlainGPT(nn.Module):
    """The model, with the loss of full logits.  ids, targets, docs (B, T), docs or None -> ()."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.embed = nn.Embedding(cfg.padded_vocab_size, cfg.d_model)
        self.pos_embed = nn.Embedding(cfg.max_seq_len, cfg.d_model) if cfg.pos == "learned" else None
        self.blocks, self.norm = nn.ModuleList(PlainBlock(cfg) for _ in range(cfg.n_layers)), plain_norm(cfg)
        frequencies = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2) / cfg.head_dim)
        angles = torch.outer(torch.arange(cfg.max_seq_len), frequencies).repeat(1, 2)  # (S, D)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets, docs=None):
        T, x, rope = ids.shape[1], self.embed(ids), None
        mask = None if docs is None else (docs[:, :, None] == docs[:, None]).tril()[:, None]  # (B, 1, T, T)
        if self.pos_embed is not None:
            x = x + self.pos_embed.weight[:T]
        else:
            rope = self.cos[:T], self.sin[:T]
        for block in self.blocks:
            x = block(x, rope, mask)
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
        loss_of = model = PlainGPT(gpt2_shape(cfg) if peer == "GPT-2" else cfg).to(device)
    elif peer == "transformers":
        model = transformers_model(cfg).to(device)

        def loss_of(x, y, docs):
            return model(input_ids=x, labels=x, use_cache=False).loss  # shifts the labels itself
    else:
        from litgpt import GPT as LitGPT
        from litgpt import Config
        from litgpt.utils import chunked_cross_entropy
        model = LitGPT(Config(
            block_size=cfg.max_seq_len, vocab_size=cfg.vocab_size, padded_vocab_size=cfg.padded_vocab_size,
            n_layer=cfg.n_layers, n_head=cfg.n_heads, n_query_groups=cfg.n_kv_heads, n_embd=cfg.d_model,
            head_size=cfg.head_dim, intermediate_size=cfg.d_ff, rotary_percentage=1.0, parallel_residual=False,
            bias=cfg.bias, norm_class_name="RMSNorm", norm_eps=cfg.norm_eps, mlp_class_name="LLaMAMLP",
            norm_qk=cfg.qk_norm, rope_base=int(cfg.rope_theta))).to(device)
        model.apply(model._init_weights)
        model.lm_head.weight = model.transformer.wte.weight

        def loss_of(x, y, docs):
            return chunked_cross_entropy(model(x), y, chunk_size=0)
    return model, loss_of


def decoder(peer: str, precision: str, cfg: ModelConfig, device, folder: Path):
    """(decode(prompts, n_new) -> the first row's new ids, greedily; bytes of weights read per token).

    llama_cpp takes one prompt at a time, and a file, which is made in folder.
    """
    if peer == "llama_cpp":
        import llama_cpp
        path, threads = write_gguf(cfg, folder, precision), torch.get_num_threads()
        other = llama_cpp.Llama(str(path), n_ctx=cfg.max_seq_len, n_batch=512, n_threads=threads, verbose=False,
                                n_threads_batch=threads, n_gpu_layers=-1 if device.type == "cuda" else 0)

        def decode(prompts, n_new):
            other.reset()  # else it keeps what it has read of an equal prompt
            return list(itertools.islice(other.generate(prompts[0], temp=0.0, repeat_penalty=1.0), n_new))
        return decode, path.stat().st_size
    from transformers import GenerationConfig
    model = transformers_model(cfg).to(device, PRECISIONS[precision]).eval()

    def decode(prompts, n_new):
        ids, greedy = torch.tensor(prompts, device=device), GenerationConfig(max_new_tokens=n_new, pad_token_id=0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)[0, -n_new:].tolist()
    return decode, sum(p.nbytes for p in model.parameters())


def made_tokenizer(vocab_size: int) -> Tokenizer:
    """A vocabulary of bytes, pairs and triples, behind them the special tokens."""
    tokens = itertools.chain(*(itertools.product(range(256), repeat=n) for n in (1, 2, 3)))
    n = max(vocab_size - len(SPECIALS), 0)
    return Tokenizer(PATTERN, {bytes(token): i for i, token in enumerate(itertools.islice(tokens, n))},
                     {name: n + i for i, name in enumerate(SPECIALS)})


def write_gguf(cfg: ModelConfig, folder: Path, kind: str) -> Path:
    """A random model as llama.cpp reads it, through convert.py."""
    checkpoint.save(folder / "run", "ckpt_last", model=GPT(cfg), tokenizer=made_tokenizer(cfg.vocab_size),
                    model_cfg=cfg, state={"progress": {"step": 0}, "data": None})
    subprocess.run([sys.executable, Path(__file__).parent.with_name("convert.py"), "gguf", folder / "run",
                    folder / "model.gguf", "--type", kind], check=True, capture_output=True)
    return folder / "model.gguf"
