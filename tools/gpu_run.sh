#!/usr/bin/env bash
# Tests, sanitizers and benchmarks on a machine with a GPU, in one go; it changes no setting of the card.
#
#   tools/gpu_run.sh [tests] [memcheck] [initcheck] [synccheck] [racecheck] [benchmarks]     (no word: all of these)
#   tools/gpu_run.sh racecheck:decode,context   (a sanitizer over some families of kernels; without: all of them)
#   tools/gpu_run.sh multi_gpu          (the tests that need two GPUs, alone)
#   tools/gpu_run.sh decode:gqa,fp8     (the benchmark of the decode alone, and of its sections those; decode: all)
#   tools/gpu_run.sh mla                (that of the MLA decode alone; decode mla: both, one after the other)
#   tools/gpu_run.sh prefill            (that of context attention alone)
#   tools/gpu_run.sh profile            (rows of all three in the profiler, which has to be there as ncu)
#
# Before: `make artifacts` here or elsewhere, so that build/artifacts holds the release (or CUBIN_RUNTIME_SOURCES
# names a source). Python packages that the machine lacks are taken from wheels in .whl/, without a network.
# Tests run first. Then sanitizers run side by side, and so does the compilation of the peers' kernels; benchmarks run
# alone, at last. racecheck takes what MLA kernels hand over at mbarriers for races, so no word means the other families.
# Logs and results go to $OUT (build/gpu); gpu_run.json there says what ran, on what, for how long, how it ended.
# PYTHON names the interpreter, STEP_SECONDS (300) ends a step that hangs, WORKERS (6) is pytest's, where xdist is there.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- tests memcheck initcheck synccheck racecheck:decode,reduction,copying,context benchmarks
for word in "$@"; do
    case $word in
    tests | memcheck | initcheck | synccheck | racecheck | multi_gpu) ;;
    memcheck:* | initcheck:* | synccheck:* | racecheck:*) ;;
    benchmarks | decode | decode:* | mla | prefill | profile) ;;
    *)
        echo "gpu_run.sh: '$word' is no step: tests multi_gpu memcheck initcheck synccheck racecheck benchmarks decode mla prefill" \
            "profile" >&2
        exit 2
        ;;
    esac
done
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
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" "$begin" "$end" "$(tail -n 1 "$log" | tr -d '\t')" \
        >>"$scratch/steps.tsv"
    return "$status"
}

sanitize() { # tool, or tool:families
    local tool=${1%%:*} families=()
    [ "$1" = "$tool" ] || IFS=, read -ra families <<<"${1#*:}"
    # 86: the tool found something; the cases' own failures keep their code.
    step "$1" "${1//[:,]/-}.log" compute-sanitizer --tool "$tool" --error-exitcode 86 \
        "$python" -m tests.gpu.sanitizer_cases "${families[@]}"
}

run_tests() { # step, options of pytest...
    local name=$1 workers=()
    shift
    "$python" -c 'import xdist' 2>/dev/null && workers=(-n "${WORKERS:-6}")
    CUBIN_RUNTIME_GPU_OUT=$out OPENBLAS_NUM_THREADS=2 \
        step "$name" "$name.log" "$python" -m pytest -p no:cacheprovider -p cubin_runtime.testing.plugin \
            -q "${workers[@]}" "$@" tests/gpu || return 1
    # Tests that all skipped are no proof.
    grep -Eq '[0-9]+ passed' "$out/$name.log" || { echo "gpu_run.sh: no GPU test ran" >&2 && return 1; }
}

rm -f "$out"/{memcheck,initcheck,synccheck,racecheck}*.log
rm -f "$out"/{tests,multi_gpu,compile_decode,compile_mla,compile_prefill,benchmarks,profile}.log

for word in "$@"; do
    case $word in
    tests) run_tests tests || failed=1 ;;
    multi_gpu) run_tests multi_gpu -m multi_gpu || failed=1 ;;
    esac
done
jobs=()
declare -A peers=() # benchmarks whose peers are compiled ahead, each once
for word in "$@"; do
    case $word in
    memcheck* | initcheck* | synccheck* | racecheck*) sanitize "$word" & jobs+=($!) ;;
    benchmarks) peers[decode]=1 peers[mla]=1 peers[prefill]=1 ;;
    decode | decode:*) peers[decode]=1 ;;
    mla) peers[mla]=1 ;;
    prefill) peers[prefill]=1 ;;
    esac
done
for name in "${!peers[@]}"; do
    step "compile_$name" "compile_$name.log" "$python" "benchmarks/gpu_$name.py" --out "$out" --compile & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || failed=1; done

for word in "$@"; do
    case $word in
    benchmarks)
        for script in benchmarks/gpu_*.py; do
            [ "$script" = benchmarks/gpu_environment.py ] && continue # no benchmark
            [[ $script = *profile.py ]] && continue # a word of its own
            step "$script" benchmarks.log "$python" "$script" --out "$out" || failed=1
        done
        ;;
    decode | decode:*)
        sections=${word#decode}
        step benchmarks/gpu_decode.py benchmarks.log "$python" benchmarks/gpu_decode.py --out "$out" \
            ${sections:+--sections "${sections#:}"} || failed=1
        ;;
    profile)
        for script in benchmarks/gpu_*profile.py; do
            step "$script" profile.log "$python" "$script" --out "$out" || failed=1
        done
        ;;
    prefill) step benchmarks/gpu_prefill.py benchmarks.log "$python" benchmarks/gpu_prefill.py --out "$out" || failed=1 ;;
    mla) step benchmarks/gpu_mla.py benchmarks.log "$python" benchmarks/gpu_mla.py --out "$out" || failed=1 ;;
    esac
done

"$python" - "$scratch/steps.tsv" "$out/gpu_run.json" <<'PYTHON' || failed=1
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
from gpu_environment import built_sources, gpu_environment
from row_origin import commit

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
manifests = [path for source in built_sources() for path in Path(source).glob("*/checksums.txt")]
releases = {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in manifests}
report = {"environment": gpu_environment(), "commit": commit(), "releases": releases, "steps": steps}
Path(sys.argv[2]).write_text(json.dumps(report, indent=2) + "\n")
print(json.dumps(steps, indent=1))
PYTHON
exit $failed
