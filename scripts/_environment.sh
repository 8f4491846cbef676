# What do test.sh and demo.sh need? A Python with torch, Triton, FLA, transformers, the test tools, and this package.
# Sourced by both; leaves the interpreter in $PYTHON and the repository in $ROOT.
#
# An active virtual or conda environment is used as it is, otherwise .venv in the repository is made. What is installed
# already is kept (torch above all); only what is missing is fetched, so that everything works offline the second time.
# FLA_KDA_TORCH: what to install where there is no torch (default torch==2.13.0).

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { echo "[fla_kda_backend] $*" >&2; }

is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    PYTHON=$(command -v python || command -v python3)
    is_recent_python "$PYTHON" || { say "the active environment's Python is older than 3.10"; exit 1; }
else
    PYTHON="$ROOT/.venv/bin/python"
    if ! is_recent_python "$PYTHON"; then
        for candidate in python3 python3.12 python3.11 python3.13 python3.10; do
            if is_recent_python "$candidate"; then
                say "making a virtual environment in $ROOT/.venv with $candidate"
                "$candidate" -m venv "$ROOT/.venv" || {
                    say "$candidate cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)"
                    exit 1
                }
                break
            fi
        done
        is_recent_python "$PYTHON" || { say "no Python 3.10 or newer was found"; exit 1; }
    fi
fi
"$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --upgrade >/dev/null

# The requirements given as arguments that the environment does not meet, one a line.
missing() {
    "$PYTHON" - "$@" <<'PY'
import sys
from importlib import metadata

for requirement in sys.argv[1:]:
    name, _, minimum = requirement.partition(">=")
    try:
        installed = metadata.version(name.partition("==")[0])
    except metadata.PackageNotFoundError:
        print(requirement)
        continue
    numbers = [tuple(int(n) for n in text.split("+")[0].split(".")[:2] if n.isdigit()) for text in (installed, minimum)]
    if numbers[0] < numbers[1]:
        print(requirement)
PY
}

# Install what is missing, leaving the installed torch alone.
ensure() {
    local wanted
    mapfile -t wanted < <(missing "$@")
    [ "${#wanted[@]}" -gt 0 ] || return 0
    say "installing ${wanted[*]}"
    local pinned
    pinned=$("$PYTHON" -c 'from importlib import metadata; print("torch==" + metadata.version("torch"))' 2>/dev/null || true)
    "$PYTHON" -m pip install --quiet ${pinned:+--constraint <(echo "$pinned")} "${wanted[@]}" || {
        say "could not install ${wanted[*]}"
        exit 1
    }
}

if [ -n "$(missing torch)" ]; then
    ensure "${FLA_KDA_TORCH:-torch==2.13.0}"
fi
ensure "setuptools>=77" wheel triton "flash-linear-attention==0.6.0" "fla-core==0.6.0" "transformers>=5.24" pytest hypothesis

say "building and installing this checkout"
"$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --editable "$ROOT" || {
    say "the build failed; its sentence stands above"
    exit 1
}
if [ -f "$ROOT/fla_kda_backend/_C/no_kernels.txt" ]; then
    say "no CUDA kernels: $(cat "$ROOT/fla_kda_backend/_C/no_kernels.txt")"
fi
