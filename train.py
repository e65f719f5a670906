"""Train a model: text made into shards by prepare.py becomes a run folder that sample.py and eval.py read.

    python train.py configs/demo.py                                        a laptop, minutes
    python train.py configs/stack100m.py                                   one GPU
    torchrun --standalone --nproc_per_node=8 train.py configs/stack100m.py   eight
    python train.py configs/stack100m.py --init_from=resume                go on after a stop, exactly
    python train.py configs/x.py --init_from=out/stack100m --out_dir=out/x   finetune

Ctrl-C or SIGTERM finishes the step, saves and leaves; a second one leaves at once.
"""

import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import checkpoint
import torch
from tqdm import tqdm

from config import ConfigError, TrainConfig, describe, load, save_json, to_dict
from data import Batches, TokenData, document_ids, iterate_windows
from device import autocast, keep_freed_memory, peak_flops, pick_device, pick_dtype
from metrics import RunLog, evaluate
from model import GPT, ModelConfig, flops_per_token, generate, num_params
from optim import lr_scale, make_optimizers
from parallel import connect, disconnect, parallelize, read_ranks
from tokenizer import Tokenizer


def check(model_cfg: ModelConfig, cfg: TrainConfig) -> list[str]:
    """Problems that span both dataclasses and the number of ranks."""
    found, world_size = [], read_ranks().world_size
    if cfg.seq_len > model_cfg.max_seq_len:
        found.append(f"seq_len ({cfg.seq_len}) is more than max_seq_len ({model_cfg.max_seq_len}). "
                     "Lower the first or raise the second.")
    unit = cfg.seq_len * cfg.micro_batch_size * world_size
    if cfg.batch_tokens % unit:
        below, above = cfg.batch_tokens // unit * unit, -(-cfg.batch_tokens // unit) * unit
        found.append(f"batch_tokens ({cfg.batch_tokens}) must be a multiple of seq_len * micro_batch_size * ranks "
                     f"({cfg.seq_len} * {cfg.micro_batch_size} * {world_size} = {unit}). Set it to "
                     f"{' or '.join(str(n) for n in (below, above) if n)}.")
    return found


def run(model_cfg: ModelConfig, cfg: TrainConfig):
    # 1. run folder --------------------------------------------------------------------------------------------------
    out_dir = Path(cfg.out_dir)
    resuming, finetuning = cfg.init_from == "resume", cfg.init_from not in ("resume", "scratch")

    # 2. device, ranks, seeds ----------------------------------------------------------------------------------------
    ranks = read_ranks()
    device = connect(ranks, pick_device(cfg.device))
    dtype = pick_dtype(cfg.dtype, device)
    main = ranks.rank == 0
    say = tqdm.write if main else (lambda *_: None)  # above the progress bar
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high")  # TF32 for the fp32 matmuls that are left
    if not cfg.compile:
        torch.compiler.set_stance("force_eager")  # blocks and loss head alike
    torch.manual_seed(cfg.seed)

    # 3. data --------------------------------------------------------------------------------------------------------
    tokenizer = Tokenizer.load(cfg.data_dir)
    open_data = dict(seq_len=cfg.seq_len, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
    train_data, val_data = (TokenData(cfg.data_dir, split, **open_data) for split in ("train", "val"))
    token_bytes = tokenizer.token_bytes()
    docs_of = (lambda x: document_ids(x, tokenizer.boundary_id)) if cfg.doc_mask else (lambda x: None)
    batch_seqs = cfg.batch_tokens // cfg.seq_len
    micro_steps = batch_seqs // (cfg.micro_batch_size * ranks.world_size)

    # 4. model -------------------------------------------------------------------------------------------------------
    state = {"step": 0, "seqs_seen": 0, "best_val": math.inf, "wandb_id": None}
    source = (out_dir / "ckpt_last" if resuming else Path(cfg.init_from)) if cfg.init_from != "scratch" else None
    if source is not None:
        saved = checkpoint.read_state(source)
        saved_cfg = ModelConfig(**saved["model"])
        if saved["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(f"{source} was trained with another tokenizer than {cfg.data_dir} was made with "
                             f"({saved['tokenizer'][:12]} and {tokenizer.fingerprint[:12]}): its rows would mean other "
                             f"tokens. Prepare the data with --tokenizer {source}.")
        model_cfg = replace(saved_cfg, dropout=model_cfg.dropout) if finetuning else replace(
            model_cfg, vocab_size=tokenizer.vocab_size)
        if resuming:
            refuse_changes(saved, model_cfg, cfg, train_data)
            state |= saved["progress"]
        if cfg.seq_len > model_cfg.max_seq_len:
            raise ConfigError(f"seq_len ({cfg.seq_len}) is more than the {model_cfg.max_seq_len} tokens of {source}. "
                              "Lower it.")
    elif tokenizer.vocab_size > model_cfg.vocab_size:
        raise ConfigError(f"vocab_size ({model_cfg.vocab_size}) is less than the {tokenizer.vocab_size} ids of "
                          f"{cfg.data_dir}. Set --vocab_size={tokenizer.vocab_size}.")
    else:
        if tokenizer.vocab_size < model_cfg.vocab_size:
            say(f"vocab_size {tokenizer.vocab_size}, the size of {cfg.data_dir}'s tokenizer, instead of "
                f"{model_cfg.vocab_size}")
        model_cfg = replace(model_cfg, vocab_size=tokenizer.vocab_size)
    model = GPT(model_cfg).to(device)
    if source is not None:
        checkpoint.load_weights(model, source)

    # 5. compile, parallelize ----------------------------------------------------------------------------------------
    if cfg.compile:
        for block in model.blocks:
            block.compile(dynamic=False)  # one code object: compiled once, used by every layer
    replica = parallelize(model, ranks, device)  # `model` stays the bare module: evaluation, samples, checkpoints

    # 6. optimizer ---------------------------------------------------------------------------------------------------
    optimizers = make_optimizers(model, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, adamw_lr=cfg.adamw_lr,
                                 weight_decay=cfg.weight_decay, betas=(cfg.beta1, cfg.beta2))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    params = [p for p in model.parameters() if p.requires_grad]

    # 7. resume ------------------------------------------------------------------------------------------------------
    if resuming:
        checkpoint.load_optimizers(source, model, optimizers, scaler)
        if saved["train"]["max_steps"] != cfg.max_steps:
            say(f"max_steps was {saved['train']['max_steps']} and is {cfg.max_steps}: from step {state['step']} on the "
                f"learning rate follows the new {cfg.schedule} schedule, at "
                f"{schedule(cfg, min(state['step'], cfg.max_steps - 1)):.3g} of its peak.")
        if state["step"] >= cfg.max_steps:
            say(f"nothing to do: {source} is at step {state['step']} of {cfg.max_steps}. Raise --max_steps to go on.")
            disconnect(ranks)
            return
    elif main:
        checkpoint.start_fresh(out_dir)
    ranks.barrier()
    if main:
        out_dir.mkdir(parents=True, exist_ok=True)
        save_json(out_dir / "config.json", (model_cfg, cfg))
    log = RunLog(out_dir, resume_step=state["step"] if resuming else None, enabled=main, run_id=state["wandb_id"],
                 wandb_project=cfg.wandb_project, config=to_dict((model_cfg, cfg)))
    state["wandb_id"] = log.run_id
    counts, flops = num_params(model_cfg), flops_per_token(model_cfg, cfg.seq_len)["causal"]
    peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else peak_flops(device, dtype)
    say(describe((model_cfg, cfg)))
    say(f"{counts['total']:,} parameters, {counts['embedding'] / counts['total']:.1%} of them the table | {device}, "
        f"{str(dtype).removeprefix('torch.')}, {ranks.world_size} rank(s) | {train_data.n_tokens:,} training tokens | "
        f"{cfg.batch_tokens:,} a step = {ranks.world_size} x {micro_steps} x {cfg.micro_batch_size} x {cfg.seq_len}")

    # 8. loop --------------------------------------------------------------------------------------------------------
    stop = StopSignal()
    batches = Batches(train_data, seed=cfg.seed, micro_batch_size=cfg.micro_batch_size, batch_seqs=batch_seqs,
                      rank=ranks.rank, world_size=ranks.world_size, start_seq=state["seqs_seen"], device=device)

    def save(name: str):
        if main:
            checkpoint.save(out_dir, name, model=model, optimizers=optimizers, scaler=scaler, tokenizer=tokenizer,
                            model_cfg=model_cfg, train_cfg=cfg, keep=cfg.keep,
                            state=dict(progress=state, data=train_data.data_fingerprint))

    def held_out():
        n_windows = max(cfg.eval_tokens // cfg.seq_len, 1)
        windows = iterate_windows(val_data, cfg.micro_batch_size, max_windows=n_windows, rank=ranks.rank,
                                  world_size=ranks.world_size)
        return evaluate(model, windows, token_bytes, device=device, dtype=dtype, ranks=ranks,
                        boundary_id=tokenizer.boundary_id if cfg.doc_mask else None)

    bar = tqdm(total=cfg.max_steps, initial=state["step"], unit="step", dynamic_ncols=True,
               disable=None if main else True)  # None: only on a terminal
    first_step, saved_step, bad_steps = state["step"], state["step"] if resuming else -1, 0
    clock, clock_steps, wait = 0.0, 0, 0.0  # seconds and steps since the last log line, without evaluation and saving
    while True:
        step = state["step"]
        last, leaving = step == cfg.max_steps, ranks.any(stop.asked, device)
        ran = step > first_step
        # save before evaluating: a failure there must not cost the weights
        if last or leaving or (ran and due(step, cfg.save_interval)):
            if step != saved_step:
                save("ckpt_last")
                saved_step = step
        if leaving and not last:
            say(f"stopped at step {step}; go on with --init_from=resume")
            break
        if last or (ran and due(step, cfg.eval_interval)):
            held = held_out()
            log.write(step=step, val_loss=held["loss"], val_bpb=held["bpb"], val_tokens=held["tokens"])
            log.plot()
            say(f"step {step:>6}/{cfg.max_steps} | held out: loss {held['loss']:.4f} | ppl {held['ppl']:.2f} | "
                f"{held['bpb']:.4f} bits per byte")
            if held["loss"] < state["best_val"]:  # false for NaN
                state["best_val"] = held["loss"]
                save("ckpt_best")
        if main and (last or ran and due(step, cfg.sample_interval)) and cfg.sample_interval:
            with autocast(device, dtype):
                ids = generate(model, [[tokenizer.boundary_id]], max_new_tokens=min(128, model_cfg.max_seq_len),
                               temperature=0.8, top_p=0.95, seed=cfg.seed, stop_ids=[tokenizer.boundary_id])[0]
            log.write(step=step, sample=tokenizer.decode(ids))
            say(f"--- sample at step {step}\n{tokenizer.decode(ids)}\n---")
        if last:
            break

        started = time.perf_counter()
        scale = schedule(cfg, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
        totals = torch.zeros(2, device=device)  # nats, valid tokens
        waited = 0.0
        for micro_step in range(micro_steps):
            fetching = time.perf_counter()
            x, y = next(batches)  # (b, T) each
            waited += time.perf_counter() - fetching
            if model_cfg.dropout:  # randomness as a function of the position, so that a resumed run draws the same
                torch.manual_seed(hash((cfg.seed, step, micro_step, ranks.rank)) % 2**63)
            if ranks.world_size > 1:  # set before the forward, where DDP reads it: gradients travel once a step
                replica.require_backward_grad_sync = micro_step == micro_steps - 1
            with autocast(device, dtype):
                nats = replica(x, y, docs=docs_of(x), z_loss=cfg.z_loss, reduction="sum")
            # divided by what the step holds, not per micro-batch: each token weighs the same; DDP averages over ranks
            scaler.scale(nats * (ranks.world_size / cfg.batch_tokens)).backward()
            totals += torch.stack((nats.detach(), (y != -100).sum()))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        ranks.sum(totals)
        correction = cfg.batch_tokens / totals[1].clamp(min=1)  # 1 unless targets were ignored
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) * correction  # before clipping; the same on every rank
        grad_norm = norm.item()
        if math.isfinite(grad_norm):
            clip = (cfg.grad_clip / (norm + 1e-6)).clamp(max=1) if cfg.grad_clip else 1.0
            torch._foreach_mul_(grads, correction * clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
            bad_steps = 0
        else:  # decided by all ranks alike: DDP has spread the inf
            bad_steps += 1
            say(f"step {step}: the gradient is not finite; the step is skipped ({bad_steps} in a row)")
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        state["seqs_seen"] += batch_seqs
        if bad_steps >= cfg.max_bad_steps:
            raise FloatingPointError(
                f"{bad_steps} steps in a row had a gradient that is not finite. The last good checkpoint is "
                f"{out_dir / 'ckpt_last'} (step {saved_step}). Resume from it with lower learning rates or in float32.")
        if step > first_step:  # the first step compiles and warms up
            clock, clock_steps, wait = clock + time.perf_counter() - started, clock_steps + 1, wait + waited
        bar.update()
        if clock_steps and (due(state["step"], cfg.log_interval) or state["step"] == cfg.max_steps):
            loss = (totals[0] / totals[1]).item()
            step_s, tok_per_s = clock / clock_steps, clock_steps * cfg.batch_tokens / clock
            mfu = flops * tok_per_s / (peak * ranks.world_size) if peak else None
            log.write(step=state["step"], loss=loss, lr=scale * cfg.adamw_lr, lr_scale=scale, grad_norm=grad_norm,
                      tok_per_s=round(tok_per_s), step_ms=step_s * 1e3, mfu=mfu, data_wait=wait / clock,
                      tokens=state["seqs_seen"] * cfg.seq_len)
            bar.set_postfix_str(f"loss {loss:.3f}, {tok_per_s:,.0f} tok/s")
            if bar.disable:
                say(f"step {state['step']:>6}/{cfg.max_steps} | loss {loss:.4f} | lr {scale * cfg.adamw_lr:.1e} | "
                    f"grad {grad_norm:.2f} | {tok_per_s:>9,.0f} tok/s | mfu {f'{mfu:.1%}' if mfu else 'n/a'}")
            clock, clock_steps, wait = 0.0, 0, 0.0

    # 9. close -------------------------------------------------------------------------------------------------------
    bar.close()
    batches.close()
    log.close()
    disconnect(ranks)


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def schedule(cfg: TrainConfig, step: int) -> float:
    return lr_scale(step, schedule=cfg.schedule, warmup_steps=cfg.warmup_steps, max_steps=cfg.max_steps,
                    decay_fraction=cfg.decay_fraction, min_lr_fraction=cfg.min_lr_fraction)


def refuse_changes(saved: dict, model_cfg: ModelConfig, cfg: TrainConfig, data: TokenData):
    """A resumed run is the same run: its architecture, data, sequence length, seed and optimizer do not change."""
    now = to_dict((model_cfg, cfg)) | {"data": data.data_fingerprint}
    before = {**saved["model"], **saved["train"], "data": saved["data"]}
    fixed = [*saved["model"], "data", "seq_len", "seed", "optimizer"]
    changed = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in fixed
               if key != "dropout" and now[key] != before[key]]
    if changed:
        raise ConfigError(f"{cfg.out_dir} cannot be resumed: {'; '.join(changed)}. Set them back, or start from its "
                          f"weights with --init_from={cfg.out_dir} and another --out_dir.")


class StopSignal:
    """SIGINT or SIGTERM: the loop leaves after the step it is in.  Twice: at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number, frame):
        if self.asked:
            sys.exit(128 + number)
        self.asked = True


def main():
    try:
        run(*load((ModelConfig, TrainConfig), sys.argv[1:], doc=__doc__, check=check))
    except (ConfigError, ValueError, OSError, FloatingPointError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)


if __name__ == "__main__":
    main()
