# Telamon in two commands, on a machine with Python 3.11 or 3.12, git and make:
#
#   make train      sets up .venv and trains; TRAIN='.venv/bin/telamon train ...' trains something else
#   make test       sets up .venv and runs the linters, the type checker and the fast tests
#
#   make test-slow  the slow tests: whole builds, chaos, Ray, many backends
#   make lint       what `make test` does before the tests
#   make proto      generates telamon/rpc/v1 from proto/
#   make clean      removes .venv and what the tools cached; runs stay

RUN := runs/tdmpc2-dmc-cartpole-swingup-seed1
TRAIN ?= .venv/bin/telamon train tdmpc2 dmc:cartpole-swingup --preset laptop --steps 30000 --eval.every 5000 --eval.episodes 1
# a second `make train` continues where the first was stopped
RESUME = $(if $(wildcard $(RUN)/config.yaml),--resume)

# The first of these that is a supported Python and can make a virtual environment.
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c '$(USABLE)' 2>/dev/null && { echo "$$p"; break; }; done)
INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-slow lint proto clean
.NOTPARALLEL:

train: .venv/train.stamp
	$(TRAIN) $(RESUME)

test: lint
	.venv/bin/pytest -m 'not slow and not gpu' -n 2

test-slow: .venv/test.stamp
	.venv/bin/pytest -m 'slow and not gpu'

lint: .venv/test.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

proto: .venv/test.stamp
	.venv/bin/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/telamon/rpc/v1/replay.proto

clean:
	rm -rf .venv build telamon.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Stamps: nothing is installed again until what they depend on changes. Editable, so that edits need no new install.
.venv/train.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo 'Installing Telamon and what it trains with into .venv; this takes a minute or two, once.'
	$(INSTALL) --editable '.[dmc,plot,video,view]'
	@touch $@

.venv/test.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo 'Installing Telamon and what its tests need into .venv; this takes a minute or two, once.'
	$(INSTALL) --editable '.[dmc,gym,atari,crafter,jaxenvs,envpool,plot,video,view,service,cluster,dev]'
	@touch $@

.venv/made.stamp:
	@'$(PYTHON)' -c '$(USABLE)' 2>/dev/null || { \
	  echo "Telamon needs Python 3.11 or 3.12 with the venv module (on Debian: apt install python3-venv), and PYTHON='$(PYTHON)' is none; set it: make PYTHON=/path/to/python3.12 train"; \
	  exit 1; }
	'$(PYTHON)' -m venv .venv
	@touch $@
