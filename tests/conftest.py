"""Shared fixtures: the repository on the path, one thread (tests run side by side), tiny models."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy processes on two cores spin at barriers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it, and so would commands
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same under nohup
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

from model import GPT, ModelConfig  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tiny_config(**changes) -> ModelConfig:
    """2 layers, d_model 64, 4 query and 2 key heads, 300 ids padded to 320."""
    return ModelConfig(**{**dict(vocab_size=300, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96,
                                 max_seq_len=32), **changes})


def document_ids(x, boundary_id: int):
    """The number of the document each token is in, counted per row; a boundary starts one.  (B, T) -> (B, T)"""
    return (x == boundary_id).cumsum(dim=1)


def resident() -> int:
    """Bytes of memory in use now: the most ever, which other tests may have needed, would hide growth."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small data set; see runs.make_data."""
    import runs
    return runs.make_data(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="session")
def plain(data, tmp_path_factory):
    """One ordinary run: 12 steps, evaluated and sampled on the way, with dropout."""
    import runs
    return runs.run(data, tmp_path_factory.mktemp("plain") / "run", max_steps=12, eval_interval=5, sample_interval=6,
                    save_interval=4, dropout=0.1, keep=2)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A small tokenizer in a file: training one takes longer than all the rest, and rayon does not survive a fork."""
    from prepared import prose

    from stack.data.tokenizer import train_tokenizer
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([prose(0, 3000)], 400).save(path)
    return path


@pytest.fixture
def corpus(tmp_path):
    """300 short documents in one .jsonl and 30 files, one of them the duplicate of a line; see prepared.py."""
    from prepared import prose
    folder = tmp_path / "corpus"
    folder.mkdir()
    docs = [prose(i, 5 + i % 40) for i in range(330)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in docs[:300]))
    for i, text in enumerate([*docs[300:329], docs[7]]):
        (folder / f"b_{i}.txt").write_text(text, newline="")
    return folder


@pytest.fixture
def tiny():
    """tiny(**config changes) -> a GPT with a fixed seed."""
    def build(**changes):
        torch.manual_seed(0)
        return GPT(tiny_config(**changes))
    return build


@pytest.fixture
def run_eval(monkeypatch, capsys):
    """run_eval(run folder, *flags) -> (exit code, stdout, stderr) of eval.py, run in this process on the CPU."""
    def call(run, *flags):
        import eval as evaluation
        monkeypatch.setattr(sys, "argv", ["eval.py", str(run), "--device", "cpu", *map(str, flags)])
        code = 0
        try:
            evaluation.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()
    return call
