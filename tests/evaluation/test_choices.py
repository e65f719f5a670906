"""Multiple choice: the numbers are those of the definition, and of lm-evaluation-harness where it is installed."""

import functools
import json
import sys

import pytest
import torch
import transformers
from conftest import tiny_config
from exchange_models import save, texts, trained_words

from model import GPT
from stack.evaluation import choices as tasks
from stack.exchange import hf

transformers.utils.logging.set_verbosity_error()
CONTEXT = 48
CPU = dict(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def words():
    return trained_words()


@pytest.fixture(scope="module")
def run(tmp_path_factory, words):
    """(run folder, model) with a short context and logits far apart."""
    torch.manual_seed(6)
    model = GPT(tiny_config(vocab_size=words.vocab_size, max_seq_len=CONTEXT)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if name.startswith("blocks") else 0.1))
    return save(tmp_path_factory.mktemp("tasks") / "run", model, words), model


@pytest.fixture(scope="module")
def questions(words):
    """Ordinary ones, and every edge the rules speak of."""
    source, made = [word for word in texts(3)[2].split() if len(words.encode(f" {word}")) < 6][:400] * 9, []
    for i in range(60):
        at, n = 31 * i, 3 + i % 9
        choices = [" ".join(source[at + n + 50 * k:at + n + 50 * k + 2 + (i + k) % 5]) + " 日本" * ((i + k) % 3 == 0)
                   for k in range(4)]  # some with more bytes than characters
        made.append((" ".join(source[at:at + n]), choices, i % 4))
    longest = next(" ".join(source[:n]) for n in range(100, 1, -1)
                   if len(tasks.encode_pair(words, "", " ".join(source[:n]))[1]) <= CONTEXT)
    assert len(words.encode(longest)) > CONTEXT - 6
    return [*made,
            ("", ["def f(x):", "return", "import os"], 1), ("   ", ["a", "b"], 0), ("return \n", ["x", "None"], 1),
            ("print(", ["'a'", " 'b'", "\n"], 2), ("<|endoftext|>import", ["os", "sys"], 0),
            ("<|endoftext|>", ["a"], 0), ("one <|end|> two", ["three <|end|>", "four"], 1),
            (" ".join(source[:200]), ["self", "the end"], 0), ("x =", [longest, "1"], 0),
            ("", [longest, longest[:-1] + "?"], 1), ("ein", ["ß" * 9, "aaaaaaaaa"], 0),
            ("twice", ["the same", "the same", "other"], 1), ("emoji", ["👍🏽 é", "e\u0301"], 0)]


def by_definition(folder, questions):
    """Each sum of log-probabilities, and the shares, from transformers' logits: one choice at a time, in float64."""
    words = transformers.AutoTokenizer.from_pretrained(folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    sums, right = [], {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    for question, choices, gold in questions:
        begin = [] if question.startswith("<|endoftext|>") else [words.bos_token_id]
        for choice in choices:
            whole, first = (begin + words.encode(text) for text in (f"{question} {choice}", question.rstrip()))
            ids = torch.tensor([*first, *whole[len(first):]])
            n = len(ids) - len(first)  # the last n are the choice
            seen = ids[-CONTEXT - 1:-1]
            log_p = other(seen[None]).logits[0].log_softmax(-1)
            sums.append(sum(log_p[-n + k, ids[len(ids) - n + k]].item() for k in range(n)))
        own = sums[-len(choices):]
        for name, lengths in (("acc", [1] * len(own)), ("acc_norm", map(len, choices)),
                              ("acc_bytes", [len(c.encode()) for c in choices])):
            scores = [value / length for value, length in zip(own, lengths, strict=True)]
            right[name] += scores.index(max(scores)) == gold
    return sums, {name: count / len(questions) for name, count in right.items()}


def pairs_of(words, questions):
    return [tasks.encode_pair(words, question, choice) for question, choices, _ in questions for choice in choices]


@pytest.mark.parametrize("rows", [1, 7])
def test_scores_are_those_of_the_definition(tmp_path, run, words, questions, rows):
    """Empty questions, white space at the seam, a spelled-out boundary, left truncation, ties, characters and bytes;
    the batch makes no difference."""
    hf.save_folder(run[1], words, tmp_path)
    with torch.no_grad():
        sums, shares = by_definition(tmp_path, questions)
    ours = tasks.log_likelihoods(run[1], pairs_of(words, questions), rows=rows, dtype=torch.float32, **CPU)
    assert ours == pytest.approx(sums, abs=2e-3, rel=1e-5)
    got = tasks.choices(run[1], words, questions, rows=rows, **CPU)
    assert got["questions"] == len(questions) and {name: got[name] for name in shares} == shares
    assert len(set(shares.values())) == 3 and got["acc_stderr"] == pytest.approx(
        (shares["acc"] * (1 - shares["acc"]) / (len(questions) - 1)) ** 0.5)


def test_every_text_begins_with_one_boundary(words, questions):
    for before, after in pairs_of(words, questions):
        assert before[0] == words.boundary_id and words.boundary_id not in before[1:] + after
    assert tasks.encode_pair(words, "a ", "b") == tasks.encode_pair(words, "a", " b")


def test_the_harness_gets_the_same_numbers(tmp_path, run, words, questions):
    """lm_eval on the exported folder: each log-likelihood, and acc and acc_norm of a task file."""
    pytest.importorskip("lm_eval", reason='lm_eval is not installed (pip install "lm_eval[hf]")')
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    hf.save_folder(run[1], words, tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), add_bos_token=True, device="cpu", batch_size=4, dtype="float32")
    asked = [Instance("loglikelihood", {}, (question, f" {choice}"), i) for question, choices, _ in questions
             for i, choice in enumerate(choices)]
    ours = tasks.log_likelihoods(run[1], pairs_of(words, questions), rows=4, dtype=torch.float32, **CPU)
    assert ours == pytest.approx([value for value, _ in theirs.loglikelihood(asked, disable_tqdm=True)], abs=2e-3,
                                 rel=1e-5)
    write(tmp_path / "q.jsonl", questions)
    (tmp_path / "made_up.yaml").write_text(
        f"task: made_up\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'q.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{query}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n  - metric: acc_bytes\n")
    got = tasks.harness(run[1], words, [str(tmp_path / "made_up.yaml")], **CPU)["made_up"]
    want = tasks.choices(run[1], words, questions, **CPU)
    assert {name: got[name] for name in ("acc", "acc_norm", "acc_bytes", "acc_stderr")} == pytest.approx(
        {name: want[name] for name in ("acc", "acc_norm", "acc_bytes", "acc_stderr")})
    with pytest.raises(ValueError, match="no task 'made_down'"):
        tasks.harness(run[1], words, ["made_down"], **CPU)


def write(path, questions):
    path.write_text("".join(json.dumps({"query": q, "choices": c, "gold": g}) + "\n" for q, c, g in questions))


@pytest.fixture
def call(run, run_eval):
    return functools.partial(run_eval, run[0], "--dtype", "float32")


def test_the_command_scores_a_file(tmp_path, run, words, questions, call):
    """--choices, as JSON and for people; fields under either name; --limit takes the first."""
    write(tmp_path / "q.jsonl", questions)
    code, out, err = call("--choices", tmp_path / "q.jsonl", "--json")
    assert code == 0, err
    assert json.loads(out) == {str(tmp_path / "q.jsonl"): pytest.approx(tasks.choices(run[1], words, questions, **CPU))}
    rows = [{"ctx": q, "endings": c, "label": str(g)} for q, c, g in questions]
    (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    code, out, err = call("--choices", tmp_path / "q.jsonl", "--limit", 9)
    r = tasks.choices(run[1], words, questions[:9], **CPU)
    assert code == 0 and f"9 questions | acc {r['acc']:.4f} ± {r['acc_stderr']:.4f} | acc_norm" in out, err


def test_hellaswags_own_file(tmp_path):
    """Its questions as the harness puts them: heading, capital letter, no WikiHow marks."""
    row = {"ind": 1, "activity_label": "Baking", "ctx": "unused", "ctx_a": "[header] How to bake [title] Mix.  Stir.",
           "ctx_b": "she then", "endings": [" stirs [substeps] it.", "sleeps."], "label": "1", "source_id": "x"}
    (tmp_path / "h.jsonl").write_text(json.dumps(row))
    assert tasks.read_questions(tmp_path / "h.jsonl") == [
        ("Baking: How to bake. Mix. Stir. She then", ["stirs it.", "sleeps."], 1)]


@pytest.mark.parametrize("line, named", [
    ("{", "line 2: JSONDecodeError"), ('{"query": "a", "choices": ["b"]}',
     "line 2: it has no gold or label; its keys are query, choices.\n  A line is one question"),
    ('{"question": "a", "answers": ["b"]}', "it has no query or ctx, no choices or endings, no gold or label"),
    ('{"ctx_a": "a", "endings": ["b"], "label": 0}', "line 2: it has no 'activity_label'"),
    ('{"query": "a", "choices": ["b"], "gold": 1}', "line 2"),
    ('{"query": "a", "choices": ["b", ""], "gold": 0}', "line 2"),
    ('{"query": 1, "choices": ["b"], "gold": 0}', "line 2"), ("[]", "line 2"),
    ('{"query": "a", "choices": ["b"], "gold": 1e999}', "line 2"), ("[" * 100_000, "line 2"),
    ('{"query": "a", "choices": ["b", "c"], "gold": 0.5}', "line 2"),
    ("\udcff", "line 2"),
    ('{"activity_label": "a", "ctx_a": "b", "ctx_b": null, "endings": ["c"], "label": 0}', "line 2"),
    (json.dumps({"query": "", "choices": ["many words " * 99], "gold": 0}), f"context of {CONTEXT}")])
def test_questions_that_cannot_be_scored_are_named(tmp_path, call, line, named):
    (tmp_path / "q.jsonl").write_text('{"query": "a", "choices": ["b"], "gold": 0}\n' + line, errors="surrogateescape")
    code, out, err = call("--choices", tmp_path / "q.jsonl")
    assert code == 2 and out == "" and named in err and "Traceback" not in err


def test_half_surrogates_are_what_they_are_in_training_text(tmp_path, call):
    """U+FFFD, in questions and choices."""
    said = []
    for half in ("\\ud800", "\\ufffd"):
        (tmp_path / "q.jsonl").write_text(f'{{"query": "a{half}", "choices": ["b{half}", "return x"], "gold": 0}}\n')
        said.append(call("--choices", tmp_path / "q.jsonl", "--json"))
    assert said[0][0] == 0 and said[0] == said[1]


@pytest.mark.parametrize("flags, named", [
    (["--tasks", "hellaswag"], "pip install"), (["--choices", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--choices", "a", "--tasks", "b"], "not allowed with"), (["--limit", 3], "--limit belongs"),
    (["--choices", "a", "--seq_len", 8], "belong to the held-out loss"),
    (["--tasks", "a", "--limit", 0], "--limit is 0"), (["--tasks", ""], "--tasks is empty; it needs names of tasks"),
    (["--choices", ""], "--choices is empty: a path is needed")])
def test_wrong_flags_end_with_a_message(call, monkeypatch, flags, named):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    code, out, err = call(*flags)
    assert code == 2 and out == "" and named in err and "Traceback" not in err
