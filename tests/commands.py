"""Commands of a copy of the repository, each in a process of its own that need not import torch again.

    with Commands() as commands:
        code, stdout, stderr = commands(folder, "train.py", "--max_steps=10")

A Python that has imported what takes seconds, and nothing of ours, forks once for each command: what runs is the code
in `folder`, whatever the tests have imported.  torch.compile traces and differentiates as ever, but runs the operators
of a graph one by one, where with inductor=True it makes C++ of them, which takes seconds.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

HEAVY = ("numpy", "torch", "torch._dynamo", "torch._inductor.compile_fx", "tiktoken", "rustbpe", "tqdm",
         "safetensors.torch", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")


class Commands:
    """(folder, command, *arguments) -> exit code, stdout, stderr."""

    def __enter__(self):
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=env)
        return self

    def __call__(self, folder, *argv, inductor: bool = False) -> tuple[int, str, str]:
        folder = Path(folder)
        print(json.dumps([str(folder), list(map(str, argv)), inductor]), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait(600)


def serve():
    for name in HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, argv, inductor = json.loads(line)
        child = os.fork()
        if child == 0:
            if not inductor:
                leave_inductor_out()
            run(folder, argv)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def leave_inductor_out():
    import torch
    compile = torch.compile
    torch.compile = lambda *args, options=None, **settings: compile(*args, backend="aot_eager", **settings)


def run(folder, argv):
    """As `python *argv` in this folder; does not return."""
    os.chdir(folder)
    for number, stream in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), *(open(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.argv, sys.path[0], code = argv, folder, 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
