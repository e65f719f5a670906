"""What computes the same as model.py, faster: attached to a built model, compared with it, put aside where it differs.

    compile_blocks(model, device)    before training: compiled blocks and loss head; on a CPU kernels.cpp, on a GPU
                                     FlexAttention under document masks
    check(model, x, y, docs, ...)    on the first real batch: every such twin against what model.py says
    compile_head(model)              the loss head alone, to evaluate
    fast_decoding(model)             for generate: decode.cpp on a CPU, else one compiled program for all tokens

model.py is the truth.  Whoever changes `Attention.attend`, `GPT.mask`, `chunk_arithmetic` or a block there has said a
thing once that these say a second time, so each is held against model.py's own with numbers: in fp32, values and
gradients of the same inputs, within half a per cent; attention also at the full length, where a window would bite;
decoding at the next place and at the last one of the cache, which is filled at random for it.
"""

import functools
import math
import time
import warnings

import torch

from model import GPT, fused_linear_cross_entropy
from stack import compiled
from stack.cpu import decode, kernels
from stack.device import autocast

BOUND = 5e-3  # of values and gradients, as the difference's share of their norm: what 1 % changes is seen
CHECKED = 256  # tokens of the first batch for which all is compared
SCORES = 1 << 27  # as many are computed at the full length: 16 layers of 8 heads and 1,024 tokens


# ---------------------------------------------------------------------------------------------------------------------
# Attaching


def replace_attend(model, fast, serves):
    """Let fast(q, k, v, mask) stand in for Attention.attend where serves(attn, q, k, v, mask): by another class for the
    layers that are there, one for all, since by an object for each each block would be compiled by itself."""
    for block in model.blocks:
        if hasattr(type(getattr(block, "attn", None)), "attend"):
            block.attn.__class__ = _with_twin(type(block.attn), fast, serves)


@functools.cache
def _with_twin(plain, fast, serves):
    def attend(self, q, k, v, mask, *more):
        if not more and serves(self, q, k, v, mask):
            return fast(q, k, v, mask)
        return plain.attend(self, q, k, v, mask, *more)
    return type(plain.__name__, (plain,), {"attend": attend, "plain": plain, "fast": staticmethod(fast)})


def _put_back(model):
    for block in model.blocks:
        if hasattr(block.attn, "plain"):
            block.attn.__class__ = block.attn.plain


def compile_blocks(model: GPT, device: torch.device, like: GPT | None = None):
    """Compile a built model for training, or to be evaluated as it trains.  like: a model whose twins were checked
    already; what does not serve there is not attached here."""
    cpu = device.type == "cpu" and kernels.available()
    if like is None or hasattr(like.blocks[0].attn, "plain"):
        if cpu:
            replace_attend(model, kernels.attention, kernels.serves)
        elif device.type == "cuda":
            model.mask = functools.partial(compiled.document_mask, model)
            replace_attend(model, compiled.flex, _under_block_mask)
    if like is None or like.cross_entropy is not fused_linear_cross_entropy:
        compile_head(model, kernels.chunk_arithmetic if cpu else compiled.chunk_arithmetic)
    for block in model.blocks:  # one code object: compiled once, used by every layer
        block.forward = compiled.compile_or_not(block.forward, model.cfg.dropout > 0)


def compile_head(model: GPT, arithmetic=compiled.chunk_arithmetic) -> GPT:
    """The loss head's arithmetic, compiled where that pays; returns the model."""
    if model.cross_entropy is fused_linear_cross_entropy:  # else it is a fork's, or tensor_parallel.py's
        model.cross_entropy = functools.partial(fused_linear_cross_entropy, arithmetic=arithmetic)
    return model


def _under_block_mask(attn, q, k, v, mask) -> bool:
    return mask is not None and not isinstance(mask, torch.Tensor)


# ---------------------------------------------------------------------------------------------------------------------
# A training step, compared


def check(model: GPT, x, y, docs, *, dtype: torch.dtype, z_loss: float = 0.0) -> list[str]:
    """Compare the twins attached to `model` with model.py on a micro batch x, y (B, T), docs (B, T) or None; what
    differs steps aside.  Returns what to say about it, a line each.  Of several ranks all call it together."""
    if "cross_entropy" not in model.__dict__ and not any(hasattr(block.attn, "fast") for block in model.blocks):
        return []
    started, same = time.perf_counter(), {}  # same: by what is compared, whether all of it was as model.py has it
    twin_mask, twin_head = model.__dict__.pop("mask", None), model.__dict__.pop("cross_entropy", None)
    twins = [block.attn for block in model.blocks if hasattr(block.attn, "fast")]
    if twin_mask is not None and docs is None:
        twins = []  # FlexAttention is for document masks
    docs = docs if docs is None else docs[:1]

    def mask_of(T, mask):
        """By a model's `mask`, for the first T tokens."""
        return None if docs is None or mask is None else mask(torch.arange(T, device=docs.device), T, docs[:, :T])

    def attention(attn, block_mask, gradients: bool, q, k, v, mask):
        """In place of attn.attend: its value, once its twin is held against it."""
        own = functools.partial(attn.plain.attend, attn)
        same["attention"] = same.get("attention", True) and _agree(
            _results(own, q, k, v, rest=(mask,), gradients=gradients),
            _results(attn.fast, q, k, v, rest=(mask if block_mask is None else block_mask,), gradients=gradients))
        return own(q, k, v, mask)

    def head(hidden, weight, targets, **options):
        if twin_head is not None:
            same["loss head"] = _agree(*_heads(type(model).cross_entropy, twin_head, hidden, weight, targets, options))
        return hidden.sum()

    T, cfg, was_training = x.shape[1], model.cfg, model.training
    model.eval()  # dropout is no twin's
    targets = y[:1, :CHECKED].clone()
    targets[:, ::7] = -100  # ignored ones too
    try:
        for attn in twins:
            attn.attend = functools.partial(attention, attn, mask_of(min(T, CHECKED), twin_mask), True)
        model.cross_entropy = head
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(x.device, dtype):
            model(x[:1, :CHECKED], targets, docs=docs if docs is None else docs[:, :CHECKED], z_loss=z_loss)
    finally:
        for attn in twins:
            del attn.attend
        del model.cross_entropy
        for name, twin in (("mask", twin_mask), ("cross_entropy", twin_head)):
            if twin is not None:
                setattr(model, name, twin)
        model.train(was_training)
        if hasattr(model, "reshard"):  # FSDP's, which only a backward would do
            model.reshard()
    generator = torch.Generator(x.device).manual_seed(0)
    long = twins[:SCORES // (cfg.n_heads * T * T) + 1] if T > CHECKED and same.get("attention") else ()
    for attn in long:
        q, k, v = (torch.randn(1, T, n, cfg.head_dim, device=x.device, generator=generator).transpose(1, 2)
                   for n in (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads))  # of the size they have after QK-norm
        attention(attn, mask_of(T, twin_mask), False, q, k, v, mask_of(T, functools.partial(type(model).mask, model)))
    return _put_aside(model, same, time.perf_counter() - started)


def _put_aside(model, same: dict, seconds: float) -> list[str]:
    if same.get("attention") is False:
        for block in model.blocks:
            block.attn.__class__ = getattr(block.attn, "plain", type(block.attn))
        model.__dict__.pop("mask", None)
    if same.get("loss head") is False:
        twin, plain = model.__dict__.pop("cross_entropy"), type(model).cross_entropy
        if "mesh" in twin.keywords:  # the weight has to be put together first
            model.cross_entropy = lambda hidden, weight, targets, **options: plain(
                hidden, weight.full_tensor(), targets, **options)
    changed = {"attention": "Attention.attend or GPT.mask", "loss head": "chunk_arithmetic or the function around it"}
    lines = [f"the fast {what} does not compute what model.py computes: training goes on without it, slower. Was "
             f"{changed[what]} changed? State it in the twin too (stack/twins.py names it), or leave it so."
             for what, well in same.items() if not well]
    if all(same.values()) and same:
        lines.append(f"fast {' and '.join(same)}: compared with model.py on the first batch, equal ({seconds:.1f} s)")
    return lines


def _results(function, *inputs, rest=(), gradients: bool = True, **options) -> list | None:
    """function(*inputs, *rest, **options) and the inputs' gradients, in fp32; None where it cannot be called so."""
    inputs = [tensor.detach().float().requires_grad_(gradients) for tensor in inputs]
    try:
        with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            value = function(*inputs, *rest, **options)
        if not gradients:
            return [value]
        generator = torch.Generator(value.device).manual_seed(0)
        towards = torch.randn(value.shape, device=value.device, generator=generator)
        return [value.detach(), *torch.autograd.grad(value, inputs, towards)]
    except (RuntimeError, TypeError, ValueError, IndexError):  # another signature, other shapes
        return None


def _agree(want, got) -> bool:
    """Whether all tensors are the same but for rounding.  NaN is damage, no difference: training speaks of it."""
    return want is None or got is not None and not any(
        (b - a).norm() > BOUND * a.norm() for a, b in zip(want, got, strict=True))


def _heads(plain, twin, hidden, weight, targets, options):
    """Results of model.py's loss head and of its twin, which under tensor parallelism has some rows of the weight."""
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    mesh, mine = twin.keywords.get("mesh"), lambda rows: rows
    if mesh is not None:
        mine = lambda rows: rows.chunk(mesh.size())[mesh.get_local_rank()]  # noqa: E731
    want = _results(plain, hidden, whole, rest=(targets,), **options)
    got = _results(twin, hidden, mine(whole), rest=(targets,), **options)
    if want is not None:
        want[2] = mine(want[2])
    return want, got


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def fast_decoding(model: GPT) -> GPT:
    """Let `generate` decode fast: decode.cpp on a CPU, else one compiled program for all tokens; returns the model."""
    model.decoder = functools.partial(_decoder, {})
    return model


def _decoder(known: dict, model, cache, docs):
    """For GPT.decoder: the first of the fast steps that is model.py's.  known: up to which length of cache a step is so
    for the weights at some addresses, or False."""
    weights = tuple(p.data_ptr() for p in model.parameters())
    makes = [compiled_step] if model.embed.weight.device.type != "cpu" else [decode.Step, compiled_step]
    for make in makes:
        size = known.get((make, weights), 0)
        if size is False:
            continue
        try:
            step = make(model, cache, docs)
        except (AttributeError, KeyError, TypeError):  # parts that decode.cpp cannot read
            continue
        if size >= cache.k.shape[3]:
            return step
        at = _differs_at(step, model, cache, docs)
        known[make, weights] = cache.k.shape[3] if at is None else False
        if at is None:
            return step
        what = "decode.cpp" if make is decode.Step else "compiled decoding"
        warnings.warn(f"{what} does not compute what model.py computes, seen at token {at}: decoding goes on without "
                      "it. Was the model changed? State the change there too, or leave it so.", stacklevel=4)
    return plain_step(model, cache, docs)


def compiled_step(model, cache, docs):
    replace_attend(model, compiled.attend_once, _single)
    return compiled.decoder(model, cache, docs)


def _single(attn, q, k, v, mask) -> bool:
    return torch.compiler.is_compiling() and q.shape[2] == 1 and mask is not None


def plain_step(model, cache, docs):
    """model.py's own, as generate has it."""
    @torch.compiler.set_stance("force_eager")
    def step(ids):
        return model.logits(model.hidden(ids, docs=docs, cache=cache)[:, -1])
    return step


def _differs_at(step, model, cache, docs) -> int | None:
    """The length of context at which a step's logits are not model.py's: the next token's or the last that the cache
    can hold, for which what is still empty is filled at random, so that a window shows that is shorter."""
    length, last, generator = cache.length, cache.k.shape[3] - 1, torch.Generator(cache.k.device).manual_seed(0)
    for part in (cache.k, cache.v):
        part[:, :, :, length:].normal_(generator=generator)  # each place is written before it is read in earnest
    ids = torch.randint(model.cfg.vocab_size, (cache.k.shape[1], 1), device=cache.k.device, generator=generator)
    low = torch.bfloat16 in (cache.k.dtype, model.embed.weight.dtype)
    bound = max(0.01, 0.004 * math.sqrt(model.cfg.n_layers)) if low else 1e-3  # bf16 alone makes 0.002 times the root
    try:
        for at in sorted({min(length, last), last}):
            cache.length = at
            got = step(ids).clone()
            cache.length = at
            want = plain_step(model, cache, docs)(ids)
            if want.isnan().any():  # damaged weights, which sample_next speaks of
                return None
            if not (got - want).norm() <= bound * want.norm() < math.inf:  # infinite: a change that forbids ids
                return at
    finally:
        cache.length = length
    return None
