# make demo      set up, train, certify, print Table 1 (about six minutes on two cores)
# make test      set up, run the tests;  make test-all runs the long ones;  make lint checks style and types
# make peers     set up the engines of others in .peers, time this one beside them (hours; PEERS='shapes=[small]' cuts it)
# make debian    the same on real text, from scratch: three stages, Table 1 (under two hours on two idle cores)
# make debian-arms  shallower models and uniform exits beside the plain recipe, from the trained model (about an hour)
# make skipdecode layers by position (SkipDecode) and its rivals on decoder-only models: trained on two corpora, compared
# make gpu-check everything that only a GPU can tell: results/gpu/summary.json (PYTHON: one with torch and Triton; GPU='parts=core')
# make gpu-carry what gpu-check takes along to such a machine: wheels that it may lack (.gpu/wheels, which are installed),
#                and Debian's package descriptions with their token ids (.gpu/debian, which the part 'learned' trains on)
# PYTHON=python3.12 chooses the interpreter that the environment in .venv is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints/cpu-py311.txt
WORKERS ?= 2

# Two spinning OpenMP pools on two cores slow each other down many times over; one thread per process is fastest.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUNBUFFERED := 1
export HF_HUB_OFFLINE ?= 1

.PHONY: env demo debian debian-arms skipdecode test test-all lint peers gpu-carry gpu-check clean
.DELETE_ON_ERROR:

env: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11 or missing; choose another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV): about two minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m train +experiment=demo resume=auto output=runs/demo/model hydra.run.dir=runs/demo/train
	$(BIN)/python -m eval.table1 checkpoint=runs/demo/model n=1000 hydra.run.dir=runs/demo

# What the model learns last are targets of its own that are near the references (eval.relabel).
D := runs/debian
debian: $(STAMP)
	$(BIN)/python -m train +experiment=debian_pretext +model=tiny_debian resume=auto output=$D/pretext/model hydra.run.dir=$D/pretext/train
	$(BIN)/python -m train +experiment=debian_pairs checkpoint=$D/pretext/model resume=auto output=$D/pairs/model hydra.run.dir=$D/pairs/train
	$(BIN)/python -m eval.relabel checkpoint=$D/pairs/model samples=9 margin=0.05 one_per_family=true output=$D/targets.jsonl hydra.run.dir=$D/relabel
	$(BIN)/python -m train +experiment=debian_tiny checkpoint=$D/pairs/model data.targets=$D/targets.jsonl resume=auto output=$D/model hydra.run.dir=$D/train
	$(BIN)/python -m eval.table1 checkpoint=$D/model hydra.run.dir=$D

# From the trained model: its own answers nearest to the references, and on these an arm of the plain recipe, two whose
# rows are to cross together, three of its first layers alone; then what they are worth beside each other.
A := runs/arms
M ?= results/debian_tiny/model
ARM = $(BIN)/python -m train +experiment=debian_arms checkpoint=$M data.targets=$A/targets.jsonl resume=auto
SOFTMAX := finetune.uniformity.measure=softmax finetune.uniformity.threshold=0.5 finetune.uniformity.temperature=0.1
debian-arms: $(STAMP)
	test -f $A/targets.jsonl || $(BIN)/python -m eval.relabel checkpoint=$M samples=9 margin=0.05 one_per_family=true output=$A/targets.jsonl hydra.run.dir=$A/relabel
	$(ARM) output=$A/plain/model hydra.run.dir=$A/plain
	$(ARM) finetune.uniformity.weight=3 $(SOFTMAX) output=$A/uniform-softmax/model hydra.run.dir=$A/uniform-softmax
	$(ARM) finetune.uniformity.weight=3 output=$A/uniform-state/model hydra.run.dir=$A/uniform-state
	for k in 2 4 6; do $(ARM) decoder_layers=$$k finetune.loss=final_only stage=finetune output=$A/shallow-$$k/model hydra.run.dir=$A/shallow-$$k || exit; done
	$(BIN)/python -m eval.shallow checkpoint=$A/plain/model shallow=[$A/shallow-2/model,$A/shallow-4/model,$A/shallow-6/model] hydra.run.dir=$A/shallow
	$(BIN)/python -m eval.uniformity checkpoint=$A/plain/model uniform=[$A/uniform-softmax/model,$A/uniform-state/model] hydra.run.dir=$A/uniformity

# From a decoder-only model of full depth on each corpus: arms of one budget for every method and speed-up, and on
# restaurants other schedules at 3x; then the tables. Interrupt it and call it again: what is done is not done twice.
K := runs/skipdecode
SPEEDUPS := 2 3 4 5
comma := ,
list = [$(subst $() ,$(comma),$(strip $(1)))]
scheduled = $(call list,$(foreach m,skipdecode multi_layer_exit,$(foreach k,$(SPEEDUPS),$K/$(1)/$m-$(k)x/model)))
LAYERS := skip_schedule@finetune.skip_schedule
VARIANT = $(BIN)/python -m train +experiment=skipdecode_restaurants checkpoint=$K/restaurants/base/model $(LAYERS)=layers8_3x resume=auto
VARIANTS := warmup-0 warmup-2 power-3-2 power-8-2
skipdecode: $(STAMP)
	for c in restaurants debian; do \
	  $(BIN)/python -m train +experiment=skipdecode_base_$$c resume=auto output=$K/$$c/base/model hydra.run.dir=$K/$$c/base || exit; \
	  for k in $(SPEEDUPS); do for m in skipdecode multi_layer_exit; do \
	    $(BIN)/python -m train +experiment=$${m}_$$c checkpoint=$K/$$c/base/model $(LAYERS)=layers8_$${k}x resume=auto output=$K/$$c/$$m-$${k}x/model hydra.run.dir=$K/$$c/$$m-$${k}x || exit; \
	  done; done; \
	  for m in full_depth calm_dec; do \
	    $(BIN)/python -m train +experiment=$${m}_$$c checkpoint=$K/$$c/base/model resume=auto output=$K/$$c/$$m/model hydra.run.dir=$K/$$c/$$m || exit; \
	  done; \
	done
	$(VARIANT) finetune.skip_schedule.warmup_layers=0 output=$K/restaurants/warmup-0/model hydra.run.dir=$K/restaurants/warmup-0
	$(VARIANT) finetune.skip_schedule.warmup_layers=2 output=$K/restaurants/warmup-2/model hydra.run.dir=$K/restaurants/warmup-2
	$(VARIANT) finetune.skip_schedule.decay=power output=$K/restaurants/power-3-2/model hydra.run.dir=$K/restaurants/power-3-2
	$(VARIANT) finetune.skip_schedule.decay=power finetune.skip_schedule.max_layers=8 finetune.skip_schedule.power=0.8 output=$K/restaurants/power-8-2/model hydra.run.dir=$K/restaurants/power-8-2
	$(BIN)/python -m eval.skipdecode checkpoint=$K/restaurants/full_depth/model 'scheduled=$(call scheduled,restaurants)' exits=$K/restaurants/calm_dec/model 'variants=$(call list,$(foreach v,$(VARIANTS),$K/restaurants/$v/model))' hydra.run.dir=$K/tables/restaurants
	$(BIN)/python -m eval.skipdecode checkpoint=$K/debian/full_depth/model 'scheduled=$(call scheduled,debian)' exits=$K/debian/calm_dec/model paper=reddit_tldr hydra.run.dir=$K/tables/debian
	$(BIN)/python -m eval.skipdecode 'merge=[$K/tables/restaurants/summary.json,$K/tables/debian/summary.json]' hydra.run.dir=$K/tables

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" --nbmake tests notebooks --cov --cov-report=term:skip-covered --cov-fail-under=90

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu" --timeout=1800

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Those whose libraries collide with ours get an environment each. One that cannot be set up is a line in the record.
.peers/onnxruntime/.installed: PEER_PACKAGES := torch 'optimum-onnx[onnxruntime]' accelerate
.peers/openvino/.installed: PEER_PACKAGES := torch 'optimum-intel[openvino]'

.peers/%/.installed: constraints/peers-%.txt
	@echo "setting up $(@D): some minutes, once"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar off -c $< $(PEER_PACKAGES) > .peers/$*.log 2>&1
	$(@D)/bin/python -m pip uninstall --yes torchvision >> .peers/$*.log 2>&1  # a CUDA build beside torch for CPUs
	@touch $@

peers: $(STAMP)
	-$(MAKE) --keep-going .peers/onnxruntime/.installed .peers/openvino/.installed
	$(BIN)/python -m eval.peers hydra.run.dir=runs/peers_cpu $(PEERS)

# Nothing else is needed there: the check configures itself. rouge_score is published as source alone; huggingface-hub stays
# that machine's own, for a newer one needs an HTTP library that it may lack.
GPU_PYTHON := 3.12
gpu-carry: $(STAMP)
	rm -rf .gpu.new
	mkdir -p .gpu.new/wheels
	$(BIN)/python -m pip download --disable-pip-version-check --progress-bar off --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  --platform manylinux_2_17_x86_64 -c $(CONSTRAINTS) -d .gpu.new/wheels \
	  transformers tokenizers jaxtyping wadler-lindig nltk defusedxml absl-py six
	$(BIN)/python -m pip wheel --disable-pip-version-check --progress-bar off --no-deps -c $(CONSTRAINTS) -w .gpu.new/wheels rouge_score
	$(BIN)/python -m eval.gpu_corpus .gpu.new/debian
	rm -rf .gpu && mv .gpu.new .gpu

gpu-check:
	@if ls .gpu/wheels/*.whl > /dev/null 2>&1; then \
	  $(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target .gpu/site .gpu/wheels/*.whl; fi
	PYTHONPATH=.gpu/site:. $(PYTHON) -m eval.gpu_check $(GPU)

clean:
	rm -rf $(VENV) .peers .gpu .gpu.new build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
