"""The README's commands are read out of it and run, at tiny size, in a copy of the repository."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALLER = {  # appended to a command, so that it takes seconds
    "prepare.py": ["--max_bytes", "600000"],
    "train.py": ["--max_steps=4", "--warmup_steps=1", "--compile=false", "--eval_interval=2", "--eval_tokens=4096"],
    "sample.py": ["--max_new_tokens", "8"],
    "eval.py": ["--max_tokens", "4096"],
}


def commands(block):
    """The commands of the README's block ```bash <name>, as argument lists."""
    text = re.search(rf"^```bash {block}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@pytest.fixture
def copy(tmp_path):
    """The top-level files and configs, so that nobody's data/ and out/ are touched."""
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile"]:
        shutil.copy(path, tmp_path)
    for folder in ("configs", "stack"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def run(argv, cwd):
    done = subprocess.run([sys.executable, *argv[1:], *SMALLER.get(argv[1], [])], cwd=cwd, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_quick_start(copy):
    """The quick start works as printed: data, training, bits per byte, a sample; and again, over what is there."""
    for _ in range(2):
        outputs = {argv[1]: run(argv, copy) for argv in commands("quick-start")}
        assert list(outputs) == ["prepare.py", "train.py", "eval.py", "sample.py"]
        assert "bits per byte" in outputs["eval.py"]
        assert outputs["sample.py"].startswith("    def read")
        assert (copy / "out/demo/loss.png").stat().st_size > 1000


def test_quick_start_is_what_make_demo_does():
    """make demo runs the quick start's commands, in its order."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndemo:", 1)[1].split("\n\n", 1)[0]
    lines = [line.strip("\t@") for line in recipe.splitlines()[1:]]
    made = [shlex.split(line)[1:] for line in lines if line.startswith("$(PY)")]
    printed = [argv[1:] for argv in commands("quick-start")]
    assert [argv[:len(want)] for argv, want in zip(made, printed, strict=True)] == printed


def test_measurements_say_how():
    """A table of measurements has in its section the command, the machine, the version and the day; each run of the
    results is a command of its own, and its config is there."""
    measured = [section for section in re.split(r"^## ", README, flags=re.MULTILINE)
                if re.search(r"^\|.*(seconds|MiB|tokens/s|tokens a second).*\n\|-", section, re.MULTILINE)]
    assert [section.split("\n")[0] for section in measured][:1] == ["What you get"] and len(measured) > 1
    for section in measured:
        for pattern in (r"`python (\w+\.py|-m \w+)\s[^`]+`", r"\b20\d\d-\d\d-\d\d\b", r"\d cores|GPU|H[12]00",
                        r"torch 2\.\d+"):
            assert re.search(pattern, section), f"{section[:40]}: no {pattern}"
    rows = re.findall(r"^\|.*\d \|$", measured[0], re.MULTILINE)
    assert len(rows) >= 2
    for row in rows:
        assert (ROOT / re.search(r"`python train\.py (configs/\w+\.py)", row)[1]).exists()


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^python (?:train|account)\.py .*$", README, re.MULTILINE))))
def test_settings_in_the_readme_exist(line):
    """Each printed train.py and account.py command has a config that is there and settings that exist."""
    from model import ModelConfig
    from stack.config import TrainConfig, load
    load((ModelConfig, TrainConfig), shlex.split(line, comments=True)[2:])
