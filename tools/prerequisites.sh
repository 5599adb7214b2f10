#!/bin/sh
# Check what this machine must have before anything is installed into the clone.
# Usage: prerequisites.sh PYTHON             prints what lacks and the line that installs it; exit 1 if anything does
#        prerequisites.sh --packages PYTHON  prints the Debian package names alone, for scripts; exit 0
set -u
quiet=
if [ "${1:-}" = --packages ]; then
    quiet=1
    shift
fi
python=${1:-python3}
missing= packages=

lacks() { # what, Debian package (may be empty)
    missing="$missing
  - $1"
    [ -z "$2" ] || case " $packages " in *" $2 "*) ;; *) packages="$packages $2" ;; esac
}

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || lacks "Linux on x86-64 (this is $(uname -s) on $(uname -m))" ""
command -v git >/dev/null || lacks git git
command -v make >/dev/null || lacks make make
if ! command -v "$python" >/dev/null; then
    lacks "Python 3.10 or newer ('$python' is not found; name another with PYTHON=...)" python3
    lacks "its modules venv and ensurepip" python3-venv
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    lacks "Python 3.10 or newer ('$python' is older or does not run; name another with PYTHON=...)" ""
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || lacks "the modules venv and ensurepip of '$python'" python3-venv
fi
include='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
! command -v "$python" >/dev/null || "$python" -c "$include" 2>/dev/null ||
    lacks "the headers of '$python', to build the accelerator" python3-dev
# nvcc reads its headers through gcc, as C++ with the standard library.
if ! command -v cc >/dev/null || ! command -v gcc >/dev/null; then
    lacks "a C compiler (cc and gcc)" gcc
fi
echo '#include <utility>' | gcc -x c++ -E -o /dev/null - 2>/dev/null ||
    lacks "the C++ preprocessor and headers of gcc (nvcc needs them)" g++

if [ -n "$quiet" ]; then
    echo "${packages# }"
    exit 0
fi
[ -n "$missing" ] || exit 0
echo "This machine lacks:$missing" >&2
if [ -n "$packages" ]; then
    echo "On Debian or Ubuntu, install with:" >&2
    [ "$(id -u)" = 0 ] && sudo= || sudo="sudo "
    echo "  ${sudo}apt-get update && ${sudo}apt-get install -y$packages" >&2
fi
exit 1
