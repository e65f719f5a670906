"""Shared fixtures: the repository on the path, one thread (tests run side by side), tiny models."""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
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


def table(out):
    """Rows of the last markdown table, by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


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


@pytest.fixture
def here(monkeypatch, capsys, tmp_path, request):
    """here(*args) -> (exit code, stdout, stderr) of bench in this process, its rows too, with nothing compiled."""
    from bench import __main__ as bench
    from bench import gpu, measure
    from stack import device
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))  # a row's own process ends with it

    def main(*argv):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, argv)])
        bench.main()

    def run_row(command, row, timeout=None, cache=None):
        argv, out = sys.argv, io.TextIOWrapper(io.BytesIO(), write_through=True)
        with contextlib.redirect_stdout(out):
            try:
                main(*command, "--row", row)
            except Exception as error:
                return dict(row=row, failed=f"{type(error).__name__}: {error}")
            finally:
                sys.argv = argv  # a row that is train.py has its own
        *before, last = measure.objects(out.buffer.getvalue().decode())
        return last | (dict(before=before) if before else {})

    def call(*argv):
        code = 0
        try:
            main(*argv)
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as a row's process has its own
    monkeypatch.setattr(measure, "run_row", run_row)
    monkeypatch.setattr(gpu, "run_row", run_row)
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)  # is for good, and other tests measure memory
    monkeypatch.setitem(measure.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(measure.MATMUL_SIZE, "cpu", 256)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # half a second in a process full of other tests' modules
    yield call
    torch.compiler.set_stance("default")
