#!/usr/bin/env bash
# What one large GPU shows in ten minutes: bytes, bits, times and a link, each row in JSON as soon as it is known, and a
# verdict in one table.
#
#   bench/gpu.sh [folder, default runs/gpu]
#
# Runs from the source tree on any python3 with torch 2.11 or newer, without network. PYTHON names another interpreter;
# PARTS what to run, of "environment contract speed wall offload triton verdict" in any order; QUICK=1 takes tiny
# networks, to see that it runs; PERCENT=300 gives each part three times its time, for a slow host. What a part has
# written stays where it ends early, with a row that says so.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-runs/gpu}
PARTS=${PARTS:-environment contract speed wall offload triton verdict}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
export SHOAL_CACHE="${SHOAL_CACHE:-$OUT/cache}"

PERCENT=${PERCENT:-100}
declare -A seconds=([environment]=20 [contract]=60 [speed]=240 [wall]=60 [offload]=60 [triton]=90 [verdict]=30)
for part in $PARTS; do
  if [ -z "${seconds[$part]:-}" ]; then
    echo "gpu.sh: PARTS has $part; give some of: ${!seconds[*]}" >&2
    exit 2
  fi
done

began=$SECONDS
"$PYTHON" - <<'PY' || exit 2
import importlib.util, platform, sys

try:
    import torch
except ImportError:
    sys.exit("gpu.sh: this python has no torch; set PYTHON to one that has")
if not torch.cuda.is_available():
    sys.exit("gpu.sh: torch sees no CUDA device here")
missing = [name for name in ("highspy", "numpy", "psutil", "rich", "scipy") if importlib.util.find_spec(name) is None]
for name in missing:
    print(
        f"gpu.sh: {name} is missing: where there is a network, `pip download --no-deps --only-binary=:all: --python-version "
        f"{platform.python_version()} --platform manylinux_2_28_{platform.machine()} {name}` fetches the wheel; unpack it "
        "here into a folder on PYTHONPATH"
    )
if importlib.util.find_spec("pytest") is None:
    print("gpu.sh: pytest is missing; the part triton will fail")
sys.exit(1 if missing else 0)
PY

# Before its first row a part imports PyTorch and Shoal, which on a busy host takes many times what it takes on a free one.
opening=$((10 * (SECONDS - began)))

# ended_early PART REASON: the row that says so, beside those that the part has written.
ended_early() {
  "$PYTHON" - "$OUT/$1.json" "$2" <<'PY'
import json, sys
from pathlib import Path

path, reason = Path(sys.argv[1]), sys.argv[2]
try:
    found = json.loads(path.read_text())
except (OSError, ValueError):
    found = {"rows": []}
found["rows"].append({"row": "ended early", "error": reason})
path.write_text(json.dumps(found, indent=1))
PY
}

status=0
began=$SECONDS
for part in $PARTS; do
  echo "== $part"
  rm -f "$OUT/$part.json" # of an earlier run
  # A part that begins nothing new after its time has half as long again to end what it began.
  given=$((seconds[$part] * PERCENT / 100))
  limit=$(((seconds[$part] * 3 / 2 + 30) * PERCENT / 100 + opening))
  timeout --kill-after 10 "$((limit > 0 ? limit : 1))" "$PYTHON" -m bench.gpu --device cuda --part "$part" \
    --seconds "$given" --out "$OUT" ${QUICK:+--quick} 2>&1 | tee "$OUT/$part.log"
  code=${PIPESTATUS[0]}
  if [ "$code" -ne 0 ]; then
    reason="ended with $code"
    case $code in 124 | 137) reason="stopped after $limit s; PERCENT=$((2 * PERCENT)) gives it twice as long" ;; esac
    ended_early "$part" "$reason"
    echo "gpu.sh: $part $reason; see $OUT/$part.log"
    status=1
  fi
done
echo "gpu.sh: took $((SECONDS - began)) s; rows and logs in $OUT"
exit $status
