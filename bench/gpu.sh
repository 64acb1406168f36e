#!/usr/bin/env bash
# Everything that needs a CUDA device, in under ten minutes: the GPU tests, then the GPU figures. Float32 without TF32.
#
#   bench/gpu.sh [folder for figures and logs, default runs/gpu]
#
# Runs from the source tree on any python3 with torch 2.11 or newer, without network. PYTHON names another interpreter;
# MINUTES (default 9) is when the figures stop, and finished networks are kept; `bench/gpu.sh` again goes on with the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-runs/gpu}
MINUTES=${MINUTES:-9}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 NVIDIA_TF32_OVERRIDE=0
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
export SHOAL_CACHE="${SHOAL_CACHE:-$OUT/cache}"
started=$SECONDS

left() { echo $((MINUTES * 60 - (SECONDS - started))); }

"$PYTHON" - <<'PY' || exit 2
import importlib.util, platform, sys

try:
    import torch
except ImportError:
    sys.exit("gpu.sh: this python has no torch; set PYTHON to one that has")
if not torch.cuda.is_available():
    sys.exit("gpu.sh: torch sees no CUDA device here")
tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
needed = {"highspy": "the planner 'joint'", "scipy": "", "rich": "", "numpy": "", "pytest": "the tests"}
missing = [name for name in needed if importlib.util.find_spec(name) is None]
for name in missing:
    what = f", for {needed[name]}" if needed[name] else ""
    print(
        f"gpu.sh: {name} is missing{what}: where there is a network, `pip download --no-deps --only-binary=:all: "
        f"--python-version {platform.python_version()} --platform manylinux_2_28_{platform.machine()} {name}` fetches the "
        f"wheel ({tag}); unpack it here into a folder on PYTHONPATH"
    )
for name in ("typer", "jinja2", "plotly", "hypothesis", "sklearn"):
    if importlib.util.find_spec(name) is None:
        print(f"gpu.sh: {name} is missing; tests that need it are left out")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}, python {platform.python_version()}")
sys.exit(1 if {"scipy", "rich", "numpy"} & set(missing) else 0)
PY

status=0
planner=joint
if ! "$PYTHON" -c 'import highspy' 2>/dev/null; then
  planner=chain
  status=1
  echo "gpu.sh: no highspy: the figures below are the planner 'chain's, not the default's"
fi

echo "== GPU tests"
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
  # Only the files that have such tests, so that no other file's imports matter. pytest-timeout may be missing.
  mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu|^@on_device' tests)
  timeout "$(left)" "$PYTHON" -m pytest -m gpu -q -rs --continue-on-collection-errors \
    -o addopts=--import-mode=importlib -p no:cacheprovider "${files[@]}" 2>&1 | tee "$OUT/tests.log"
  code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || status=1
else
  status=1
fi

echo "== Batch norm's sweeps"
for layout in channels_last contiguous; do
  for dtype in float32 bfloat16; do
    timeout "$(left)" "$PYTHON" -m bench.norm_sweeps --device cuda --batch 64 --layout "$layout" --dtype "$dtype" \
      --json "$OUT/norm_sweeps_${layout}_$dtype.json" 2>&1 | tee -a "$OUT/norm_sweeps.log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
  done
done

echo "== Codecs"
timeout "$(left)" "$PYTHON" -m bench.codecs --parts speed --device cuda --out "$OUT" 2>&1 | tee "$OUT/codecs.log"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1

echo "== GPU figures"
# Quickest first, so that a slow machine still leaves some; every other value of the peer's sweep.
for network in resnet50 vgg16_bn densenet121; do
  if [ "$(left)" -lt 20 ]; then
    echo "gpu.sh: $network left out: $MINUTES minutes are over; run this again for the rest"
    status=1
    continue
  fi
  timeout "$(left)" "$PYTHON" -m bench.budgets --device cuda --networks "$network" --planner "$planner" --sweep 11 --resume \
    --out "$OUT" 2>&1 | tee -a "$OUT/figures.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
done
echo "== Offloading on the GPU's own link"
for network in resnet50 vgg19; do
  if [ "$(left)" -lt 60 ]; then
    echo "gpu.sh: offloading of $network left out: $MINUTES minutes are over"
    status=1
    continue
  fi
  timeout "$(left)" "$PYTHON" -m bench.offloading --device cuda --networks "$network" --out "$OUT/$network" 2>&1 |
    tee -a "$OUT/offloading.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
done
echo "gpu.sh: took $((SECONDS - started)) s; logs and figures in $OUT"
exit $status
