"""From ten conversations to a model that answers: prepared, finetuned from a base, talked to, scored, handed over."""

import json

import pytest
import transformers
from exchange_models import trained_words
from runs import log, run

import convert
import prepare
from stack.checkpoint.tensors import load_model
from stack.data import chat
from stack.talk import Talk

transformers.utils.logging.set_verbosity_error()
FACTS = ["red", "blue", "green", "gold", "grey", "pink", "black", "white", "brown", "violet"]
SIZE = dict(vocab_size=777, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, max_seq_len=128,
            seq_len=64, batch_tokens=256, packing="best_fit", log_interval=10, warmup_steps=10, muon_lr=2e-2,
            adamw_lr=1e-2)


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """A folder with data/, a base model in base/ and, finetuned from it, one that answers in chat/."""
    base = tmp_path_factory.mktemp("way")
    (base / "words").mkdir()
    trained_words().save(base / "words")
    with open(base / "ten.jsonl", "w") as file:
        for i, colour in enumerate(FACTS):
            talk = [{"role": "user", "content": f"Colour {i}?"}, {"role": "assistant", "content": f"It is {colour}."},
                    {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": f"Yes, {colour}."}]
            file.write(json.dumps({"messages": talk}) + "\n")
    common = ["--tokenizer", str(base / "words"), "--val_fraction", "0.2"]
    (base / "text.txt").write_text("Colour 1? It is red. Sure? " * 300)
    assert prepare.main([str(base / "text.txt"), "--out", str(base / "text"), *common]) == 0
    assert prepare.main([str(base / "ten.jsonl"), "--chat", "--out", str(base / "data"), *common]) == 0
    run(base / "text", base / "base", **SIZE | dict(max_steps=2, warmup_steps=1))
    run(base / "data", base / "chat", init_from=str(base / "base"), **SIZE | dict(
        max_steps=40, eval_interval=40, weight_decay=0.0))
    return base


def test_it_answers_what_it_was_taught_and_stops(way):
    model, words, _ = load_model(way / "chat")
    learned = [chat.read(json.loads(line)) for line in (way / "ten.jsonl").read_text().splitlines()]
    right = 0
    for talk in learned:
        said = Talk(model, words)
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            said.messages.append(question)
            right += words.decode(said.answer(max_new_tokens=20)) == answer["content"]
    assert right >= 2 * json.loads((way / "data" / "meta.json").read_text())["splits"]["train"]["documents"]
    assert log(way / "chat", key="val_loss")


def test_the_last_line_says_how_to_talk_to_it(way, tmp_path, capsys):
    run(way / "data", tmp_path / "more", init_from=str(way / "base"), **SIZE | dict(max_steps=1))
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"python sample.py {tmp_path / 'more'} --chat")


def test_answers_end_after_finetuning_and_not_before(way, run_eval):
    data = ("--data", way / "data", "--split", "train", "--answers", "--json")
    before, after = (json.loads(run_eval(way / name, *data)[1]) for name in ("base", "chat"))
    assert (before["ended"], after["ended"]) == (0, 1) and before["questions"] == after["questions"] >= 5
    example = after["examples"][0]
    assert example["answer"] == f"It is {FACTS[int(example['question'].split()[1].strip('?'))]}."
    code, out, _ = run_eval(way / "chat", "--answers")
    assert code == 0 and "held-out questions have an answer that ends within 64 tokens" in out and "> Colour" in out


def test_the_held_out_loss_is_of_answers_for_both(way, run_eval):
    """eval.py's loss on a set of conversations: the assistant's tokens, attention inside each, for a base model too."""
    losses = [json.loads(run_eval(way / name, "--data", way / "data", "--split", "train", "--json")[1])
              for name in ("base", "chat")]
    tokens = json.loads((way / "data" / "meta.json").read_text())["chat"]["learned_tokens"]
    assert losses[0]["tokens"] == losses[1]["tokens"] < tokens  # some were held out
    assert losses[1]["loss"] < 0.2 < 2 < losses[0]["loss"]
    assert "answers only" in run_eval(way / "chat", "--data", way / "data")[1]
    (way / "mix.py").write_text(f"sources = [dict(source={str(way / 'text.txt')!r}, weight=1),\n"
                                f"           dict(source={str(way / 'ten.jsonl')!r}, weight=1, chat=True)]\n")
    argv = [str(way / "mix.py"), "--tokenizer", str(way / "words"), "--val_fraction", "0.2", "--out", str(way / "mix")]
    assert prepare.main(argv) == 0
    assert "answers and text: loss" in run_eval(way / "chat", "--data", way / "mix", "--split", "train")[1]
    assert "no conversations" in run_eval(way / "chat", "--data", way / "text", "--answers")[2]
    assert "whole" in run_eval(way / "chat", "--stride", "8")[2]


MESSAGES = [{"role": "user", "content": "Colour 3?"}]


def own_answer(way) -> str:
    """sample.py's greedy one to MESSAGES."""
    model, words, _ = load_model(way / "chat")
    return words.decode(Talk(model, words, MESSAGES).answer(max_new_tokens=30))


def test_transformers_gives_its_answer_and_stops(way, tmp_path):
    words = trained_words()
    convert.main(["export", str(way / "chat"), str(tmp_path / "hf")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = theirs.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1]:].tolist()
    assert ids[-1] == words.special_ids["<|end|>"] and tokenizer.decode(ids[:-1]) == own_answer(way)


def test_llama_cpp_gives_its_answer_and_stops(way, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make exchange builds it)")
    convert.main(["gguf", str(way / "chat"), str(tmp_path / "m.gguf"), "--type", "f32"])
    other = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, verbose=False, flash_attn=False, type_k=0, type_v=0)
    choice = other.create_chat_completion(MESSAGES, temperature=0.0, repeat_penalty=1.0, max_tokens=30)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (own_answer(way), "stop")
