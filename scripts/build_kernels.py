"""How csrc/ becomes one shared library, fla_kda_backend/_C/libfla_kda.so.

    python scripts/build_kernels.py [--archs auto|all|80,90a,...] [--clean]

builds into the source tree, for development; setup.py uses the same functions for `pip install`. Only the standard
library is imported: torch is found as files (headers and libraries), so a build costs no `import torch` and works
inside pip's isolated build environment, too.

The library uses PyTorch's stable ABI: it has no Python in it, and one build serves every torch from 2.10 on. Each
source file is compiled by its own nvcc call, for all chosen architectures at once; a file under csrc/sm90/ only for
90a. An object is kept while its command, its source and every csrc header it included are unchanged. What ptxas
reports about registers and spills lies beside the object as <object>.log.

Environment: FLA_KDA_CUDA_ARCHS (auto, all, or a list; default auto), MAX_JOBS (default 2), CUDA_HOME,
FLA_KDA_NVCC_FLAGS.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BUILD_DIR = ROOT / "build" / "kernels"
LIBRARY_DIR = Path("fla_kda_backend") / "_C"
LIBRARY_NAME = "libfla_kda.so"
NO_KERNELS_NOTE = "no_kernels.txt"

MINIMUM_TORCH = (2, 10)
# Every architecture with kernels or with a cubin of its own; `all` is the part of it that the toolkit knows.
ALL_ARCHS = ("80", "86", "89", "90a", "100a", "103a", "120a")
# Built by `auto` where no GPU can be seen: the portable kernels for Ampere and Ada, and for Hopper.
DEFAULT_ARCHS = ("80", "90a")
# Source folders whose files are compiled for these architectures only (where chosen); all others for every chosen one.
FOLDER_ARCHS = {"sm90": ("90a",)}
HEADER_SUFFIXES = (".cuh", ".h", ".hpp")


class KernelsUnavailable(Exception):
    """Something this machine lacks: the package installs without kernels. The message is one sentence."""


class BuildError(Exception):
    """A request that cannot be met, or a compiler that failed: the build stops. The message starts with a sentence."""


@dataclass(frozen=True)
class Torch:
    """The installed torch, as files."""

    folder: Path
    version: str

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        include = self.folder / "include"
        return (include, include / "torch" / "csrc" / "api" / "include")


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit: its nvcc, release such as (13, 0), and the compute capabilities it compiles for."""

    nvcc: str
    release: tuple[int, int]
    capabilities: frozenset[int]

    @property
    def release_text(self) -> str:
        return ".".join(map(str, self.release))

    def builds(self, arch: str) -> bool:
        # nvcc lists sm_90 for both "90" and "90a"; architecture-specific targets exist from 9.0 on (CUDA 12.0).
        capability = int(arch.rstrip("a"))
        return capability in self.capabilities and (not arch.endswith("a") or capability >= 90)


@dataclass(frozen=True)
class Plan:
    """Everything a build depends on."""

    torch: Torch
    toolkit: Toolkit
    archs: tuple[str, ...]
    notes: tuple[str, ...] = ()


def find_torch() -> Torch:
    """The torch of this interpreter, without importing it. Raises KernelsUnavailable."""
    folders = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent)
    # pip's isolated build environment hides site-packages from sys.path, but not from sysconfig.
    bases = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders += [Path(base) / "torch" for base in bases]
    for folder in folders:
        version_file = folder / "version.py"
        if not version_file.is_file():
            continue
        found = re.search(r"__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", version_file.read_text())
        version = found.group(1) if found else "0"
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        if numbers < MINIMUM_TORCH:
            raise KernelsUnavailable(f"torch {version} is too old to build against: 2.10 or newer is needed")
        if not (folder / "include" / "torch" / "csrc" / "stable").is_dir():
            raise KernelsUnavailable(f"torch {version} has no stable-ABI headers in {folder / 'include'}")
        return Torch(folder, version)
    raise KernelsUnavailable(
        "no torch was found to build against: install torch >= 2.10 first, then this package with --no-build-isolation"
    )


def find_toolkit() -> Toolkit:
    """The CUDA toolkit of CUDA_HOME if that is set, else of PATH or the usual place. Raises KernelsUnavailable."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = os.path.join(home, "bin", "nvcc")
        if not os.access(nvcc, os.X_OK):
            raise KernelsUnavailable(f"no CUDA compiler is at {nvcc}, where CUDA_HOME says it should be")
    else:
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not os.access(nvcc, os.X_OK):
            raise KernelsUnavailable("no CUDA compiler was found: put nvcc on the PATH or set CUDA_HOME")
    try:
        about = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        listing = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelsUnavailable(f"{nvcc} does not run ({error})") from error
    release = re.search(r"release (\d+)\.(\d+)", about)
    capabilities = frozenset(int(n) for n in re.findall(r"sm_(\d+)", listing))
    if release is None or not capabilities:
        raise KernelsUnavailable(f"{nvcc} does not tell its release and its architectures")
    return Toolkit(nvcc, (int(release.group(1)), int(release.group(2))), capabilities)


def visible_archs() -> tuple[str, ...]:
    """The architectures of this machine's GPUs, as nvidia-smi tells them; empty where there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ()
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.findall(r"^(\d+)\.(\d)\s*$", listing.stdout, re.M)
    capabilities = {int(major) * 10 + int(minor) for major, minor in found}
    return tuple(f"{capability}a" if capability >= 90 else str(capability) for capability in sorted(capabilities))


def choose_archs(request: str, toolkit: Toolkit) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(architectures, notes) for a value of FLA_KDA_CUDA_ARCHS.

    Raises BuildError for a request that cannot be met, KernelsUnavailable where `auto` finds only GPUs that it cannot
    serve.
    """
    request = request.strip().lower() or "auto"
    if request == "all":
        return tuple(arch for arch in ALL_ARCHS if toolkit.builds(arch)), ()
    if request == "auto":
        seen = visible_archs()
        if not seen:
            archs = tuple(arch for arch in DEFAULT_ARCHS if toolkit.builds(arch))
            return archs, (
                f"no GPU is visible here, so the kernels are built for {', '.join(archs)} "
                "(FLA_KDA_CUDA_ARCHS chooses others)",
            )
        usable = tuple(arch for arch in seen if toolkit.builds(arch) and int(arch.rstrip("a")) >= 80)
        left = [arch for arch in seen if arch not in usable]
        sentence = (
            f"this machine's GPU of architecture {', '.join(left)} cannot be served: compute capability 8.0 or newer "
            f"and a CUDA toolkit that knows it are needed, and the toolkit here is {toolkit.release_text}"
        )
        if not usable:
            raise KernelsUnavailable(sentence)
        return usable, (sentence,) if left else ()
    archs = tuple(dict.fromkeys(re.split(r"[,;\s]+", request.strip(",; "))))
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}a?", arch) or int(arch.rstrip("a")) < 80:
            raise BuildError(
                f"FLA_KDA_CUDA_ARCHS={request}: {arch!r} is not an architecture this package has kernels for "
                f"(use auto, all, or a list of {', '.join(ALL_ARCHS)})"
            )
        if not toolkit.builds(arch):
            known = ", ".join(a for a in ALL_ARCHS if toolkit.builds(a))
            raise BuildError(
                f"FLA_KDA_CUDA_ARCHS={request}: the CUDA toolkit {toolkit.release_text} at {toolkit.nvcc} cannot build "
                f"{arch}; it can build {known}"
            )
    return archs, ()


def make_plan(request: str | None = None) -> Plan:
    """What would be built here and now. Raises KernelsUnavailable or BuildError."""
    if sys.platform != "linux":
        raise KernelsUnavailable(f"the kernels build on Linux only, and this is {sys.platform}")
    if not sources():
        raise KernelsUnavailable(f"there is no CUDA source in {CSRC}")
    toolkit = find_toolkit()
    torch = find_torch()
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("c++") is None:
        raise KernelsUnavailable("no C++ compiler was found, and nvcc needs one: install g++")
    archs, notes = choose_archs(os.environ.get("FLA_KDA_CUDA_ARCHS", "auto") if request is None else request, toolkit)
    if not archs:
        raise KernelsUnavailable(
            f"the CUDA toolkit {toolkit.release_text} at {toolkit.nvcc} builds none of {', '.join(ALL_ARCHS)}"
        )
    return Plan(torch, toolkit, archs, notes)


def sources() -> list[Path]:
    return sorted(path for suffix in ("*.cu", "*.cpp") for path in CSRC.rglob(suffix))


def object_dir(archs: tuple[str, ...]) -> Path:
    """The folder of the objects and ptxas logs of a build for these architectures."""
    return BUILD_DIR / "_".join(archs)


def compile_commands(plan: Plan) -> list[tuple[Path, Path, list[str]]]:
    """(source, object, nvcc command without source and output) of every file to compile."""
    folder = object_dir(plan.archs)
    facts = folder / "build_facts.h"
    toolkit = plan.toolkit
    common = [toolkit.nvcc, "-std=c++17", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    common += ["-cudart", "static", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", f"-I{CSRC}"]
    common += [part for path in plan.torch.include_dirs for part in ("-isystem", str(path))]
    if os.environ.get("CXX"):
        common += ["-ccbin", os.environ["CXX"]]
    common += shlex.split(os.environ.get("FLA_KDA_NVCC_FLAGS", ""))
    device = ["-Xptxas=-v", compression(toolkit)]
    commands = []
    for source in sources():
        relative = source.relative_to(CSRC)
        command = list(common)
        if relative.parts[0] == "api":
            command += ["-include", str(facts)]
        if source.suffix == ".cu":
            only = FOLDER_ARCHS.get(relative.parts[0], plan.archs)
            archs = [arch for arch in plan.archs if arch in only]
            if not archs:
                continue
            command += device + gencode(archs)
        commands.append((source, folder / relative.with_name(relative.name + ".o"), command))
    return commands


def compression(toolkit: Toolkit) -> str:
    """The flag that makes the library small: the cubins of all architectures are compressed.

    nvcc knows the denser mode since 12.8, but what it compresses needs a driver of CUDA 12.4 or newer, which a library
    built with CUDA 12 otherwise does not. With CUDA 13 every driver is newer.
    """
    return "--compress-mode=size" if toolkit.release >= (13, 0) else "-Xfatbin=-compress-all"


def gencode(archs) -> list[str]:
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def build_facts(plan: Plan) -> str:
    """The macros through which csrc/api learns what it was built with, and which kernel folders are in the library."""
    facts = {
        "FLA_KDA_ARCHS": f'"{",".join(plan.archs)}"',
        "FLA_KDA_TORCH_VERSION": f'"{plan.torch.version}"',
        "FLA_KDA_CUDA_VERSION": f'"{plan.toolkit.release_text}"',
    }
    for folder, archs in FOLDER_ARCHS.items():
        facts[f"FLA_KDA_HAS_{folder.upper()}"] = int(any(arch in archs for arch in plan.archs))
    return "".join(f"#define {name} {value}\n" for name, value in facts.items())


def build(plan: Plan, library: Path) -> Path:
    """Compile what has changed, link `library`, and return it. Raises BuildError where a compiler fails."""
    jobs = job_count()
    folder = object_dir(plan.archs)
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / "build_facts.h"
    if not facts.exists() or facts.read_text() != build_facts(plan):
        facts.write_text(build_facts(plan))

    commands = compile_commands(plan)
    stale = [entry for entry in commands if not is_fresh(*entry)]
    say(
        f"{len(stale)} of {len(commands)} files to compile for {', '.join(plan.archs)} "
        f"(nvcc {plan.toolkit.release_text}, torch {plan.torch.version}, {jobs} jobs)"
    )
    # Idle jobs compile several architectures of one file at a time.
    threads = max(1, jobs // len(stale)) if stale else 1
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(compile_one, *entry, threads) for entry in stale]
        try:
            for future in futures:
                future.result()
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    link(plan, [target for _, target, _ in commands], library)
    return library


def compile_one(source: Path, target: Path, command: list[str], threads: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    key_file(target).unlink(missing_ok=True)
    say(f"compiling {source.relative_to(ROOT)}")
    extra = [f"--threads={threads}"] if threads > 1 else []
    dependencies = ["-MD", "-MF", str(dependency_file(target))]
    run(command + extra + dependencies + ["-c", str(source), "-o", str(target)], source, target.with_suffix(".log"))
    key_file(target).write_text(object_key(source, target, command))


def link(plan: Plan, objects: list[Path], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # No rpath: torch is in the process before this library is loaded, and its libraries are found by their names.
    command = [plan.toolkit.nvcc, "-shared", "-cudart", "static", *gencode(plan.archs), *map(str, objects)]
    command += [f"-L{plan.torch.folder / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch_cpu", "-lc10"]
    # A symbol that nobody defines is an error here, not when a user's torch loads the library.
    command += ["-Xlinker=--exclude-libs,ALL", "-Xlinker=-z,defs", "-ldl"]
    if os.environ.get("CXX"):
        command += ["-ccbin", os.environ["CXX"]]
    partial = library.with_suffix(".partial")
    run([*command, "-o", str(partial)], library, object_dir(plan.archs) / "link.log")
    partial.replace(library)
    say(f"built {library} ({library.stat().st_size / 2**20:.1f} MiB)")


def run(command: list[str], subject: Path, log: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        output = "\n".join(line for line in lines if not line.startswith("ptxas info"))
        raise BuildError(f"nvcc failed on {subject}:\n{output}\n{shlex.join(command)}")


def is_fresh(source: Path, target: Path, command: list[str]) -> bool:
    key = key_file(target)
    return target.exists() and key.exists() and key.read_text() == object_key(source, target, command)


def object_key(source: Path, target: Path, command: list[str]) -> str:
    """A hash over the command, the source, and the files below this repository that the last compilation included."""
    digest = hashlib.sha256("\0".join(command).encode())
    included = set()
    if dependency_file(target).exists():
        text = dependency_file(target).read_text().replace("\\\n", " ")
        included = {Path(name) for name in text.partition(": ")[2].split()}
    for path in sorted({source, *(path for path in included if path.is_relative_to(ROOT))}):
        digest.update(f"\0{path}\0".encode() + (path.read_bytes() if path.exists() else b""))
    return digest.hexdigest()


def key_file(target: Path) -> Path:
    return target.with_suffix(".key")


def dependency_file(target: Path) -> Path:
    return target.with_suffix(".d")


def job_count() -> int:
    try:
        return max(1, int(os.environ.get("MAX_JOBS", "2")))
    except ValueError:
        return 2


def build_or_explain(package_parent: Path, plan: Plan | KernelsUnavailable) -> None:
    """Put the library into package_parent/fla_kda_backend/_C, or a note that says why there is none."""
    folder = package_parent / LIBRARY_DIR
    library, note = folder / LIBRARY_NAME, folder / NO_KERNELS_NOTE
    if isinstance(plan, Plan):
        build(plan, library)
        note.unlink(missing_ok=True)
        return
    if library.exists():
        say(f"keeping {library}, which was built earlier: {plan}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{plan}\n")
    say(f"installing without CUDA kernels: {plan}")


def say(sentence: str) -> None:
    print(f"[fla_kda_backend build] {sentence}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CUDA kernels into the source tree.")
    parser.add_argument("--archs", help="auto, all, or a list such as 80,90a (default: FLA_KDA_CUDA_ARCHS, else auto)")
    parser.add_argument("--clean", action="store_true", help="compile every file anew")
    options = parser.parse_args()
    if options.clean:
        shutil.rmtree(BUILD_DIR, ignore_errors=True)
    try:
        plan = make_plan(options.archs)
        for note in plan.notes:
            say(note)
        build_or_explain(ROOT, plan)
    except (KernelsUnavailable, BuildError) as error:
        say(f"no kernels were built: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
