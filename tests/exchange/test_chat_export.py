"""A model that talks, elsewhere: the same ids, the same mask of what is learned, the same answers, the same end."""

import json

import gguf
import jinja2.sandbox
import pytest
import transformers
from exchange_models import conversations, run, save, sharp, talking_words, trained_words

from model import generate
from stack.data import chat
from stack.exchange import hf, hf_tokenizers

transformers.utils.logging.set_verbosity_error()
THEIRS = "{% for m in messages %}<|user|>{{ m.content }}\n{% generation %}.{%- endgeneration %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(our model, our tokenizer, the exported folder)"""
    words, base = talking_words(), tmp_path_factory.mktemp("talks")
    model = sharp(words)
    run("export", save(base / "run", model, words), base / "hf")
    return model, words, base / "hf"


def test_transformers_renders_our_ids_and_our_mask(folder):
    _, words, path = folder
    other, marks = transformers.AutoTokenizer.from_pretrained(path), chat.Marks(chat.marks_of(words))
    for talk in conversations(300, seed=1):
        ids = chat.encode(words, talk)
        assert other.apply_chat_template(talk, return_dict=True, add_generation_prompt=True)["input_ids"] == (
            chat.encode(words, talk, answer=True).tolist())
        theirs = other.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert theirs["input_ids"] == ids.tolist()
        assert theirs["assistant_masks"] == [0, *marks.learned(ids).astype(int).tolist()]
    with pytest.raises(jinja2.TemplateError, match="special token"):
        other.apply_chat_template([{"role": "user", "content": "what is <|late|>?"}])


def test_transformers_answers_alike_and_stops(folder):
    """Greedy answers are ours, and end at <|end|> and at <|endoftext|>, which the card's own lines show."""
    ours, words, path = folder
    assert "apply_chat_template" in (path / "README.md").read_text()
    other = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    ends = chat.ends(words)
    assert model.generation_config.eos_token_id == ends == [words.special_ids["<|end|>"], words.boundary_id]
    short = [talk for talk in conversations(20, seed=2) if len(chat.encode(words, talk)) < 100]
    assert len(short) > 3
    for talk in short:
        inputs = other.apply_chat_template(talk[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        n = inputs["input_ids"].shape[1]
        theirs = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, n:].tolist()
        prompt = chat.encode(words, talk[:-1], answer=True).tolist()
        answer = generate(ours, [prompt], max_new_tokens=40, stop_ids=ends)[0]
        assert answer == theirs[:len(answer)] and (len(answer) == 40 or theirs[len(answer)] in ends)


def test_a_model_of_text_says_nothing_of_chat(tmp_path):
    words = trained_words()
    run("export", save(tmp_path / "run", sharp(words), words), tmp_path / "hf")
    run("gguf", tmp_path / "run", tmp_path / "m.gguf")
    assert not (tmp_path / "hf" / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == words.boundary_id
    assert "tokenizer.chat_template" not in gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert hf_tokenizers.tokenizer_from_hf(tmp_path / "hf").chat_template == ""


def test_gguf_has_template_and_end(folder, tmp_path):
    """The template renders as ours with plain Jinja, as llama-cpp-python does it, and has no marks."""
    ours, words, _ = folder
    run("gguf", save(tmp_path / "run", ours, words), tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert fields["tokenizer.ggml.eot_token_id"] == words.special_ids["<|end|>"]
    assert "{%- generation" not in fields["tokenizer.chat_template"]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = plain.from_string(fields["tokenizer.chat_template"])
    for talk in conversations(50, seed=3):
        talk = [{key: value for key, value in message.items() if key != "tool_calls"} for message in talk]
        text = template.render(messages=talk, add_generation_prompt=True)
        assert words.encode(text, special=True) == chat.encode(words, talk, answer=True).tolist()


def test_an_imported_model_keeps_its_template_and_its_ends(tmp_path):
    """Ours comes back as ours; another as it is, with what ends its answers; both leave again as they came."""
    words = talking_words()
    hf.save_folder(sharp(words), words, tmp_path / "ours")
    back = hf_tokenizers.tokenizer_from_hf(tmp_path / "ours")
    assert (back.chat_template, back.fingerprint) == (chat.OWN, words.fingerprint)
    (tmp_path / "ours" / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "ours/tokenizer_config.json").read_text())
    for said in (THEIRS, [{"name": "tools", "template": "x"}, {"name": "default", "template": THEIRS}]):
        settings["chat_template"] = said
        (tmp_path / "ours/tokenizer_config.json").write_text(json.dumps(settings))
        back = hf_tokenizers.tokenizer_from_hf(tmp_path / "ours")
        assert back.chat_template == THEIRS
    run("import", tmp_path / "ours", tmp_path / "run")
    run("export", tmp_path / "run", tmp_path / "again")
    assert (tmp_path / "again/chat_template.jinja").read_text() == THEIRS
    assert set(json.loads((tmp_path / "again/generation_config.json").read_text())["eos_token_id"]) == {
        words.special_ids["<|end|>"], words.boundary_id}
    settings |= {"chat_template": "{{ bos_token }}" + THEIRS, "bos_token": {"content": "<|late|>"}}
    (tmp_path / "ours/tokenizer_config.json").write_text(json.dumps(settings))  # another token begins there than ends
    back = hf_tokenizers.tokenizer_from_hf(tmp_path / "ours")
    assert back.decode(chat.encode(back, [{"role": "user", "content": "Hi"}]).tolist()) == "<|late|><|user|>Hi\n."
