"""Train a model: text made into shards by prepare.py becomes a run folder that sample.py and eval.py read.

    python train.py configs/demo.py                                        a laptop, minutes
    python train.py configs/stack100m.py                                   one GPU
    torchrun --standalone --nproc_per_node=8 train.py configs/stack100m.py   eight
    python train.py configs/stack100m.py --init_from=resume                go on after a stop, exactly
    python train.py configs/stack100m.py --init_from=resume:ckpt_step_0001000   the same from there; what is later moves
    python train.py configs/demo.py --init_from=out/demo --data_dir=data/mine --out_dir=out/mine
                                     finetune a run, with --keep_moments branch off; hf:FOLDER is Hugging Face's

Ctrl-C, SIGTERM, SIGUSR1 or a lost terminal finishes the step, saves and leaves with code 0; a second leaves at once.

A run that was stopped or killed and resumed is the run that never stopped: batches, dropout and learning rate are
functions of the position (seed, step, micro step, data rank), the rest of the state is in the checkpoint, and hyper-
parameters come from the command line again.  Steps whose gradient is not finite are skipped, by all ranks (processes)
together.
"""

import contextlib
import functools
import gc
import math
import os
import shlex
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from stack.config import RunFailed, describe, explain, load, not_installed, save_json, to_dict, warn_in_sentences

try:
    import torch
    from tqdm import tqdm
except ModuleNotFoundError as error:
    not_installed(error)

from model import GPT, ModelConfig, generate
from stack import spikes, threads, twins
from stack.checkpoint.folder import go_back, occupied, read_state, start_fresh
from stack.checkpoint.saves import Saves
from stack.checkpoint.tensors import forgotten, load_optimizers, load_weights
from stack.counts import describe_groups, flops_per_token, num_params
from stack.data.batches import Batches, TokenData, iterate_windows
from stack.data.tokenizer import Tokenizer
from stack.device import DTYPES, autocast, keep_freed_memory, peak_flops, pick_device, pick_dtype
from stack.evaluation.held_out import evaluate
from stack.exchange import hf
from stack.log import RunLog, visible
from stack.optim import make_optimizers, schedule
from stack.parallel import tensor_parallel
from stack.parallel.ranks import connect, disconnect, read_ranks
from stack.parallel.sharding import fill, finish_gradients, local, parallelize, sync_gradients, total_norm, whole
from stack.report import write_report
from stack.resume import StopSignal, compare, resume_command, settle
from stack.start import check, repeated, shortened, what_it_starts_from, what_trains
from stack.train_config import TrainConfig


def run(model_cfg: ModelConfig, cfg: TrainConfig, typed: list[str] | None = None):
    """Train, and leave the process as it was found: signals, compiler, threads and files.

    typed: the command line, for the one that goes on; without it that one names the run folder's config.json.
    """
    ranks = read_ranks(cfg.tp)
    with contextlib.ExitStack() as at_exit:
        train(model_cfg, cfg, ranks, at_exit, resume_command(typed or ["train.py", f"{cfg.out_dir}/config.json"]))
    disconnect(ranks)  # at a clean end only: after an exception the others may be waiting elsewhere


def train(model_cfg: ModelConfig, cfg: TrainConfig, ranks, at_exit: contextlib.ExitStack, resume: str):
    # 1. run folder --------------------------------------------------------------------------------------------------
    out_dir, main = Path(cfg.out_dir), ranks.rank == 0
    resuming, finetuning = bool(cfg.checkpoint), not cfg.checkpoint and cfg.init_from != "scratch"
    source = out_dir / cfg.checkpoint if resuming else Path(cfg.init_from) if finetuning else None
    say = functools.partial(tell, main)
    cfg = shortened(cfg, say)

    # 2. device, ranks, seeds ----------------------------------------------------------------------------------------
    device = connect(ranks, pick_device(cfg.device), what_trains(model_cfg, cfg))
    dtype = pick_dtype(cfg.dtype, device)
    tqdm.set_lock(threading.RLock())  # its own is for several processes, and is reported as leaked after a kill
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for the fp32 matmuls that are left
    at_exit.callback(torch.compiler.set_stance, "default")
    if not cfg.compile:
        torch.compiler.set_stance("force_eager")  # blocks and loss head alike
    if cfg.deterministic:  # costs the atomic sums of backward kernels, and a fill of each new buffer
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matmul
        at_exit.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(cfg.seed)

    # 3. data, checkpoint --------------------------------------------------------------------------------------------
    if main:
        at_exit.enter_context(occupied(out_dir))
    ranks.barrier()
    with ranks.together() as found:  # what is not there for one rank, or is another for it, ends all
        tokenizer = Tokenizer.load(cfg.data_dir)
        open_data = dict(seq_len=cfg.seq_len, loss_on=cfg.loss_on, doc_mask=cfg.doc_mask,
                         fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
        train_data = TokenData(cfg.data_dir, "train", packing=cfg.packing, **open_data)
        val_data = TokenData(cfg.data_dir, "val", **open_data) if cfg.eval_interval or cfg.eval_first else None
        if cfg.init_from.startswith("hf:"):
            theirs, words = hf.load_folder(cfg.init_from)
            saved = {"model": asdict(theirs.cfg), "tokenizer": words.fingerprint, "checksum": hf.checksum(theirs)}
        else:
            theirs, saved = None, read_state(source) if source else None
        model_cfg, cfg = settle(model_cfg, cfg, source, saved, tokenizer, say)
        changes = compare(saved, model_cfg, cfg, train_data) if resuming else ()
        found |= what_it_starts_from(model_cfg, train_data, dtype, saved)
    token_bytes, talk = tokenizer.token_bytes(), " --chat" * bool(tokenizer.chat_template)
    micro_tokens = ranks.dp_size * cfg.micro_batch_size * cfg.seq_len

    # 4. model, state ------------------------------------------------------------------------------------------------
    state = {"step": 0, "seqs_seen": 0, "bad_steps": 0, "best_val": None, "wandb_id": None, "tokens": 0,
             "threads": None, "base": cfg.init_from if finetuning else None,  # whose weights these were
             "norms": spikes.unseen(), "spikes": 0, "unlogged": [0.0, 0]}  # nats and tokens since the last line
    if resuming:
        for line in changes:
            say(line)
        state |= {"tokens": saved["progress"]["seqs_seen"] * saved["train"]["seq_len"], **saved["progress"]}
        state["seqs_seen"] = state["seqs_seen"] * saved["train"]["seq_len"] // cfg.seq_len
        with contextlib.suppress(OSError, ValueError):  # an evaluation after the last save may have found a better one
            best = read_state(out_dir, "best")
            if best["data"] != train_data.data_fingerprint:
                state["best_val"] = None
            elif source.name == "ckpt_last" or best["progress"]["step"] <= state["step"]:
                state["best_val"] = best["progress"]["best_val"]
        if state["step"] >= cfg.max_steps:
            say(f"nothing to do: {source} is at step {state['step']} of {cfg.max_steps}. Raise --max_steps to go on.")
            return
    if device.type == "cpu":
        keep_freed_memory()
        state["threads"] = threads.take(state["threads"], at_exit, say)
    model = GPT(model_cfg)

    # 5. parallelize, compile ----------------------------------------------------------------------------------------
    replica = parallelize(model, ranks, device, dp=cfg.dp, dtype=dtype, remat=cfg.remat, compile=cfg.compile,
                          doc_mask=cfg.doc_mask, residual_dtype=DTYPES[cfg.residual_dtype])
    if cfg.tp > 1:
        say(tensor_parallel.plan(model_cfg, cfg.tp))
    if theirs is not None:  # `model` is the bare module or its shards: evaluation, samples, checkpoints
        for name, tensor in theirs.state_dict().items():
            fill(model.get_parameter(name), tensor)
        theirs = None  # one copy of the weights less
    elif source is not None:
        load_weights(model, source)

    # 6. optimizer ---------------------------------------------------------------------------------------------------
    optimizers = make_optimizers(model, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, adamw_lr=cfg.adamw_lr,
                                 weight_decay=cfg.weight_decay, betas=(cfg.beta1, cfg.beta2))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    params = [p for p in model.parameters() if p.requires_grad]

    # 7. resume ------------------------------------------------------------------------------------------------------
    if resuming or cfg.keep_moments:
        if without := load_optimizers(source, model, optimizers, scaler, strict=not cfg.allow_changes):
            say(f"{len(without)} parameters start without optimizer state")
    ranks.barrier()  # until all have read what may move now
    if main:
        if moved := go_back(out_dir, cfg.checkpoint) if resuming else start_fresh(out_dir):
            say(moved)
        out_dir.mkdir(parents=True, exist_ok=True)
        save_json(out_dir / "config.json", (model_cfg, replace(cfg, init_from=state["base"] or "scratch")))
    stop = at_exit.enter_context(StopSignal(launched=ranks.world_size > 1))
    log = RunLog(out_dir, resume_step=state["step"] if resuming else None, enabled=main,
                 run_id=state["wandb_id"] if cfg.checkpoint == "ckpt_last" else None,  # no step twice in one there
                 wandb_project=cfg.wandb_project, wandb_name=cfg.wandb_name, wandb_group=cfg.wandb_group,
                 tensorboard=cfg.tensorboard, config=to_dict((model_cfg, cfg)))
    at_exit.callback(lambda: log.close(curves=not stop.asked))  # drawing takes seconds, which nobody should wait for

    def report():
        with log.forgive("report.html"):
            write_report(out_dir, model_cfg, cfg, step=state["step"], device=device, dtype=dtype,
                         n_ranks=ranks.world_size, resume=resume, curves=not stop.asked)
    if main:
        at_exit.callback(report)
    state["wandb_id"] = log.run_id
    saves = Saves(out_dir, sharded=cfg.tp > 1 or cfg.dp == "fsdp" and ranks.dp_size > 1, main=main, say=say,
                  step=state["step"] if resuming else None, model=model, optimizers=optimizers, scaler=scaler,
                  tokenizer=tokenizer, model_cfg=model_cfg, train_cfg=cfg, keep=cfg.keep)
    batches = Batches(train_data, seed=cfg.seed, micro_batch_size=cfg.micro_batch_size, rank=ranks.dp_rank,
                      world_size=ranks.dp_size, start_seq=state["seqs_seen"], device=device)
    at_exit.callback(batches.close)
    counts, ramp = num_params(model_cfg), min(cfg.ramp_steps, cfg.max_steps)
    flops = flops_per_token(model_cfg, cfg.seq_len, train_data.mean_doc_len if cfg.doc_mask else None)
    flops = flops.get("doc_masked", flops["causal"])
    peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else peak_flops(device, dtype)
    say(describe((model_cfg, cfg)))
    say(f"{counts['total']:,} parameters, {counts['embedding'] / counts['total']:.1%} of them the table | {device}, "
        f"{str(dtype).removeprefix('torch.')}, {ranks.world_size} rank(s) | {train_data.n_tokens:,} training tokens | "
        f"{cfg.batch_tokens:,} a step = {ranks.dp_size} x {cfg.batch_tokens // micro_tokens} x {cfg.micro_batch_size} "
        f"x {cfg.seq_len}{f', half of them in the first {ramp:,}' if ramp else ''}")
    if main:  # the share is counted in the data, which need not be read by those who say nothing
        say(train_data.describe())
    for line in (*repeated(cfg, train_data.n_windows), *describe_groups(optimizers, model), *forgotten(model)):
        say(line)

    # 8. loop --------------------------------------------------------------------------------------------------------
    bar = tqdm(total=cfg.max_steps, initial=state["step"], unit="step", dynamic_ncols=True,
               bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]",
               disable=None if main else True)  # None: only on a terminal
    at_exit.callback(bar.close)
    first_step = state["step"]
    gc.collect()
    gc.freeze()  # what is there stays: no collection in the loop looks through it, which would hold up all ranks
    at_exit.callback(gc.unfreeze)
    # since the last log line: seconds of steps, steps, tokens, seconds without data
    clock, clock_steps, clock_tokens, wait = 0.0, 0, 0, 0.0
    while True:
        step = state["step"]
        last, leaving = step == cfg.max_steps, ranks.any(stop.asked, device)
        standing = dict(progress=state, data=train_data.data_fingerprint)  # what a checkpoint says of the run
        seen = dict(step=step, tokens=state["tokens"], flops=state["tokens"] * flops)
        if step == first_step or due(step, cfg.eval_interval):  # of parts of model.py, compiled, there are twins
            x, y, docs = batches.peek()
            for line in twins.check(model, x, y, docs if cfg.doc_mask else None, dtype=dtype, z_loss=cfg.z_loss,
                                    again=step > first_step):
                say(line)
        # save before evaluating: a failure there must not cost the weights.  Not amid bad steps: they may be to blame
        if step != saves.step and (last or leaving or due(step, cfg.save_interval) and not state["bad_steps"]):
            saves.save("ckpt_last", standing, final=last or leaving)
        if not leaving and (cfg.eval_interval and (last or due(step, cfg.eval_interval)) or
                            cfg.eval_first and step == 0):
            windows = iterate_windows(val_data, cfg.micro_batch_size, rank=ranks.dp_rank, world_size=ranks.dp_size,
                                      max_windows=max(cfg.eval_tokens // cfg.seq_len, 1))
            held = evaluate(whole(model, cfg.compile), stop.cut_short(windows), token_bytes, device=device, dtype=dtype,
                            ranks=ranks, rows=cfg.micro_batch_size, doc_mask=cfg.doc_mask)
            leaving = ranks.any(stop.asked, device)  # then it has not seen all windows
            if not leaving:
                log.write(**seen, val_loss=held["loss"], val_bpb=held["bpb"], val_tokens=held["tokens"])
                say(f"step {step:>6}/{cfg.max_steps} | held out: loss {held['loss']:.4f} | ppl {held['ppl']:.2f} | "
                    f"{held['bpb']:.4f} bits per byte")
                if held["loss"] < (math.inf if state["best_val"] is None else state["best_val"]):  # false for NaN
                    state["best_val"] = held["loss"]
                    saves.save("ckpt_best", standing)
        if not leaving and cfg.sample_interval and (last or due(step, cfg.sample_interval)):
            complete = whole(model)  # by all ranks together
            if main:
                with log.forgive("a sample"), autocast(device, dtype):
                    ids = generate(twins.check_cache(complete), [[tokenizer.boundary_id]], temperature=0.8, top_p=0.95,
                                   max_new_tokens=min(128, model_cfg.max_seq_len), seed=cfg.seed,
                                   stop_ids=[tokenizer.boundary_id])[0]
                    text = tokenizer.decode(ids)
                    log.write(step=step, sample=text)
                    say(f"--- sample at step {step}\n{visible(text) or '(it ended at once)'}\n---")
        if leaving and step != saves.step:  # asked to stop during the evaluation
            saves.save("ckpt_last", standing, final=True)
        if last or leaving:
            saves.finish()
            say(f"stopped at step {step} of {cfg.max_steps}; go on with: {resume}" if not last else
                f"saved in {out_dir}{', stopped without a last evaluation' * leaving}: python "
                f"{'eval' if leaving else 'sample'}.py {shlex.quote(str(out_dir))}{talk * (not leaving)}")
            break

        began = time.perf_counter()
        scale, step_tokens = schedule(cfg, step), cfg.step_tokens(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
        totals = torch.zeros(2, device=device)  # nats, valid tokens
        for micro_step in range(step_tokens // micro_tokens):
            fetching = time.perf_counter()
            x, y, docs = next(batches)  # (b, T) each
            wait += time.perf_counter() - fetching
            torch.manual_seed(hash((cfg.seed, step, micro_step, ranks.dp_rank)) % 2**63)  # resumed runs draw the same
            sync_gradients(replica, (micro_step + 1) * micro_tokens == step_tokens)  # gradients travel once a step
            with autocast(device, dtype):
                nats = replica(x, y, docs=docs if cfg.doc_mask else None, z_loss=cfg.z_loss, reduction="sum")
            # divided by what the step holds, not per micro-batch: each token weighs the same; averaged over ranks
            scaler.scale(nats * (ranks.dp_size / step_tokens)).backward()
            totals += torch.stack((nats.detach(), (y != -100).sum()))
        finish_gradients(model, ranks)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        ranks.sum(totals)
        correction = step_tokens / totals[1].clamp(min=1)  # 1 unless targets were ignored
        grads = [p.grad for p in params if p.grad is not None]
        norm = total_norm(grads) * correction  # before clipping; the same on every rank
        nats, n_valid, grad_norm = torch.stack((*totals, norm)).tolist()  # the one wait for the device in a step
        finite = math.isfinite(nats + grad_norm)  # for all ranks alike: an inf spreads to all
        spike, skip = spikes.judge(state["norms"], grad_norm, cfg.skip_spikes)
        skip = bool(cfg.skip_spikes) and ranks.any(skip, device)
        if spike:
            state["spikes"] += 1
            log.write(step=step + 1, spike=grad_norm, skipped=skip)
            say(f"step {step}: spike {state['spikes']}, a gradient norm of {grad_norm:.3g}{'; skipped' * skip}")
        if finite and not skip:
            clip = (cfg.grad_clip / (norm + 1e-6)).clamp(max=1) if cfg.grad_clip else 1.0
            torch._foreach_mul_([local(grad) for grad in grads], correction * clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
        state["bad_steps"] = 0 if finite else state["bad_steps"] + 1
        if not finite:
            what = "loss" if math.isfinite(grad_norm) else "gradient"
            say(f"step {step}: the {what} is not finite; the step is skipped ({state['bad_steps']} in a row)")
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        del grads  # else they are held until the next step's are there
        n_valid = int(n_valid)
        state |= {"step": step + 1, "seqs_seen": state["seqs_seen"] + step_tokens // cfg.seq_len,
                  "tokens": state["tokens"] + n_valid}
        if math.isfinite(nats):
            state["unlogged"] = [state["unlogged"][0] + nats, state["unlogged"][1] + (n_valid or 1e-9)]  # no target: 0
        if state["bad_steps"] >= cfg.max_bad_steps:
            good = "No checkpoint was saved before." if saves.step is None else (
                f"The last good checkpoint is {out_dir / 'ckpt_last'} (step {saves.step}).")
            raise RunFailed(f"{state['bad_steps']} steps in a row had a {what} that is not finite.\n  {good} Resume "
                            "with lower learning rates or --dtype=float32.")
        clock, clock_steps, clock_tokens = clock + time.perf_counter() - began, clock_steps + 1, clock_tokens + n_valid
        bar.update()
        logged = cfg.log_interval and (due(step + 1, cfg.log_interval) or step + 1 == cfg.max_steps)
        if logged:
            (nats, n_tokens), state["unlogged"] = state["unlogged"], [0.0, 0]
            loss, tok_per_s = nats / n_tokens if n_tokens else math.nan, clock_tokens / clock
            mfu = flops * tok_per_s / (peak * ranks.world_size) if peak else None
            passed, ahead = cfg.between(step + 1 - clock_steps, step + 1), cfg.between(step + 1, cfg.max_steps)
            left = tqdm.format_interval(clock * ahead / passed)  # by tokens: behind a ramp a step takes twice as long
            log.write(step=step + 1, loss=loss, lr=scale * cfg.adamw_lr, lr_scale=scale, grad_norm=grad_norm,
                      tok_per_s=round(tok_per_s), step_ms=clock / clock_steps * 1e3, mfu=mfu, data_wait=wait / clock,
                      tokens=state["tokens"], flops=state["tokens"] * flops, spikes=state["spikes"])
            bar.set_postfix_str(f"loss {loss:.3f}, {tok_per_s:,.0f} tok/s, {left} left")
            if bar.disable:
                say(f"step {step + 1:>6}/{cfg.max_steps} | loss {loss:.4f} | lr {scale * cfg.adamw_lr:.1e} | grad "
                    f"{grad_norm:.2f} | {tok_per_s:>9,.0f} tok/s | {f'mfu {mfu:.1%} | ' if mfu else ''}{left} left")
        if logged or step == first_step:  # the first compiles and warms up: no part of the average
            clock, clock_steps, clock_tokens, wait = 0.0, 0, 0, 0.0
    # 9. close: at_exit writes report and curves, closes the log, ends the threads, gives the signals back ------------


def tell(main: bool, text: str):
    """Print above the progress bar.  Nobody may be there to read it: a closed pipe or terminal stops no run."""
    if main:
        try:
            tqdm.write(text)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # else Python tries again at exit and ends with 120


def due(step: int, interval: int) -> bool:
    return interval > 0 and step > 0 and step % interval == 0


def main():
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # None if closed
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # samples, on a console that cannot show them
    warn_in_sentences("train.py")
    try:
        run(*load((ModelConfig, TrainConfig), sys.argv[1:], doc=__doc__, check=check), typed=sys.argv)
    except (RunFailed, ValueError, OSError) as error:
        print(f"train.py: {explain(error)}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunFailed) else 2)


if __name__ == "__main__":
    main()
    os._exit(0)  # all is written, line by line; to take torch apart takes a second, or ten on a busy machine
