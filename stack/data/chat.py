"""Conversations: the template, stated once, and what of it is learned.

    BOUNDARY  <|system|>TEXT<|end|>  <|user|>TEXT<|end|>  <|assistant|>TEXT<|tool_call|>CALL<|end|>
              <|tool_result|>TEXT<|end|>  <|assistant|>TEXT<|end|>

without the white space between: `parts` says it as (special token, text behind it), one after the other, and `encode`,
the Jinja text of an export and the marks below follow from the names here.  A CALL is {"name": ..., "arguments": ...}
as JSON; an answer may have several and no text, a system message without text is left out.

*What was typed is text.*  Texts are encoded apart from the special tokens, so "<|end|>" in a message is the six or so
tokens of its characters.  Other programs render a conversation to text first and look for special tokens then: there
the name would become the token, so the exported template raises where a message has one.

*What is learned* is a function of the ids (`learned`): the assistant's tokens with their calls and the <|end|> behind
them, so that the model can stop; of a document that is no conversation every token.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

LISTS = ("messages", "conversations")  # the keys of a record that may hold one
FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'  # for messages
OWN = "stack100m"  # Tokenizer.chat_template of this template; another is Jinja, an imported model's
OPENINGS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool_result|>"}
CALL, END = "<|tool_call|>", "<|end|>"
WINDOWS = (256, 512, 1024, 2048, 4096)
NAMES = (*OPENINGS.values(), CALL, END)
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in OPENINGS}}


# ---- messages


def read(record, *, to_answer: bool = False, counts: Counter | None = None) -> list[dict]:
    """The messages of {"messages": [{"role", "content"}]} or {"conversations": [{"from", "value"}]}, as the first has
    them, to learn from or to answer.  counts: gets, as "field NAME", what stands beside these and is not read.  Raises
    ValueError with what is wrong, to be put behind the record's name."""
    if not isinstance(record, dict):
        raise ValueError('is no object with "messages"')
    found = next((key for key in LISTS if isinstance(record.get(key), list)), None)
    (who, what), said = ("from", "value") if found == LISTS[1] else ("role", "content"), record.get(found)
    if said is None:
        raise ValueError('has no list under "messages" or "conversations"; its keys are '
                         f"{', '.join(map(str, record)) or 'none'}")
    messages = []
    for number, message in enumerate(said, 1):
        if not isinstance(message, dict) or who not in message:
            raise ValueError(f"has a message ({number}) without {who!r}")
        role, text, calls = message[who], message.get(what), message.get("tool_calls") or []
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"has a message ({number}) of role {role!r}; known are {', '.join(ROLES)}")
        if message.get("function_call"):
            raise ValueError(f"has a message ({number}, {role}) with a function_call; calls are read from tool_calls")
        if not to_answer and ROLES[role] == "assistant" and message.get("weight") not in (None, 1):
            raise ValueError(f"has a message ({number}, {role}) of weight {message['weight']}; all that the assistant "
                             "says is learned alike")
        text = "" if text is None and (calls or ROLES[role] == "system") else text
        if not isinstance(text, str):
            given = json.dumps(text, default=str)
            given = given if len(given) <= 40 else given[:40] + "..."
            raise ValueError(f"has a message ({number}, {role}) whose {what} is {given}; text is needed")
        if not text.strip() and not calls and (text or ROLES[role] != "system"):
            raise ValueError(f"has an empty message ({number}, {role})")
        if calls and ROLES[role] != "assistant":
            raise ValueError(f"has a message ({number}) of role {role} with tool calls; only an assistant makes them")
        messages.append({"role": ROLES[role], "content": text} | ({"tool_calls": calls} if calls else {}))
        try:
            nul = any("\0" in part for _, part in parts(messages[-1:]))
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f'has a tool call (in {number}) that is no {{"name", "arguments"}}') from None
        if nul:
            raise ValueError(f"has a message ({number}, {role}) with a NUL in it, which no text has")
    if to_answer and (not messages or messages[-1]["role"] not in ("user", "tool")):
        raise ValueError("does not end with a message to answer, of user or tool")
    if not to_answer and all(message["role"] != "assistant" for message in messages):
        raise ValueError("has no message of the assistant, so nothing to learn")
    if counts is not None:
        of_message = [(message, {who, what, "tool_calls"}) for message in said]
        counts.update(f"field {key}" for each, taken in [(record, {found}), *of_message] for key, value in each.items()
                      if key not in taken and value not in (None, "", [], {}) and (key, value) != ("weight", 1))
    return messages


def parts(messages: Iterable[dict]) -> Iterator[tuple[str, str]]:
    """(special token, text behind it), in order: the template, but for the boundary that every document begins with."""
    for message in messages:
        if message["content"] or message["role"] != "system":
            yield OPENINGS[message["role"]], message["content"]
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                arguments = function["arguments"]
                arguments = arguments if isinstance(arguments, str) else _json(arguments)  # OpenAI's have JSON as text
                yield CALL, f'{{"name": {_json(function["name"])}, "arguments": {arguments}}}'
            yield END, ""


def encode(tokenizer, messages: Iterable[dict], *, answer: bool = False) -> np.ndarray:
    """The ids of a conversation, uint32; answer: with what the assistant's answer follows.  An imported model's are
    those of its own template.  A message may have "ids" to stand for its text and calls: those that the model wrote."""
    if tokenizer.chat_template not in ("", OWN):
        return np.array(tokenizer.encode(_render(tokenizer, messages, answer), special=True), np.uint32)
    special, ids = tokenizer.special_ids, [[tokenizer.boundary_id]]
    for message in messages:
        if "ids" in message:
            ids += [[special[OPENINGS[message["role"]]], *message["ids"], special[END]]]
            continue
        for name, text in parts([message]):
            ids += [[special[name]], tokenizer.encode_to_numpy(text)]
    if answer:
        ids.append([special[OPENINGS["assistant"]]])
    return np.concatenate(ids).astype(np.uint32)


def written(tokenizer, ids: list[int]) -> dict:
    """The message of an answer that the model wrote."""
    text, *calls = tokenizer.decode(ids).split(CALL) if CALL in tokenizer.special_ids else [tokenizer.decode(ids)]
    message = {"role": "assistant", "content": text, "ids": list(ids)}
    try:
        found = [{"function": {key: json.loads(call)[key] for key in ("name", "arguments")}} for call in calls]
    except (ValueError, KeyError, TypeError):  # no call that anybody could make: then it is what it said
        return message | {"content": tokenizer.decode(ids)}
    return message | ({"tool_calls": found} if found else {})


def _render(tokenizer, messages, answer: bool) -> str:
    """A conversation by an imported model's template, as transformers renders it."""
    import jinja2.sandbox
    messages = [{key: message[key] for key in message if key != "ids"} for message in messages]
    if typed := [name for name in tokenizer.special_ids for message in messages
                 if message["role"] != "assistant" and name in message["content"]]:
        raise ValueError(f"a message has {typed[0]} in it, which this model's template would make a special token of.\n"
                         "  Spell it otherwise.")

    def refuse(why):
        raise jinja2.TemplateError(why)
    jinja_ = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                          extensions=["jinja2.ext.loopcontrols"])
    jinja_.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    jinja_.globals |= {"raise_exception": refuse, "strftime_now": lambda form: time.strftime(form)}
    try:
        return jinja_.from_string(jinja(tokenizer, marks=False)).render(
            messages=messages, add_generation_prompt=answer, bos_token=tokenizer.boundary, eos_token=tokenizer.boundary)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's own chat template does not take this conversation: {error}") from None


def ends(tokenizer) -> list[int]:
    """The ids that end an answer."""
    names = [END] if tokenizer.chat_template == OWN else tokenizer.chat_ends
    return list(dict.fromkeys([*(tokenizer.special_ids[name] for name in names), tokenizer.boundary_id]))


def typed(text: str) -> str:
    """What is written in the messages that are JSON in a text, for a tokenizer to learn from."""
    return "\n".join(part for message in json.loads(text) for _, part in parts([message]))


def lacking(tokenizer) -> list[str]:
    """The names of the template that a tokenizer does not have."""
    return [name for name in NAMES if name not in tokenizer.special_ids]


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- what is learned


class Marks:
    """The ids by which conversations are known.  ids: of NAMES and "boundary", as meta.json has them under "chat"."""

    def __init__(self, ids: dict[str, int]):
        self.boundary, self.assistant, self.end = ids["boundary"], ids[OPENINGS["assistant"]], ids[END]
        self.openings = np.array([ids[name] for name in OPENINGS.values()])

    def learned(self, ids: np.ndarray) -> np.ndarray:
        """Which tokens have a target that is learned.  ids (n + 1,), the last one a target only -> bool (n,).

        ids begin with a document, or amid one that is no conversation, and have of another its boundary at most."""
        x = ids[:-1]
        if not (len(x) and x[0] == self.boundary and ids[1] in self.openings):
            return np.ones(len(x), bool)
        turns = np.isin(x, self.openings) | (x == self.end)
        return x[np.maximum.accumulate(np.where(turns, np.arange(len(x)), 0))] == self.assistant


def census(blocks: Iterable[np.ndarray], ids: dict[str, int]) -> dict:
    """What conversations there are in the tokens of whole shards: their turns by role, the tokens that are learned, the
    longest, and how many are longer than windows of some sizes.  ids: as Marks has them."""
    marks, at, last, turns, learned = Marks(ids), 0, ids["boundary"], np.zeros(len(OPENINGS), np.int64), 0
    begins, opens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for x in blocks:
        opening, boundary = np.isin(x, marks.openings), x == marks.boundary
        turn = np.maximum.accumulate(np.where(opening | boundary | (x == marks.end), np.arange(len(x)), -1))
        now = np.where(turn < 0, last, x[turn])
        learned += int((now == marks.assistant).sum())
        turns += [int((x == i).sum()) for i in marks.openings]
        begins.append(np.flatnonzero(boundary) + at)
        opens.append(np.flatnonzero(opening) + at)
        at, last = at + len(x), now[-1]
    begins = np.concatenate(begins)
    lengths = np.diff(begins, append=at)[np.isin(begins + 1, np.concatenate(opens))]
    return {"conversations": len(lengths), "turns": dict(zip(OPENINGS, turns.tolist(), strict=True)),
            "learned_tokens": learned, "longest": int(lengths.max(initial=0)),
            "longer": {str(size): int((lengths > size + 1).sum()) for size in WINDOWS}}


def marks_of(tokenizer) -> dict[str, int]:
    """What Marks needs of a tokenizer."""
    return {"boundary": tokenizer.boundary_id, **{name: tokenizer.special_ids[name] for name in NAMES}}


# ---- the way out


def jinja(tokenizer, *, marks: bool = True) -> str:
    """The template as Jinja text; an imported model's own; "" of a model that was never trained to talk.  marks: with
    those by which transformers' return_assistant_tokens_mask goes, which not all that render it know."""
    if not marks:
        return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{#\1 \2#}", jinja(tokenizer))
    if tokenizer.chat_template != OWN:
        return tokenizer.chat_template
    names = ", ".join(map(json.dumps, tokenizer.special_ids))
    openings = ", ".join(f"'{role}': '{name}'" for role, name in OPENINGS.items())
    return "".join(line.strip() for line in f"""
        {{%- macro typed(text) -%}}
          {{%- if text is not string -%}}{{{{- raise_exception('A message is no text.') -}}}}{{%- endif -%}}
          {{%- for name in [{names}] -%}}
            {{%- if name in text -%}}
              {{{{- raise_exception('A message has ' + name + ' in it, which would become a special token.') -}}}}
            {{%- endif -%}}
          {{%- endfor -%}}
          {{{{- text -}}}}
        {{%- endmacro -%}}
        {{%- set openings = {{{openings}}} -%}}
        {{{{- {json.dumps(tokenizer.boundary)} -}}}}
        {{%- for message in messages -%}}
          {{%- set text = message['content'] or '' -%}}
          {{%- if message['role'] not in openings -%}}
            {{{{- raise_exception('Roles are {", ".join(OPENINGS)}.') -}}}}
          {{%- endif -%}}
          {{%- if message['role'] == 'assistant' -%}}
            {{{{- openings['assistant'] -}}}}
            {{%- generation -%}}
            {{{{- typed(text) -}}}}
            {{%- for call in message['tool_calls'] or [] -%}}
              {{%- set function = call['function'] or call -%}}
              {{%- set arguments = function['arguments'] -%}}
              {{{{- '{CALL}{{"name": ' + typed(function['name'] | tojson) + ', "arguments": ' -}}}}
              {{{{- typed(arguments if arguments is string else arguments | tojson) + '}}' -}}}}
            {{%- endfor -%}}
            {{{{- '{END}' -}}}}
            {{%- endgeneration -%}}
          {{%- elif text or message['role'] != 'system' -%}}
            {{{{- openings[message['role']] -}}}}
            {{{{- typed(text) -}}}}
            {{{{- '{END}' -}}}}
          {{%- endif -%}}
        {{%- endfor -%}}
        {{%- if add_generation_prompt -%}}{{{{- openings['assistant'] -}}}}{{%- endif -%}}""".splitlines())
