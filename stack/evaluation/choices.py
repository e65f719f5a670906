"""Multiple choice: of several ways a text may go on, does the model find the right one the likeliest?

A choice is scored by the sum of log-probabilities of its tokens after the question.  Everything about that sum that is
a convention is EleutherAI's lm-evaluation-harness's, so that numbers can be compared with published ones:

- one space stands between question and choice; white space at the end of the question belongs to the choice.
- question and choice are encoded together and cut where the question's own ids end, since merges cross the seam.
- every text begins with the boundary, once: also an empty question, also one that spells it out (names of special
  tokens in a question are special tokens).  The harness calls this add_bos_token.
- what is longer than the context loses its beginning; a choice that alone is longer is refused.
- acc takes the largest sum, acc_norm the largest sum per character of the choice, acc_bytes per byte; the first of
  equals.

`choices` scores a file by these rules in a few lines; `harness` hands the model, as a Hugging Face folder that exists
for the moment, to lm_eval itself, which knows some thousand tasks and fetches their data.  A test holds the two
together.
"""

import json
import logging
import math
import re
import tempfile
from pathlib import Path

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from model import ANY_LENGTH
from stack.device import autocast
from stack.exchange import hf

FIELDS = (("query", "ctx"), ("choices", "endings"), ("gold", "label"))  # of a question; either name will do


def read_questions(path) -> list[tuple[str, list[str], int]]:
    """(question, choices, number of the right one) of each line of a .jsonl; HellaSwag's own file is one, too."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if "ctx_a" in row:
                row = hellaswag(row)
            if missing := [" or ".join(names) for names in FIELDS if not {*names} & {*row}]:
                raise ValueError(f"it has no {', no '.join(missing)}; its keys are {', '.join(row) or 'none'}")
            query, choices, gold = (row[a] if a in row else row[b] for a, b in FIELDS)
            if not (isinstance(query, str) and isinstance(choices, list) and type(gold) in (int, str)
                    and 0 <= (gold := int(gold)) < len(choices)
                    and all(isinstance(choice, str) and choice for choice in choices)):
                raise ValueError("the question must be text, the choices a list of texts, the right one its number "
                                 "from 0")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = {ValueError: "", KeyError: "it has no "}.get(type(error), f"{type(error).__name__}: ")
            raise ValueError(f"{path}, line {number}: {why}{error}.\n  A line is one question: "
                             '{"query": "Two and two are", "choices": ["three", "four"], "gold": 1}') from None
        questions.append((query, choices, gold))
    if not questions:
        raise ValueError(f"{path} has no questions.\n  A line of JSON each is needed.")
    return questions


def hellaswag(row: dict) -> dict:
    """A question of HellaSwag as the harness puts it: with its heading, without WikiHow's marks."""
    def plain(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {"query": plain(query), "choices": [plain(text) for text in row["endings"]], "gold": row["label"]}


def encode_pair(tokenizer, question: str, choice: str) -> tuple[list[int], list[int]]:
    """Ids of the question, beginning with the boundary, and those of the choice after it."""
    def encode(text):
        ids = tokenizer.encode(text, special=True)
        return ids if ids[:1] == [tokenizer.boundary_id] else [tokenizer.boundary_id, *ids]

    before = question.rstrip()
    ids = encode(before)
    return ids, encode(f"{question} {choice}")[len(ids):]


@torch.no_grad()
def log_likelihoods(model, pairs: list[tuple[list[int], list[int]]], *, device, dtype, rows: int) -> list[float]:
    """log p(second | first) of each pair of ids, `rows` of about equal length at a time."""
    from tqdm import tqdm
    limit, results = model.cfg.max_seq_len, [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    for start in tqdm(range(0, len(order), rows), unit="batch", leave=False, disable=None):
        some = order[start:start + rows]
        texts = [(pairs[i][0] + pairs[i][1])[-limit - 1:] for i in some]
        targets = [[-100] * (len(ids) - 1 - len(pairs[i][1])) + pairs[i][1] for i, ids in zip(some, texts, strict=True)]
        # filled up behind, which is never seen: attention looks back
        x = pad_sequence([torch.tensor(ids[:-1]) for ids in texts], batch_first=True)
        y = pad_sequence([torch.tensor(ids) for ids in targets], batch_first=True, padding_value=-100)
        # each length would be compiled anew, and planned anew by cuDNN
        with autocast(device, dtype), torch.compiler.set_stance("force_eager"), sdpa_kernel(ANY_LENGTH):
            nats = model(x.to(device), y.to(device), reduction="none").view(x.shape).cpu()  # 0 where ignored
        for i, value in zip(some, nats.double().sum(1).tolist(), strict=True):
            results[i] = -value
    if not all(map(math.isfinite, results)):
        raise ValueError(f"a log-likelihood is {min(results)}: the weights are damaged. Try an earlier checkpoint.")
    return results


def choices(model, tokenizer, questions, *, device, dtype=torch.float32, rows: int = 8) -> dict:
    """{"questions", "acc", "acc_norm", "acc_bytes", and of each a standard error} over read_questions' list."""
    pairs = []
    for question, texts, _ in questions:
        for text in texts:
            before, after = encode_pair(tokenizer, question, text)
            if not 0 < len(after) <= model.cfg.max_seq_len:
                raise ValueError(f"the choice {text[:50]!r} is {len(after)} tokens long; from 1 to the model's context "
                                 f"of {model.cfg.max_seq_len} can be scored.\n  Leave the question out.")
            pairs.append((before, after))
    likelihood = iter(log_likelihoods(model, pairs, device=device, dtype=dtype, rows=rows))
    right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}

    def n_bytes(text):  # half a surrogate pair is U+FFFD to the tokenizer, in training text too: three bytes either way
        return len(text.encode("utf-8", "surrogatepass"))
    for _, texts, gold in questions:
        sums = [next(likelihood) for _ in texts]
        for name, length in (("acc", lambda text: 1), ("acc_norm", len), ("acc_bytes", n_bytes)):
            each = [value / length(text) for value, text in zip(sums, texts, strict=True)]
            right[name] += each.index(max(each)) == gold
    n, result = len(questions), {"questions": len(questions)}
    for name, count in right.items():
        share = count / n
        result |= {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None}
    return result


def harness(model, tokenizer, names: list[str], *, device, dtype=torch.float32, rows: int = 8, limit=None) -> dict:
    """Task -> {metric: value} as lm_eval measures them; a name may be a .yaml file that defines a task."""
    try:
        import lm_eval.tasks
    except ModuleNotFoundError:
        raise ValueError("lm_eval, which --tasks runs, is not installed.\n  Install it: pip install \"lm_eval[hf]\".  "
                         "Or score a file of your own without it: --choices FILE.jsonl") from None
    files = {name: Path(name).read_text(encoding="utf-8") for name in names if name.endswith(".yaml")}
    manager = lm_eval.tasks.TaskManager(include_path=[str(Path(name).parent.absolute()) for name in files] or None)
    names = [re.search(r"^task:\s*(\S+)", files[name], re.MULTILINE)[1] if name in files else name for name in names]
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(f"lm_eval has no task {unknown[0]!r}.\n  `lm_eval ls tasks` lists them.")
    with tempfile.TemporaryDirectory() as folder:
        hf.save_folder(model, tokenizer, folder)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        settings = {"pretrained": folder, "dtype": str(dtype).removeprefix("torch."), "add_bos_token": True}
        done = lm_eval.simple_evaluate("hf", settings, tasks=names, task_manager=manager, device=str(device),
                                       batch_size=rows, limit=limit, log_samples=False)
    return {task: {key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)}
            for task, values in done["results"].items()}


def text(results: dict) -> str:
    """Name -> metrics, for people: a line each, with standard errors."""
    def said(metrics, key):
        value, error = metrics[key], metrics.get(f"{key}_stderr")
        if not isinstance(value, float):
            return f"{value:,} {key}"
        return f"{key} {value:.4f}" + ("" if error is None else f" ± {error:.4f}")

    return "\n".join(f"{name}: " + " | ".join(said(metrics, key) for key in metrics if not key.endswith("_stderr"))
                     for name, metrics in results.items())
