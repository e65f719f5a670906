"""What a config will reach, before it runs: small models of its shape are trained, a law is fitted and carried up.

    python ladder.py configs/demo.py --budget 2h --plan        what it would train and cost; hours are timed first
    python ladder.py configs/demo.py --budget 2h               minutes (m) or hours (h) of this machine
    python ladder.py configs/stack100m.py --device=cuda --budget 6e17           or training FLOPs

Four rungs of the config's shape, the widest as wide as the budget pays for, the others 2/3, 1/2 and 1/3 as wide.  Each
is one run at a constant learning rate (rates in stack/optim.py, from the config's where that gives numbers), from which
decays branch at 5, 10, 20 and 40 tokens per parameter: each end is what a run of that length would have reached.  To
those of the three narrower rungs is fitted (arXiv 2203.15556, 2305.16264)

    loss = E + A / N^a + B / D^a        N parameters that multiply, D training tokens

The widest is never fitted: how far off it is predicted is printed, above 2 % with a warning.  No number is claimed for
more than 300 times the FLOPs of the largest fitted run (docs/scaling-laws.md).  The same command again goes on after a
stop.  Written to out/ladder-NAME: ladder.json, ladder.png.  Any setting of the config may follow as --key=value.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from stack.config import ROOT, RunFailed, as_command, load, not_installed, save_json, to_dict, written_aside

try:
    import numpy as np
    from tqdm import tqdm

    from model import ModelConfig
    from stack.checkpoint.folder import model_code, occupied, read_state
except ModuleNotFoundError as error:
    not_installed(error)

from stack.counts import build, flops_per_token
from stack.data.batches import TokenData
from stack.law import best, bootstrap, fit, interval, missed, plot, predict, table
from stack.log import read_log
from stack.rungs import Rung, cheapest, describe, family, ladder, own_flops, parameters, reach, seconds, tops
from stack.start import check
from stack.train_config import TrainConfig

PROBE_STEPS = 12


@dataclass
class LadderConfig:
    budget: str = "30m"  # for all rungs: 30m or 3h of this machine, or training FLOPs (3e17)
    plan: bool = False  # say what would be trained and stop

    def problems(self) -> list[str]:
        try:
            return [] if self.amount()[0] > 0 else [f"budget ({self.budget}) must be positive."]
        except ValueError:
            return [f"budget ({self.budget}) must be minutes, hours or FLOPs. Write --budget 30m, 3h or 3e17."]

    def amount(self) -> tuple[float, str]:
        """(30 * 60, "s") or (3e17, "FLOPs")."""
        number, unit = re.fullmatch(r"(.*?)([mh]?)", self.budget.strip()).groups()
        if not math.isfinite(float(number)):
            raise ValueError
        return float(number) * {"m": 60, "h": 3600, "": 1}[unit], "s" if unit else "FLOPs"


# the plan -------------------------------------------------------------------------------------------------------------

def choose(cfg: ModelConfig, train: TrainConfig, options: LadderConfig, folder: Path) -> tuple[int, list]:
    """The widest ladder that the budget pays for: (width of its widest rung, probes).  ValueError if there is none."""
    (amount, unit), began, speed = options.amount(), time.monotonic(), []
    if not tops(cfg):
        raise ValueError(f"the model is {cfg.d_model} wide, and a ladder's widest rung, {tops(cfg).start} at least, "
                         "must be narrower. Train the model itself: it is small enough.")
    ladders = {top: ladder(cfg, train, top, folder) for top in tops(cfg)}
    if unit == "s":
        print(f"timing {PROBE_STEPS} steps of two or three widths: minutes where none is compiled yet", flush=True)
        narrow, *_, wide = ladders[tops(cfg)[0]]
        cold, warm = (probe(narrow, folder) for _ in range(2))  # the first compiles
        speed = [[*warm, cold[-1]], probe(wide, folder)]  # a narrow model may be no faster a token than a wide one
        guess = max((top for top in ladders if seconds(ladders[top], speed) <= amount), default=tops(cfg)[0])
        speed[-1] = probe(ladders[guess][-1], folder)
        amount -= time.monotonic() - began
    cost = {top: seconds(rungs, speed) if speed else sum(rung.cost() for rung in rungs)
            for top, rungs in ladders.items()}
    if fits := [top for top, price in cost.items() if price <= amount]:
        return max(fits), speed
    raise ValueError(f"--budget {options.budget} is " + cheapest(ladders, cost, own_flops(cfg, train), speed))


def probe(rung: Rung, folder: Path) -> list[float]:
    """Trains a rung for some steps, to see how fast this machine is."""
    began = time.monotonic()
    train = replace(rung.trunk, out_dir=str(folder / "probe"), max_steps=PROBE_STEPS, warmup_steps=1, log_interval=4,
                    save_interval=0, keep=0)
    run_train(rung.model, train)
    per_token = 1 / read_log(folder / "probe" / "log.jsonl")[-1]["tok_per_s"]
    start = time.monotonic() - began - per_token * PROBE_STEPS * train.batch_tokens
    shutil.rmtree(folder / "probe")
    return [rung.flops_per_token, per_token, max(start, 0.0)]


# training -------------------------------------------------------------------------------------------------------------

def run_train(model: ModelConfig, train: TrainConfig, *flags: str, seen=lambda steps: None):
    """train.py in a process of its own, which saves and ends where this one is asked to.  seen(step) while it runs."""
    out = Path(train.out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_json(f"{out}.config.json", (model, train))
    with open(f"{out}.txt", "ab") as said:
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), f"{out}.config.json", *flags], stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # Ctrl-C comes from here, once
        try:
            while process.poll() is None:
                time.sleep(0.2)
                seen(last_step(out))
        except BaseException:
            process.terminate()
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("\nladder.py: ends once train.py has saved; then the same command goes on", file=sys.stderr)
            process.wait()
            raise
    if process.returncode:
        raise RunFailed(f"train.py ended with {process.returncode}. Its last words, in {out}.txt:\n"
                        + "\n".join(Path(f"{out}.txt").read_text(errors="replace").splitlines()[-5:]))


def last_step(out: Path) -> int:
    return max((line["step"] for line in read_log(out / "log.jsonl") if "step" in line), default=0)


def standing(folder: Path) -> int | None:
    """The step of a run's last checkpoint."""
    return read_state(folder, "last")["progress"]["step"] if any(folder.glob("ckpt_last*")) else None


def climb(rungs: list[Rung], keep) -> list[dict]:
    """Train what is not trained yet, one process after the other; the end of every decay.  keep(those so far)."""
    total = sum(np.array([rung.cost(), rung.cost() / rung.flops_per_token]) for rung in rungs)  # FLOPs, tokens
    points, done, here, began = [], 0 * total, 0 * total, time.monotonic()
    bar = tqdm(total=total[0], disable=None, dynamic_ncols=True, bar_format="{desc} {percentage:.0f}%|{bar}| {elapsed}")
    for rung in rungs:
        per_step = rung.trunk.batch_tokens * np.array([rung.flops_per_token, 1])
        for train, begin, end in rung.jobs():
            out, whole = Path(train.out_dir), begin == 0
            bar.set_description(out.name)

            def seen(step, begin=begin, end=end, done=done, per_step=per_step):
                bar.n = (done + min(max(step - begin, 0), end - begin) * per_step)[0]
                bar.refresh()
            if fresh := not finished(train, whole):
                if not whole and standing(out) in (None, end):  # not begun, or cut off amid its evaluation
                    with occupied(out):  # no train.py that outlived a ladder is at work in it
                        shutil.rmtree(out, ignore_errors=True)
                    fork(Path(rung.trunk.out_dir) / f"ckpt_step_{begin:07d}", out)
                at = standing(out)
                run_train(rung.model, train, *([] if at is None else ["--init_from=resume"]), seen=seen)
                if not finished(train, whole):
                    raise RunFailed(f"{out} diverged or stopped before step {end}: see {out}.txt. Run again to go on.")
                here += (end - (at or 0)) * per_step
            seen(end)
            done = done + (end - begin) * per_step
            if not whole:
                got, tokens = log_of(train)[-1], end * train.batch_tokens
                points.append({"run": out.name, "parameters": rung.n, "tokens": tokens, "held_out": rung.held_out,
                               "flops": tokens * rung.flops_per_token, "loss": got["val_loss"], "bpb": got["val_bpb"]})
                said = f"{out.name}: loss {got['val_loss']:.4f} after {tokens:,} tokens, {(done / total)[0]:.0%}"
                if fresh:  # a small machine takes its time by tokens, a large one by FLOPs
                    keep(points)
                    left = sorted((total - done) / here * (time.monotonic() - began))
                    said += f", {' to '.join(map(tqdm.format_interval, left))} left at this pace" if left[1] > 1 else ""
                tqdm.write(said)
    bar.close()
    return points


def log_of(train: TrainConfig) -> list[dict]:
    """What a run's log has of held-out text."""
    return [line for line in read_log(Path(train.out_dir) / "log.jsonl") if line.get("val_loss") is not None]


def finished(train: TrainConfig, whole: bool) -> bool:
    """A trunk is where its last decay begins; a decay was evaluated at its end."""
    if whole:
        return (standing(Path(train.out_dir)) or 0) >= train.max_steps
    return bool(log_of(train)) and log_of(train)[-1]["step"] == train.max_steps


def fork(checkpoint: Path, out: Path):
    """A run folder that resumes from another run's checkpoint: in links where the file system has them."""
    aside = out.with_name(out.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, aside / "ckpt_last", copy_function=os.link)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(checkpoint, aside / "ckpt_last")
    os.rename(aside, out)


# what it says ---------------------------------------------------------------------------------------------------------

def conclude(cfg: ModelConfig, train: TrainConfig, rungs: list[Rung], points: list[dict]) -> dict:
    """The law of the points that are not held out, how far off it is on those that are, and what it predicts."""
    n, d, loss = (np.array([p[key] for p in points if not p["held_out"]]) for key in ("parameters", "tokens", "loss"))
    law = fit(n, d, loss)
    drawn, per_nat = bootstrap(law, n, d, loss), points[0]["bpb"] and points[0]["bpb"] / points[0]["loss"]
    for p in points:
        p["predicted"] = float(predict(law, p["parameters"], p["tokens"]))

    def predicted(n, d) -> dict:
        value, between = float(predict(law, n, d)), interval([predict(one, n, d) for one in drawn], missed(points))
        return {"loss": value, "interval": between, "bpb": per_nat and value * per_nat,
                "bpb_interval": per_nat and [end * per_nat for end in between]}
    whole, furthest = own_flops(cfg, train), reach(rungs)
    cost, sizes = min(whole, furthest), {}
    for k in range(-32, 25):
        width = max(round(cfg.d_model * 2 ** (k / 8) / 8), 2) * 8
        other = build(family(cfg, width))
        sizes[width] = (parameters(other), cost / flops_per_token(other, train.seq_len)["causal"])
    width, _ = best(law, sizes)
    least, most = np.transpose([best(one, sizes)[1] for one in drawn])
    order, at = list(sizes), list(sizes).index(width)
    n, tokens = parameters(cfg), train.tokens
    return {
        "law": dict(zip(("E", "A", "B", "a"), map(float, (*np.exp(law[:3]), law[3])), strict=True)),
        "points": points, "flops": whole, "reach": furthest,
        "prediction": {"parameters": n, "tokens": tokens, **predicted(n, tokens)} if whole <= furthest else None,
        "equal_cost": {"flops": cost, "best_width": width, "tokens_per_parameter": sizes[width][1] / sizes[width][0],
                       "tokens_per_parameter_interval": [interval(least)[0], interval(most)[1]],
                       "sizes": [{"width": other, "parameters": sizes[other][0], "tokens": round(sizes[other][1]),
                                  **predicted(*sizes[other])} for other in order[max(at - 6, at % 2):at + 7:2]]}}


def main():
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the run under way saves first.  nohup's is ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with as_command("ladder.py"):
        scratch = "init_from must be scratch: a ladder has no other runs."
        cfg, train, options = load((ModelConfig, TrainConfig, LadderConfig), sys.argv[1:], doc=__doc__, check=lambda
                                   cfg, train, _: check(cfg, train) + [scratch] * (train.init_from != "scratch"))
        val, n_tokens = None, None
        if Path(train.data_dir).exists() or not options.plan or options.amount()[1] == "s":
            val = TokenData(  # decays end with it: what is wrong with it is said before a trunk is trained
                train.data_dir, "val", seq_len=train.seq_len, loss_on=train.loss_on, doc_mask=train.doc_mask)
            cfg = replace(cfg, vocab_size=min(cfg.vocab_size, val.vocab_size))
            n_tokens = sum(entry["tokens"] for entry in val.meta["splits"]["train"]["shards"])
        folder = Path(train.out_dir).parent / f"ladder-{Path(train.out_dir).name}"
        asked = {"budget": options.budget, "data": val and val.data_fingerprint, "model.py": model_code(),
                 **json.loads(json.dumps(to_dict((cfg, train))))}
        before = begun(folder)
        if before and (other := [key for key in asked if before["asked"].get(key) != asked[key]]):
            raise ValueError(f"{folder} has a ladder of other settings: {', '.join(other)}.\n  Set them back to go on "
                             "with it, or begin another: --out_dir=out/NAME puts it in out/ladder-NAME.")
        if not before:
            top, speed = choose(cfg, train, options, folder)
            before = {"asked": asked, "top": top, "speed": speed}
        rungs = ladder(cfg, train, before["top"], folder)
        print(describe(cfg, train, folder, rungs, before["speed"], n_tokens), flush=True)
        if options.plan:
            return
        write(folder, before)
        result = before | conclude(cfg, train, rungs, climb(rungs, keep=lambda points: write(
            folder, {key: before[key] for key in ("asked", "top", "speed")} | {"points": points})))
        write(folder, result)
        with written_aside(folder / "ladder.png") as aside:
            plot(result).savefig(aside, format="png", dpi=120)
        print(f"{table(result)}\nsaved in {folder}: ladder.json, ladder.png")


def begun(folder: Path) -> dict:
    """What ladder.json has of a ladder that was begun in a folder; {} where none was."""
    try:
        if not (folder / "ladder.json").exists() and not any(folder.glob("width-*")):
            return {}
        before = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
        kinds = {"asked": dict, "top": int, "speed": list}
        if not all(isinstance(before[key], kind) for key, kind in kinds.items()):
            raise ValueError
        return before
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # whose settings nobody knows: they would pass for any
        raise ValueError(f"{folder} has no sound ladder.json, which says of what its runs are. Move the folder away."
                         ) from None


def write(folder: Path, what: dict):
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / "ladder.json") as aside:
        aside.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
