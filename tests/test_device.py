"""The device is decided first, the format after it; a peak rate is known or absent; a missing compiler is survived."""

import re
import warnings

import pytest
import torch

from stack import device as device_module
from stack.device import autocast, peak_flops, pick_device, pick_dtype

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")


@pytest.fixture
def machine(monkeypatch):
    """machine(gpus, mps, bf16) pretends that PyTorch sees these."""
    def pretend(gpus=0, mps=False, bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    return pretend


@pytest.mark.parametrize("gpus, mps, expected", [(0, False, "cpu"), (2, False, "cuda"), (0, True, "mps"),
                                                 (1, True, "cuda")])
def test_auto_device(machine, gpus, mps, expected):
    machine(gpus, mps)
    assert pick_device("auto").type == expected


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "meta", "gpu", "xpu", "cuda:x", ""])
def test_a_device_that_is_not_there(machine, name):
    """Refused in a sentence that names what was asked for and what there is."""
    machine(gpus=1 if name == "cuda:7" else 0)
    with pytest.raises(ValueError, match=f"device is '{name}'"):
        pick_device(name)


@pytest.mark.parametrize("there, gpus, name, said", [(True, 0, "auto", True), (True, 0, "cpu", False),
                                                     (True, 1, "auto", False), (False, 0, "auto", False)])
def test_a_gpu_that_cannot_be_used_is_said(machine, monkeypatch, tmp_path, recwarn, there, gpus, name, said):
    """The driver's file is there and torch sees nothing; only where the choice was left to us."""
    machine(gpus)
    (tmp_path / "version").touch()
    monkeypatch.setattr(device_module, "NVIDIA_DRIVER", tmp_path / ("version" if there else "none"))
    pick_device(name)
    assert ["cannot use" in str(w.message) for w in recwarn] == [True] * said


def test_named_devices(machine, monkeypatch):
    """The one that is named is CUDA's current one: graphs and Triton's kernels are made there."""
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    machine(gpus=2, mps=True)
    assert [str(pick_device(name)) for name in ("cpu", "cuda", "cuda:1", "mps")] == ["cpu", "cuda", "cuda:1", "mps"]
    assert current == ["cuda:1"]


def test_format_follows_the_device(machine):
    """--device=cpu on a machine with a GPU does not inherit the GPU's bf16; an old GPU gets fp16, which it has."""
    machine(gpus=1)
    assert pick_dtype("auto", pick_device("cpu")) == torch.float32
    assert pick_dtype("auto", pick_device("auto")) == torch.bfloat16
    machine(gpus=1, bf16=False)  # PyTorch would emulate it, slowly
    assert pick_dtype("auto", pick_device("auto")) == torch.float16
    machine(mps=True)
    assert pick_dtype("auto", pick_device("auto")) == torch.float32


@pytest.mark.parametrize("name, device, bf16, said", [
    ("bfloat16", CUDA, False, True), ("bfloat16", CUDA, True, False), ("auto", CUDA, False, False),
    ("float16", CUDA, False, False), ("bfloat16", CPU, False, False)])
def test_an_emulated_format_is_said(machine, recwarn, name, device, bf16, said):
    """The full-size configs name bfloat16: on a card without it one is told what to set, and gets what was named."""
    machine(gpus=1, bf16=bf16)
    assert pick_dtype(name, device) == (torch.float16 if name in ("auto", "float16") else torch.bfloat16)
    assert ["--dtype=float16" in str(w.message) for w in recwarn] == [True] * said


def test_named_formats(machine):
    machine(gpus=1)
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16 and pick_dtype("float16", CPU) == torch.float16
    assert pick_dtype("float32", CUDA) == torch.float32
    with pytest.raises(ValueError, match="float16 needs loss scaling"):
        pick_dtype("float16", MPS)
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        pick_dtype("float8", CPU)


PEAKS = [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A10", 125), ("NVIDIA A10G", 70),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H20", 148), ("NVIDIA GH200 480GB", 989), ("NVIDIA L4", 121), ("NVIDIA L40", 181), ("NVIDIA L40S", 362),
    ("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA RTX A6000", 155),
    # other chips whose names contain one of the table's
    ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None), ("NVIDIA RTX A3000 Laptop GPU", None), ("T400", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ("NVIDIA GeForce RTX 5090 D", None), ("NVIDIA GB200", None), ("NVIDIA A100X", None),
    ("NVIDIA GeForce RTX 9090", None), ("AMD Instinct MI300X", None), ("", None),
]


@pytest.mark.parametrize("name, tflops", PEAKS)
def test_peak_of_a_device(monkeypatch, name, tflops):
    """Whole words and the longest of them: an A100 is no A10, a PCIe card no SXM module; what is unknown is None."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, torch.bfloat16) == (tflops and tflops * 1e12)
    assert peak_flops(CUDA, torch.float32) is None  # the table is for tensor cores


def test_peak_elsewhere():
    assert peak_flops(CPU, torch.bfloat16) is None and peak_flops(MPS, torch.float16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Matmuls run in the format; float32 means that nothing is cast."""
    x = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (x @ x).dtype == dtype
        assert torch.is_autocast_enabled("cpu") == (dtype != torch.float32)
    assert (x @ x).dtype == torch.float32


def test_keeping_memory_is_harmless_where_there_is_no_glibc(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")
    monkeypatch.setattr(device_module.ctypes, "CDLL", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_module.keep_freed_memory()


def test_the_table_is_readable():
    """Every name could be found in a device's name, and is in TFLOP/s."""
    assert all(re.fullmatch(r"(RTX )?[A-Z]*\d+[A-Z]*( PCIe| NVL)?", name) for name in device_module.PEAK_TFLOPS)
    assert all(50 < peak < 5000 for peak in device_module.PEAK_TFLOPS.values())
