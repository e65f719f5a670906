"""The repository keeps its own rules: who imports whom, what importing costs, that every setting and config is used."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import model
from stack import config
from stack.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"train", "sample", "prepare", "eval", "account", "convert", "plot", "ladder", "bench"}
ROOMS = {  # whose files each folder of stack/ may import besides its own and those that stand in stack/ itself
    "stack.data": set(),
    "stack.checkpoint": {"stack.data", "stack.parallel"},
    "stack.parallel": set(),
    "stack.cpu": set(),
    "stack.exchange": {"stack.data"},
    "stack.evaluation": {"stack.data", "stack.exchange"},
}
ALONE = {  # what each file that stands in stack/ itself may import
    "stack.threads": set(), "stack.config": {"stack.threads"}, "stack.counts": set(), "stack.device": set(),
    "stack.optim": {"stack.counts"},
    "stack.compiled": set(), "stack.quantize": set(), "stack.spikes": set(),
    "stack.twins": {"stack.compiled", "stack.cpu", "stack.device"},
    "stack.memory": {"stack.optim"}, "stack.law": set(),
    "stack.roofline": {"stack.counts", "stack.device", "stack.memory", "stack.optim"},
    "stack.rungs": {"stack.counts", "stack.device", "stack.law", "stack.optim", "stack.train_config"},
    "stack.log": {"stack.config"},
    "stack.talk": {"stack.data"},
    "stack.train_config": {"stack.config"},
    "stack.resume": {"stack.config", "stack.optim", "stack.train_config"},
    "stack.start": {"stack.config", "stack.counts", "stack.parallel", "stack.train_config"},
    "stack.report": {"stack.config", "stack.counts", "stack.device", "stack.log", "stack.train_config"},
}
FILES = sorted(path for path in ROOT.rglob("*.py")
               if path.relative_to(ROOT).parts[0] in ("stack", "bench") or path.parent == ROOT)


def module(path) -> str:
    """stack/data/shards.py -> stack.data.shards, bench/__init__.py -> bench"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path) -> set[str]:
    """Modules a file imports, anywhere in it; `from stack.data import shards` is stack.data.shards."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports say whose they are"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in inside if name in MODULES} or {node.module}
    return names


MODULES = {module(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_follow_the_table(path):
    """Arrows go commands -> stack -> model.py, never up, never between commands; in stack/ as ROOMS says."""
    name = module(path)
    ours = (imported(path) & MODULES) - {name}
    if name.split(".")[0] in COMMANDS:
        assert not [other for other in ours if other.split(".")[0] in COMMANDS - {name.split(".")[0]}]
        return
    assert name == "model" or name.startswith("stack"), f"{path.name} is neither a command nor a part"
    room = name.rpartition(".")[0] if name not in ROOMS else name
    if room in ROOMS:
        allowed = [room, *ROOMS[room]]
        wrong = {other for other in ours - {"model", *ALONE} if not any(other.startswith(f"{r}.") for r in allowed)}
    else:
        allowed = ALONE.get(name, set())
        wrong = {other for other in ours - {"model"} if not any(f"{other}.".startswith(f"{a}.") for a in allowed)}
    assert not wrong


def test_imports_lead_in_no_circle():
    """Following the arrows between files never leads back."""
    arrows = {module(path): imported(path) & MODULES - {module(path)} for path in FILES}
    while leaves := {name for name, others in arrows.items() if not others & set(arrows)}:
        arrows = {name: others for name, others in arrows.items() if name not in leaves}
    assert not arrows


@pytest.mark.parametrize("name, lines", [("model.py", 560), ("train.py", 360), ("README.md", 180)])
def test_read_in_an_evening(name, lines):
    """What a researcher forks, and what everybody opens first, stays within its length."""
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


def test_model_stands_alone():
    """model.py can be copied out: it imports torch and the standard library only."""
    assert {name.split(".")[0] for name in imported(ROOT / "model.py")} - {"torch"} <= set(sys.stdlib_module_names)


def test_importing_is_free():
    """Importing any module prints nothing and pulls in none of the heavy packages."""
    names = ", ".join(sorted(MODULES))
    heavy = ["matplotlib", "datasets", "wandb", "transformers", "pyarrow", "tiktoken", "rustbpe", "zstandard", "gguf",
             "scipy"]
    code = f"import {names}, sys; print([m for m in {heavy} if m in sys.modules], end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]", "")


@pytest.mark.parametrize("command", ["train.py configs/demo.py", "sample.py out/x", "prepare.py stdlib",
                                     "eval.py out/x", "account.py", "convert.py tie a b",
                                     "bench/__main__.py head", "plot.py out/x", "ladder.py configs/demo.py"])
def test_without_packages(command, tmp_path):
    """A Python without torch and numpy, say the system's: one message that says how to get them, exit code 2."""
    code = ("import runpy, sys; sys.modules |= dict.fromkeys(('torch', 'numpy', 'tqdm')); sys.argv = sys.argv[1:]; "
            "sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')")
    log = tmp_path / "log.jsonl"  # what plot.py reads before it draws
    log.write_text('{"step": 1, "loss": 2, "tokens": 1, "seconds": 1, "flops": 1}\n')
    words = command.replace("out/x", str(tmp_path)).split()
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 2 and "requirements.txt" in done.stderr, done.stderr
    assert done.stderr.startswith(command.split("/")[0].split()[0])


def test_make_clean_leaves_data_and_runs():
    """make clean names what it deletes, and data and runs are not among it."""
    done = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    deleted = {word for line in done.stdout.splitlines() if line.startswith("rm ") for word in line.split()[2:]}
    assert ".venv" in deleted and not [word for word in deleted if word.startswith(("data", "out", "/", "*"))]


def test_make_env_through_a_link(tmp_path):
    """A .venv that is a link to an environment without the packages is left alone, and said."""
    for name in ("Makefile", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(tmp_path / "elsewhere")
    done = subprocess.run(["make", "env", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "elsewhere").exists()
    assert f".venv is a link to {tmp_path / 'elsewhere'}" in done.stderr and "rm .venv" in done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_begins_with_examples(name):
    """A command's page says in a line what it is for, then how to call it."""
    where, call = ("bench/__main__.py", "-m bench") if name == "bench" else (f"{name}.py",) * 2
    lines = ast.get_docstring(ast.parse((ROOT / where).read_text(encoding="utf-8"))).splitlines()
    assert lines[0].endswith(".") and not lines[1] and lines[2].startswith(f"    python {call} ")


@pytest.mark.parametrize("cls", [model.ModelConfig, TrainConfig])
def test_every_setting_is_explained(cls):
    comments, _ = config._comments(cls)
    assert [name for name in cls.__dataclass_fields__ if not comments[name]] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_configs_load_and_say_what_they_cost(path):
    """Every training config is sound, and its head names hardware, time, expected loss and the launch line."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert head.startswith(("#", '"""'))
    if path.stem.startswith("data_"):
        assert "prepare.py" in head
        return
    config.load((model.ModelConfig, TrainConfig), [str(path)])
    assert re.search(r"train\.py configs/" + path.name, path.read_text(encoding="utf-8"))


def test_every_setting_is_read():
    """No setting does nothing: each field of both dataclasses is read outside its declaration."""
    attributes = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not (
                    isinstance(node.value, ast.Name) and node.value.id == "self" and path.stem == "train_config"):
                attributes.add(node.attr)
    for cls in (model.ModelConfig, TrainConfig):
        unread = {f.name for f in dataclasses.fields(cls)} - attributes
        assert not unread, f"{cls.__name__}: nothing reads {unread}"


def test_readme_maps_the_files():
    """README's file map names every tracked Python file at the top, every folder there and every folder of stack/, and
    nothing that is not there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: the list of tracked files is not there to compare with")
    table = readme.split("## Files", 1)[1].split("\n## ", 1)[0]
    named = {name for cell in re.findall(r"^\| ([\w./ ]+) \|", table, re.MULTILINE) for name in cell.split()}
    wanted = {name for name in tracked if "/" not in name and name.endswith(".py")}
    wanted |= {name.split("/")[0] + "/" for name in tracked if "/" in name and not name.startswith(".")}
    wanted |= {name.rpartition("/")[0] + "/" for name in tracked if name.startswith("stack/")}
    assert wanted <= named <= wanted | {"data/", "out/", "Makefile"}


def test_speaks_of_itself_alone():
    """No machine's paths in tracked files."""
    command = ["git", "grep", "-nIE", r"/(home|root)/[a-z]", "--", ".", ":!tests/test_repo.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert found == ""
