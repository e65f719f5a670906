"""docs/hacking.md: each change on the page is made in a copy of the repository and runs there, and what the page says
of its place, its size and what will be read is so.

Nothing may go on computing the old model without a word.  Commands run in processes (commands.py) on a model of 26,000
parameters: 64 tokens, from which on kernels.cpp takes part; fp32, so that equal means equal.
"""

import ast
import difflib
import json
import re
import shutil
import subprocess

import pytest
from commands import Commands
from conftest import ROOT
from safetensors.torch import load_file

import train
from model import ModelConfig
from stack.config import load
from stack.counts import flops_per_token
from stack.log import read_log
from stack.train_config import TrainConfig

PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
SECTIONS = {re.search(r"hacks/(\w+)\.diff", text)[1]: text
            for text in re.findall(r"^## .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}
DIFFS = {path.stem: path for path in sorted((ROOT / "tests" / "hacks").glob("*.diff"))}
CONCERN_A_TWIN = {"label_smoothing", "attention_scale", "sliding_window", "buffer"}
SAME_TRAINING = {"buffer", "block_norms"}
SETTINGS = ["--vocab_size=320", "--d_model=32", "--n_layers=2", "--n_heads=2", "--n_kv_heads=1", "--head_dim=16",
            "--d_ff=48", "--max_seq_len=128", "--seq_len=64", "--micro_batch_size=2", "--batch_tokens=256",
            "--max_steps=10", "--warmup_steps=2", "--log_interval=1", "--eval_interval=10", "--eval_tokens=1024",
            "--save_interval=0", "--sample_interval=0", "--device=cpu", "--dtype=float32", "--muon_lr=6e-3",
            "--adamw_lr=1e-2"]
SAMPLE = ["sample.py", "out/plain", "--prompt", "def main(", "--temperature=1", "--top_p=1", "--max_new_tokens=100",
          "--no_stop", "--ids", "--device=cpu", "--dtype=float32"]
EVAL = ["--max_tokens=1024", "--json", "--device=cpu", "--dtype=float32"]
TEXTS = [f'def f{i}():\n    return "{i}, {i * i}"\n' * (20 + i) for i in range(30)]
PREPARE = ["prepare.py", "films/*.srt", "--vocab_size=320", "--val_fraction=0.2", "--workers=1", "--out=data/films"]


class Hacked:
    """A copy of the repository, to be changed, and what each command there said: {name: (exit code, text)}."""

    def __init__(self, name: str, folder, commands=None):
        self.name, self.folder, self.commands, self.said = name, folder, commands, {}
        for path in ROOT.glob("*.py"):
            shutil.copy2(path, folder)
        shutil.copytree(ROOT / "stack", folder / "stack")  # with __pycache__, which dates keep good

    def apply(self):
        done = subprocess.run(["git", "apply", str(DIFFS[self.name])], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, (f"the hack {self.name} no longer applies: mend tests/hacks/{self.name}.diff, and "
                                      f"docs/hacking.md if its place or size is another now\n{done.stderr}")

    def run(self, what: str, *argv, inductor: bool = False) -> str:
        """stdout of a command, which is called `what` from now on."""
        code, stdout, stderr = self.commands(self.folder, *argv, inductor=inductor)
        self.said[what] = code, f"{stdout}\n{stderr}"
        assert "Traceback" not in stderr, f"{self.name}, {what}:\n{stderr}"
        return stdout

    def log(self, run: str, key: str) -> list:
        return [line[key] for line in read_log(self.folder / "out" / run / "log.jsonl") if key in line]

    def write_subtitles(self):
        (self.folder / "films").mkdir()
        for i, text in enumerate(TEXTS):
            said = (f"{n}\n00:00:01,000 --> 00:00:04,000\n{line}" for n, line in enumerate(text.splitlines(True), 1))
            (self.folder / f"films/{i}.srt").write_text("".join(said), encoding="utf-8", newline="")


@pytest.fixture(scope="module")
def commands():
    with Commands() as running:
        yield running


@pytest.fixture(scope="module")
def untouched(data, tmp_path_factory):
    """The losses of the repository as it is."""
    out = tmp_path_factory.mktemp("untouched")
    settings = [*SETTINGS, f"--data_dir={data}", f"--out_dir={out}", "--compile=false"]
    train.run(*load((ModelConfig, TrainConfig), settings))
    return [line["loss"] for line in read_log(out / "log.jsonl") if "loss" in line]


# ---------------------------------------------------------------------------------------------------------------------
# What the page says


def new_lines(before: str, after: str) -> list[int]:
    """Numbers of the lines of `after` that `before` lacks."""
    steps = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return [line + 1 for step, _, _, begin, end in steps if step != "equal" for line in range(begin, end)]


def place(node, line: int) -> str:
    """The name in which a line of a parsed file lies, MLP.forward, train, or FORMATS that is assigned; else ""."""
    for child in node.body:
        if child.lineno <= line <= child.end_lineno:
            if isinstance(child, ast.ClassDef):
                return f"{child.name}.{place(child, line)}".removesuffix(".")
            if isinstance(child, ast.FunctionDef):
                return child.name
            if isinstance(node, ast.Module) and isinstance(child, ast.Assign):
                return child.targets[0].id
    return ""


def quoted(section: str) -> list[list[str]]:
    """[command, sentence] of each quotation of a section."""
    blocks = re.findall(r"(?:^> .*\n)+", section, re.MULTILINE)
    return [block.replace("\n> ", " ").removeprefix("> ").strip().split(": ", 1) for block in blocks]


def pattern(sentence: str) -> str:
    """What matches a sentence of the page: N is a number, white space is any."""
    return re.sub(r"\bN\b", r"[\\d,]+", re.escape(sentence).replace(r"\ ", r"\s+"))


def test_each_hack_has_its_section():
    assert SECTIONS and sorted(SECTIONS) == sorted(DIFFS)


@pytest.mark.parametrize("name", SECTIONS)
def test_place_and_size(name, tmp_path):
    """A hack touches the places that the page names, and adds as many lines."""
    Hacked(name, tmp_path).apply()
    n_lines, named = re.search(r"\.diff\), (\d+) lines?: (.*?)\.(?:\s|$)", SECTIONS[name], re.DOTALL).groups()
    diff, named, found = DIFFS[name].read_text(encoding="utf-8"), re.findall(r"`([\w.]+)`", named), set()
    assert len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)) == int(n_lines)
    for file in re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE):
        before, after = ((folder / file).read_text(encoding="utf-8") for folder in (ROOT, tmp_path))
        tree = ast.parse(after)
        found |= {place(tree, line) for line in new_lines(before, after)} - {""}
    found = {next((name for name in named if f"{where}.".startswith(f"{name}.")), where) for where in found}
    assert found == set(named)


# ---------------------------------------------------------------------------------------------------------------------
# What happens


@pytest.mark.parametrize("name", SECTIONS)
def test_nothing_is_silently_another_model(name, commands, run_eval, data, untouched, tmp_path):
    """Everything that runs is the changed model, or says in the page's words that it is not or will not."""
    hack = Hacked(name, tmp_path, commands)
    hack.apply()
    if name == "subtitles_source":
        hack.write_subtitles()
        hack.run("prepare", *PREPARE)
        data = tmp_path / "data/films"
    flags = re.findall(r"`(--\w+=[\w.]+)`", SECTIONS[name].splitlines()[0])
    training = ["train.py", *SETTINGS, *flags, f"--data_dir={data}"]
    hack.run("train", *training, "--out_dir=out/plain", "--compile=false")
    if name in CONCERN_A_TWIN:
        hack.run("train compiled", *training, "--out_dir=out/compiled", inductor=name == "label_smoothing")
    text = hack.run("sample", *SAMPLE)
    fast_text = hack.run("sample --compile", *SAMPLE, "--compile", inductor=name == "value_embeddings")
    held_out = json.loads(hack.run("eval", "eval.py", "out/plain", "--quant=int8", *EVAL))
    account = json.loads(hack.run("account", "account.py", "out/plain/config.json", "--json"))
    hack.run("export", "convert.py", "export", "out/plain", "exported")

    quotations = quoted(SECTIONS[name])
    for what, sentence in quotations:
        assert re.search(pattern(sentence), hack.said[what][1]), f"{name}, {what}:\n{hack.said[what][1]}"
    for what, (code, said) in hack.said.items():
        announced = what in [where for where, _ in quotations]
        assert code == (2 if what == "export" and announced else 0), f"{name}, {what}:\n{said}"
        assert announced or "not compute" not in said, f"{name}, {what}:\n{said}"

    losses = hack.log("plain", "loss")
    assert len(losses) == 10 and losses[-1] < losses[0]
    apart = max(abs(a - b) for a, b in zip(losses, untouched, strict=True))
    assert apart == 0 if name in SAME_TRAINING else apart > 4e-4  # more than what counts as equal below
    if name in CONCERN_A_TWIN:
        assert hack.log("compiled", "loss") == pytest.approx(losses, abs=2e-4)
    assert len(text.split()) == 100 and fast_text == text
    assert held_out["loss"] == pytest.approx(hack.log("plain", "val_loss")[-1], abs=1e-5)
    assert held_out["quantized"]["loss"] == pytest.approx(held_out["loss"], abs=0.01)
    weights = load_file(tmp_path / "out/plain/ckpt_last/model.safetensors")
    assert account["total"] == sum(w.numel() for w in weights.values() if w.is_floating_point())
    exported = (tmp_path / "exported").exists()
    assert exported == (hack.said["export"][0] == 0)
    if exported:  # the same model still: the repository as it is reads the run and has the same numbers for it
        code, out, err = run_eval(tmp_path / "out/plain", "--data", data, *EVAL)
        assert code == 0 and json.loads(out)["loss"] == pytest.approx(held_out["loss"], abs=1e-5), err
    if name in CHECKS:
        CHECKS[name](hack, account, data)


def check_lion(hack, account, data):
    """One value of state for each parameter, also in the account; the export's card names it."""
    assert account["train_state_bytes"] == 3 * 4 * account["total"]
    assert re.search(r"Learning rate \| .*Lion", (hack.folder / "exported/README.md").read_text())


def check_sliding_window(hack, account, data):
    """FLOPs follow: half of the layers see 16 of 64 tokens at most."""
    cfg, _ = load((ModelConfig, TrainConfig), SETTINGS)
    full = flops_per_token(cfg, 64)
    assert account["flops_6n"] == full["6n"]
    assert account["flops_palm"] - full["6n"] == (full["palm"] - full["6n"]) * (64 + 16) / (2 * 64)
    assert account["flops_causal"] < full["causal"]
    split = json.loads((data / "meta.json").read_text())["splits"]["train"]
    unwindowed = flops_per_token(cfg, 64, split["tokens"] / split["documents"])["doc_masked"]
    assert full["6n"] < hack.log("plain", "flops")[-1] / (10 * 256) < unwindowed


def check_cosine_restarts(hack, account, data):
    """Down and up again, each time to the peak."""
    assert hack.log("plain", "lr_scale")[2:] == pytest.approx(4 * [1, 0.5])


def check_block_norms(hack, account, data):
    """A number for each block and step; together they are less than the whole; the report shows them."""
    for total, *parts in zip(*(hack.log("plain", f"grad_norm{i}") for i in ("", "_0", "_1")), strict=True):
        assert min(parts) > 0 and sum(part**2 for part in parts) < total**2
    assert "gradient norm of each block" in (hack.folder / "out/plain/report.html").read_text()


def check_subtitles_source(hack, account, data):
    """Each film is a document, of what is said in it."""
    for i in range(3):
        shown = hack.run("show", "prepare.py", "show", "data/films", f"--doc={i}")
        assert shown in [f"{text}\n" for text in TEXTS]


CHECKS = {"lion": check_lion, "sliding_window": check_sliding_window, "cosine_restarts": check_cosine_restarts,
          "block_norms": check_block_norms, "subtitles_source": check_subtitles_source}


def test_data_made_before_the_change(commands, tmp_path):
    """What the code before the change made of the same file is not taken for what it makes now."""
    hack = Hacked("subtitles_source", tmp_path, commands)
    hack.write_subtitles()
    hack.run("before", *PREPARE)
    hack.run("again", *PREPARE)
    assert hack.said["again"][1].strip().endswith("already made by this command: nothing to do")
    hack.apply()
    hack.run("after", *PREPARE)
    assert not hack.said["after"][1].strip().endswith("already made by this command: nothing to do")
