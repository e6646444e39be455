# make train   trains the quickstart     ARGS="run.steps=5" goes to pentad train
# make test    runs the tests            ARGS="-k program" goes to pytest; two processes share them out
# make test-all  runs the slow matrices too, which take far longer, and installs what they talk to: an S3 server, MLflow;
#                then, one after the other, the tests that measure what other processes would change
#                Processes share what they compile, also where the environment says not to keep it.
# make check   lint, format and types
# make docs    regenerates the pages and pictures that come from the code
# The first call makes .venv (deploy/setup.py); later ones start at once.

PYTHON ?= python3
INPUTS := pyproject.toml constraints.txt deploy/setup.py

.PHONY: train test test-all check docs
.NOTPARALLEL:

train: .venv/ready-to-run
	@.venv/bin/pentad train $(ARGS)

test: .venv/ready-to-test
	@PYTHONDONTWRITEBYTECODE= PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 $(ARGS)

test-all: .venv/ready-to-test-all
	@PYTHONDONTWRITEBYTECODE= PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 .venv/bin/pytest -n 3 --slow -o faulthandler_timeout=3100 $(ARGS)
	@PYTHONDONTWRITEBYTECODE= PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 .venv/bin/pytest --slow -m quiet $(ARGS) || [ $$? -eq 5 ]  # 5: none

docs: .venv/ready-to-test
	@.venv/bin/python docs/generate.py

check: .venv/ready-to-test
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy -p pentad
	.venv/bin/mypy tests docs deploy/setup.py

.venv/ready-to-%: $(INPUTS)
	@$(PYTHON) deploy/setup.py $*
