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
from decimal import Decimal
from pathlib import Path

BOOLS = {"true": True, "1": True, "false": False, "0": False}
KINDS = {int: "int", float: "float", bool: "true|false", str: "text", type(None): "None"}
WIDTH, HELP_COLUMN = 110, 42  # characters


class RunFailed(RuntimeError):
    """A run cannot go on, and its settings are not to blame: exit code 1."""


class ConfigError(ValueError):
    """Settings that cannot be used; the message says which, why, and what to write instead."""


def load(classes, argv: list[str], *, doc: str = "", check=None) -> tuple:
    """One instance of each dataclass from its defaults, the config file named in argv, and the flags; the last counts.

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
    files, flags, problems = _split(argv, types_of)
    if len(files) > 1:
        problems.append(f"{' and '.join(files)}: one config file at most. A value needs its key: --key=value.")
    assigned = _read(files[0], types_of).items() if files else ()
    values = {}
    for where, key, value, typed in [(f"{files[0]}: {key}", key, value, False) for key, value in assigned] + flags:
        if key not in types_of:
            problems.append(f"{where}: there is no setting {key!r}.{_nearest(key, types_of)}")
            continue
        try:
            values[key] = _convert(value, types_of[key], typed)
        except ValueError:
            quotes = f" Write {key} = {str(value)!r}." if not typed and types_of[key] is str else ""
            problems.append(f"{where}: {key} must be {_kind(types_of[key])}, not {value!r}.{quotes}")
    _raise(problems)
    instances = tuple(cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
                      for cls in classes)
    problems = [p for instance in instances if hasattr(instance, "problems") for p in instance.problems()]
    _raise(problems or (check(*instances) if check else []))  # checks across dataclasses presume that each is sound
    return instances


def to_dict(instances) -> dict:
    """Every setting and its value, flat: plain types only."""
    return {key: value for instance in instances for key, value in dataclasses.asdict(instance).items()}


def not_installed(error: ModuleNotFoundError, command: str | None = None):
    """End a command for which a package is missing: with one message and exit code 2."""
    command = command or os.path.basename(sys.argv[0])
    print(f"{command}: {sys.executable} has no package {error.name!r}.\n  Use this folder's "
          "own (make env, then source .venv/bin/activate), or: pip install -r requirements.txt", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def as_command(name: str):
    """Around what a command does: a mistake of the user's is one message and exit code 2, Ctrl-C is 130."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        not_installed(error)
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


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
                files.append(word)
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
    """What a config file assigns; the names of settings always count, so `import *` brings another file's."""
    if not os.path.isfile(path):
        folder = Path(path if os.path.isdir(path) else os.path.dirname(path) or "configs")
        recipes = set(folder.glob("data_*.py"))  # settings of no model: prepare.py's
        there = ", ".join(sorted(str(file) for file in folder.glob("*.py") if file not in recipes))
        raise ConfigError(f"config file {path} not found." + (f" There is: {there}." if there else ""))
    source = Path(path).read_bytes()
    try:
        if path.endswith(".json"):
            return dict(json.loads(source))
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


def _nearest(name: str, names) -> str:
    found = difflib.get_close_matches(name, names, n=1) or [known for known in names if known.endswith(f"_{name}")]
    return f" Did you mean {' or '.join(found)}?" if found else " --help lists them all."


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
