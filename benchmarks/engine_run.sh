#!/usr/bin/env bash
# Measurements of vLLM or SGLang on a machine with a Hopper GPU and no network.
#
#   benchmarks/engine_run.sh vllm|sglang ARCHIVE OUT SECTION...
#
# ARCHIVE is what tools/pack_engine.py wrote; sections are those of benchmarks/engine_vllm.py or engine_sglang.py, whose
# options may stand before them. Before: `make artifacts`, here or elsewhere, and the wheels of the package and of its
# accelerator in .whl/. MODELS names models instead of those of a section. Several runs may go on at the same time.
set -euo pipefail
engine=$1 archive=$2 out=$3
shift 3
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=${ENGINE_SCRATCH:-${TMPDIR:-/tmp}/$engine}
python=${PYTHON:-python3}
export ENGINE_SCRATCH=$scratch
mkdir -p "$out" "$scratch"
(
    flock 9
    [ -e "$scratch/.ready" ] && exit 0
    rm -rf "$scratch/site" "$scratch/ours"
    tar x -I "xz -T0" -f "$archive" -C "$scratch"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/ours" \
        "$root"/.whl/*.whl
    "$python" -m compileall -q -j 0 "$scratch/site" "$scratch/ours" >/dev/null || true # some files are templates
    touch "$scratch/.ready"
) 9>"$scratch/.lock"
export PYTHONPATH="$scratch/ours:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUBIN_RUNTIME_SOURCES=${CUBIN_RUNTIME_SOURCES:-$root/build/artifacts}
export CUBIN_RUNTIME_CACHE=${CUBIN_RUNTIME_CACHE:-$scratch/store}
names=${MODELS:-$("$python" "$root/benchmarks/engine/models.py")}
for name in $names; do
    (
        flock 9
        [ -e "$scratch/models/$name/config.json" ] ||
            "$python" "$root/benchmarks/engine/models.py" "$scratch/models" "$name"
    ) 9>"$scratch/.lock.$name" &
done
wait
# shellcheck disable=SC2086
exec "$python" "$root/benchmarks/engine_$engine.py" ${MODELS:+--names $MODELS} --out "$out" --models "$scratch/models" "$@"
