#!/usr/bin/env bash
# Runs the demo from a fresh clone: an environment, the build, then scripts/demo.py, to which arguments go.
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
exec "$PYTHON" "$ROOT/scripts/demo.py" "$@"
