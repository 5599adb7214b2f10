# What stands in for programs that a page's commands name: each fails unless what it is asked for exists. ROOT is the
# repository.

fail() {
    echo "stand-in: $*" >&2
    exit 1
}

as_make() {
    for word in "$@"; do
        case $word in
        *=*) ;;
        *) grep -q "^$word:" "$ROOT/Makefile" || fail "the Makefile has no target '$word'" ;;
        esac
    done
}

as_pip() {
    [ "$1" = install ] || fail "pip $1"
    shift
    for word in "$@"; do
        case $word in
        cubin-runtime\[*\]) extra=${word#*[} && grep -q "^${extra%]} = \[" "$ROOT/pyproject.toml" || fail "no extra '$word'" ;;
        dist/cubin_runtime-\*.whl | dist/cubin_runtime_kernels-\*.whl) ;;
        ./*) [ -f "$ROOT/$word/pyproject.toml" ] || fail "there is no $word/pyproject.toml" ;;
        *) fail "pip install $word" ;;
        esac
    done
}

as_python() {
    case $1 in
    -m) file=$(echo "$2" | tr . /).py && shift ;;
    *) file=$1 ;;
    esac
    [ -f "$ROOT/$file" ] || fail "there is no $file"
    shift
    for word in "$@"; do
        case $word in
        # The drivers of the peers' tests declare the options that they share in one of them.
        --*) grep -q -e "\"$word\"" "$ROOT/$file" "$ROOT"/tools/*_tests/run.py || fail "$file has no option $word" ;;
        esac
    done
}

as_gpu_run() {
    for word in "$@"; do
        grep -qE "^    ([a-z:*| ]+ )?${word%%:*}( |\\))" "$ROOT/tools/gpu_run.sh" || fail "gpu_run.sh has no step '$word'"
    done
}
