"""Optimizers: Muon for the block matrices, AdamW for the rest; the schedule as a pure function of the step.

*Muon* (Jordan 2024, https://kellerjordan.github.io/posts/muon/) treats a weight matrix as a matrix.  The momentum of
its gradient, M = U S V^T, is replaced by roughly U V^T, so that every direction moves by the same amount and not only
the few that dominate the gradient.  Five Newton-Schulz steps do it without an SVD: X <- aX + (bA + cA^2)X with
A = X X^T drives all singular values to about [0.7, 1.2] (the coefficients are chosen for speed near 0, not for
convergence to 1).  The update is scaled by 0.2 sqrt(max(m, n)), which gives it the RMS of an AdamW update (Moonlight,
arXiv 2502.16982), so that one weight decay serves both; decay is decoupled.  torch.optim.Muon (match_rms_adamw)
computes the same and is the reference in the tests.  Ours exists because that one works matrix by matrix: here those of
one shape are stacked and go through Newton-Schulz as batched matmuls, in bf16 where the hardware multiplies it and
fp32 elsewhere, in buffers that are kept (on a CPU, fresh pages cost as much as the arithmetic).

*Momentum* rises from 0.85 to 0.95 over a parameter's first 300 updates (modded-nanogpt): early gradients age fast.  The
count is kept in the state, as AdamW keeps its own, so that a run that is resumed goes on with it.

*Sharded matrices* (FSDP2's and tensor parallelism's DTensors) cannot be orthogonalized piece by piece.  Momentum stays
where its rows are; then each matrix is put together on one rank, which runs Newton-Schulz on it, and goes back: two
all-to-alls in which every number travels once each way, and no two ranks do the same work.  (Gathering every matrix
everywhere, the simpler way, sends world_size times as much and repeats the arithmetic on each rank.)

*Who gets what.*  The 2-D weights inside `blocks` go to Muon.  The embedding, learned positions, an untied head and any
other nn.Embedding are tables of rows, not maps between spaces: AdamW, as for the gains and biases.  Weight decay goes
to everything with two dimensions, never to gains and biases.  With optimizer="adamw" AdamW has it all.

Every group holds "peak_lr"; the loop sets group["lr"] = group["peak_lr"] * schedule(cfg, step).
"""

import copy
import math

import torch
from torch.optim import AdamW, Optimizer

from stack.counts import tables

MOMENTUM_FROM, MOMENTUM_STEPS = 0.85, 300  # where momentum begins, and the updates in which it rises to what is set
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
# Numbers in one stack.  On a CPU as much as stays in cache: measured on 2 cores, Stack-100M steps in 1.31 s with 2**20,
# 1.49 s with 2**23, 1.63 s matrix by matrix.  Elsewhere enough to fill the device, at 190 MB of buffers.
STACK_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 24}
# Where the rates are known: Muon's and AdamW's; d_model, n_layers, tokens of the run, tokens of a step
KNOWN = {
    # configs/demo.py with 3,800 steps of one size.  By now it has half of the one and 1.5 times the other, is ahead
    # early and as good at the end; published rates for longer runs speak for Muon's as it is here (docs/lab-notes.md)
    "muon": (5e-3, 4e-3, 128, 3, 3800 * 2048, 2048),
    "adamw": (None, 6e-4, 768, 12, 600_000 * 491_520, 491_520),  # GPT-2 small by nanoGPT; GPT-3's of this size too
}


def rates(cfg, tokens: int, batch_tokens: int, optimizer: str = "muon") -> tuple[float | None, float]:
    """Peak learning rates (Muon's, AdamW's) for a model of this ModelConfig and a run of so many tokens.

    KNOWN's, carried over by published laws.  *Run*: sqrt(batch_tokens) * tokens^-0.3 (Delphi, marin's ladder of Qwen3
    models, 0.2 % of the loss at 300 times the compute; HyperP, arXiv 2603.28743, finds -0.32).  The first holds up to
    the critical batch, some 0.58 tokens^0.571 (Step Law, arXiv 2503.04715), and counts up to twice that; the second
    says of runs under a tenth of the known one nothing, and raises no rate further there.  *Shape*: Muon's goes with
    d_model^-0.5, for its update, scaled by 0.2 sqrt(max(m, n)), then has the same spectral norm at every width, and
    with n_layers^-0.5 (HyperP); AdamW's of the table with neither, since a row's coordinates move by the rate itself.
    tests/test_rates.py checks that what the model computes then moves as far at every shape.  With optimizer="adamw",
    where AdamW has the matrices too, d_model^-1 (muP, arXiv 2203.03466; GPT-3's table, arXiv 2005.14165) and no Muon:
    None.

    How much it matters: in Step Law's 1,911 runs a rate 2 times off the best costs 0.1 to 0.4 % of the loss, 4 times
    0.7 to 1 %; on the demo, from one checkpoint, twice the table's rate cost 0.5 to 1 %, half of it or of Muon's gained
    0.1 to 0.7 %; in a fifth of its run half of Muon's and 1.5 times the table's gains 2 to 7 % (docs/lab-notes.md).
    """
    if optimizer not in KNOWN:
        raise ValueError(f"No learning rate is known for optimizer {optimizer!r}: KNOWN in stack/optim.py has none. "
                         "Set --adamw_lr.")
    muon, adamw, width, depth, known_tokens, known_batch = KNOWN[optimizer]
    batch_tokens = min(batch_tokens, 2 * 0.58 * tokens**0.571)
    run = math.sqrt(batch_tokens / known_batch) * max(tokens / known_tokens, 0.1) ** -0.3
    if optimizer == "adamw":
        return None, adamw * run * width / cfg.d_model
    return muon * run * math.sqrt(width / cfg.d_model * depth / cfg.n_layers), adamw * run


def make_optimizers(model, *, optimizer: str = "muon", muon_lr: float = 6e-3, adamw_lr: float = 3e-3,
                    weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)) -> list[Optimizer]:
    """[Muon, AdamW], or [AdamW] for optimizer="adamw"; over the raw model, whose names stay in the groups."""
    if optimizer not in ("muon", "adamw"):
        raise ValueError(f"optimizer is {optimizer!r}; it must be 'muon' or 'adamw'.")
    matrices, rest, groups, looked_up = [], [], {}, tables(model)
    for name, p in model.named_parameters():
        if p.requires_grad:
            in_muon = optimizer == "muon" and p.ndim == 2 and name.startswith("blocks.") and p not in looked_up
            (matrices if in_muon else rest).append((name, p))
    for name, p in sorted(rest, key=lambda named: named[1].ndim < 2):  # tables, then vectors
        # by decay, and by what the parameters lie on: one call does not take parts and whole tensors
        decay, mesh = weight_decay if p.ndim >= 2 else 0.0, getattr(p, "device_mesh", None)
        groups.setdefault((decay, mesh), {"params": [], "weight_decay": decay})["params"].append((name, p))
    made = [Muon(matrices, lr=muon_lr, weight_decay=weight_decay)] if matrices else []
    if rest:
        fused = all(p.device.type in ("cpu", "cuda") for _, p in rest)
        made.append(AdamW(list(groups.values()), lr=adamw_lr, betas=betas, eps=1e-8, fused=fused))
    for opt in made:
        for group in opt.param_groups:
            group["peak_lr"] = group["lr"]
        opt.begun_with = outside_state(opt)
    return made


def outside_state(opt: Optimizer) -> dict:
    """Numbers and tensors that an optimizer keeps elsewhere than in its state by parameter, where checkpoints look."""
    kept = {**vars(opt), **{f"group[{key!r}]": value for group in opt.param_groups for key, value in group.items()}}
    return {name: copy.deepcopy(value) for name, value in kept.items() if name != "group['lr']"
            and isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)}


class Muon(Optimizer):
    """Momentum, orthogonalized, for 2-D parameters (see above).  State: "momentum_buffer" and "step" per parameter."""

    def __init__(self, params, *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1,
                 ns_dtype: torch.dtype | None = None):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if odd := [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.ndim != 2]:
            raise ValueError(f"Muon is for matrices; a parameter of shape {odd[0]} belongs in AdamW.")
        self.ns_dtype = ns_dtype
        self._buffers, self._parts = {}, {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            stacks = {}  # same shape, same arithmetic
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state.update(momentum_buffer=torch.zeros_like(p), step=torch.zeros((), device="cpu"))
                step = state.setdefault("step", torch.tensor(float(MOMENTUM_STEPS)))  # saved before there was a count
                sharding = (p.device_mesh, p.placements) if hasattr(p, "device_mesh") else None
                stacks.setdefault((p.shape, p.dtype, p.device, sharding, step.item()), []).append(p)
                step += 1
            for (shape, _, device, sharding, step), params in stacks.items():
                below = max(group["momentum"] - MOMENTUM_FROM, 0)
                momentum = group["momentum"] - below * max(1 - step / MOMENTUM_STEPS, 0)
                elements = STACK_ELEMENTS.get(device.type, STACK_ELEMENTS["other"])
                size = max(elements // shape.numel(), 1) * (sharding[0].size() if sharding else 1)
                for i in range(0, len(params), size):
                    self._update(params[i:i + size], group, momentum, sharding)

    def _update(self, params: list[torch.Tensor], group: dict, momentum: float, sharding: tuple | None):
        """One step of n matrices of one shape (m, k); what is here of a sharded one has fewer rows or columns."""
        m, k = params[0].shape
        momenta, grads = [self.state[p]["momentum_buffer"] for p in params], [p.grad for p in params]
        if sharding:
            params, momenta, grads = ([t.to_local() for t in some] for some in (params, momenta, grads))
        first = params[0]
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        update = torch.stack(grads, out=self._buffer("update", (len(params), *first.shape), first.dtype, first.device))
        each = list(update.unbind())
        torch._foreach_lerp_(each, momenta, momentum)  # Nesterov: look ahead by one more gradient
        if sharding:
            self._orthogonalize_sharded(update, (m, k), *sharding)
        else:
            update.copy_(self._orthogonalize(update))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, each, alpha=-group["lr"] * 0.2 * math.sqrt(max(m, k)))

    def _orthogonalize_sharded(self, update, shape: tuple[int, int], mesh, placements):
        """The same for the parts update (n, rows, columns) of n matrices of this shape, in place: each rank puts some
        of them together, and takes them apart again."""
        import torch.distributed as dist
        key = (shape, mesh, placements)
        if key not in self._parts:
            self._parts[key] = parts_of(shape, mesh, placements)
        group, parts = self._parts[key]
        size, rank = len(parts), dist.get_rank(group)
        owned = [len(range(owner, len(update), size)) for owner in range(size)]  # as many on each rank, or one more
        n, part = owned[rank], update[0].numel()
        mine = [n * len(rows) * len(columns) for rows, columns in parts]  # numbers of my matrices on each rank
        theirs = [count * part for count in owned]
        received = update.new_empty(sum(mine))
        dist.all_to_all_single(received, update.flatten(), mine, theirs, group=group)
        full = update.new_empty(n, *shape)
        for (rows, columns), piece in zip(parts, received.split(mine), strict=True):
            full[:, rows[:, None], columns] = piece.view(n, len(rows), len(columns))
        full = self._orthogonalize(full)
        pieces = torch.cat([full[:, rows[:, None], columns].flatten() for rows, columns in parts])
        returned = pieces.new_empty(sum(theirs))
        dist.all_to_all_single(returned, pieces, theirs, mine, group=group)
        update.copy_(returned.view(update.shape))

    def _orthogonalize(self, update):
        """Newton-Schulz of each matrix.  update (n, m, k) -> (n, m, k) in ns_dtype, in a buffer that is reused."""
        n, m, k = update.shape
        small, dtype = min(m, k), self.ns_dtype or fastest_matmul_dtype(update.device)
        a, b, c = NS_COEFFICIENTS
        x, y = (self._buffer(name, (n, m, k), dtype, update.device) for name in ("x", "y"))
        gram, poly = (self._buffer(name, (n, small, small), dtype, update.device) for name in ("gram", "poly"))
        norm = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)  # (n, 1, 1): no singular value is larger
        x.copy_(update.div_(norm.clamp_(min=1e-7)))
        for _ in range(NS_STEPS):  # the Gram matrix of the shorter side, from the left or from the right
            torch.bmm(*((x, x.mT) if m <= k else (x.mT, x)), out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
            torch.baddbmm(x, *((poly, x) if m <= k else (x, poly)), beta=a, out=y)
            x, y = y, x
        return x

    def _buffer(self, name: str, shape: tuple, dtype, device):
        """A tensor of this shape whose memory stays between calls and is shared by all shapes."""
        numel = math.prod(shape)
        key = (name, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel].view(shape)


def parts_of(shape: tuple[int, int], mesh, placements):
    """(process group, [(rows, columns) of a matrix of this shape that lie on each of its ranks]) of a sharding."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    assert mesh.size() == dist.get_world_size(group)  # a mesh of two dimensions is all of it
    mine = []
    for dim in (0, 1):  # each dimension by itself, by the code that shards the tensors: no rule is written twice
        cut = [Replicate() if not (p.is_shard(dim) or getattr(p, "dim", None) == dim) else p for p in placements]
        cut = [Shard(0) if type(p) is Shard else p for p in cut]
        mine.append(distribute_tensor(torch.arange(shape[dim]), mesh, cut, src_data_rank=None).to_local())
    parts = [None] * mesh.size()
    dist.all_gather_object(parts, [indices.cpu() for indices in mine], group=group)
    return group, [tuple(indices.to(mine[0].device) for indices in part) for part in parts]


def fastest_matmul_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it, else fp32.  Newton-Schulz does not need more (nor does Muon's author)."""
    multiplied = (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
                  or device.type == "cpu" and torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if multiplied else torch.float32


def schedule(cfg, step: int) -> float:
    """Multiplier of every group's peak for the update made at `step` (0 is the first), by a TrainConfig's settings.

    Up linearly over warmup_steps, the first update already above 0; then "wsd" stays flat and falls over the last
    decay_fraction of the run like 1 - sqrt(progress) (arXiv 2405.18392), "linear" the same along a line, "cosine" falls
    from the warm-up on.  From max_steps on exactly min_lr_fraction (or 1 where decay_fraction is 0).  Where warm-up and
    decay overlap the smaller of the two counts: it rises, then falls.
    """
    if cfg.schedule not in ("wsd", "linear", "cosine"):
        raise ValueError(f"schedule is {cfg.schedule!r}; it must be 'wsd', 'linear' or 'cosine'.")
    warmup_steps = min(cfg.warmup_steps, cfg.max_steps)
    warm = min((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0
    start = warmup_steps if cfg.schedule == "cosine" else cfg.max_steps * (1 - cfg.decay_fraction)
    if step < start or cfg.schedule != "cosine" and cfg.decay_fraction == 0:
        return warm
    progress = min((step - start) / (cfg.max_steps - start), 1.0) if cfg.max_steps > start else 1.0
    lines = {"wsd": 1 - math.sqrt(progress), "linear": 1 - progress}
    shape = lines.get(cfg.schedule, (1 + math.cos(math.pi * progress)) / 2)
    return min(warm, cfg.min_lr_fraction + (1 - cfg.min_lr_fraction) * shape)
