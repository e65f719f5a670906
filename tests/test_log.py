"""The log is one JSON object a line, goes on over a resume, and whatever fails in it stops no run."""

import json
import math
import sys
import types
import unicodedata
import warnings

import pytest
import torch

from stack import log as log_module
from stack.log import SIGNS, RunLog, read_log, visible

CPU = torch.device("cpu")
BOUNDARY = 299


def test_lines_are_json(tmp_path):
    """One object a line, on disk at once; NaN and inf are null, since JSON has neither."""
    log = RunLog(tmp_path)
    log.write(step=1, loss=float("nan"), grad_norm=math.inf, lr=0.1)
    text = (tmp_path / "log.jsonl").read_text()  # before close: a killed run has its lines
    line = json.loads(text, parse_constant=pytest.fail)
    assert line.pop("seconds") >= 0 and line == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}
    log.close()


def test_resume_keeps_steps_monotone(tmp_path):
    """Lines behind the resumed step go, as do evaluations at it, which are made again; a cut line is no obstacle."""
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step=step, loss=1.0)
        log.write(step=step, val_loss=1.0)
    log.write(step=2, spike=9.0)
    log.close()
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"step": 4, "lo')
    log = RunLog(tmp_path, resume_step=2)
    log.write(step=2, val_loss=1.0)
    log.write(step=3, loss=2.0)
    log.close()
    assert [(line["step"], *line)[0:3:2] for line in read_log(tmp_path / "log.jsonl")] == [
        (1, "loss"), (1, "val_loss"), (2, "loss"), (2, "spike"), (2, "val_loss"), (3, "loss")]
    RunLog(tmp_path).close()  # a new run starts with an empty log
    assert read_log(tmp_path / "log.jsonl") == []


def test_lines_after_a_broken_one_are_read(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "los\n\xff\xfe\n{"step": 3}\n')
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 3]
    assert read_log(tmp_path / "nothing.jsonl") == []


def test_only_rank_0_writes(tmp_path):
    log = RunLog(tmp_path / "run", enabled=False, wandb_project="p")
    log.write(step=1, loss=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


class FakeWandb(types.ModuleType):
    """Fails where it is told to; remembers what it was given."""

    def __init__(self, *failing):
        super().__init__("wandb")
        self.failing, self.calls, self.id = failing, [], "abc123"

    def call(self, name, /, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        if name in self.failing:
            raise ConnectionError(f"{name}: no network")
        return self

    def init(self, **kwargs):
        self.id = kwargs["id"] or self.id
        return self.call("init", **kwargs)

    def log(self, *args, **kwargs):
        return self.call("log", *args, **kwargs)

    def finish(self):
        return self.call("finish")


@pytest.mark.parametrize("failing", ["init", "log", "finish", "import"])
def test_wandb_never_stops_a_run(tmp_path, monkeypatch, failing):
    """A service that is down, a raising log call and a missing package cost one warning; the file has every line."""
    monkeypatch.setitem(sys.modules, "wandb", None if failing == "import" else FakeWandb(failing))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = RunLog(tmp_path, wandb_project="p")
        for step in range(3):
            log.write(step=step, loss=1.0)
        log.close()
    assert [str(w.message).split(" failed")[0] for w in caught] == ["wandb"]
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [0, 1, 2]


def test_wandb_goes_on_in_its_run(tmp_path, monkeypatch):
    """The run's id is there to be saved; resuming with it continues the same curve at the same steps."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandb())
    log = RunLog(tmp_path, wandb_project="p", config={"a": 1})
    assert log.run_id == "abc123"
    log.write(step=5, loss=1.0)
    RunLog(tmp_path, wandb_project="p", resume_step=5, run_id="xyz")
    calls = [(name, kwargs.get("id"), kwargs.get("step")) for name, _, kwargs in wandb.calls]
    assert calls == [("init", None, None), ("log", None, 5), ("init", "xyz", None)]


def test_the_real_wandb(tmp_path, monkeypatch):
    """The package as it is, offline: two sittings of one run are recorded under one id, without a warning."""
    pytest.importorskip("wandb")
    for key, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(key, value)
    first = RunLog(tmp_path, wandb_project="p", config={"a": 1})
    first.write(step=1, loss=1.0)
    first.close()
    second = RunLog(tmp_path, wandb_project="p", resume_step=1, run_id=first.run_id)
    second.write(step=2, loss=1.0, sample="text")
    second.close()
    assert first.failed == second.failed == set() and first.run_id == second.run_id
    recorded = [p for p in tmp_path.rglob("*.wandb") if not p.parent.is_symlink()]
    assert recorded and {p.stem for p in recorded} == {f"run-{first.run_id}"}


@pytest.mark.parametrize("broken", ["write", "plot", "open"])
def test_a_full_disk_costs_lines(tmp_path, monkeypatch, broken):
    """ENOSPC while writing a line, drawing the curve or opening the file: one warning each, and on."""
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(RunLog if broken != "plot" else log_module, "plot" if broken != "plot" else "draw",
                        full if broken == "plot" else lambda log: None)
    if broken == "open":
        monkeypatch.setattr(log_module, "open", full, raising=False)
    with pytest.warns(UserWarning, match="goes on without it: OSError.*No space left") as caught:
        log = RunLog(tmp_path)
        if broken == "write":
            log.sinks["log.jsonl"].close()
            log.sinks["log.jsonl"] = types.SimpleNamespace(write=full, close=full)
        for step in range(3):
            log.write(step=step, loss=1.0)
            log.plot()
        log.close()
    assert len(caught) == 1


def test_seconds_go_on_over_a_resume(tmp_path, monkeypatch):
    """Every line says how long the run has taken: a resumed one goes on where its last kept line ended, without the
    time between, and without what was done in vain behind the checkpoint."""
    now = [1000.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])

    def steps(log, *numbers):
        for step in numbers:
            now[0] += 1.5
            log.write(step=step, loss=1.0)
            log.write(step=step, val_loss=1.0)
        log.sinks["log.jsonl"].close()
    steps(RunLog(tmp_path), 1, 2, 3, 4)
    now[0] += 5000
    steps(RunLog(tmp_path, resume_step=3), 4, 5)
    seconds = {line["step"]: line["seconds"] for line in read_log(tmp_path / "log.jsonl")}
    assert seconds == {1: 1.5, 2: 3.0, 3: 4.5, 4: 6.0, 5: 7.5}
    steps(RunLog(tmp_path), 1)
    assert read_log(tmp_path / "log.jsonl")[-1]["seconds"] == 1.5


def tensorboard_has(folder):
    """What TensorBoard shows of a run: {key: [(step, value), ...]}"""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {key: [(e.step, e.value) for e in events.Scalars(key)] for key in events.Tags()["scalars"]}


def test_tensorboard_has_the_log(tmp_path):
    """TensorBoard shows the log's numbers, once each and in order, after a kill, a resume and a new start too."""
    def in_log():
        lines, keys = read_log(tmp_path / "log.jsonl"), {}
        for line in lines:
            for key in line.keys() - {"step", "sample"}:
                if line[key] is not None:
                    keys.setdefault(key, []).append((line["step"], pytest.approx(line[key], rel=1e-6)))
        return keys
    for first, resume_step in ((1, None), (3, 2), (1, None)):
        log = RunLog(tmp_path, tensorboard=True, resume_step=resume_step)
        if resume_step:
            log.write(step=resume_step, val_loss=2.5)
        for step in range(first, first + 4):
            log.write(step=step, loss=float(step), mfu=None)
            log.write(step=step, val_loss=step + 0.5)
            log.write(step=step, sample="text")
        if resume_step:
            log.close()  # otherwise killed: what it wrote is on disk
        assert tensorboard_has(tmp_path / "tensorboard") == in_log()


def test_tensorboard_never_stops_a_run(tmp_path, monkeypatch):
    """A package that cannot be imported and a write that fails cost one warning; the file has every line."""
    for broken in ("import", "write"):
        if broken == "import":
            monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.warns(UserWarning, match="tensorboard failed") as caught:
            log = RunLog(tmp_path / broken if (tmp_path / broken).mkdir() is None else None, tensorboard=True)
            if broken == "write":
                monkeypatch.setattr(log.sinks["tensorboard"], "add_scalar", lambda *args: 1 / 0)
            for step in (1, 2):
                log.write(step=step, loss=1.0)
            log.close()
        assert len(caught) == 1 and len(read_log(tmp_path / broken / "log.jsonl")) == 2
        monkeypatch.undo()


def test_what_a_terminal_would_obey_is_spelled_out():
    """Every character that is a control, or of format and not to be seen; of text nothing else, in whatever pieces."""
    for c in map(chr, range(0x110000)):
        spelled = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t" + SIGNS
        assert visible(f"a{c}") == "a" + (repr(c)[1:-1] if spelled else c)
    assert visible("\u202etxt.exe\u2066 a\u200bb\ufeff\xad\U000e0041") == (
        r"\u202etxt.exe\u2066 a\u200bb\ufeff\xad\U000e0041")
    needed = ["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "👨🏽\u200d🚀", "می\u200cخواهم", "क्\u200dष", "ക്\u200c",
              "naïve Ελλάδα עברית"]
    hides = {"pass\u200dword": r"pass\u200dword", "привет\u200cм": r"привет\u200cм", "\u200dx": r"\u200dx",
             "👩\u200d\u200d👧": "👩\u200d\\u200d👧", "“\u200c": r"“\u200c"}
    for text, shown in {**hides, **{text: text for text in needed}}.items():
        assert visible(text) == "".join(visible(c, text[:i]) for i, c in enumerate(text)) == shown
