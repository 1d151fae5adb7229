# `make demo` and `make test` set up everything they need; the rest is a contributor's day.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/crosscheck
ENGINES := $(VENV)/bridges
EXPECT ?= $(shell $(PYTHON) -c 'import sys; print("stable-baselines3" + ",trl" * (sys.version_info >= (3, 11)))')

# One thread per process: two notebooks side by side on two cores must not fight over them.
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED  ?= 0

.PHONY: demo test test-all test-gpu crosscheck bridges newcomer install export outputs check site docs book slides lab clean breaks

demo: $(READY)          ## train with the embedded defaults, print what came of it
	$(BIN)/rlhf-notes demo

test: $(READY)          ## modules, notebooks and README agree; every notebook runs; the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: export HYPOTHESIS_PROFILE = thorough
test-all: test breaks   ## the same with ten times the examples, and every deliberate break

test-gpu: $(READY)      ## what tests/gpu shows on a pretended GPU, on the one that is here
	PYTHONPATH=tests/gpu $(BIN)/python -m pytest -p real tests/gpu/inside_formulas.py tests/gpu/inside_control.py tests/gpu/inside_language.py tests/gpu/inside_benchmarks.py

crosscheck: $(PEERS)/.ready ## our formulas against those of other libraries; fails if one of EXPECT is missing
	$(PEERS)/bin/python -m pytest tests/crosscheck --expect '$(EXPECT)'

# What the last four require excludes what the others do; their losses are functions of tensors and need none of it.
$(PEERS)/.ready: constraints.txt pyproject.toml settings.ini setup.py
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,crosscheck]'
	for peer in DI-engine==0.5.3 verl==0.9.1 openrlhf==0.11.2 trinity-rft==0.6.0; do \
	    $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$peer || echo "$$peer cannot be installed here: its tests will be skipped"; done
	touch $@

bridges: $(ENGINES)/.ready ## our losses inside verl and TRL, in an environment of their own; nothing is skipped for want of a library
	$(ENGINES)/bin/python -m pytest tests/bridges --expect verl,trl

# What verl requires excludes the newest transformers and TRL; what its losses and a Ray cluster import is this.
$(ENGINES)/.ready: constraints.txt pyproject.toml settings.ini setup.py
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,crosscheck]'
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check ray tensordict omegaconf hydra-core codetiming orjson datasets torchdata tinker==0.38.0
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	touch $@

install: $(READY)       ## the virtual environment, with the pinned versions of constraints.txt
$(READY): constraints.txt pyproject.toml settings.ini setup.py
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python >= 3.10 is needed; this is " + sys.version.split()[0] + ": set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

export: $(READY)        ## notebooks -> modules (nbdev-export) and README
	$(BIN)/python tools/notebooks.py export

outputs: $(READY)       ## execute the notebooks and store their outputs; NB='nbs/a.ipynb nbs/b.ipynb' for some
	$(BIN)/python tools/notebooks.py outputs $(NB)

check: $(READY)         ## in half a minute: lint, limits of the style, notebooks and modules in step
	$(BIN)/ruff check
	$(BIN)/python -m pytest -n 2 tests/test_in_step.py tests/test_package.py tests/test_style.py -m 'not slow'

newcomer: $(READY)       ## wheel and sdist built, installed in fresh environments, and used
	$(BIN)/python tools/newcomer.py

breaks: $(READY)        ## break the code on purpose and count the breaks that the tests catch
	$(BIN)/python tools/breaks.py --out tests/breaks/caught.csv

site: $(READY)          ## the site, in _docs
	$(BIN)/python tools/site_pages.py

docs: site              ## the site, each page of it opened in Chromium (wide, narrow, light, dark), and lessons in JupyterLab
	$(BIN)/python -m pytest docs -n 2 -p no:cacheprovider
	$(BIN)/python docs/sizes.py

book: site              ## a path of the front page as a PDF, _docs/book-1.pdf; NUMBER=2 for another
	$(BIN)/python tools/paper.py book $(or $(NUMBER),1)

slides: site            ## a lesson as slides, _docs/slides-surrogate.pdf; LESSON=formulas/kl for another
	$(BIN)/python tools/paper.py slides $(or $(LESSON),formulas/surrogate)

lab: $(READY)           ## JupyterLab at the index
	$(BIN)/jupyter lab nbs/index.ipynb

clean:                  ## all that can be made again, the virtual environment included
	rm -rf $(VENV) build dist _docs *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
