"""README.md and docs/: the quick start is read out and run, at tiny size, in a copy of the repository; every other
command is one that exists, every number names its evidence, every file that is named is there."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README = PAGES["README.md"]
COMING = set()  # linked from the README and not written yet
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


def section(name):
    """A section of the README, without its heading."""
    return README.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def printed() -> list[list[str]]:
    """Every python and torchrun command of the pages, once, from code and from running text, as argument lists;
    without those that have [options] in them, which are forms to fill in."""
    text = "\n".join(PAGES.values()).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^ *((?:python|torchrun) .*)$", text, re.MULTILINE)
    found += [" ".join(code.split()) for code in re.findall(r"`((?:python|torchrun)\s[^`]+)`", prose)]
    commands = [shlex.split(command, comments=True) for command in dict.fromkeys(found)]
    return [argv for argv in commands if not any(arg.startswith("[") for arg in argv)]


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
                          text=True, stdin=subprocess.DEVNULL, timeout=1800)
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
    assert "\ndemo: $(READY)\n\t@bash runs/demo.sh base\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    base = (ROOT / "runs/demo.sh").read_text(encoding="utf-8").split("\nbase() {\n", 1)[1].split("\n}\n", 1)[0]
    made = [shlex.split(line)[1:] for line in map(str.strip, base.splitlines()) if line.startswith("python ")]
    printed = [argv[1:] for argv in commands("quick-start")]
    assert [argv[:len(want)] for argv, want in zip(made, printed, strict=True)] == printed


@pytest.mark.parametrize("page", PAGES)
def test_measurements_say_how(page):
    """A table of measurements has in its section the command, the machine, the version and the day.  The lab notes say
    machine and version once, at their top, and there too that a table without a command is only a record."""
    top, *sections = re.split(r"^## ", PAGES[page], flags=re.MULTILINE)
    measured = [section for section in sections
                if re.search(r"^\|.*(seconds|MiB|tokens/s|bpb|injected).*\n\|-", section, re.MULTILINE)]
    evidence = {"command": r"python (\w+\.py|-m \w+) |make \w+", "machine": r"(\d|two) cores|NVIDIA",
                "version": r"torch 2\.\d+", "day": r"\b20\d\d-\d\d-\d\d\b"}
    if page == "docs/lab-notes.md":
        measured = [top + section for section in measured]
        del evidence["command"]
    for section in measured:
        for what, pattern in evidence.items():
            assert re.search(pattern, section), f"{section[:40]}: no {what}"
    expected = {"README.md": 1, "docs/speed.md": len(sections), "docs/faults.md": 1, "docs/lab-notes.md": 12}
    assert len(measured) == expected.get(page, 0)


def test_each_result_is_a_run():
    """Each row of the README's results is a command of its own, whose config is there."""
    rows = re.findall(r"^\|.*\d \|$", section("What you get"), re.MULTILINE)
    assert len(rows) >= 2
    for row in rows:
        assert (ROOT / re.search(r"`python train\.py (configs/\w+\.py)", row)[1]).exists()


def test_headlines_stand_on_their_pages():
    """Each bold number of "In numbers" is on the page that its row links to; what is a sum there is the table's."""
    rows = re.findall(r"^\| .*\*\*.*$", section("In numbers"), re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        page = PAGES[re.search(r"\]\((.+)\)", row)[1]]
        for number in re.findall(r"\*\*(.+?)\*\*", row):
            assert re.search(rf"(?<![\w.,]){re.escape(number)}(?!\w|[.,]\d)", page), f"{number}, in: {row}"
    faults, source = PAGES["docs/faults.md"], PAGES["docs/source.md"]
    counts = re.findall(r"^\| .* \| (\d+) \| (\d+) \| .* \|$", faults, re.MULTILINE)
    injected, survived = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert f"{injected} injected, {survived} survived" in " ".join(faults.split())
    assert f"In {len(re.findall('^[|] ', source, re.MULTILINE)) - 1} places" in source


@pytest.mark.parametrize("argv", [argv for argv in printed() if {"train.py", "account.py"} & {*argv}], ids=shlex.join)
def test_settings_exist(argv):
    """Each printed train.py and account.py command has a config that is there and settings that exist."""
    from model import ModelConfig
    from stack.config import load
    from stack.train_config import TrainConfig
    settings = argv[argv.index("train.py" if "train.py" in argv else "account.py") + 1:]
    load((ModelConfig, TrainConfig), [arg for arg in settings if arg != "--help" and not arg.startswith("out/")])


def test_in_any_order():
    """No two printed commands want the same folder for different things, nor one that prepare.py would choose for the
    sources of another: whoever types them in another order gets the same."""
    made = {}
    for _, *argv in printed():
        if argv[0] == "prepare.py" and argv[1] not in ("show", "verify"):
            sources = [arg for arg, before in zip(argv[1:], argv, strict=False) if "--" not in arg + before]
            out, chosen = argv[argv.index("--out") + 1], f"data/{Path(sources[0]).stem}"
            made.setdefault(out, set()).add(shlex.join(argv))
            if chosen != out:  # by the same line without --out
                made.setdefault(chosen, set()).add(sources[0])
    assert len(made) > 3 and not {out: how for out, how in made.items() if len(how) > 1}
    tokenizers = {}
    for _, *argv in printed():
        settings = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith("--") and "=" in arg)
        if "init_from" in settings and settings["init_from"] != "resume":
            tokenizers[settings.get("data_dir")] = settings["init_from"]
    for data_dir, init_from in tokenizers.items():
        assert f"--tokenizer {init_from} " in "".join(made.get(data_dir, {f"--tokenizer {init_from} "}))


def flags() -> dict[tuple, set[str]]:
    """{("-m", "bench", "step"): {"--rows"}, ...}: what is printed with the commands that take no settings."""
    found = {}
    for _, *argv in printed():
        command = tuple(argv[:3 if argv[0] == "-m" else 1])
        named = {arg.partition("=")[0] for arg in argv if arg.startswith("--")} - {"--help"}
        if named and not {"train.py", "account.py", "convert.py"} & {*argv}:  # the last are test_convert.py's
            found[command] = found.get(command, set()) | named
    return found


@pytest.mark.parametrize("command", flags(), ids=" ".join)
def test_flags_exist(command):
    """Each printed flag is in the command's --help."""
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for flag in flags()[command]:
        assert re.search(rf"{flag}(?![\w-])", done.stdout)


@pytest.mark.parametrize("path, word", sorted({
    found for text in [*PAGES.values(), (ROOT / "Makefile").read_text()]
    for found in re.findall(r"pytest (tests/\S+\.py) -k (\w+)", text)}))
def test_chosen_tests_exist(path, word):
    """A printed `pytest FILE -k WORD` selects something."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [node.name.lower() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name.startswith("test_") and word.lower() in name]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_is_there(page):
    """Links lead to files, and paths in a text are those of files and folders."""
    text, here = PAGES[page], (ROOT / page).parent
    links = {(here / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link}
    paths = {(ROOT / path) for path in re.findall(r"(?<![\w./-])((?:stack|bench|tests|configs|docs)/[\w./-]*\w)", text)}
    missing = {str(path.relative_to(ROOT)) for path in links | paths if not path.exists()}
    assert missing - COMING == set()
    assert page != "README.md" or COMING <= missing, "it has come: take it out of COMING"


def test_readme_is_short():
    """What it is, how to run it, where to change what; the rest is in docs/."""
    assert README.count("\n") <= 180
