"""Files for llama.cpp, read back by gguf's reader, by transformers', and by llama.cpp where it is installed."""

import unicodedata

import numpy as np
import pytest
import torch
import transformers
from exchange_models import LEARNED, refused, run, save, sharp, trained_words

from model import generate
from stack.data.tokenizer import Tokenizer
from stack.exchange import gguf as ours_gguf
from stack.exchange import hf, hf_tokenizers

transformers.utils.logging.set_verbosity_error()
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install gguf)")


@pytest.fixture(scope="module")
def words():
    return trained_words()


def read_gguf(path):
    reader = gguf.GGUFReader(path)
    tensors = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type).astype("float32")) for t in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors, {
        t.name: t.tensor_type.name for t in reader.tensors}


@pytest.mark.parametrize("kind, error", [("f32", 0.0), ("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 8e-3)])
def test_gguf_reads_back(tmp_path, words, kind, error):
    """Every tensor under llama.cpp's name, to the precision of its type; settings and tokenizer complete."""
    model = sharp(words, tie_embeddings=False)
    save(tmp_path / "run", model, words)
    run("gguf", tmp_path / "run", tmp_path / "m.gguf", "--type", kind)
    fields, tensors, types = read_gguf(tmp_path / "m.gguf")
    want = ours_gguf.theirs(hf.settings_to_hf(model.cfg), hf.to_theirs(model))
    assert tensors.keys() == want.keys() and "output.weight" in want and "blk.1.attn_k_norm.weight" in want
    for name, tensor in want.items():
        assert tensors[name].shape == tensor.shape
        assert (tensors[name] - tensor).abs().max() <= error * tensor.abs().max(), name
        assert types[name] == ("F32" if tensor.ndim == 1 else kind.upper())
    assert fields["general.architecture"] == "qwen3" and fields["qwen3.block_count"] == 2
    for key, value in {"context_length": 160, "embedding_length": 64, "feed_forward_length": 96,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
                       "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 1e4,
                       "vocab_size": words.vocab_size}.items():
        assert fields["qwen3." + key] == value, key
    assert fields["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    letters = {c: b for b, c in enumerate(hf_tokenizers.LETTERS)}
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert len(tokens) == words.vocab_size == len(tensors["token_embd.weight"])
    for token, rank in words.ranks.items():
        assert bytes(letters[c] for c in tokens[rank]) == token and kinds[rank] == gguf.TokenType.NORMAL
    for name, i in words.special_ids.items():
        assert tokens[i] == name and kinds[i] == gguf.TokenType.CONTROL
    assert [tuple(bytes(letters[c] for c in part) for part in merge.split(" "))
            for merge in fields["tokenizer.ggml.merges"]] == hf_tokenizers.merges_of(words.ranks)
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (words.boundary_id,) * 2
    assert fields["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize("changes", [{}, dict(qk_norm=False), LEARNED], ids=["qwen3", "llama", "gpt2"])
def test_gguf_is_the_same_model_to_another_reader(tmp_path, words, changes):
    """transformers' own reader of GGUF, which knows llama.cpp's names and its order of channels, gets our logits."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    model = sharp(words, **changes)
    save(tmp_path / "run", model, words)
    run("gguf", tmp_path / "run", tmp_path / "m.gguf", "--type", "f32")
    config = transformers.AutoConfig.for_model(**hf.settings_to_hf(model.cfg))  # its reader leaves out head_dim
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    read = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=other)["tensors"]
    assert not other.load_state_dict(read, strict=False).unexpected_keys
    ids = torch.randint(0, words.vocab_size, (2, 60))
    with torch.inference_mode():
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4


def test_gguf_refuses_what_llama_cpp_does_not_have(tmp_path, words, capsys):
    """Its nope interval is 4, its split patterns are a list, fp16 ends at 65504; blocks of q8_0 are 32 wide."""
    three = save(tmp_path / "three", sharp(words, qk_norm=False, nope_every=3), words)
    assert "nope_every=3" in refused(capsys, "gguf", three, tmp_path / "m.gguf")
    run("gguf", save(tmp_path / "four", sharp(words, qk_norm=False, nope_every=4), words), tmp_path / "four.gguf")
    assert read_gguf(tmp_path / "four.gguf")[0]["general.architecture"] == "smollm3"
    foreign = Tokenizer(r"\S+|\s+", words.ranks, words.special_ids)
    assert "split pattern" in refused(capsys, "gguf", save(tmp_path / "f", sharp(words), foreign), tmp_path / "m.gguf")
    loud = sharp(words)
    with torch.no_grad():
        loud.blocks[0].mlp.w_up.weight[0, 0] = 1e5
    save(tmp_path / "loud", loud, words)
    assert "--type bf16" in refused(capsys, "gguf", tmp_path / "loud", tmp_path / "m.gguf")
    run("gguf", tmp_path / "loud", tmp_path / "m.gguf", "--type", "bf16")
    narrow = save(tmp_path / "narrow", sharp(words, d_ff=40), words)
    run("gguf", narrow, tmp_path / "narrow.gguf", "--type", "q8_0")
    types = read_gguf(tmp_path / "narrow.gguf")[2]
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"
    assert not list(tmp_path.glob("*.new"))


def llama(path, **settings):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make exchange builds it)")
    return llama_cpp.Llama(str(path), n_ctx=160, n_batch=160, logits_all=True, verbose=False, flash_attn=False,
                           type_k=0, type_v=0, **settings)  # 0: keys and values in fp32 too


def assert_same_ids(other, words):
    """On 1,000 hard strings, with special tokens as such and as text."""
    for text in hf_tokenizers.hard_strings(1000, words.special_ids):
        if text and "\0" not in text:  # its API ends strings there
            text = unicodedata.normalize("NFC", text) if words.nfc else text
            for special in (False, True):
                ids = other.tokenize(text.encode(), add_bos=False, special=special)
                assert ids == words.encode(text, special=special), text[:60]


@pytest.mark.parametrize("pre", ours_gguf.PRE.values())
def test_llama_cpp_cuts_alike(tmp_path, words, pre):
    """Each split pattern that it has a name for gives our ids; text in NFC only, where that matters."""
    pattern = next(pattern for pattern, name in ours_gguf.PRE.items() if name == pre)
    other = Tokenizer(pattern, words.ranks, words.special_ids, nfc=pre == "qwen2")
    run("gguf", save(tmp_path / "run", sharp(words), other), tmp_path / "m.gguf")
    assert_same_ids(llama(tmp_path / "m.gguf", vocab_only=True), other)


@pytest.mark.parametrize("kind, error", [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.1)])
def test_llama_cpp_reads_every_type(tmp_path, words, kind, error):
    """Logits of the smaller number formats, to their precision."""
    model, ids = sharp(words), torch.randint(0, words.vocab_size, (1, 60))
    run("gguf", save(tmp_path / "run", model, words), tmp_path / "m.gguf", "--type", kind)
    other = llama(tmp_path / "m.gguf")
    other.eval(ids[0].tolist())
    with torch.inference_mode():
        ours, theirs = model(ids)[0], torch.tensor(np.array(other.scores[:60]))
    assert (ours - theirs).std() < error * ours.std()


@pytest.mark.parametrize("changes", [{}, dict(qk_norm=False, bias=True), dict(qk_norm=False, nope_every=4, n_layers=5),
                                     {**LEARNED, "tie_embeddings": False}], ids=["qwen3", "llama", "smollm3", "gpt2"])
def test_llama_cpp_runs_it(tmp_path, words, changes):
    """llama.cpp: same logits, same greedy tokens from a plain text prompt."""
    model = sharp(words, **changes)
    run("gguf", save(tmp_path / "run", model, words), tmp_path / "m.gguf", "--type", "f32")
    other = llama(tmp_path / "m.gguf")
    assert other.n_vocab() == words.vocab_size
    ids = torch.randint(0, words.vocab_size, (1, 60))
    other.eval(ids[0].tolist())
    with torch.inference_mode():
        ours = model(ids)[0]
    error = (ours - torch.tensor(np.array(other.scores[:60]))).abs().max()
    assert error < (5e-3 if model.cfg.mlp == "gelu" else 1e-4)  # its GELU is a table in fp16
    prompt = [words.boundary_id, *words.encode("def main(argv):")]
    assert other.tokenize(b"def main(argv):") == prompt  # it begins documents by itself
    want = generate(model, [prompt], max_new_tokens=20, stop_ids=[words.boundary_id])[0]
    other.reset()
    assert [token for token, _ in zip(other.generate(prompt, temp=0.0, repeat_penalty=1.0), want, strict=False)] == want
