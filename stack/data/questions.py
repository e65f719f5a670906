"""Conversations made of Python source: questions about its modules, classes and functions.

The answers are what stands there, the first sentence of a docstring and the names and signatures behind it, read by
`ast`: nothing is imported, so nothing can happen.  Each object gives one conversation, so that what is held out is
asked about nowhere else.  How a question is put follows from the object's name: the same source gives the same.
"""

import ast
import hashlib
import re

LONGEST = 240  # characters of an answer: what a small model can hold
WHAT = ("What does {0} do?", "What is {0} for?", "Explain {0}.", "Tell me about {0}.", "What is {0}?")
HOW = ("How do I call it?", "What are its arguments?", "What is its signature?", "How is it called?")
INSIDE = ("What is in it?", "What does it have?", "Which names does it have?")


def conversations(source: str, module: str):
    """The messages of every public object of a module that has a docstring; of none if its source is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _about(tree, module, INSIDE, _names(tree.body))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            name = f"{module}.{node.name}"
            yield from _about(node, name, INSIDE, _names(node.body))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(inner.name):
                    yield from _about(inner, f"{name}.{inner.name}", HOW, _call(inner, method=True))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            yield from _about(node, f"{module}.{node.name}", HOW, _call(node))


def _about(node, name: str, then, more: str):
    """One conversation: what it is, and what comes with it if that is short enough to say."""
    text = ast.get_docstring(node) or ""
    first = re.split(r"(?<=[.!?])\s|\n\s*\n", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    if not 12 <= len(first) <= LONGEST or not re.fullmatch("[ -~]+", first) or " " not in first:
        return
    pick = hashlib.blake2b(name.encode(), digest_size=2).digest()
    messages = [{"role": "user", "content": WHAT[pick[0] % len(WHAT)].format(name)},
                {"role": "assistant", "content": first}]
    if more and len(more) <= LONGEST:
        messages += [{"role": "user", "content": then[pick[1] % len(then)]}, {"role": "assistant", "content": more}]
    yield messages


def _call(node, method: bool = False) -> str:
    """name(a, b=1), of a method without its self; "" of a property, which nobody calls."""
    if any(ast.unparse(d).endswith(("property", ".setter", ".getter")) for d in node.decorator_list):
        return ""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): 0").body[0].args
    if method and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list):
        places = arguments.posonlyargs or arguments.args
        del places[:1]
        n = len(arguments.posonlyargs + arguments.args)
        arguments.defaults = arguments.defaults[-n:] if n else []
    return f"{node.name}({ast.unparse(arguments)})"


def _names(body) -> str:
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
             and _is_public(node.name)]
    some = ", ".join(dict.fromkeys(names))
    while len(some) > LONGEST:
        some = some.rpartition(", ")[0]
    return f"{some}." if some else ""


def _is_public(name: str) -> bool:
    return not name.startswith("_")
