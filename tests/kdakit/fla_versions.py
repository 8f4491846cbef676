"""How does a test run code beside one real FLA version? In a new process, with that version first on its path.

The versions are installed by `python scripts/install_fla_versions.py .fla-versions`, or into another folder that
`FLA_KDA_TEST_FLA_DIR` names. The process finds this package as an installed one: through its entry point.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from textwrap import dedent

import pytest

from scripts.install_fla_versions import FLA_VERSIONS

__all__ = ["FLA_VERSIONS", "installed_versions", "run", "run_with"]

ROOT = Path(__file__).parents[2]
# Importing torch, Triton and FLA takes seconds on an idle core, and several times that on a busy one.
TIMEOUT_SECONDS = 300

_PRELUDE = """
import json as _json

def report(**facts):
    print("REPORT", _json.dumps(facts))

"""


def installed_versions() -> list[str]:
    """Those of `FLA_VERSIONS` that `run` finds."""
    return [version for version in FLA_VERSIONS if (_root() / f"{version}.path").exists()]


def _root() -> Path:
    return Path(os.environ.get("FLA_KDA_TEST_FLA_DIR") or ROOT / ".fla-versions")


def folders(version: str) -> list[Path]:
    """What has to come first on the path for this version; skips the test when it is not installed."""
    root = _root()
    listing = root / f"{version}.path"
    if not listing.exists():
        pytest.skip(f"FLA {version} is not in {root}: run scripts/install_fla_versions.py")
    return [root / name for name in listing.read_text(encoding="utf-8").split()]


@cache
def entry_point_folder() -> Path:
    """A folder that tells `importlib.metadata` of this package's entry point, as an installation would."""
    folder = Path(mkdtemp(prefix="fla-kda-backend-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    distribution = folder / "fla_kda_backend-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: fla-kda-backend\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(
        "[torch.backends]\nfla_kda_backend = fla_kda_backend.autoload:install\n"
    )
    return folder


def run(version: str, code: str, **environment: str) -> dict:
    """Run `code` in a new process beside FLA `version`; returns what it gives to `report(**facts)`."""
    return run_with(folders(version), code, **environment)


def run_with(first_on_path: list[Path], code: str, **environment: str) -> dict:
    """Run `code` in a new process with these folders first on its path; returns what it gives to `report(**facts)`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FLA_", "TORCH_DEVICE"))}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, [*first_on_path, entry_point_folder(), ROOT]))
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", _PRELUDE + dedent(code)]
    done = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    facts: dict = {"stderr": done.stderr}
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            facts |= json.loads(line.removeprefix("REPORT "))
    return facts
