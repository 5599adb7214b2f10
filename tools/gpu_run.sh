#!/usr/bin/env bash
# Tests, sanitizers and benchmarks on a machine with a GPU, in one go; it changes no setting of the card.
#
#   tools/gpu_run.sh [tests] [memcheck] [initcheck] [synccheck] [racecheck] [benchmarks]     (no word: all of them)
#   tools/gpu_run.sh decode:gqa,fp8     (the benchmark of the decode alone, and of its sections those; decode: all)
#   tools/gpu_run.sh mla                (that of the MLA decode alone)
#
# Before: `make artifacts` here or elsewhere, so that build/artifacts holds the release (or CUBIN_RUNTIME_SOURCES
# names a source). Python packages that the machine lacks are taken from wheels in .whl/, without a network.
# Logs and results go to $OUT (build/gpu); gpu_run.json there says what ran, on what, for how long, how it ended.
# PYTHON names the interpreter, STEP_SECONDS (300) ends a step that hangs.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
command -v nvidia-smi >/dev/null || {
    echo "gpu_run.sh: this machine has no nvidia-smi, so no GPU to run on" >&2
    exit 1
}
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if compgen -G '.whl/*.whl' >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$scratch/site" .whl/*.whl || exit 1
fi
export PYTHONPATH="$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export CUBIN_RUNTIME_SOURCES=${CUBIN_RUNTIME_SOURCES:-build/artifacts}
export CUBIN_RUNTIME_CACHE="$scratch/store" CUBIN_RUNTIME_OFFLINE=1

failed=0
step() { # name, log, command...
    local name=$1 log=$out/$2 begin end status
    shift 2
    echo "==== $name"
    begin=$(date +%s.%N)
    { echo "==== $name: $*"; timeout "${STEP_SECONDS:-300}" "$@"; } 2>&1 | tee -a "$log" | tail -n 40
    status=${PIPESTATUS[0]}
    end=$(date +%s.%N)
    [ "$status" = 0 ] || failed=1
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" "$begin" "$end" "$(tail -n 1 "$log" | tr -d '\t')" \
        >>"$scratch/steps.tsv"
}

sanitize() { # tool
    # 86: the tool found something; the cases' own failures keep their code.
    step "$1" sanitizers.log compute-sanitizer --tool "$1" --error-exitcode 86 "$python" tests/gpu/sanitizer_cases.py
}

rm -f "$out/tests.log" "$out/sanitizers.log" "$out/benchmarks.log"
[ $# -gt 0 ] || set -- tests memcheck initcheck synccheck racecheck benchmarks
for word in "$@"; do
    case $word in
    tests)
        CUBIN_RUNTIME_GPU_OUT=$out step tests tests.log "$python" -m pytest -p no:cacheprovider tests/gpu
        # Tests that all skipped are no proof.
        grep -Eq '[0-9]+ passed' "$out/tests.log" || { echo "gpu_run.sh: no GPU test ran" >&2 && failed=1; }
        ;;
    memcheck | initcheck | synccheck | racecheck) sanitize "$word" ;;
    benchmarks)
        for script in benchmarks/gpu_*.py; do
            [ "$script" = benchmarks/gpu_environment.py ] || step "$script" benchmarks.log "$python" "$script" --out "$out"
        done
        ;;
    decode | decode:*)
        sections=${word#decode}
        step benchmarks/gpu_decode.py benchmarks.log "$python" benchmarks/gpu_decode.py --out "$out" \
            ${sections:+--sections "${sections#:}"}
        ;;
    mla) step benchmarks/gpu_mla.py benchmarks.log "$python" benchmarks/gpu_mla.py --out "$out" ;;
    *)
        echo "gpu_run.sh: '$word' is no step: tests memcheck initcheck synccheck racecheck benchmarks decode mla" >&2
        exit 2
        ;;
    esac
done

"$python" - "$scratch/steps.tsv" "$out/gpu_run.json" <<'PYTHON' || failed=1
import json
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
from gpu_environment import gpu_environment

rows = (line.split("\t") for line in Path(sys.argv[1]).read_text().splitlines())
steps = [
    {
        "step": name,
        "exit_status": int(status),
        "seconds": round(float(end) - float(begin), 1),
        "last_line": last,
    }
    for name, status, begin, end, last in rows
]
report = {"environment": gpu_environment(), "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(report, indent=2) + "\n")
print(json.dumps(steps, indent=1))
PYTHON
exit $failed
