# Everything runs from $(VENV), which the first target that needs it makes. `make VENV=folder ...` takes another one.
VENV := .venv
PYTHON := python3
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing

# Other trainers' tools, whose files tests bring to a line, have an environment of their own on top of $(VENV), which
# has nothing then that CoServe does not ask for.
TRAINERS := $(VENV)/trainers

# KServe's client, which a test asks with, wants an older psutil than ours: it has an environment with nothing of ours.
KSERVE := $(VENV)/kserve

# How many processes `make test` runs tests in: half more than cores, because tests also wait. Each takes about 1.5 GB.
WORKERS := $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))

# How long `make mutants` may take, and which module it is about (as in ONLY=agent.core.queue; all when empty).
MINUTES := 45
ONLY :=

# What tests need beside Python, as command:package, and where it lies if not on the PATH.
TOOLS := mosquitto:mosquitto openssl:openssl promtool:prometheus gcc:gcc curl:curl chromium:chromium nginx:nginx-light
SBIN := /usr/sbin:/usr/local/sbin

# What `make test-forms` runs: all that packs, tries, chooses or names a form, and what a CPU does without some of them.
FORM_TESTS := tests/experts/backends/onednn tests/experts/backends/onnx tests/experts/backends/ort \
  tests/experts/backends/test_contract.py tests/experts/backends/test_forms.py \
  tests/agent/commands/test_doctor.py tests/agent/deployment/test_eight_bits.py \
  tests/profiler/microbench/test_precision_choice.py tests/profiler/profiling/test_eight_bits.py
AS_WITH_AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2

# GStreamer's RTSP server and its H.264, which cameras are tested against: files that show it, and Debian's packages.
RTSP_SERVER := /usr/lib/*/girepository-1.0/GstRtspServer-1.0.typelib /usr/lib/*/gstreamer-1.0/libgstx264.so
RTSP_PACKAGES := gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-good gstreamer1.0-plugins-ugly python3-gi

# What `make gpu` runs on: auto, cuda or mps; emulated or integrated for a trial of its steps.
DEVICE := auto

# `make bundle CUDA=no` leaves CUDA out, for boxes without an NVIDIA GPU.
CUDA := yes

.PHONY: help venv trainers kserve cluster tools demo screenshots test test-all test-forms lint house drill bench gpu mutants proto bundle clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED)  ## the virtual environment, about 6 GB; kept while pyproject.toml and what is compiled are unchanged

trainers: $(TRAINERS)/.installed  ## timm, Lightning and Anomalib, which only tests use; 0.5 GB inside $(VENV)

kserve: $(KSERVE)/.installed  ## KServe's client, which only a test uses; 0.5 GB inside $(VENV)

cluster: $(VENV)/.cluster  ## Ray, which a line with workers on several boxes needs

$(VENV)/.cluster: $(INSTALLED)
	$(VENV)/bin/pip install --quiet -e '.[cluster]'
	touch $@

demo: $(INSTALLED)  ## an inspection line on this machine, from training to the closing report
	$(VENV)/bin/coserve demo

screenshots: $(INSTALLED) tools  ## the station's pages over the demo line at three sizes, into pictures; docs/station.png
	$(VENV)/bin/python tests/agent/doors/http/screenshots.py

# Without them the tests that need them are skipped, or fail, and say so. Tests start a broker of their own; where
# systemd runs, Debian also starts the services mosquitto, nginx and prometheus once they are installed: nothing here
# needs these. A compiler without the headers of the C library, which apt-get only recommends, is of no use.
tools:  ## what tests need: mosquitto, openssl, promtool, gcc, curl, chromium, nginx, GStreamer, installed where apt-get is there and may
	@for tool in $(TOOLS); do \
	  PATH="$$PATH:$(SBIN)" command -v $${tool%%:*} >/dev/null || { missing="$$missing $${tool%%:*}"; wanted="$$wanted $${tool##*:}"; }; \
	done; \
	for file in $(RTSP_SERVER); do \
	  [ -e "$$file" ] || { missing="$$missing gstreamer"; wanted="$$wanted $(RTSP_PACKAGES)"; break; }; \
	done; \
	[ -z "$$missing" ] && exit 0; \
	case "$$wanted" in *gcc*) wanted="$$wanted libc6-dev";; esac; \
	install="env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends$$wanted"; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  { $$install || { apt-get update -qq && $$install; }; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "not installed, so tests that need it are skipped or fail:$$missing (as root: apt-get install$$wanted)" >&2

# Several processes share the cores: threads of one that waited by spinning would take them from the others.
# Agents that tests start find compiled what a worker has imported.
PYTEST := OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

test: $(INSTALLED) trainers tools  ## the tests of every push: each promise, and one representative of each slow kind
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED) trainers kserve cluster tools  ## all tests, the slow ones too, and 400 examples of each property
	$(PYTEST) --hypothesis-profile=all

# ONNX Runtime asks the CPU itself: its forms are the same ones here.
test-forms: $(INSTALLED)  ## the tests of the forms as on a CPU with AVX2 and no AVX-512, as far as libraries obey
	$(AS_WITH_AVX2) $(PYTEST) $(FORM_TESTS)

lint: $(INSTALLED)  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

house: $(INSTALLED)  ## lines, rooms, signatures, circles and records on the ways of data, against their bounds
	$(VENV)/bin/python tests/house.py

# Up to fifteen minutes: a hundred kills, full and lying disks, floods, hangs. `make test-all` runs a short form of it.
drill: $(INSTALLED) tools  ## what could go wrong on the line, on purpose: what was lost, doubled or judged without evidence
	DRILL=full OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -q tests/drill

bench: $(INSTALLED)  ## the short proof, under five minutes: bench-report/report.md with charts
	$(VENV)/bin/coserve bench report --out bench-report

# On the day a device is there. Each step is a process: what fails does not stop the rest. Exit code 2 without a device.
gpu: $(INSTALLED)  ## what a CUDA or Metal device has to show: gpu-report/report.md; DEVICE=emulated tries the steps
	$(VENV)/bin/coserve bench gpu --device $(DEVICE) --out gpu-report

# Not part of the tests: it runs them for each of nearly three thousand changes. One worker, behind everything else that runs.
mutants: $(INSTALLED)  ## which changes of the core and the records no test notices, in up to MINUTES=45; ONLY=module
	$(VENV)/bin/python tests/mutants.py $(MINUTES) $(ONLY)

# The generator has a virtual environment of its own: what it needs is not what it makes stubs for.
proto:  ## make the stubs of the protocols again, from agent/doors/proto; after each change there
	@[ -x .venv-proto/bin/pip ] || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --prefer-binary grpcio-tools==1.73.1
	.venv-proto/bin/python packaging/make_stubs.py

bundle: $(INSTALLED)  ## dist/coserve-*.tar, installed by its install.sh where there is no network; CUDA=no for less
	$(VENV)/bin/python packaging/make_bundle.py --cuda $(CUDA)

clean:  ## remove what the targets wrote, but not $(VENV)
	rm -rf build dist demo pictures bench-report gpu-report mutants *.egg-info packaging/*/build packaging/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find experts agent profiler proof tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A folder that still holds $(INSTALLING) was left by an installation that failed or was interrupted: it is made anew.
# Both names of OpenCV go first, because pip may remove the one over the files of the other.
$(INSTALLED): pyproject.toml setup.py experts/llm/kernels/products.c packaging/opencv-python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "CoServe needs Python 3.11 or newer: install it, or name it, as in: make PYTHON=python3.12 venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	@if [ -e $(INSTALLING) ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(INSTALLING) && rm -f $(INSTALLED)
	@[ -x $(VENV)/bin/pip ] || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless
	$(VENV)/bin/python -m pip install --prefer-binary ./packaging/opencv-python --editable '.[dev]'
	@mv $(INSTALLING) $(INSTALLED)

# It sees the packages of $(VENV) and adds what those do not have. Made anew when $(VENV) is.
$(TRAINERS)/.installed: $(INSTALLED)
	@rm -rf $(TRAINERS)
	$(VENV)/bin/python -m venv $(TRAINERS) --without-pip
	@below=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && own=$$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && echo "import site; site.addsitedir('$$below')" > "$$own/below.pth"
	$(TRAINERS)/bin/python -m pip install --quiet --prefer-binary --editable '.[trainers]'
	@touch $@

$(KSERVE)/.installed: $(INSTALLED)
	@rm -rf $(KSERVE)
	$(VENV)/bin/python -m venv $(KSERVE)
	$(KSERVE)/bin/python -m pip install --quiet --prefer-binary 'kserve>=0.21,<1'
	@touch $@
