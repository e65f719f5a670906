"""The recipe of a mixture: a .py file that assigns `sources`, what it may assign besides, and the shares it asks for.

A .py file may as well be text, so what is one by mistake, or is none by mistake, is refused with what would make it
plain: a file that assigns no `sources` and looks as if it should, one that is broken, a name or a value that is not
known.  A recipe is Python and is run.  It sets what flags set, and flags win (prepare.py).
"""

import ast
import difflib
import math
import os
import re
import runpy
from dataclasses import fields
from pathlib import Path

import numpy as np

from stack.data.filters import FILTERS
from stack.data.sources import Source

EXAMPLE = '  sources = [dict(source="texts/", weight=70), dict(source="code/", weight=30)]'
AS_TEXT = "To read it as text name its folder, or a glob that matches it, in quotes"


def is_recipe(source: str, options=()) -> bool:
    """A .py file that assigns `sources` at its top level; any other is text.  A broken one that seems to is refused.

    options: the names of prepare.py's, if this is to be all of the text: then one that assigns what recipes do, such
    names or a list of sources by another name, is refused too.
    """
    code = Path(source).read_bytes() if source.endswith(".py") and os.path.isfile(source) else b""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        if re.search(rb"^(?:\w+\s*,\s*)*sources\b\s*[,:=](?!=)", code, re.MULTILINE):
            line = f", line {error.lineno}" * bool(getattr(error, "lineno", None))
            raise ValueError(f"{source}{line}: {getattr(error, 'msg', error)}.\n  It assigns sources, so it is a recipe"
                             f": repair it. {AS_TEXT}.") from None
        return False
    given = [(target, node.value) for node in body if isinstance(node, ast.Assign | ast.AnnAssign)
             for target in getattr(node, "targets", None) or [node.target]]
    if any(isinstance(name, ast.Name) and name.id == "sources" and isinstance(name.ctx, ast.Store)
           for target, _ in given for name in ast.walk(target)):
        return True
    pairs = [(target.id, value) for target, value in given if options and isinstance(target, ast.Name)]
    lists = [name for name, value in pairs if isinstance(value, ast.List | ast.Tuple | ast.ListComp)
             and any(isinstance(call, ast.Call) and ast.unparse(call.func) == "dict"
                     and any(given.arg == "source" for given in call.keywords) for call in ast.walk(value))]
    chosen = {name for name, _ in pairs if name in options and "_" in name}
    if found := [*lists, *sorted(chosen)] if lists or len(chosen) > 1 else []:
        near = f" Is {lists[0]} meant to be sources?" if lists else ""
        raise ValueError(f"{source} assigns {', '.join(dict.fromkeys(found))} as a recipe does, but no sources.{near}\n"
                         f"{EXAMPLE}\n  {AS_TEXT}.")
    return False


def read_recipe(path: str, flags: dict):
    """(sources, options) as a recipe assigns them; flags: argparse's actions by name.  Names that are neither's, and
    values that are not what a flag or a source takes, are refused."""
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}.\n  It assigns sources, so it was run as a recipe. "
                         f"{AS_TEXT}.") from None
    names = {key: value for key, value in names.items()
             if not key.startswith("_") and not callable(value) and type(value) is not type(os)}
    sources, source_keys = names.pop("sources", None), {field.name for field in fields(Source)}
    names["phases"] = phases = names.get("phases", [])
    bounds = [0, *phases, 1] if isinstance(phases, list) and all(type(at) in (int, float) for at in phases) else [1]
    if sorted({*bounds}) != bounds or len(bounds) < 2:
        raise ValueError(f"{path}: phases is {phases!r}; a list of rising shares of max_tokens between 0 and 1 is "
                         "needed.\n  With phases = [0.9] the second mixture begins at 0.9 of them.")
    if not sources or not isinstance(sources, list | tuple) or not all(isinstance(each, dict) for each in sources):
        raise ValueError(f"{path}: sources is {sources!r}; a list of dict(source=..., weight=...) is needed.\n"
                         f"{EXAMPLE}\n  {AS_TEXT}.")
    places = [(f"{path}: source {i}", source, source_keys) for i, source in enumerate(sources, 1)]
    for where, given, allowed in [(path, names, {*flags, "phases"}), *places]:
        for key in set(given) - allowed:
            near = "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(key, allowed, 1))
            raise ValueError(f"{where} has {key!r}, which is nothing known.{near}\n  Known are "
                             f"{', '.join(sorted(allowed))}.")
    for key, value in names.items():
        fits, needed = (True, "") if key == "phases" else taken(flags[key], value)
        if not fits:
            raise ValueError(f"{path} has {key} = {value!r}; {needed} is needed.")
        whole = type(value) is float and value.is_integer()  # 10e9
        names[key] = int(value) if whole else list(value) if isinstance(value, tuple) else value
    kinds, weights = {field.name: field.type for field in fields(Source)}, []
    for where, source, _ in places:
        for key, value in source.items():
            if key != "weight" and not isinstance(value, kind := kinds[key]):
                needed = ("True or False" if kind is bool else "a string" if key != "filter" else
                          f"{', '.join(filter(None, FILTERS))} or the name of one of yours in stack/data/filters.py")
                raise ValueError(f"{where} has {key}={value!r}; {needed} is needed.\n{EXAMPLE}")
        if not source.get("source"):
            raise ValueError(f"{where} has no name: {source!r}.\n{EXAMPLE}")
        weights.append(own := by_phase(source.get("weight", 0), len(phases) + 1))
        if any(type(each) not in (int, float) or not 0 <= each < float("inf") for each in own) or not any(
                own) or len(own) != len(phases) + 1:
            weight = f"weight={source['weight']!r}" if "weight" in source else "no weight"
            raise ValueError(f"{where} has {weight}; a number above 0 is needed, or a list of one for each of "
                             f"{len(phases) + 1} phase(s).\n{EXAMPLE}")
    if empty := [number for number, phase in enumerate(zip(*weights, strict=True), 1) if not any(phase)]:
        raise ValueError(f"{path}: in phase {empty[0]} no source has a weight above 0.\n{EXAMPLE}")
    return sources, names


def taken(flag, value) -> tuple[bool, str]:
    """(whether a recipe may assign this to an option, what is needed).

    flag: argparse's action of the option; its type is None for a string, float for a number, any other for a whole one.
    """
    number = type(value) in (int, float) and -math.inf < value < math.inf
    if flag.nargs == 0:
        return isinstance(value, bool), "True or False"
    if flag.nargs == "+":
        given = value if isinstance(value, list | tuple) else [value]
        strings = all(isinstance(each, str) for each in given)
        return given is value and strings, f"a list of strings, as {list(map(str, given))},"
    if flag.choices:
        return value in flag.choices, " or ".join(map(repr, flag.choices))
    if flag.type is None:
        return isinstance(value, str), "a string"
    return (number, "a number") if flag.type is float else (number and value == int(value), "a whole number")


def mixtures(sources: list[dict], phases: list[float], max_tokens: int | None):
    """(shares of the sources over all, [(tokens from which a phase's mixture counts, its shares)]), or None for shares
    where nothing has a weight, or one source is all there is."""
    starts, weights = [0.0, *phases], [source.get("weight", 0) for source in sources]
    if not any(map(bool, weights)) or len(weights) == len(starts) == 1:
        return None, [(0, None)]
    per_phase = np.array([by_phase(each, len(starts)) for each in weights], float).T
    per_phase /= per_phase.sum(1, keepdims=True)
    over_all = np.diff([*starts, 1.0]) @ per_phase
    return over_all.tolist(), [(int(start * (max_tokens or 0)), shares) for start, shares in
                               zip(starts, per_phase.tolist(), strict=True)]


def by_phase(weight, n: int) -> list:
    """A source's weight in each of n phases."""
    return list(weight) if isinstance(weight, list | tuple) else [weight] * n
