"""Settings: each value is checked against its declared type wherever it came from; each refusal says what to do."""

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from model import ModelConfig
from stack.config import NANOGPTS, ConfigError, Parser, describe, explain, load, nearest, save_json, to_dict
from stack.train_config import PATHS, TrainConfig

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    # where
    out_dir: str = "out/run"  # folder of the run
    note: str | None = None  # free text
    # how
    max_steps: int = 100  # optimizer steps,
                          # over the whole run
    lr: float = 3e-3  # peak
    seed: int = 1337
    top_k: int | None = None  # None = off
    compile: bool = True
    schedule: Literal["wsd", "cosine"] = "wsd"

    def problems(self):
        return ["max_steps must be positive. Set it to 1 or more."] if self.max_steps < 1 else []


def run(*argv):
    return load((Run,), list(argv))[0]


def refusal(*argv, classes=(Run,), **kw) -> str:
    with pytest.raises(ConfigError) as error:
        load(classes, list(argv), **kw)
    return str(error.value)


@pytest.mark.parametrize("argv, field, value", [
    (["--lr=1"], "lr", 1.0), (["--lr", "1e-4"], "lr", 1e-4), (["--lr=0"], "lr", 0.0),
    (["--max_steps=1e3"], "max_steps", 1000), (["--max_steps", "2_000"], "max_steps", 2000),
    (["--max-steps=7"], "max_steps", 7), (["--max_steps=9007199254740993"], "max_steps", 2**53 + 1),
    (["--seed=-1"], "seed", -1), (["--seed", "-1"], "seed", -1),
    (["--out_dir=runs/a=b"], "out_dir", "runs/a=b"), (["--out_dir=123"], "out_dir", "123"),
    (["--out_dir=None"], "out_dir", "None"), (["--out_dir="], "out_dir", ""),
    (["--out_dir", "true"], "out_dir", "true"),
    (["--note=None"], "note", None), (["--note=1e3"], "note", "1e3"),
    (["--top_k=None"], "top_k", None), (["--top_k=5"], "top_k", 5),
    (["--compile=false"], "compile", False), (["--compile=False"], "compile", False),
    (["--compile=0"], "compile", False), (["--compile", "false"], "compile", False),
    (["--compile=true"], "compile", True), (["--compile=1"], "compile", True),
    (["--compile=0", "--compile"], "compile", True), (["--compile=0", "--compile", "--lr=1"], "compile", True),
    (["--schedule=cosine"], "schedule", "cosine"), (["--seed=1", "--seed=2"], "seed", 2),
])
def test_accepted_as_declared(argv, field, value):
    got = getattr(run(*argv), field)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("argv, says", [
    (["--max_steps=2.5"], "int, not '2.5'"), (["--max_steps=many"], "max_steps must be int"),
    (["--max_steps="], "int, not ''"), (["--max_steps=inf"], "int"), (["--max_steps=1e400"], "int"),
    (["--max_steps=None"], "int, not 'None'"), (["--lr=nan"], "lr must be float"), (["--lr=fast"], "float"),
    (["--compile=maybe"], "true|false"), (["--schedule=cosin"], "wsd|cosine"), (["--top_k=1.5"], "int|None"),
    (["seed=8"], "Write --seed=8."), (["-seed=8"], "Write --seed=8."), (["--seed"], "--seed needs a value"),
    (["--seed", "--lr=1"], "--seed needs a value"), (["--max_step=3"], "Did you mean max_steps?"),
    (["--lerning_rate", "1e-3"], "no setting 'lerning_rate'"), (["--no_compile"], "Did you mean compile?"),
    (["--k=3"], "Did you mean top_k?"), (["--max_iters=9"], "nanoGPT's max_iters is max_steps here."),
    (["--max_iter", "9"], "max_steps"), (["--block_size=9"], "--help lists"),
    (["--max_steps=0"], "Set it to 1 or more."), (["nowhere.py"], "nowhere.py not found"),
])
def test_refused_with_reason(argv, says):
    assert says in refusal(*argv)


def test_nanogpts_names_are_known():
    """Each is answered with a setting that there is; none is one of ours."""
    ours = {*ModelConfig.__dataclass_fields__, *TrainConfig.__dataclass_fields__}
    for name in ("block_size", "n_embd", "n_layer", "n_head", "learning_rate", "max_iters", "eval_iters", "batch_size",
                 "gradient_accumulation_steps", "warmup_iters", "lr_decay_iters", "min_lr", "dataset", "decay_lr"):
        assert nearest(name, ours).startswith(f" nanoGPT's {name} is ") and name not in ours
    assert nearest("eval_only", ours) == " nanoGPT's eval_only is another command here: python eval.py RUN."
    assert "nccl for --device cuda" in nearest("backend", ours) and "batch_tokens" in nearest("batch_token", ours)
    assert nearest("n_head", ours) == " nanoGPT's n_head is n_heads and n_kv_heads here."
    assert "n_embd is d_model" in refusal("--n_embd=768", classes=(ModelConfig, TrainConfig))
    for name, mine in NANOGPTS.items():
        assert {*mine.split()} <= {*ours, "prompt"} and name not in ours


def test_flags_of_argparse_are_answered_likewise(capsys):
    """Of a command of commands, with those of the command that was named; hidden ones are not advised."""
    parser = Parser(prog="tool")
    commands = parser.add_subparsers(dest="command")
    one, two = commands.add_parser("one"), commands.add_parser("two")
    one.add_argument("--seq_len", type=int)
    one.add_argument("--zebra", help=argparse.SUPPRESS)
    two.add_argument("--sequence")
    for words, says in ((["one", "--seq-len", "3"], "Did you mean --seq_len?"), (["one", "-seq_len=3"], "--seq_len?"),
                        (["one", "--seqlen=3", "x"], "--seqlen=3 x. Did you mean --seq_len?"),
                        (["one", "--block_size=3"], "nanoGPT's block_size is --seq_len here."),
                        (["two", "--block_size=3"], "--help lists them all."), (["two", "--se=1"], "--help lists"),
                        (["one", "--zebro=1"], "--help lists"), (["two", "x"], "unrecognized arguments: x\n")):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(words)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and says in said and said.startswith(f"usage: tool {words[0]}"), words


@pytest.mark.parametrize("says", ["{} not found.\n  Make it.", "{}, the data, not found.", "{} is no folder."])
def test_where_a_relative_path_was_looked_for(tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    added = f"\n  It was looked for in {tmp_path}."
    assert explain(FileNotFoundError(says.format("data/x y"))) == says.format("data/x y") + added
    for path in (tmp_path / "data", "there"):
        assert explain(FileNotFoundError(says.format(path))) == says.format(path)
    try:
        open("nowhere.txt")
    except OSError as error:
        assert explain(error).endswith(added)
    assert explain(ValueError("seq_len (3) is wrong.")) == "seq_len (3) is wrong."
    assert explain(ConfigError(refusal("nowhere.py"))).endswith(added)


def test_a_command_warns_in_sentences():
    """As what is said, without the line of code that said it; what is for programmers stays as Python has it."""
    code = """
import warnings
from stack.config import as_command
with as_command("tool"):
    warnings.warn("This is slower. Install a compiler.")
    warnings.warn("old", FutureWarning)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.startswith("tool: This is slower. Install a compiler.\n<string>:6: FutureWarning: old\n")


def test_union_takes_the_narrowest_type():
    @dataclass
    class Device:
        index: str | int | None = None
    for text, value in (("3", 3), ("cuda", "cuda"), ("none", None)):
        assert load((Device,), [f"--index={text}"])[0].index == value


def test_all_problems_at_once():
    text = refusal("--max_step=3", "--lr=fast", "seed=1")
    assert all(part in text for part in ("--max_step=3", "--lr=fast", "--seed=1")) and text.startswith("3 ")
    text = refusal("--max_steps=0", "--n_heads=6", "--n_kv_heads=4", "--dropout=1", classes=(ModelConfig, Run))
    assert all(part in text for part in ("max_steps", "n_kv_heads", "dropout"))


def test_check_spans_dataclasses():
    def check(m, r):
        return ["too long"] if r.max_steps > m.max_seq_len else []
    assert refusal("--max_steps=3000", classes=(ModelConfig, Run), check=check) == "too long"
    load((ModelConfig, Run), ["--max_steps=30"], check=check)


def test_a_seed_beyond_64_bits_is_refused():
    assert "seed" in TrainConfig(seed=2**63).problems()[0] and TrainConfig(seed=2**63 - 1).problems() == []


@pytest.mark.parametrize("name, bad, good, says", [
    ("tp", 0, 1, "tp (0) must be positive."), ("keep", -1, 0, "keep (-1) must be 0 or more."),
    ("min_lr_fraction", 1.1, 1.0, "min_lr_fraction (1.1) must lie in [0, 1]."),
    ("beta2", 1.0, 0.0, "beta2 (1.0) must lie in [0, 1)."), ("peak_tflops", 0.0, None, "must be positive, or None."),
    ("skip_spikes", -1, 0, "must be 0 or more."), ("init_from", "resume:", "resume:ckpt_step_10", "behind resume:"),
    ("init_from", "resume:../b/ckpt_last", "resume:ckpt_best", "behind resume:"),
    ("out_dir", "out/\udcff", "out/\u00fc", "out_dir ('out/\\udcff') is no UTF-8"),
    ("out_dir", "", "out/x", "names no folder"), ("data_dir", "", "data/demo", "names no folder"),
    ("init_from", "hf:", "hf:models/m", "names no folder"), ("out_dir", "./data/stack100m/", "out/x", "one folder"),
    ("data_dir", "\udcfc", "data/demo", "is no UTF-8"), ("init_from", "hf:\udcfc", "hf:models/m", "is no UTF-8")])
def test_bounds(name, bad, good, says):
    found, = TrainConfig(**{name: bad}).problems()
    assert says in found and TrainConfig(**{name: good}).problems() == []


@pytest.mark.parametrize("given, meant", [("~/runs/x", "HOME/runs/x"), ("hf:~/m", "hf:HOME/m"), ("a/~", "a/~"),
                                          ("~", "HOME"), ("resume", "resume"), ("hf:m/~", "hf:m/~"),
                                          ("a/ckpt_step_20/", "a/ckpt_step_0000020/"), ("ckpt_step_7/x",) * 2,
                                          ("resume:ckpt_step_00020", "resume:ckpt_step_0000020")])
@pytest.mark.parametrize("name", PATHS)
def test_the_home_folder(monkeypatch, tmp_path, name, given, meant):
    """--out_dir=~/x is the user's, wherever it stands: a shell leaves the ~ behind = alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for cfg in (TrainConfig(**{name: given}), load((TrainConfig,), [f"--{name}={given}"])[0],
                load((TrainConfig,), [write(tmp_path, f"{name} = {given!r}")])[0]):
        assert getattr(cfg, name) == meant.replace("HOME", str(tmp_path))


def test_paths_of_the_other_commands(monkeypatch, tmp_path, capsys):
    """What a command's help calls a run, a file or a folder is a path: ~ is the user's home; text stays text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    p = Parser(prog="command.py")
    p.add_argument("run")
    p.add_argument("--prompt", metavar="TEXT")
    p.add_argument("--out", metavar="FILE", default="~/default")
    p.add_argument("--more", metavar="FOLDER", nargs="*")
    sub = Parser(prog="several.py")
    sub.add_subparsers(dest="which").add_parser("export").add_argument("source", metavar="RUN")
    args = p.parse_args(["~/a", "--prompt=~/b", "--more", "~/c", "d"])
    assert vars(args) == {"run": f"{tmp_path}/a", "prompt": "~/b", "out": f"{tmp_path}/default",
                          "more": [f"{tmp_path}/c", "d"]}
    assert sub.parse_args(["export", "~/a"]).source == f"{tmp_path}/a"
    for call in (lambda: p.parse_args(["\udcff"]), lambda: sub.parse_args(["export", "x/\udcff"])):
        with pytest.raises(SystemExit) as stop:
            call()
        assert stop.value.code == 2 and "is no UTF-8" in capsys.readouterr().err
    assert "'a\\udcff.py' is no UTF-8" in refusal("a\udcff.py")
    for words, name in (([""], "run"), (["a", "--out="], "--out"), (["a", "--more", "b", ""], "--more")):
        with pytest.raises(SystemExit) as stop:  # --out=$UNSET: it would be the current folder
            p.parse_args(words)
        assert stop.value.code == 2 and f"{name} is empty: a path is needed" in capsys.readouterr().err


def test_moments_need_a_run():
    """--keep_moments without a run to take them from is refused; with resume, as a command that goes on has it, not."""
    for init_from, problems in (("scratch", 1), ("hf:m", 1), ("out/x", 0), ("resume", 0), ("resume:ckpt_best", 0)):
        assert len(TrainConfig(init_from=init_from, keep_moments=True).problems()) == problems


def write(folder: Path, text: str, name="c.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_file_then_flags_and_nothing_leaks(tmp_path):
    path = write(tmp_path, "import math\nfrom os import path, sep\nfrom math import pi\n_half = 8\n"
                           "def double(x):\n    return 2 * x\n"
                           "max_steps = double(_half)\nlr = 1\nnote = None\nout_dir = f'out/{_half}'\ncompile = 0\n")
    cfg = run(path, "--lr=0.5", "--seed=3")
    assert cfg == Run(out_dir="out/8", max_steps=16, lr=0.5, seed=3, compile=False)
    assert run("--lr=0.5", path).lr == 0.5  # flags win wherever the file stands
    assert run("--compile", path).compile is True  # a bare flag does not swallow the file's name
    assert not hasattr(sys.modules["stack.config"], "max_steps") and "_half" not in globals()


@pytest.mark.parametrize("text, says", [
    ("learning_rat = 1e-3", "learning_rat"), ("max_step = 3", "Did you mean max_steps?"),
    ("max_steps = 2.5", "max_steps must be int, not 2.5"), ("max_steps = '30'", "int, not '30'"),
    ("max_steps = True", "int, not True"), ("lr = 'fast'", "float"), ("compile = 'false'", "true|false"),
    ("out_dir = 123", "Write out_dir = '123'."), ("schedule = 'cosin'", "wsd|cosine"), ("seed = None", "int, not None"),
    ("seed = 1\nlr = 1 +\n", "line 2: SyntaxError"), ("seed = 1\n\nlr = nope\n", "line 3: NameError"),
    ("import not_a_module_anywhere", "line 1: ModuleNotFoundError"),
])
def test_file_passes_the_same_check(tmp_path, text, says):
    message = refusal(write(tmp_path, text))
    assert says in message and "c.py" in message


def test_float_of_a_file_counts_as_int_only_if_whole(tmp_path):
    assert run(write(tmp_path, "max_steps = 1e3")).max_steps == 1000


def test_file_builds_on_another(tmp_path, monkeypatch):
    write(tmp_path, "max_steps = 7\nlr = 2", "base_of_test_config.py")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = run(write(tmp_path, "from base_of_test_config import *\nlr = 3"))
    assert (cfg.max_steps, cfg.lr) == (7, 3.0)


def test_bom_folder_and_second_file(tmp_path):
    assert run(write(tmp_path, "\ufeffseed = 5")).seed == 5
    write(tmp_path, "sources = []", "data_c.py")
    assert refusal(str(tmp_path)) == f"config file {tmp_path} not found. There is: {tmp_path / 'c.py'}."  # no recipe
    assert "one config file" in refusal(write(tmp_path, ""), write(tmp_path, "", "d.py"))
    os.mkdir(tmp_path / "a=b")
    assert run(write(tmp_path / "a=b", "seed = 6")).seed == 6  # "=" in a path that exists is no setting


def test_json_round_trip(tmp_path):
    made = load((ModelConfig, Run), ["--lr=0.1", "--note=ünï", "--rope_theta=41830.5", "--top_k=3"])
    save_json(tmp_path / "config.json", made)
    assert load((ModelConfig, Run), [str(tmp_path / "config.json")]) == made
    assert os.listdir(tmp_path) == ["config.json"]
    assert to_dict(made)["lr"] == 0.1
    assert "int" in refusal(write(tmp_path, '{"seed": "x"}', "broken.json"))
    assert "broken.json" in refusal(write(tmp_path, '{"seed": ', "broken.json"))
    assert "broken.json" in refusal(write(tmp_path, "[1, 2]", "broken.json"))
    os.mkdir(tmp_path / "ckpt_best")
    os.mkdir(tmp_path / "else")
    for folder in (tmp_path, f"{tmp_path}/", tmp_path / "ckpt_best", f"{tmp_path / 'ckpt_best'}/"):  # a run is a config
        here = replace(made[1], seed=4, out_dir=str(tmp_path))  # and where it lies, not where it was made, goes on
        assert load((ModelConfig, Run), [str(folder), "--seed=4"])[1] == here
    assert "not found" in refusal(str(tmp_path / "else")) and "not found" in refusal(str(tmp_path / "ckpt_not_there"))


def test_describe_groups_and_marks():
    text = describe(load((ModelConfig, Run), ["--lr=0.1"]))
    assert "ModelConfig: vocab_size=32768" in text and "lr=0.1*" in text and "seed=1337 " in text
    assert text.endswith("\n* not the default")
    assert max(map(len, text.splitlines())) <= 110


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        load((ModelConfig, Run), ["--lr=oops", "--help"], doc="What it is.")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.startswith("What it is.")
    for part in ("--max_steps int (100)", "optimizer steps, over the whole run", "--top_k int|None (None)",
                 "None = off", "--schedule wsd|cosine ('wsd')", "--compile true|false (True)",
                 "  where\n    --out_dir"):
        assert part in text
    for field in (*ModelConfig.__dataclass_fields__, *Run.__dataclass_fields__):
        assert f"--{field} " in text


def test_help_into_a_closed_pipe():
    """`--help | head -1` ends quietly."""
    code = "from stack import config, train_config; config.load((train_config.TrainConfig,), ['--help'])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONUNBUFFERED": ""})
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, b"")


def test_command_refuses_in_one_message_and_imports_nothing_but_pythons_own(tmp_path):
    command = tmp_path / "command.py"
    command.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from dataclasses import dataclass
before = set(sys.modules)
from stack.config import ConfigError, load
@dataclass
class Run:
    batch_size: int = 1  # sequences
try:
    load((Run,), sys.argv[1:], doc="A command.")
except ConfigError as error:
    sys.exit(print(f"error: {{error}}", file=sys.stderr) or 2)
finally:
    print({{name.partition(".")[0] for name in set(sys.modules) - before}} - {{*sys.stdlib_module_names}})
""")
    done = subprocess.run([sys.executable, command, "batch_size=8"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Write --batch_size=8." in done.stderr
    done = subprocess.run([sys.executable, command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--batch_size int (1)" in done.stdout
    assert done.stdout.splitlines()[-1] == "{'stack'}"


@pytest.mark.parametrize("command", ["train", "sample", "eval", "account", "convert", "prepare", "bench.__main__"])
def test_torch_loads_behind_what_its_threads_are_told(command):
    """OpenMP reads GOMP_SPINCOUNT once, as it is loaded; what the user has set stays."""
    watch = ("import builtins, os, runpy, sys\nload = builtins.__import__\n"
             "def look(name, *more):\n"
             "    if name.split('.')[0] == 'torch' and os.environ.get('GOMP_SPINCOUNT') is None: os._exit(7)\n"
             "    return load(name, *more)\n"
             f"builtins.__import__ = look\nimport {command}\nprint(os.environ['GOMP_SPINCOUNT'])")
    for set_by_user, spins in ((None, "3000"), ("77", "77")):
        env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
        env |= {"GOMP_SPINCOUNT": set_by_user} if set_by_user else {}
        done = subprocess.run([sys.executable, "-c", watch], cwd=ROOT, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, spins), done.stderr


@pytest.fixture
def loading(tmp_path):
    """An environment in which importing a large package is met by Ctrl-C, of which nothing else is heard, as torch does
    with numpy."""
    for name in ("numpy", "torch", "matplotlib"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(
            "import contextlib, os, signal\nwith contextlib.suppress(KeyboardInterrupt):\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(1000): pass\nprint('went on')\n")
    return os.environ | {"PYTHONPATH": str(tmp_path / "packages")}


@pytest.mark.parametrize("argv", ["train.py configs/demo.py", "sample.py out/x --prompt x", "eval.py out/x",
                                  "account.py configs/demo.py", "convert.py export out/x out/y", "-m bench step",
                                  "prepare.py stdlib --out out/x", "plot.py {run}"])
def test_ctrl_c_while_torch_loads(argv, loading, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1.0, "tokens": 8, "flops": 8, "seconds": 1}\n')
    argv = argv.format(run=tmp_path).split()
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=loading, capture_output=True, text=True)
    name = "bench" if argv[0] == "-m" else argv[0]
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{name}: stopped\n")


def test_ctrl_c_is_said(tmp_path):
    """Later than that it is an exception, so that what a command began is tidied up, and ends in the same words."""
    os.mkfifo(tmp_path / "prompt")
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", "out/x", "--prompt_file", tmp_path / "prompt"],
                               stderr=subprocess.PIPE, text=True)
    with open(tmp_path / "prompt", "w"):  # once the other side reads
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "\nsample.py: stopped\n" and process.returncode == 130


def test_ctrl_c_elsewhere_is_pythons():
    """In a notebook, a test or a program of one's own, whose file is no command's, importing changes nothing."""
    code = ("import signal, sys\nimport stack.config\n"
            "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\nraise KeyboardInterrupt")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith("KeyboardInterrupt\n") and "Traceback" in done.stderr
