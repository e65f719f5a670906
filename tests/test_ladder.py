"""The ladder: its law is found again in made losses, its plan costs what account.py says, and a real one, stopped and
gone on with, ends where one ends that was never stopped."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs

import account
import ladder
import train as training
from model import ModelConfig
from stack import law as law_py
from stack import rungs
from stack.checkpoint.folder import occupied
from stack.config import load, save_json
from stack.law import bootstrap, fit, interval, predict
from stack.log import RunLog
from stack.optim import rates
from stack.train_config import TrainConfig

RUN_TRAIN = ladder.run_train  # as a process; `tiny` has training in this one
LAW = np.array([math.log(1.2), math.log(30), math.log(300), 0.35])


def points(noise: float = 0.0, seed: int = 0):
    """Parameters, tokens and losses of four sizes and four lengths that follow LAW but for `noise`."""
    n = np.repeat([2e5, 4e5, 8e5, 1.6e6], 4)
    d = n * np.tile([5, 10, 20, 40], 4)
    return n, d, predict(LAW, n, d) * np.exp(np.random.default_rng(seed).normal(0, noise, 16))


def test_law_is_found_again():
    """Of losses without noise the four constants; of losses with noise, and one run that went wrong, what the law says
    of 36 times the FLOPs, within the interval."""
    n, d, loss = points()
    np.testing.assert_allclose(fit(n, d, loss), LAW, rtol=2e-2)
    far = (6 * n[-1], 6 * d[-2])
    inside = []
    for seed in range(2):
        n, d, loss = points(noise=0.002, seed=seed)
        loss[5] *= 1.1
        law = fit(n, d, loss)
        low, high = interval([predict(one, *far) for one in bootstrap(law, n, d, loss)])
        assert low < high < 1.2 * low and predict(law, *far) == pytest.approx(predict(LAW, *far), rel=0.03)
        inside.append(low <= predict(LAW, *far) <= high)
    assert all(inside)


def test_draws_are_no_narrower_than_the_noise():
    """More noise, a wider interval; the same losses, the same one."""
    widths = []
    for noise in (0.0005, 0.004):
        n, d, loss = points(noise)
        law = fit(n, d, loss)
        low, high = interval([predict(one, 1e7, 2e8) for one in bootstrap(law, n, d, loss)])
        widths.append(high - low)
    assert widths[1] > 2 * widths[0] > 0


def test_what_is_off_is_said():
    """Where the law missed what was held out by more than 2 % the table warns; the interval is wider by the miss."""
    points = [dict(held_out=False, predicted=9.0, loss=3.0), dict(held_out=True, predicted=3.03, loss=3.0),
              dict(held_out=True, predicted=2.97, loss=3.0)]
    assert law_py.warning(points, None) == [] and law_py.missed(points) == pytest.approx(0.01, rel=0.02)
    points[1]["predicted"] = 3.2
    assert "6.7%" in law_py.warning(points, None)[0]
    points[1]["predicted"], points[2]["predicted"] = 3.0, 2.8  # the other way the logarithm is no longer the ratio
    assert "6.7%" in law_py.warning(points, None)[0] and "+0.00%" in table(points) and "-6.67%" in table(points)
    points[1]["predicted"], points[2]["predicted"] = 3.2, 2.97
    low, high = interval([2.0] * 20, off=law_py.missed(points))
    assert low == pytest.approx(2 / (3.2 / 3)) and high == pytest.approx(2 * 3.2 / 3)


def table(points, tokens=()):
    """What is printed of runs, and of widths that are predicted for so many tokens, with a parameter each."""
    sizes = [dict(width=8, parameters=1, tokens=d, loss=2.0, interval=[1.9, 2.1], bpb=None) for d in tokens or [20]]
    equal = dict(flops=1e12, sizes=sizes, best_width=8, tokens_per_parameter=9, tokens_per_parameter_interval=[4, 17.6])
    return law_py.table(dict(law=dict(E=1, A=1, B=1, a=0.3), points=[dict(run="w", tokens=20, parameters=1) | p
                                                                     for p in points], prediction=None,
                             equal_cost=equal))


def test_what_no_run_was_like_is_marked():
    """A row with fewer or more tokens per parameter than any run has a star, which is told of."""
    points = [dict(held_out=True, predicted=3.0, loss=3.0, tokens=d) for d in (5, 40)]
    said = table(points, [4, 5, 20, 40, 51])
    assert [line.split()[2] == "*" for line in said.splitlines() if line.startswith("width ")] == [
        True, False, False, False, True]
    assert "* no run here had so few or many tokens per parameter (5 to 40)" in said
    assert "*" not in table(points, [5, 40])


def test_the_best_size_is_no_surer_than_the_losses():
    """The best of widths has the lowest loss; as good are all within half a percent, by LAW's own arithmetic."""
    sizes = {width: (100 * width ** 2, 1e13 / width ** 2) for width in range(8, 200, 2)}
    width, (least, most) = law_py.best(LAW, sizes)
    loss = {other: float(predict(LAW, *size)) for other, size in sizes.items()}
    assert loss[width] == min(loss.values())
    for other, (n, d) in sizes.items():
        assert (least <= d / n <= most) is (loss[other] <= 1.005 * loss[width])
    assert least < sizes[width][1] / sizes[width][0] < most


def test_a_prediction_above_what_was_measured_is_said():
    """What is promised to a config must be below what less of a model reached on less text, and may be above a
    larger's."""
    own = dict(parameters=100, tokens=1000, loss=2.0)
    points = [dict(run=f"width-{n}-x{d}", held_out=True, parameters=n, tokens=d, loss=loss, predicted=loss)
              for n, d, loss in ((50, 1000, 2.1), (200, 900, 1.5), (50, 2000, 1.6))]
    assert law_py.warning(points, own) == []
    points += [points[0] | dict(loss=1.9, predicted=1.9)]
    said = " ".join(law_py.warning(points, own | dict(tokens=899)))
    assert "sees 899 tokens, fewer than any run here, 900 and more" in said
    said = " ".join(law_py.warning(points, own))
    assert "width-50-x1000 came to 1.9000" in said and "2.0000 predicted for it is too high" in said


def test_time():
    """A rung's first job compiles, the others start at once; what cost nothing but time is no part of FLOPs."""
    cfg, train = load((ModelConfig, TrainConfig), ["configs/stack100m.py"])
    plan = rungs.ladder(cfg, train, 48, Path("out/ladder"))
    seconds = [rungs.seconds(plan, [[1e9, 1e-6, start, cold], [2e9, 2e-6, start]])
               for start, cold in ((0, 0), (1, 1), (1, 31))]
    assert seconds[1] - seconds[0] == pytest.approx(20) and seconds[2] - seconds[1] == pytest.approx(4 * 30)
    said = rungs.cheapest({48: plan}, {48: 600.0}, 1e9, speed=[1.0])
    assert "itself takes 1e+09 FLOPs, less than that, and tells more" in said
    assert "takes 1e+19 FLOPs.\n" in rungs.cheapest({48: plan}, {48: 600.0}, 1e19, speed=[1.0])
    assert "10 minutes here" in said and f"{sum(r.cost() for r in plan) * 1.01:.3g}" in said
    small = rungs.ladder(replace(cfg, vocab_size=512), train, 48, Path("out/ladder"))  # no table to make smaller
    assert "--n_kv_heads" in said and "however busy" in said
    assert "--vocab_size" in said and "--vocab_size" not in rungs.cheapest({48: small}, {48: 600.0}, 1e9, speed=[1.0])
    assert rungs.family(replace(cfg, n_layers=3), 16).n_layers == 3 and rungs.family(cfg, 16).n_layers == 3


@pytest.mark.parametrize("token, flop, minutes", [(3e-5, 0, 24), (3e-5, 0, 60), (1e-5, 1e-12, 60), (0, 1e-11, 60)])
def test_a_budget_of_time(monkeypatch, token, flop, minutes):
    """What is promised is what the rungs take, whether a token costs the same at every width, as on a small machine,
    or by its FLOPs; and the ladder is the widest that fits.  What takes so long is said while it does."""
    cfg, train = load((ModelConfig, TrainConfig), ["configs/demo.py"])
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))

    def probe(rung, folder):
        assert b"timing" in file.getvalue()
        return [rung.flops_per_token, token + flop * rung.flops_per_token, 2]
    monkeypatch.setattr(ladder, "probe", probe)
    top, speed = ladder.choose(cfg, train, ladder.LadderConfig(budget=f"{minutes}m"), Path("out/ladder"))
    took = {}
    for width in rungs.tops(cfg):
        plan = rungs.ladder(cfg, train, width, Path("out/ladder"))
        took[width] = sum(rung.cost() * (token / rung.flops_per_token + flop) + 2 * 5 for rung in plan)
    assert rungs.seconds(rungs.ladder(cfg, train, top, Path("out/ladder")), speed) == pytest.approx(took[top])
    assert top == max(width for width in took if took[width] <= 60 * minutes)


def test_heads_of_a_rung():
    """Two key heads where the config has two, whatever the width, and as many queries to each as it has, or fewer."""
    for heads, kv_heads in ((8, 2), (8, 8), (8, 1), (9, 3), (2, 1), (1, 1)):
        cfg = ModelConfig(vocab_size=512, d_model=512, n_heads=heads, n_kv_heads=kv_heads, head_dim=32, d_ff=512)
        some = [rungs.family(cfg, width) for width in range(16, 520, 24)]
        assert all(not one.problems() and min(kv_heads, 2) <= one.n_kv_heads <= kv_heads for one in some)
        assert all(one.n_heads / one.n_kv_heads <= heads / kv_heads for one in some)
        assert rungs.family(cfg, 512) == cfg and all(one.n_heads <= heads for one in some)


@pytest.fixture(scope="module")
def stack100m():
    return load((ModelConfig, TrainConfig), ["configs/stack100m.py"])


def test_plan(stack100m):
    """Rungs have the config's shape, its data and its law's rates; what they cost is what they train, by account.py."""
    cfg, train = stack100m
    plan = rungs.ladder(cfg, train, 384, Path("out/ladder"))
    assert [(r.model.d_model, r.model.n_layers) for r in plan] == [(128, 8), (192, 11), (256, 15), (384, 22)]
    assert [r.n for r in plan] == [rungs.parameters(r.model) for r in plan]
    assert [r.held_out for r in plan] == [False, False, False, True]
    assert rungs.family(cfg, 512) == cfg
    for r in plan:
        assert not r.model.problems() and not r.trunk.problems() and r.trunk.batch_tokens % (
            r.trunk.micro_batch_size * 2048) == 0
        assert r.n * 39 < r.tokens[-1] < r.n * 41
        priced = account.account(r.model, replace(r.trunk, max_steps=r.ends[-1]))
        assert priced["flops_run"] == r.tokens[-1] * r.flops_per_token
        steps = r.starts[-1] + sum(end - start for start, end in zip(r.starts, r.ends, strict=True))
        assert r.cost() == steps * r.trunk.batch_tokens * priced["flops_causal"]
        assert (r.trunk.muon_lr, r.trunk.adamw_lr) == pytest.approx(
            rates(r.model, r.n * math.sqrt(200), r.trunk.batch_tokens))
    assert rungs.own_flops(cfg, train) == account.account(cfg, train)["flops_run"]
    twice = rungs.ladder(cfg, replace(train, muon_lr=2.4e-3), 384, Path("out/ladder"))
    known, _ = rates(cfg, 38147 * 524288, 524288)
    assert twice[0].trunk.muon_lr == pytest.approx(plan[0].trunk.muon_lr * 2.4e-3 / known)  # a number given: carried


def test_reach(stack100m):
    """What is within 300 times the largest fitted run gets a number; beyond, the ladder that it takes."""
    cfg, train = stack100m
    small = rungs.ladder(cfg, train, 96, Path("out/ladder"))
    said = rungs.beyond(cfg, train, Path("out/ladder"), small)
    assert "there will be no number" in said and "--device=cuda" in said
    cost = float(said.split("takes ")[2].split(" FLOPs")[0])
    plans = [rungs.ladder(cfg, train, top, Path("out/ladder")) for top in range(264, 360, 24)]
    at = [sum(r.cost() for r in plan) == pytest.approx(cost, rel=0.01) for plan in plans].index(True)
    short, enough = plans[at - 1:at + 1]
    assert rungs.beyond(cfg, train, Path("out/ladder"), enough) == ""
    assert rungs.reach(short) < rungs.own_flops(cfg, train) <= rungs.reach(enough)
    for steps, dear in ((train.max_steps, False), (2, True)):  # whether the config itself costs as little is said
        said = rungs.describe(cfg, replace(train, max_steps=steps), Path("out/ladder"), small, [], 10**9)
        assert ("Narrow models use" in said) is dear
    speed = [[small[0].flops_per_token, 1e-6, 1, 9], [small[3].flops_per_token, 1e-6, 1]]  # a microsecond for any token
    said = rungs.describe(cfg, train, Path("out/ladder"), small, speed, 10**9)
    assert f"own run takes {rungs.own_flops(cfg, train):.3g} FLOPs, some {train.tokens / 6e7:.0f} minutes here" in said
    for how, other in ((dict(), False), (dict(decay_fraction=0.0), True), (dict(schedule="cosine"), True)):
        plan = rungs.ladder(cfg, replace(train, **how), 96, Path("out/ladder"))
        said = rungs.describe(cfg, replace(train, **how), Path("out/ladder"), plan, [], 10**9)
        assert ("which the config does not" in said) is other


@pytest.fixture(scope="module")
def tiny(data, tmp_path_factory):
    """A config of 64 wide whose ladder, of three rungs and lengths of 1 and 2 tokens per parameter, takes seconds;
    call(name, *flags) runs the command on it, with train.py's loop in this process and without its pictures."""
    home = tmp_path_factory.mktemp("ladder")

    def call(name, *flags, budget="1e13"):
        configs = runs.settings(data, home / name / "run", d_model=64, n_layers=4, d_ff=176, n_heads=4, n_kv_heads=2,
                                batch_tokens=4096, micro_batch_size=128, max_steps=40, muon_lr=None, adamw_lr=None,
                                decay_fraction=0.25, log_interval=100)
        (home / name).mkdir(exist_ok=True)
        save_json(home / name / "run.json", configs)
        sys.argv = ["ladder.py", str(home / name / "run.json"), "--budget", budget, *flags]
        ladder.main()
        return home / name / "ladder-run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rungs, "POINTS", (1, 2))
        patch.setattr(rungs, "WIDTHS", (1 / 3, 1 / 2, 1))
        patch.setattr(law_py, "DRAWS", 5)
        patch.setattr(training, "write_report", lambda *_, **__: None)
        patch.setattr(RunLog, "plot", lambda self: None)
        patch.setattr(sys, "argv", [])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        patch.setattr(ladder, "run_train", lambda model, train, *flags, seen=None: training.run(
            model, replace(train, init_from=flags[0].split("=")[1] if flags else train.init_from)))
        yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def straight(tiny):
    """The folder of a ladder that was never stopped."""
    return tiny("straight")


def test_a_ladder_stopped_and_gone_on_with(tiny, straight, monkeypatch, capsys):
    """The same ladder.json whether it was interrupted or not, amid a trunk, twice, and amid a decay, with what was
    measured until then; the widest rung is no part of the fit.  Into a file it says how long it takes."""
    schedule = training.schedule
    for step in (3, 12, 22):  # of the first run that gets there: the trunk ends at 20, where its last decay begins

        def stopping(cfg, at, step=step):
            if at == step:
                os.kill(os.getpid(), signal.SIGINT)
            return schedule(cfg, at)
        monkeypatch.setattr(training, "schedule", stopping)
        with pytest.raises(SystemExit) as stopped:
            tiny("stopped")
        assert stopped.value.code == 1
    monkeypatch.setattr(training, "schedule", schedule)
    assert re.findall(r"(\S+): loss .* \d\d:\d\d to \d\d:\d\d left at this pace", capsys.readouterr().out) == [
        "width-16-x1"]
    (kept,) = json.loads((straight.parent.parent / "stopped" / straight.name / "ladder.json").read_text())["points"]
    one, two = (json.loads((folder / "ladder.json").read_text()) for folder in (straight, tiny("stopped")))
    assert one.pop("asked") | {"out_dir": ""} == two.pop("asked") | {"out_dir": ""}
    assert kept.items() <= one["points"][0].items() and one == two
    assert "width-16-x1: loss" in (said := capsys.readouterr().out) and not re.search(
        "width-16-x1: .* left", said)  # nothing of it was trained now
    assert (straight / "ladder.png").stat().st_size > 10_000
    held, fitted = ([p for p in one["points"] if p["held_out"] is kind] for kind in (True, False))
    assert len(held) == 2 and len(fitted) == 4 and all(p["bpb"] > 0 for p in held + fitted)
    n, d, loss = (np.array([p[key] for p in fitted]) for key in ("parameters", "tokens", "loss"))
    law = fit(n, d, loss)
    assert one["law"]["E"] == pytest.approx(math.exp(law[0]))
    assert held[0]["predicted"] == pytest.approx(float(predict(law, held[0]["parameters"], held[0]["tokens"])))
    low, high = one["prediction"]["interval"]
    assert 0 < low <= high and one["equal_cost"]["tokens_per_parameter"] > 0


def test_what_is_there_is_not_trained_again(tiny, straight, monkeypatch, capsys):
    """The command again, on a ladder that is whole, trains nothing and says the same."""
    def trained(*_, **__):
        raise AssertionError("it was trained already")
    monkeypatch.setattr(ladder, "run_train", trained)
    before = (straight / "ladder.json").read_text()
    tiny("straight")
    said = capsys.readouterr().out
    assert "never fitted" in said and "predicted, held out" in said and (straight / "ladder.json").read_text() == before


@pytest.mark.parametrize("name, flags", [
    ("straight", []),
    ("other", ["--optimizer=adamw", "--schedule=cosine", "--pos=learned", "--norm=layernorm", "--mlp=gelu",
               "--qk_norm=false", "--n_kv_heads=4", "--doc_mask=true", "--packing=best_fit", "--dropout=0.1"])])
def test_a_decay_is_the_run_of_that_length(tiny, tmp_path, name, flags):
    """A branch ends with the loss, to the bit, of a run that was made for its length from the start."""
    folder = tiny(name, *flags)
    cfg, train = load((ModelConfig, TrainConfig), [str(folder / "width-24-x1")])
    training.run(cfg, replace(train, out_dir=str(tmp_path / "alone"), init_from="scratch"))
    alone, branch = (runs.log(out, key="val_loss")[-1] for out in (tmp_path / "alone", train.out_dir))
    assert alone["val_loss"] == branch["val_loss"] and alone["step"] == branch["step"] == train.max_steps


def test_run_train_saves_when_it_is_stopped(data, tmp_path):
    """train.py as a process: SIGTERM to the ladder lets the run save, and the next one goes on; its failure is told."""
    configs = runs.settings(data, tmp_path / "run", max_steps=100_000, log_interval=5, muon_lr=None, adamw_lr=None)
    save_json(tmp_path / "c.json", configs)
    code = ("import signal, sys; import ladder; from stack.config import load; "
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
            f"ladder.run_train(*load((ladder.ModelConfig, ladder.TrainConfig), [{str(tmp_path / 'c.json')!r}]))")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(ladder.__file__).parent,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while ladder.last_step(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert "the same command goes on" in process.communicate(timeout=300)[1] and process.returncode == 143
    with occupied(tmp_path / "run"):  # train.py has ended
        pass
    assert 5 <= ladder.standing(tmp_path / "run") < 100_000
    with pytest.raises(ladder.RunFailed, match="ended with 2"):
        RUN_TRAIN(configs[0], replace(configs[1], data_dir=str(tmp_path / "none")))


@pytest.mark.parametrize("flags, said", [
    (["--budget", "1e6"], "--budget 1e6 is not enough: the smallest ladder below this model takes"),
    (["--budget", "soon"], "must be minutes, hours or FLOPs"), (["--budget", "-3m"], "must be positive"),
    (["--d_model=48"], "the model is 48 wide"), (["--data_dir=nowhere"], "nowhere not found"),
    (["--batch_tokens=4097"], "must be a multiple"), (["--seq_len=20000", "--max_seq_len=20000", "--batch_tokens=20000",
      "--micro_batch_size=1", "--plan"], "Split 'val' of")])
def test_refusals(tiny, flags, said, capsys):
    """What cannot be done is one message and exit code 2, before anything is trained."""
    with pytest.raises(SystemExit) as stopped:
        tiny("refused", *flags)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_plan_trains_nothing_and_other_settings_are_refused(tiny, straight, capsys):
    assert not tiny("planned", "--plan").exists() and "9 runs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tiny("straight", "--seed=2")
    assert "has a ladder of other settings: seed" in (said := capsys.readouterr().err) and "--out_dir=out/NAME" in said
    tiny("planned", "--plan", "--data_dir=nowhere")  # before there is any text
    assert "nowhere is not there" in (said := capsys.readouterr().out) and "9 runs" in said
    folder = tiny("orphaned", "--plan")
    (folder / "width-48").mkdir(parents=True)  # runs whose ladder.json is gone, and with it what they were made with
    begun = json.dumps({"asked": {}, "top": 48})
    for text in (None, "[1]", "{}", '{"asked": 3, "top": 48, "speed": []}', '{"asked": {}, "top": null, "speed": []}',
                 begun, begun[:-3], '{"rungs": 4}'):
        if text is not None:  # cut off, or somebody else's
            (folder / "ladder.json").write_text(text)
        with pytest.raises(SystemExit) as stopped:
            tiny("orphaned")
        assert stopped.value.code == 2 and "orphaned/ladder-run has no sound ladder.json" in capsys.readouterr().err


def test_another_model_is_refused(tiny, straight, monkeypatch, capsys):
    """Losses of a model.py that has changed since would be passed off as those of the one that there is."""
    monkeypatch.setattr(ladder, "model_code", lambda: "changed")
    with pytest.raises(SystemExit):
        tiny("straight")
    assert "has a ladder of other settings: model.py.\n" in capsys.readouterr().err


def test_a_run_that_outlived_its_ladder_keeps_its_folder(tiny, straight, capsys):
    """A killed ladder's train.py, amid its last evaluation, goes on: the next ladder does not clear it away."""
    out = next(straight.glob("width-*-x1"))
    log = (out / "log.jsonl").read_bytes()
    (out / "log.jsonl").write_bytes(b"")
    try:
        with occupied(out), pytest.raises(SystemExit) as stopped:
            tiny("straight")
        assert stopped.value.code == 2 and f"another process is training in {out}" in capsys.readouterr().err
        assert any(out.glob("ckpt_last*"))
    finally:
        (out / "log.jsonl").write_bytes(log)
