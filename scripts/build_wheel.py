"""How is the one wheel made that serves every Python, every torch from 2.10 on and every GPU from Ampere on?

    python scripts/build_wheel.py [--archs all] [--output dist] [--try-with PYTHON ...]

compiles csrc/ for all architectures that the CUDA toolkit knows (scripts/build_kernels.py: MAX_JOBS, CUDA_HOME), packs
the wheel, and states its name, its size and what the machine that uses it must have. Needs the installed torch as files
(its headers and libraries), nvcc and setuptools; neither a GPU nor a network.

--try-with installs the wheel into an empty folder with another interpreter, which must have pip and a torch, and has
`python -m fla_kda_backend doctor` examine it there: the library must load and the CPU path must compute KDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels as kernels  # noqa: E402

TRY_SECONDS = 600


def build(archs: str, output: Path) -> Path:
    """Build the wheel into `output`. Raises BuildError where that fails, KernelsUnavailable where it cannot."""
    kernels.make_plan(archs)  # a wheel without kernels is not what was asked for
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # In a process of its own: setuptools keeps state, and reads the working directory.
        hook = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", hook, scratch],
            cwd=ROOT,
            env=os.environ | {"FLA_KDA_CUDA_ARCHS": archs},
            stdout=subprocess.DEVNULL,
        )
        if done.returncode:
            raise kernels.BuildError(f"the wheel was not built (status {done.returncode})")
        (wheel,) = Path(scratch).glob("*.whl")
        target = output / wheel.name
        target.write_bytes(wheel.read_bytes())
    return target


def library_in(wheel: Path) -> bytes:
    """The compiled library in a wheel. Raises BuildError where there is none."""
    with zipfile.ZipFile(wheel) as archive:
        name = (kernels.LIBRARY_DIR / kernels.LIBRARY_NAME).as_posix()
        if name not in archive.namelist():
            raise kernels.BuildError(f"{wheel.name} holds no {name}")
        return archive.read(name)


def newest_glibc(library: bytes) -> str:
    """The glibc that a library needs at least: the newest version among those of the symbols that it takes from it."""
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library)
    return ".".join(map(str, max(tuple(map(int, version)) for version in versions)))


def try_out(wheel: Path, python: str, archs: tuple[str, ...]) -> str:
    """Install the wheel into an empty folder with `python` and have the doctor look; what it is, in a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, str(wheel)]
        installed = subprocess.run(install, capture_output=True, text=True)
        if installed.returncode:
            raise kernels.BuildError(f"{python} does not install {wheel.name}:\n{installed.stderr}")
        done = subprocess.run(
            [python, "-m", "fla_kda_backend", "doctor", "--json", "--no-triton"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=TRY_SECONDS,
        )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise kernels.BuildError(f"the doctor gave no report under {python}:\n{done.stderr}") from None
    tried = f"Python {report['python']}, torch {report['torch'].get('version')}"
    probes = [probe for probe in report["probes"] if probe["status"] != "skipped"]
    bad = [probe["problem"] for probe in probes if probe["status"] != "ok"]
    if report["library"].get("archs") != list(archs) or bad or not probes:
        raise kernels.BuildError(f"{wheel.name} does not work with {tried}: {report['library']} {bad}")
    return f"{tried}: the library loads; right results from " + ", ".join(
        f"{probe['name']} on {probe['device']}" for probe in probes
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel with the kernels of all architectures.")
    parser.add_argument("--archs", default="all", help="all, or a list such as 80,90a (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the wheel goes (default: dist)")
    parser.add_argument("--try-with", action="append", default=[], metavar="PYTHON", help="a Python to try it with")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        wheel = build(options.archs, options.output)
        seconds = time.monotonic() - began
        library, plan = library_in(wheel), kernels.make_plan(options.archs)
        archs = ", ".join(f"sm_{arch}" for arch in plan.archs)
        print(f"wheel     {wheel.name}, {wheel.stat().st_size / 2**20:.2f} MiB")
        print(f"library   {len(library) / 2**20:.2f} MiB, compressed for {archs}")
        print(f"built     in {seconds:.0f} s with CUDA {plan.toolkit.release_text} against torch {plan.torch.version}")
        print(f"needs     glibc {newest_glibc(library)} or newer, torch 2.10 or newer, Python 3.10 or newer")
        for python in options.try_with:
            print(f"tried     {try_out(wheel, python, plan.archs)}", flush=True)
    except (kernels.KernelsUnavailable, kernels.BuildError) as error:
        kernels.say(f"no wheel: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
