"""How a .cpp file of this folder becomes functions: compiled for this CPU at first use, then kept."""

import ctypes
import functools
import inspect
from pathlib import Path

import torch


@functools.cache
def compile_cpp(name: str) -> ctypes.CDLL:
    """NAME.cpp beside this file, compiled for this CPU, on PyTorch's threads; seconds, then kept for other processes.
    Raises OSError where nothing compiles; with an errno where the compiler's cache cannot be written."""
    try:
        from torch._inductor.codecache import CppCodeCache  # makes the cache's folder
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, the folder for compiled code. Set TORCHINDUCTOR_CACHE_DIR to "
                      "one that can be written", error.filename) from error
    try:
        from torch._inductor.cpp_builder import is_gcc
        cpu = sorted(torch.cpu.get_capabilities().items())  # what it is compiled for: machines may share a cache
        code = f"// {cpu}\n{Path(__file__).with_name(f'{name}.cpp').read_text(encoding='utf-8')}"
        flags = ["-ffp-contract=fast"]  # PyTorch's flags for generated code leave these off
        if is_gcc():  # clang does so by itself, and does not know the flag
            flags.append("-ftree-loop-vectorize")
        options = {"extra_flags": flags}
        if "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters:  # PyTorch 2.13, not 2.11
            options["needs_vec_isa"] = False  # saves it seconds of trials for what only its own code uses
        return CppCodeCache.load(code, **options)
    except Exception as error:
        raise OSError(f"nothing can be compiled here: {' '.join(str(error).splitlines()[:2])}\n"
                      "  Install a C++ compiler, or go without compiling.") from error
