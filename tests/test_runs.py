"""runs/*.sh: every command line is one that its command takes, folders come from the commands before, and a run that is
there is gone on with."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import account
import convert
import eval as evaluation
import prepare
import sample
from model import ModelConfig
from stack.config import load
from stack.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "runs").glob("*.sh"))


def lines(script) -> list[list[str]]:
    """The commands of a script, as argument lists: `train RUN CONFIG ...` is that, functions' own lines are not."""
    text = script.read_text(encoding="utf-8")
    found = re.findall(r"^ *(?:test -e \S+ \|\| )?((?:python|train) .*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_commands_take_these_lines(script, monkeypatch):
    """Each goes through its command's own parser; runs, data sets and tokenizers are made before they are used."""
    monkeypatch.chdir(ROOT)
    subprocess.run(["bash", "-n", script], check=True)
    made, n = set(), 0
    for word, *argv in lines(script):
        if word == "train" or argv[0] == "train.py":
            run, config, *flags = argv if word == "train" else [None, *argv[1:]]
            _, cfg = load((ModelConfig, TrainConfig), [config, *flags])
            assert run in (None, cfg.out_dir) and cfg.data_dir in made
            assert cfg.init_from == "scratch" or re.sub("/ckpt_step.*", "", cfg.init_from) in made
            made.add(cfg.out_dir)
        elif argv[0] == "prepare.py":
            args = prepare.parse_args(argv[1:])
            assert not args.tokenizer or args.tokenizer in made
            made.add(args.out)
        elif argv[0] == "account.py":
            load((ModelConfig, TrainConfig, account.AccountConfig), argv[1:])
        elif argv[0] == "convert.py":
            with monkeypatch.context() as context:
                asked = []
                context.setattr(convert, "COMMANDS", {name: (lambda *given, to=asked: to.append(given), *rest)
                                                      for name, (_, *rest) in convert.COMMANDS.items()})
                convert.main(argv[1:])
            assert asked[0][0] in made
        else:
            args = {"eval.py": evaluation.parse, "sample.py": sample.parse}[argv[0]](argv[1:])
            assert args.run in made and (getattr(args, "data", None) or next(iter(made))) in made
        n += 1
    assert n > 8


def test_a_checkpoint_is_where_a_branch_finds_it():
    """Each configuration that branches from a numbered checkpoint names a step that its run keeps to the end, from
    before the decay."""
    branches = [load((ModelConfig, TrainConfig), [str(path)])[1] for path in (ROOT / "configs").glob("*anneal.py")
                if not path.stem.startswith("data_")]
    assert len(branches) == 2
    for cfg in branches:
        run, _, step = cfg.init_from.partition("/ckpt_step_")
        trunk = load((ModelConfig, TrainConfig), [str(ROOT / f"configs/{Path(run).name}.py")])[1]
        saved = [*range(trunk.save_interval, trunk.max_steps, trunk.save_interval), trunk.max_steps]
        assert int(step) in saved[-trunk.keep:] and len(step) == 7 and cfg.keep_moments
        assert int(step) <= trunk.max_steps * (1 - trunk.decay_fraction) < int(step) + trunk.save_interval
        if run == "out/demo":
            assert f"# from step {int(step)} of make demo" in (ROOT / "docs/midtraining.md").read_text(encoding="utf-8")


def noted(folder, script: str, also: str = ""):
    """Runs a script with commands that only note how they were called, and do what `also` says in Python."""
    for made in ("runs", ".venv/bin"):
        (folder / made).mkdir(parents=True)
    text = (ROOT / f"runs/{script}").read_text(encoding="utf-8").replace("make --silent", "true")
    (folder / f"runs/{script}").write_text(text)
    note = folder / ".venv/bin/python"
    note.write_text(f"#!{sys.executable}\nimport json, os, signal, sys\nprint(json.dumps(sys.argv[1:]))\n{also}\n")
    note.chmod(0o755)
    return subprocess.run(["bash", folder / f"runs/{script}"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_begins_after_a_signal(script, tmp_path):
    """A signal reaches script and command alike; train.py saves and ends well, and the next one must not begin."""
    (tmp_path / "out/demo/ckpt_last").mkdir(parents=True)
    done = noted(tmp_path, script.name, "if 'train.py' in sys.argv: os.kill(os.getppid(), signal.SIGINT)")
    assert done.returncode == 130
    assert '["train.py"' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("there", [False, True])
def test_speedrun_goes_on(there, tmp_path):
    """Runs that have a checkpoint are resumed, others begun."""
    for name in ("stack100m", "stack100m_anneal", "stack100m_chat"):
        (tmp_path / "out" / name / "ckpt_last").mkdir(parents=True) if there else None
    done = noted(tmp_path, "speedrun.sh")
    assert done.returncode == 0, done.stderr
    trained = [argv[1:] for argv in map(json.loads, done.stdout.splitlines()) if argv[0] == "train.py"]
    assert [argv[0] for argv in trained] == [f"configs/stack100m{name}.py" for name in ("", "_anneal", "_chat")]
    assert [argv[-1] == "--init_from=resume" for argv in trained] == [there] * 3


def test_demo_has_two_halves():
    """make demo and make chat are halves of runs/demo.sh, which knows no others."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"runs/demo\.sh (\w+)", makefile) == ["base", "chat"]
