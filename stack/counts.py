"""Parameters, FLOPs and cache bytes of a model: counted on what GPT(cfg) builds, so a changed model.py counts right.

It is built on the meta device, where a tensor has a shape and nothing else.  What cannot be seen there goes by class
and name.  An nn.Embedding is looked up, every other parameter multiplies.  Attention is a module of class Attention,
whose wo reads heads * head_dim values.  Where it carries an int `window` > 0, a query sees so many keys, its own among
them, else as many as GPT.mask shows the last one: a layer that looks back less far sets this attribute, and FLOPs, MFU
and account.py follow.  A token goes once through whatever the model holds: what a loop repeats, or a router leaves out,
is not seen.
"""

import contextlib
import re
from unittest import mock

import torch
from torch import nn

from model import GPT, Attention, KVCache, ModelConfig

PARTS = {"embed": "embedding", "pos_embed": "position", "attn": "attention", "mlp": "mlp", "norm": "norm",
         "head": "head"}


def build(cfg: ModelConfig | GPT) -> GPT:
    """The model of a config, without memory or values; one that is built already is returned as it is."""
    if isinstance(cfg, GPT):
        return cfg
    with undrawn():
        try:
            with torch.device("meta"):
                return GPT(cfg)
        except (RuntimeError, NotImplementedError):  # a constructor that looks at values
            return GPT(cfg).to("meta")


@contextlib.contextmanager
def undrawn():
    """A model made in here is as its constructors make it, but for random weights: those are what lay in memory, for
    whoever fills them at once.  No random number is missing afterwards."""
    def as_it_is(tensor, *_, **__):  # on meta normal_ would also import the compiler, two seconds
        return tensor
    with (torch.random.fork_rng(devices=[]), mock.patch.object(torch.Tensor, "normal_", as_it_is),
          mock.patch.object(torch.Tensor, "uniform_", as_it_is)):
        yield


def tables(model: GPT) -> set:
    """Weights whose rows are looked up: those of every nn.Embedding, wherever it stands."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def place(name: str) -> str:
    """Where a parameter stands in each block: blocks.3.attn.wq.weight -> attn.wq, blocks.3.gain -> gain."""
    return re.sub(r"^blocks\.\d+\.|\.(weight|bias)$", "", name)


def num_params(cfg: ModelConfig | GPT) -> dict[str, int]:
    """Parameters by component: every tensor the model holds, the tied table once, pad rows included.

    What is none of PARTS counts under its own name, and so does a table within one of them (attn.values).  "per_block"
    is the mean over the blocks, rounded down.
    """
    model = build(cfg)
    looked_up, counts = tables(model), dict.fromkeys(PARTS.values(), 0)
    for name, p in model.named_parameters():
        where = place(name)
        first = where if p in looked_up else "norm" if "norm" in name.rpartition(".")[0] else where.split(".")[0]
        part = PARTS.get(first, first)
        counts[part] = counts.get(part, 0) + p.numel()
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    return {**counts, "total": sum(counts.values()), "per_block": in_blocks // len(model.blocks)}


def components(counts: dict[str, int]) -> dict[str, int]:
    """Those of num_params that this model has, without the sums."""
    return {part: n for part, n in counts.items() if n and part not in ("total", "per_block")}


def lookup_params(cfg: ModelConfig | GPT) -> int:
    """Parameters that are only looked up; a table that is also the head multiplies."""
    model = build(cfg)
    return sum(table.numel() for table in tables(model) - {model.head_weight})


def multiplied_params(cfg: ModelConfig | GPT) -> int:
    """Parameters that a token is multiplied by, each as often as the model holds it: shared layers each time."""
    model = build(cfg)
    return sum(p.numel() for _, module in model.named_modules(remove_duplicate=False)
               for p in module.parameters(recurse=False)
               if not isinstance(module, nn.Embedding) or model.head is None and p is model.head_weight)


def attention_layers(cfg: ModelConfig | GPT) -> list[tuple[int, int]]:
    """(heads * head_dim, window or 0 for all) of each layer that attends, a shared one each time."""
    model, seen = build(cfg), 0
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a mask of tensors that have no values here
        last = model.mask(torch.tensor([model.cfg.max_seq_len - 1]), model.cfg.max_seq_len, None)
        seen = int((last if last.dtype == torch.bool else last > -torch.inf)[0, 0].sum()) % model.cfg.max_seq_len
    return [(module.wo.in_features, getattr(module, "window", seen))
            for _, module in model.named_modules(remove_duplicate=False) if isinstance(module, Attention)]


def mean_keys(seq_len: int, mean_doc_len: float | None = None, window: int = 0) -> float:
    """Keys a query attends to, averaged over the sequence, the diagonal counted half (so that causal is T/2).

    Position t sees min(age, t, window) tokens, its own among them.  With document masks, lengths geometric with mean m,
    the age in its document is geometric too: the mean of min(age, n) is m (1 - q^n), q = 1 - 1/m, and summed over t
    that is m (1 - q m (1 - q^T) / T) without a window.
    """
    w = min(window or seq_len, seq_len)  # from position w on all see the same number
    if mean_doc_len is None:
        return w - w * (w - 1) / 2 / seq_len - 0.5
    m, q = mean_doc_len, 1 - 1 / mean_doc_len
    return m * (1 - (q * m * (1 - q ** w) + (seq_len - w) * q ** w) / seq_len) - 0.5


def flops_per_token(cfg: ModelConfig | GPT, seq_len: int, mean_doc_len: float | None = None) -> dict[str, int]:
    """Training FLOPs (forward + backward) per token in three conventions; with mean_doc_len also "doc_masked".

    "6n": 6 per parameter that multiplies (a lookup table multiplies only where it is also the head).  "causal": plus
    the scores and weighted sums a causal model needs on average over positions, 12*H*D for each key a query sees:
    6*L*T*H*D without windows.  "palm": plus 12*L*T*H*D, all T*T of them (PaLM, arXiv 2204.02311, appendix B; nanoGPT),
    or T times the window.  "doc_masked": as "causal", under document masks.
    """
    model = build(cfg)
    multiplied = 6 * multiplied_params(model)
    keys = {"6n": lambda window: 0, "causal": lambda window: mean_keys(seq_len, None, window),
            "palm": lambda window: min(window or seq_len, seq_len)}
    if mean_doc_len is not None:
        keys["doc_masked"] = lambda window: mean_keys(seq_len, mean_doc_len, window)
    return {name: multiplied + round(sum(12 * width * seen(window) for width, window in attention_layers(model)))
            for name, seen in keys.items()}


def kv_cache_bytes_per_token(cfg: ModelConfig, bytes_per_value: int = 2) -> int:
    """What KVCache holds for one token of one sequence: one key and one value per layer and KV head."""
    cache = KVCache(cfg, 1, 1, "meta", torch.uint8)
    return bytes_per_value * (cache.k.numel() + cache.v.numel())


def describe_groups(optimizers, model: GPT) -> list[str]:
    """Which parameters each optimizer moves, a line for each kind and weight decay: "Muon: 30 matrices, 983,040
    parameters: attn.wq".  It is said where there is no decay.

    Lookup tables, of an nn.Embedding wherever it stands, are a kind of their own.  What no optimizer moves comes last.
    """
    names, looked_up, groups = {p: name for name, p in model.named_parameters()}, tables(model), {}
    owners = {p: (opt, group.get("weight_decay", 0)) for opt in optimizers for group in opt.param_groups
              for p in group["params"]}
    for p in dict.fromkeys([*owners, *names]):
        kind = "table" if p in looked_up else "vector" if p.ndim < 2 else "matrix"
        groups.setdefault((*owners.get(p, (None, 0)), kind), []).append(p)
    plural = {"table": "tables", "vector": "vectors", "matrix": "matrices"}
    return [f"{type(opt).__name__ if opt else 'no optimizer'}: {len(some)} {kind if len(some) == 1 else plural[kind]}, "
            f"{sum(p.numel() for p in some):,} parameters{', no decay' if opt and not decay else ''}: "
            + ", ".join(dict.fromkeys(place(names[p]) for p in some)) for (opt, decay, kind), some in groups.items()]
