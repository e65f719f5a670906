"""What the machine is and can do: device, number format, peak rate.

The device is decided first, the format after it, so that `--device=cpu` on a machine with a GPU never inherits the
GPU's format.  What cannot be known is None or refused, never guessed: a wrong peak gives a wrong MFU, which looks like
any other number.
"""

import contextlib
import ctypes
import os
import platform
import re
import warnings
from pathlib import Path

import torch

# Dense bf16/fp16 tensor-core peak, TFLOP/s (NVIDIA data sheets, without sparsity).  Names are matched as whole words,
# the longest counts: "A100" is neither an A10 nor an RTX A1000.  GeForce names must end there: a "Laptop GPU", a "Ti"
# or a "D" is another chip.
PEAK_TFLOPS = {
    "T4": 65, "V100": 125, "A10": 125, "A10G": 70, "A30": 165, "A40": 150, "A100": 312, "RTX A6000": 155, "L4": 121,
    "L40": 181, "L40S": 362, "H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H200 NVL": 835, "H20": 148,
    "GH200": 989, "B200": 2250, "RTX 3090": 71, "RTX 4080": 97, "RTX 4090": 165, "RTX 5090": 209,
}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str = "auto") -> torch.device:
    """auto = cuda, else mps, else cpu; that a GPU cannot be used is said.  cuda:N becomes the current device of CUDA.
    Raises ValueError when a named device is not there."""
    if name == "auto":
        if not torch.cuda.is_available() and NVIDIA_DRIVER.exists():
            warnings.warn(f"there is an NVIDIA GPU here that torch {torch.__version__} cannot use: it is left out. The "
                          "driver may be too old for this build, or the build is for CPUs: docs/scaling.md says which "
                          "one to install.", stacklevel=2)
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = None
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device is {name!r}; it must be auto, cpu, cuda, cuda:N or mps.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices here. "
                         "Use --device=auto or --device=cpu, or install a CUDA build of torch.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton's kernels and CUDA graphs go where this is, not where tensors are
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps', but PyTorch sees no Apple GPU here. Use --device=auto or cpu.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Format of the matmuls under autocast.  auto = bfloat16 where the device computes in it, float16 on older CUDA
    cards, float32 on CPU and MPS.  Warns of an emulated format; raises ValueError on a pair that does not work."""
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.float32 if device.type != "cuda" else torch.bfloat16 if native else torch.float16
    if name == "bfloat16" and device.type == "cuda" and not native:
        warnings.warn("this GPU has no bfloat16: PyTorch emulates it, slowly, and compiles nothing in it. Use "
                      "--dtype=float16, which auto would be here.", stacklevel=2)
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be auto or one of {', '.join(DTYPES)}.")
    if device.type == "mps" and name == "float16":
        raise ValueError("dtype float16 needs loss scaling, which PyTorch lacks on MPS. Use bfloat16 or float32.")
    return DTYPES[name]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s one device could do in this format, or None where it is not known: better no MFU than a wrong one."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_TFLOPS if re.search(rf"\b{key}\b", name)
             and (not key.startswith("RTX") or name.endswith(key))]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def machine(device: torch.device) -> str:
    """The device by its name; of a CPU also the cores in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [x.split(":")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        name = names[0].strip() if names else name
    n = torch.get_num_threads()
    return f"{name}, {n} core{'s' * (n > 1)}"


def autocast(device: torch.device, dtype: torch.dtype):
    """The context in which forward passes run."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def round_residual(model, dtype: torch.dtype):
    """Hand the residual stream to each block of a model in this format, autocast's, under autocast.

    Blocks then add in it, so that the stream and its gradient have it from the first block on; norms compute in fp32
    all the same.  Without autocast, as in checks in fp32, nothing is rounded.  Kept as model.residual_dtype for
    sharding.whole, which builds the model anew; a model loaded from a checkpoint has neither.
    """
    def rounded(block, args):
        x, *rest = args
        return (x.to(dtype), *rest) if torch.is_autocast_enabled(x.device.type) else None
    model.residual_dtype = dtype
    for block in model.blocks:
        block.register_forward_pre_hook(rounded)


def keep_freed_memory():
    """On a CPU, let glibc keep freed blocks instead of returning them to the system.

    A training step frees and asks again for the same hundreds of megabytes; handed back, each comes back as fresh pages
    that the kernel has to zero, which costs as much as the arithmetic on them.  Elsewhere than on glibc: does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch: large blocks on huge pages
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap
