"""Which FLA versions do the tests run against, and where are they? Installs each into a folder of its own.

    python scripts/install_fla_versions.py .fla-versions

makes .fla-versions/<version> for every version, and .fla-versions/<version>.path, the folders that a new process
needs at the front of its PYTHONPATH. A version that the installed Triton cannot import gets an older Triton,
.fla-versions/triton-<version>. What is there already is kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

FLA_VERSIONS = ("0.4.2", "0.5.0", "0.5.1", "0.5.2", "0.6.0")
# The newest Triton that takes the autotuning keys of FLA before 0.6.0.
OLDER_TRITON = "3.6.0"


def install(requirements: list[str], target: Path) -> None:
    """Install into `target` without dependencies; a failed installation leaves nothing behind."""
    if target.is_dir():
        return
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(unfinished), *requirements], check=True)
    unfinished.rename(target)


def imports(*folders: Path) -> bool:
    """Whether FLA's KDA can be imported with these folders first on the path, without this package."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "FLA_KDA_BACKEND": "0"}
    command = [sys.executable, "-W", "ignore", "-c", "import fla.ops.kda"]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Install every FLA version that the tests run against.")
    parser.add_argument("folder", type=Path, help="one folder per version is made here")
    root = parser.parse_args().folder.resolve()
    root.mkdir(parents=True, exist_ok=True)

    older_triton = root / f"triton-{OLDER_TRITON}"
    unusable = []
    for version in FLA_VERSIONS:
        target, path_file = root / version, root / f"{version}.path"
        if not path_file.exists():
            install([f"fla-core=={version}", f"flash-linear-attention=={version}"], target)
            folders = [target]
            if not imports(*folders):
                install([f"triton=={OLDER_TRITON}"], older_triton)
                folders.append(older_triton)
                if not imports(*folders):
                    unusable.append(version)
                    continue
            path_file.write_text("".join(f"{folder.name}\n" for folder in folders), encoding="utf-8")
        print(f"FLA {version}: {', '.join(path_file.read_text(encoding='utf-8').split())}", flush=True)
    if unusable:
        print(f"cannot be imported here: FLA {', '.join(unusable)}", file=sys.stderr)
    return 1 if unusable else 0


if __name__ == "__main__":
    sys.exit(main())
