# make demo       a model from nothing in minutes on a CPU: data, training, held-out score, a sample
# make chat       after it, minutes more: that model learns to answer questions; a score, three answers
# make test       the whole suite on CPU
# make lint       ruff
# make env        only the environment .venv, which the others make when it is missing
# make faults     the long fault injections, five to twenty minutes: kills, full disks, lost ranks, 2 GB under a memory cap
# make exchange   the GGUF tests that need llama.cpp, which pip builds in about five minutes
# make trace      a training step as a GPU would be given it, traced without one: PyTorch's build for CUDA in an environment
#                 of its own, .venv-trace; needs Linux, a C compiler, network, about 4.7 GB and nine minutes.  Where it ends
#                 with an error, its last lines say which kernel does not compile or which count is off: docs/gpu.md
# make clean      delete .venv and caches; never data or runs
#
# .venv is made by python3, or by another one: make demo PYTHON=python3.12
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: demo chat env test lint exchange faults trace clean
.DELETE_ON_ERROR:

demo: $(READY)
	@bash runs/demo.sh base

chat: $(READY)
	@bash runs/demo.sh chat

env: $(READY)

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

lint: $(READY)
	$(PY) -m ruff check .

faults: $(READY)
	$(PY) tests/faults.py
	BENCH_GPU=1 $(PY) -m pytest tests/bench -k without_packages

exchange: $(READY)
	$(PY) -m pip install --quiet llama-cpp-python==0.3.36
	$(PY) -m pytest tests/exchange/test_gguf.py -k llama_cpp
	$(PY) -m pytest tests/test_answering.py -k llama_cpp

# Headers and library are those of the wheels; the build for CUDA is PyPI's for Linux, whatever .venv has.
trace: TORCH = $(shell sed -n 's/^torch==/torch===/p' requirements.txt)
trace:
	@command -v cc >/dev/null || { echo "There is no C compiler here to build tests/no_cuda.c with. Install one: apt install gcc" >&2; exit 2; }
	@test -e .venv-trace || $(PYTHON) -m venv .venv-trace
	@echo "Installing $(TORCH), built for CUDA, into .venv-trace (once; some gigabytes)"
	@.venv-trace/bin/python -m pip install --quiet --disable-pip-version-check --retries 2 "$(TORCH)" "nvidia-cuda-crt==13.0.*" numpy || { echo "PyTorch's build for CUDA could not be installed; see above. Without it nothing can be traced: there is one for Linux only." >&2; exit 2; }
	@cc -shared -fPIC -w -I"$$(echo .venv-trace/lib/python3*/site-packages/nvidia/cu13/include)" -Wl,-soname,libcuda.so.1 -o .venv-trace/libcuda.so.1 tests/no_cuda.c || { echo "tests/no_cuda.c does not fit the headers of this build of CUDA; see above." >&2; exit 2; }
	@OMP_NUM_THREADS=1 LD_PRELOAD="$$PWD/.venv-trace/libcuda.so.1" .venv-trace/bin/python tests/traced.py

clean:
	rm -rf .venv .venv-trace .pytest_cache .ruff_cache .hypothesis __pycache__
	find bench configs stack tests -name __pycache__ -prune -exec rm -rf {} +
	@echo "data/ and out/ are yours and stay."

# One environment for everything; made again when requirements.txt changes.
$(READY): requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11. Install a newer one and say: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@! test -L .venv || { echo ".venv is a link to $$(readlink .venv), which lacks packages of requirements.txt. Remove the link (rm .venv) to get an environment of its own, or install them there and: touch $(READY)" >&2; exit 2; }
	@echo "Installing the packages of requirements.txt into .venv (once; a minute or two)"
	@$(PYTHON) -m venv .venv || { echo "The environment .venv could not be made; see above. Is the disk full or read-only?" >&2; exit 2; }
	@$(PY) -m pip install --quiet --disable-pip-version-check --retries 2 -r requirements.txt || { echo "The packages of requirements.txt could not be installed; see above. Is there a network? Behind a mirror, set PIP_INDEX_URL." >&2; exit 2; }
	@touch $(READY)
