"""Settings: dataclass defaults <- one config file <- flags; checked once, gathered into one message, printed, saved.

    model_cfg, cfg = load((ModelConfig, TrainConfig), sys.argv[1:], doc=__doc__)
    python train.py configs/demo.py --max_steps=200 --compile=false

A setting is a field of a dataclass: its annotation is its type, its default is the only default, the comment behind it
is its help.  Names are unique over all of them, so a flag never says which dataclass it means.

A config file is Python that assigns settings (`batch_tokens = 2**19`), run in a dictionary of its own: imports,
functions and `_private` names are for its own use, any other name that is not a setting is an error.
`from configs.stack100m import *` builds on another file.  A run's config.json is one too: naming it repeats the run.

Values of file and flags pass the same check: a whole number is a float where a float is wanted, 1e3 is an int where one
is wanted and 2.5 is not, text stays text whatever it looks like, only `X | None` takes None.

By hand rather than by tyro or argparse: neither takes `1e3` for an int, nor `--compile`, `--compile=false` and
`--compile=0` for one field, nor checks what a Python file assigned; with those rewritten, only `--help` would be left.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import traceback
import types
import typing
import warnings
from decimal import Decimal
from pathlib import Path

from stack import threads  # noqa: F401  before torch loads, in every command

ROOT = Path(__file__).resolve().parent.parent
BOOLS = {"true": True, "1": True, "false": False, "0": False}
KINDS = {int: "int", float: "float", bool: "true|false", str: "text", type(None): "None"}
WIDTH, HELP_COLUMN = 110, 42  # characters
PATHS = {"run", "RUN", "out/RUN", "FILE", "FOLDER", "DIR"}  # values that a command's help calls so are paths
NO_UTF8 = "is no UTF-8, and libraries here open no other names. Rename it."
IN_PYTHONS_WAY = warnings.formatwarning
NANOGPTS = {  # names of nanoGPT's flags that are others here: ours
    "dataset": "data_dir", "block_size": "seq_len max_seq_len", "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "batch_tokens", "max_iters": "max_steps", "n_layer": "n_layers",
    "n_head": "n_heads n_kv_heads", "n_embd": "d_model", "learning_rate": "adamw_lr muon_lr",
    "warmup_iters": "warmup_steps", "decay_lr": "schedule", "lr_decay_iters": "max_steps decay_fraction",
    "min_lr": "min_lr_fraction", "eval_iters": "eval_tokens", "always_save_checkpoint": "save_interval",
    "wandb_log": "wandb_project", "wandb_run_name": "wandb_name", "start": "prompt",
}
INSTEAD = {  # those that no flag of ours is: what does it here
    "eval_only": "another command here: python eval.py RUN.",
    "backend": "not chosen here: it is nccl for --device cuda, else gloo.",
}


class RunFailed(RuntimeError):
    """A run cannot go on, and its settings are not to blame: exit code 1."""


class ConfigError(ValueError):
    """Settings that cannot be used; the message says which, why, and what to write instead."""


def load(classes, argv: list[str], *, doc: str = "", check=None) -> tuple:
    """One instance of each dataclass from its defaults, the config file named in argv, and the flags; the last counts.
    `given`, of each, has the names that file and flags assign: with a default's value too.

    Raises one ConfigError with all that is wrong: in file and flags first, then what each dataclass's `problems()`
    names, then `check(*instances) -> list[str]` of several.  --help exits.
    """
    types_of = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    assert len(types_of) == sum(len(dataclasses.fields(cls)) for cls in classes), "a setting is declared twice"
    if {"-h", "--help"} & {*argv}:
        try:
            print(help_text(classes, doc), flush=True)
        except BrokenPipeError:  # `| head`
            sys.stdout = open(os.devnull, "w")
        raise SystemExit(0)
    _raise([f"{word!a} {NO_UTF8}" for word in argv if no_utf8(word)])
    files, flags, problems = _split(argv, types_of)
    if len(files) > 1:
        problems.append(f"{' and '.join(files)}: one config file at most. A value needs its key: --key=value.")
    assigned = _read(files[0], types_of).items() if files else ()
    values = {}
    for where, key, value, typed in [(f"{files[0]}: {key}", key, value, False) for key, value in assigned] + flags:
        if key not in types_of:
            problems.append(f"{where}: there is no setting {key!r}.{nearest(key, types_of)}")
            continue
        try:
            values[key] = _convert(value, types_of[key], typed)
        except ValueError:
            quotes = f" Write {key} = {str(value)!r}." if not typed and types_of[key] is str else ""
            problems.append(f"{where}: {key} must be {_kind(types_of[key])}, not {value!r}.{quotes}")
    _raise(problems)
    instances = tuple(cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
                      for cls in classes)
    for instance in instances:
        instance.given = frozenset(values)
    problems = [p for instance in instances if hasattr(instance, "problems") for p in instance.problems()]
    _raise(problems or (check(*instances) if check else []))  # checks across dataclasses presume that each is sound
    return instances


def to_dict(instances) -> dict:
    """Every setting and its value, flat: plain types only."""
    return {key: value for instance in instances for key, value in dataclasses.asdict(instance).items()}


class Parser(argparse.ArgumentParser):
    """argparse as the commands use it: descriptions as they stand, a flag that there is not answered as a setting that
    there is not, paths as settings have them."""

    def __init__(self, **options):
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self.named(namespace)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.advice(unknown)}")
        for action in self.named(namespace)._actions:
            value = getattr(namespace, action.dest, None)
            if (action.metavar or action.dest) in PATHS and value is not None:
                paths = [expand(path) for path in ([value] if isinstance(value, str) else value)]
                if "" in paths:
                    self.error(f"{'/'.join(action.option_strings) or action.dest} is empty: a path is needed")
                if odd := next(filter(no_utf8, paths), None):
                    self.error(f"{odd!a} {NO_UTF8}")
                setattr(namespace, action.dest, paths[0] if isinstance(value, str) else paths)
        return namespace

    def error(self, message):
        if dashed := re.search(r"argument (?:-\w/)?(--\w+)[^:]*: expected .*argument", message):
            message += f". A value that begins with a dash is written {dashed[1]}=VALUE"
        super().error(message)

    def named(self, namespace):
        """Of a command of commands, the parser of the one that was named; else the parser itself."""
        several = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next((action.choices[getattr(namespace, action.dest)] for action in several), self)

    def advice(self, unknown: list[str]) -> str:
        """What to say behind words that this parser left over."""
        known = [name[2:] for action in self._actions if action.help is not argparse.SUPPRESS
                 for name in action.option_strings if name.startswith("--")]
        flag = next((word for word in unknown if word.startswith("-")), None)
        return flag and "." + nearest(flag.lstrip("-").partition("=")[0].replace("-", "_"), known, "--") or ""


def expand(path: str) -> str:
    """~ as the user's home, also behind hf: and, where shells leave it alone, behind --key=; ckpt_step_20 as
    ckpt_step_0000020, as it is called, unless there is one of the shorter name."""
    kind = "hf:" * path.startswith("hf:")
    path = os.path.expanduser(path.removeprefix("hf:"))
    return kind + (path if os.path.exists(path) else
                   re.sub(r"(?<=ckpt_step_)\d+(?=/?$)", lambda step: f"{int(step[0]):07d}", path))


def no_utf8(text: str) -> bool:
    """Whether a name holds bytes that are no UTF-8, for which Python has half surrogate pairs."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def nearest(name: str, names, dashes: str = "") -> str:
    """A sentence for someone who gave a name that is none of `names`: which one was meant."""
    theirs = {key: [n for n in ours.split() if n in names] for key, ours in NANOGPTS.items() if key not in names}
    if name in INSTEAD:
        return f" nanoGPT's {name} is {INSTEAD[name]}"
    found = difflib.get_close_matches(name, [*names, *(key for key in theirs if theirs[key])], n=1)
    if found and found[0] in theirs:
        return f" nanoGPT's {found[0]} is {' and '.join(dashes + ours for ours in theirs[found[0]])} here."
    found = found or [known for known in names if known.endswith(f"_{name}")]
    return f" Did you mean {' or '.join(dashes + ours for ours in found)}?" if found else " --help lists them all."


def explain(error: Exception) -> str:
    """What an error says; where a relative path was not found, also in which folder it was looked for."""
    text = str(error)
    said = re.match("(?:config file )?(.+?)(?:, .*)?(?: not found| is no folder)", text.partition("\n")[0])
    path = getattr(error, "filename", None) or (said[1] if said else None)
    missing = path is not None and not os.path.isabs(path) and not os.path.exists(path)
    return f"{text}\n  It was looked for in {os.getcwd()}." if missing else text


def warn_in_sentences(name: str):
    """Print warnings meant for people as what they say, without the line of code that said it."""
    def formatwarning(message, category, *where):
        return f"{name}: {message}\n" if category is UserWarning else IN_PYTHONS_WAY(message, category, *where)
    warnings.formatwarning = formatwarning


def command() -> str:
    """The name of the command that runs: train.py, bench."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def not_installed(error: ModuleNotFoundError):
    """End a command for which a package is missing: with one message and exit code 2."""
    print(f"{command()}: {sys.executable} has no package {error.name!r}.\n  Use this folder's "
          "own (make env, then source .venv/bin/activate), or: pip install -r requirements.txt", file=sys.stderr)
    raise SystemExit(2)


def stopped(kind, error, trace):
    """sys.excepthook of a command: Ctrl-C ends it in words and with 130."""
    if not issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1"):  # ps1: of python -i
        return sys.__excepthook__(kind, error, trace)
    with contextlib.suppress(OSError, AttributeError):  # nobody may be there to read it
        print(f"\n{command()}: stopped", file=sys.__stderr__, flush=True)
    raise SystemExit(130)


def interrupted(number, frame):
    """A command's handler of SIGINT: as Python's, but while a library is imported the end at once.  For seconds that is
    torch, which may go on without numpy where the exception came amid numpy, or numpy fails of something else."""
    at = frame
    while at and not at.f_code.co_filename.startswith("<frozen importlib"):
        at = at.f_back
    if at:
        with contextlib.suppress(SystemExit):
            stopped(KeyboardInterrupt, None, None)
        os._exit(130)
    signal.default_int_handler(number, frame)


if Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve().parent in (ROOT, ROOT / "bench"):
    sys.excepthook = stopped
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: a script's `command &`
        signal.signal(signal.SIGINT, interrupted)


@contextlib.contextmanager
def as_command(name: str):
    """Around what a command does: a mistake of the user's is one message and exit code 2, a run that failed 1."""
    warn_in_sentences(name)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly
    try:
        yield
    except ModuleNotFoundError as error:
        not_installed(error)
    except (RunFailed, ValueError, OSError) as error:
        print(f"{name}: {explain(error)}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunFailed) else 2)


@contextlib.contextmanager
def written_aside(path):
    """Where to write what becomes the file `path` once all of it is there: whole or not at all, whatever happens."""
    aside = Path(f"{path}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def save_json(path, instances):
    """Write config.json; `load` reads it like any config file."""
    with written_aside(path) as aside:
        aside.write_text(json.dumps(to_dict(instances), indent=2) + "\n", encoding="utf-8")


def describe(instances) -> str:
    """The resolved settings for people, a paragraph per dataclass, and what * means."""
    parts = []
    for instance in instances:
        default = dataclasses.asdict(type(instance)())
        words = [f"{key}={value}{'' if value == default[key] else '*'}"
                 for key, value in dataclasses.asdict(instance).items()]
        parts.append(textwrap.fill("  ".join(words), WIDTH, initial_indent=f"{type(instance).__name__}: ",
                                   subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(parts + ["* not the default"])


def help_text(classes, doc: str = "") -> str:
    """The command's own words, then every setting with its type, its comment and its default."""
    lines = [inspect.cleandoc(doc), "", "Settings: --key=value, after an optional config file (default in brackets)"]
    for cls in classes:
        hints, (comments, headings) = typing.get_type_hints(cls), _comments(cls)
        lines += ["", cls.__name__]
        for field, default in zip(dataclasses.fields(cls), dataclasses.asdict(cls()).values(), strict=True):
            lines += [f"  {heading}" for heading in headings.get(field.name, [])]
            left = f"    --{field.name} {_kind(hints[field.name])} ({default!r}) "
            lines += textwrap.wrap(comments.get(field.name) or "-", WIDTH, initial_indent=left.ljust(HELP_COLUMN),
                                   subsequent_indent=" " * HELP_COLUMN)
    return "\n".join(lines)


def _raise(problems: list[str]):
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else
                          f"{len(problems)} settings cannot be used:\n" + "\n".join(f"  {p}" for p in problems))


def _split(argv, types_of):
    """argv -> config files, flags as (as typed, key, value, True), problems."""
    words, files, flags, problems = list(argv), [], [], []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if word.startswith("-") or ("=" in word and not os.path.exists(word)):
                problems.append(f"{word}: a setting starts with two dashes. Write --{word.lstrip('-')}.")
            else:
                files.append(expand(word))
            continue
        key, equals, value = word[2:].partition("=")  # at the first "=": a value may hold more of them
        key = key.replace("-", "_")
        if not equals:
            following = words[0] if words else "--"
            if bool in _options(types_of.get(key)) and following.lower() not in (*BOOLS, "none"):
                value = "true"  # a bare --compile
            elif not following.startswith("--"):
                value = words.pop(0)
                word = f"{word} {value}"
            elif key in types_of:  # else it is the key that is wrong
                problems.append(f"{word} needs a value, {_kind(types_of[key])}: {word}=...")
                continue
        flags.append((word, key, value, True))
    return files, flags, problems


def _read(path: str, types_of) -> dict:
    """What a config file assigns, or a run; the names of settings always count, so `import *` brings another file's."""
    run = os.path.dirname(path.rstrip("/")) if os.path.basename(path.rstrip("/")).startswith("ckpt_") else path
    if os.path.isdir(path) and os.path.isfile(os.path.join(run, "config.json")):
        path = os.path.join(run, "config.json")
    if not os.path.isfile(path):
        folder = Path(path if os.path.isdir(path) else os.path.dirname(path) or "configs")
        recipes = set(folder.glob("data_*.py"))  # settings of no model: prepare.py's
        there = ", ".join(sorted(str(file) for file in folder.glob("*.py") if file not in recipes))
        raise ConfigError(f"config file {path} not found." + (f" There is: {there}." if there else ""))
    source = Path(path).read_bytes()
    try:
        if path.endswith(".json"):
            values, home = dict(json.loads(source)), Path(path).parent
            if "out_dir" in values and any(home.glob("ckpt_*")):  # a run, which may have been moved or copied
                values["out_dir"] = str(home)
            return values
        names = {"__file__": os.path.abspath(path), "__name__": "config"}
        exec(compile(source, path, "exec"), names)
    except Exception as error:
        line = getattr(error, "lineno", None) or next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == path), None)
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {error}. "
                          "A config file holds key = value lines.") from error
    imported = {alias.asname or alias.name.split(".")[0] for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    return {name: value for name, value in names.items() if name in types_of or not (
        name.startswith("_") or name in imported or callable(value) or isinstance(value, types.ModuleType))}


def _options(hint) -> tuple:
    """int | None -> (int, NoneType);  int -> (int,)."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _kind(hint) -> str:
    """A type in a word: int, true|false, rope|learned, int|None."""
    return "|".join("|".join(map(str, typing.get_args(option))) if typing.get_origin(option) is typing.Literal
                    else KINDS[option] for option in _options(hint))


def _convert(value, hint, typed: bool):
    """`value` as the type a setting declares; `typed`: it is a word of the command line.  ValueError if it is none."""
    for option in sorted(_options(hint), key=lambda o: (o is not type(None), o is str)):  # None first, text last
        if option is type(None):
            if value is None or typed and value.lower() == "none":
                return None
        elif typing.get_origin(option) is typing.Literal:
            for choice in typing.get_args(option):
                if (str(choice) == value) if typed else (choice == value and type(choice) is type(value)):
                    return choice
        elif option is bool:
            if (typed or isinstance(value, int)) and str(value).lower() in BOOLS:
                return BOOLS[str(value).lower()]
        elif option is str:
            if isinstance(value, str):
                return value
        elif typed or isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(ArithmeticError):  # it is no number
                number = Decimal(value)  # exact, also of 1e3 and of ints that no float holds
                if math.isfinite(number) and (option is float or number == int(number)):
                    return option(number)
    raise ValueError


def _comments(cls) -> tuple[dict, dict]:
    """Of a dataclass's source: field -> the comment behind it, field -> the comment lines of their own above it."""
    behind, above, heading, last = {}, {}, [], None
    for line in textwrap.dedent(inspect.getsource(cls)).splitlines():
        code, _, comment = line.partition("  # ")
        if line.startswith("    # "):
            heading.append(line.strip("# "))
        elif field := re.match(r"    (\w+): ", code):
            last = field[1]
            behind[last], above[last], heading = comment.strip(), heading, []
        elif last and comment and not code.strip():  # the comment goes on in a line of its own, indented deeper
            behind[last] += " " + comment.strip()
    return behind, above
