"""Text from a trained model, printed while it is made.

    python sample.py out/demo --prompt "def main("
    python sample.py out/demo --prompt_file notes.txt --max_new_tokens 500
    echo -n "import os" | python sample.py out/demo --prompt -
    python sample.py out/demo --interactive
    python sample.py out/demo --prompt "def load(" --stop "def " --stop "class " --repetition_penalty 1.2
    python sample.py out/chat --chat --system "Be brief."
    python sample.py out/chat --chat --prompt "What does textwrap.dedent do?"

A run folder is all that is needed: model and tokenizer are in its checkpoint.  Every prompt begins with the token that
began every document in training, so an empty prompt asks for a document from its first word.  Text stops where the
model ends its document, or before the first of the --stop strings.  What looks like a special token in a prompt is
text, unless --special says otherwise.  --chat is for runs that were trained on conversations: what is typed, or
--prompt, is a message to answer.  On a terminal control characters are spelled out; into a pipe they go as they
are.
"""

import json
import os
import re
import sys
from pathlib import Path

from stack.config import Parser, as_command
from stack.data.signatures import CONVERT, check, check_shifts
from stack.log import on_terminal, visible

LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<\|\w+>|<\w+\|>")  # names as ours, and with a bar forgotten
BATCH = 32  # samples generated side by side: bounds the memory of the KV cache


def read_prompt(prompt: str, prompt_file: str | None) -> str:
    """The prompt's text, byte for byte: no newline is added or taken away."""
    if prompt_file is None and prompt != "-":
        return as_typed(prompt)
    from_stdin = prompt_file in (None, "-")
    name = "standard input" if from_stdin else prompt_file
    if not from_stdin and not os.path.exists(name):
        raise FileNotFoundError(f"{name} not found.\n  Name a text file with the prompt, or - for standard input; "
                                "--prompt is for the text itself.")
    if not from_stdin and os.path.isdir(name):
        raise ValueError(f"{name} is a folder.\n  Name a text file with the prompt.")
    raw = sys.stdin.buffer.read() if from_stdin else Path(name).read_bytes()
    check(raw[:4096], name, "", text=True, plain=False)
    check_shifts(raw, name, 0)
    try:
        return raw.decode("utf-8-sig")  # without a byte-order mark, if there is one
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.start} is {raw[error.start]:#04x}.\n  {CONVERT}."
                         ) from None


def as_typed(word: str) -> str:
    """A word of the command line as UTF-8, whatever encoding Python took it for."""
    try:
        return os.fsencode(word).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{word!a} is not UTF-8.\n  Set the terminal to UTF-8, or put a prompt into a UTF-8 file: "
                         "--prompt_file FILE") from None


def typed_prompts(chat: bool):
    """Lines from the keyboard, or from a pipe, until end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        try:
            import readline  # noqa: F401 (gives input() a history)
        except ImportError:
            pass
        print("A line is a message; Ctrl-C stops an answer, /reset forgets, /save FILE appends the conversation to a "
              ".jsonl, Ctrl-D leaves." if chat else "A line is a prompt; Ctrl-C stops a text, Ctrl-D leaves.")
    while True:
        try:
            yield input("> " if terminal else "")
        except EOFError:
            return


class Text:
    """The text of a growing sample, up to the first of `stops`; what may yet become one of them is held back.

    The first is the one that is complete first, and of those that are complete together the longest: so where tokens
    cut the text decides nothing.  stream: the tokenizer's, which holds back the bytes of an unfinished character.
    """

    def __init__(self, stream, stops):
        self.stream, self.stops, self.held, self.ended = stream, stops, "", False

    def push(self, token: int) -> str:
        return self._let_through(self.stream.push(token))

    def flush(self) -> str:
        """The rest, at the end of the sample."""
        text = self._let_through(self.stream.flush())
        return text + self.held

    def _let_through(self, text: str) -> str:
        if self.ended:
            return ""
        text = self.held + text
        if found := [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]:
            self.held, self.ended = "", True
            return text[:min(found)[1]]
        begun = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - begun:]
        return text[:len(text) - begun]


def repetition_penalty(penalty: float, seen):
    """For generate's on_logits: less for ids that a row has had.  logits (B, V), seen (B, V) bool -> (B, V).

    A positive logit of theirs is divided by `penalty`, a negative one multiplied, as in transformers; CTRL (arXiv
    1909.05858), where it comes from, divides all of them, which makes a negative one likelier."""
    import torch
    return lambda logits: torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def begin_talk(model, tokenizer, prompt: str | None, args):
    """A conversation as --system, --messages and --prompt begin it."""
    from stack.data import chat
    from stack.talk import Talk
    if not tokenizer.chat_template:
        raise ValueError(f"{args.run} was never trained to talk. Finetune it on conversations:\n  python prepare.py "
                         f"FILE.jsonl --chat --tokenizer {args.run} --out data/talks\n  python train.py "
                         f"configs/chat.py --init_from={args.run} --data_dir=data/talks --out_dir=out/talks")
    record = {"messages": [{"role": "user", "content": prompt}]}
    if args.messages:
        text = read_prompt("", args.messages)
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{args.messages} is not JSON ({error}).\n  It needs one conversation: "
                             '{"messages": [...]}') from None
        record = {"messages": record} if isinstance(record, list) else record
    try:
        messages = [] if args.interactive else chat.read(record, to_answer=True)
    except ValueError as error:
        raise ValueError(f"{args.messages or '--prompt'} {error}.") from None
    if args.system is not None:
        messages = [{"role": "system", "content": as_typed(args.system)},
                    *(message for message in messages if message["role"] != "system")]
    return Talk(model, tokenizer, messages)


def obey(talk, line: str) -> bool:
    """Do what a line asks for that is no message; whether it was one."""
    word, _, rest = line.strip().partition(" ")
    if word == "/reset":
        talk.reset()
    elif word == "/save" and not any(message["role"] == "assistant" for message in talk.messages):
        print("sample.py: nothing was answered yet that could be saved.", file=sys.stderr)
    elif word == "/save":
        try:
            talk.save(rest.strip())
            print(f"(added to {rest.strip()})", file=sys.stderr)
        except OSError as error:
            print(f"sample.py: {rest.strip() or 'no file'}: {error.strerror}", file=sys.stderr)
    elif word in ("/help", "/quit", "/exit"):
        print("(/reset begins anew, /save FILE adds the conversation to a file, Ctrl-D ends)", file=sys.stderr)
    return word in ("", "/reset", "/save", "/help", "/quit", "/exit")


def sample(model, tokenizer, prompt: str, args, seed: int, *, echo: bool, talk=None):
    """Print args.num_samples continuations of one prompt, or answers to what was said so far in a talk."""
    import torch

    from model import generate
    from stack.data import chat
    limit, ends = model.cfg.max_seq_len, chat.ends(tokenizer) if talk else [tokenizer.boundary_id]
    if talk:
        before = talk.forgotten
        ids = talk.prompt(args.max_new_tokens)
        if talk.forgotten > before:
            print(f"sample.py: the context of {limit} tokens is full: {talk.forgotten} messages at the beginning are "
                  "left out", file=sys.stderr)
    else:
        odd = {*LOOKS_SPECIAL.findall(prompt)} - {*tokenizer.special_ids} if args.special else ()
        if odd:
            print(f"sample.py: {', '.join(map(visible, sorted(odd)))} in the prompt is text, as the tokenizer has "
                  f"no such token; it has {', '.join(map(visible, tokenizer.special_ids))}", file=sys.stderr)
        ids = tokenizer.encode(prompt, special=args.special)
        ids = ids if ids[:1] == [tokenizer.boundary_id] else [tokenizer.boundary_id, *ids]
    if len(ids) > limit:
        print(f"sample.py: the prompt has {len(ids)} tokens and the context {limit}: its beginning is left out",
              file=sys.stderr)
        ids = ids[-limit:]

    shown = ""  # the last character, which may need what comes next

    def emit(text: str):
        nonlocal shown
        sys.stdout.write(on_terminal(text, shown))
        sys.stdout.flush()
        shown = text[-1:] or shown

    before, alone = prompt if echo else "", args.num_samples == 1

    def batch(first: int, rows: int):
        """Print samples first, first + 1, ..., made side by side; a single one while it grows."""
        texts, pieces = [Text(tokenizer.stream(), args.stop) for _ in range(rows)], [[] for _ in range(rows)]
        on_logits = None
        if args.repetition_penalty != 1:
            seen = torch.zeros(rows, model.cfg.vocab_size, dtype=torch.bool, device=model.embed.weight.device)
            seen[:, ids] = True
            seen[:, ends] = False  # the boundary begins every prompt, and is a sign to end with as well
            on_logits = repetition_penalty(args.repetition_penalty, seen)

        def on_token(row: int, token: int) -> bool:
            if on_logits is not None:
                seen[row, token] = True
            piece = f"{token} " if args.ids else texts[row].push(token)
            emit(piece) if alone else pieces[row].append(piece)
            return texts[row].ended
        if alone:
            emit(before)
        how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
                   seed=seed + first, on_logits=on_logits)
        if talk and alone:
            talk.answer(max_new_tokens=args.max_new_tokens, on_token=lambda token: on_token(0, token), **how)
        else:
            most = min(args.max_new_tokens, limit - len(ids)) if talk else args.max_new_tokens
            generate(model, [ids] * rows, max_new_tokens=most, on_token=on_token,
                     stop_ids=() if args.no_stop else ends, **how)
        for row, text in enumerate(texts):
            rule = "-" * 40 + "\n" if first + row and not args.ids else ""
            rest = text.flush()
            if alone and not (shown or rest) and args.temperature:  # an empty line alone looks like a fault
                print(f"sample.py: the text ended at once; --seed {args.seed + 1} begins another", file=sys.stderr)
            emit(rule + ("" if alone else before) + "".join(pieces[row]) + rest + "\n")
    for first in range(0, args.num_samples, BATCH):
        batch(first, min(BATCH, args.num_samples - first))


def parse(argv):
    p = Parser(prog="sample.py", description=__doc__)
    p.add_argument("run", help="run folder (out/NAME: its ckpt_last) or a checkpoint folder (out/NAME/ckpt_best)")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to go on from; - is standard input")
    source.add_argument("--prompt_file", metavar="FILE", help="UTF-8 file with the prompt; - is standard input")
    source.add_argument("--interactive", action="store_true",
                        help="one prompt per typed line; Ctrl-C stops a text, Ctrl-D leaves")
    source.add_argument("--messages", metavar="FILE", help='with --chat: answer this conversation, {"messages": [...]} '
                        "as JSON; - is standard input")
    p.add_argument("--chat", action="store_true", help="talk: without a prompt, with what is typed")
    p.add_argument("--system", metavar="TEXT", help="with --chat: what the conversation begins with")
    p.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="at most so many (256)")
    p.add_argument("--num_samples", type=int, default=1, metavar="N", help="continuations of the same prompt (1)")
    p.add_argument("--seed", type=int, default=1337, metavar="N", help="the same seed gives the same text (1337)")
    p.add_argument("--temperature", type=float, default=0.8, metavar="X",
                   help="0 takes the likeliest token, below 1 is safer, above 1 wilder (0.8)")
    p.add_argument("--top_k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0 is off (0)")
    p.add_argument("--top_p", type=float, default=0.95, metavar="P",
                   help="among the likeliest that together have probability P; 1 is off (0.95)")
    p.add_argument("--min_p", type=float, default=0.0, metavar="P",
                   help="among those at least P times as likely as the best; 0 is off (0)")
    p.add_argument("--repetition_penalty", type=float, default=1.0, metavar="X",
                   help="divide the logits of ids that were there, in prompt or text, by X; 1 is off (1)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT",
                   help="end before this text, which is not shown; may be given several times ($'\\n': a new line)")
    p.add_argument("--special", action="store_true",
                   help='read names such as "<|user|>" in the prompt as special tokens instead of text')
    p.add_argument("--no_stop", action="store_true", help="go on past the end of a document, up to max_new_tokens")
    p.add_argument("--ids", action="store_true", help="print the new token ids, a line per sample, instead of text")
    p.add_argument("--compile", action="store_true",
                   help="compile the step from one token to the next: seconds at first, then several times as fast")
    p.add_argument("--quant", choices=["int8"],
                   help="weights of 8 bits in the blocks: half the memory; eval.py --quant says what it costs")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (auto)")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16: of weights and cache (auto)")
    args = p.parse_args(argv)
    for name, least in (("num_samples", 1), ("max_new_tokens", 0), ("top_k", 0), ("seed", 0), ("temperature", 0)):
        if not least <= getattr(args, name) < float("inf"):
            p.error(f"--{name} is {getattr(args, name)}; it must be {least} or more, and finite.")
    if args.seed >= 2**63:
        p.error(f"--seed is {args.seed}; it must be less than 2**63.")
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(args, name) <= 1:
            p.error(f"--{name} is {getattr(args, name)}; it must lie between 0 and 1.")
    if not 0.01 <= args.repetition_penalty <= 100:
        p.error(f"--repetition_penalty is {args.repetition_penalty}; it must lie between 0.01 and 100. 1.2 is usual.")
    if "" in args.stop:
        p.error("--stop is empty; it needs the text to end before.")
    if args.stop and args.ids:
        p.error("--stop is for text: it may end amid a token. Leave it out with --ids.")
    if (args.system is not None or args.messages) and not args.chat:
        p.error("--system and --messages belong to --chat.")
    if args.chat and (args.special or args.no_stop):
        p.error("--special and --no_stop are not for --chat: what is typed is text, and an answer has an end.")
    args.interactive |= args.chat and not (args.prompt or args.prompt_file or args.messages)
    if args.chat and args.interactive and args.num_samples > 1:
        p.error("--num_samples is for one --prompt: a conversation goes on with one answer.")
    return args


def main():
    args = parse(sys.argv[1:])
    sys.stdin, sys.stdout = sys.stdin or open(os.devnull), sys.stdout or open(os.devnull, "w")  # None where closed
    for stream, how in ((sys.stdout, {"errors": "replace"}), (sys.stdin, {"encoding": "utf-8", "errors": "replace"})):
        if hasattr(stream, "reconfigure"):  # a console that lacks a character shows "?" instead of ending the program
            stream.reconfigure(**how)
    with as_command("sample.py"):
        args.stop = list(map(as_typed, args.stop))
        asked = not args.interactive and not args.messages
        prompt = read_prompt(args.prompt or "", args.prompt_file) if asked else None
        from stack.checkpoint.tensors import load_model  # torch: seconds that --help and a wrong flag need not wait for
        from stack.device import pick_device, pick_dtype
        device = pick_device(args.device)
        model, tokenizer, _ = load_model(args.run, device=device, dtype=pick_dtype(args.dtype, device))
        if args.quant:
            from stack.quantize import quantize_int8
            quantize_int8(model)
        from stack.twins import check_cache, fast_decoding
        check_cache(model)
        if args.compile:
            fast_decoding(model)
        from stack.talk import TooLong
        talk = begin_talk(model, tokenizer, prompt, args) if args.chat else None
        if tokenizer.chat_template and not args.chat:
            print(f"sample.py: {args.run} has learned to talk: --chat asks it. This continues a text.", file=sys.stderr)
        if not args.interactive:
            sample(model, tokenizer, prompt, args, args.seed, echo=not args.ids and not talk, talk=talk)
            return
        for turn, line in enumerate(typed_prompts(args.chat)):
            if talk:
                if obey(talk, line):
                    continue
                talk.messages.append({"role": "user", "content": line})
            try:
                sample(model, tokenizer, line, args, args.seed + turn, echo=False, talk=talk)
            except KeyboardInterrupt:
                print()
            except TooLong as error:  # the conversation goes on without this message
                talk.messages.pop()
                print(f"sample.py: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
