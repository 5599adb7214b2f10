#!/usr/bin/env bash
# Measurements of vLLM on a machine with a Hopper GPU and no network.
#
#   benchmarks/engine_run.sh ARCHIVE OUT SECTION...
#
# ARCHIVE is what tools/pack_engine.py wrote; sections are those of benchmarks/engine_vllm.py. Before: `make artifacts`,
# here or elsewhere, and the wheels of the package and of its accelerator in .whl/. MODELS and ROUNDS, where set, go to
# engine_vllm.py.
set -euo pipefail
archive=$1 out=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=${ENGINE_SCRATCH:-${TMPDIR:-/tmp}/engine}
python=${PYTHON:-python3}
mkdir -p "$out" "$scratch"
[ -e "$scratch/site/vllm" ] || tar x -I "xz -T0" -f "$archive" -C "$scratch"
[ -e "$scratch/ours" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$scratch/ours" "$root"/.whl/*.whl
export PYTHONPATH="$scratch/ours:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUBIN_RUNTIME_SOURCES=${CUBIN_RUNTIME_SOURCES:-$root/build/artifacts}
export CUBIN_RUNTIME_CACHE=${CUBIN_RUNTIME_CACHE:-$scratch/store}
names=${MODELS:-llama gptoss gemma3 qwen3moe llama-shape gptoss-shape gemma3-shape qwen3moe-shape}
for name in $names; do
    [ -e "$scratch/models/$name/config.json" ] || missing="${missing:-} $name"
done
# shellcheck disable=SC2086
[ -z "${missing:-}" ] || "$python" "$root/benchmarks/engine/models.py" "$scratch/models" $missing
exec "$python" "$root/benchmarks/engine_vllm.py" --out "$out" --models "$scratch/models" \
    ${ROUNDS:+--rounds "$ROUNDS"} ${MODELS:+--names $MODELS} -- "$@"
