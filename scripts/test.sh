#!/usr/bin/env bash
# Runs the whole test suite from a fresh clone: an environment, the build, the FLA versions, pytest.
# Arguments go to pytest. Tests that need a GPU run where there is one, and are skipped with the reason elsewhere.
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
cd "$ROOT"
"$PYTHON" scripts/install_fla_versions.py .fla-versions
exec "$PYTHON" -m pytest "$@"
