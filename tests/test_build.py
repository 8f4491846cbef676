"""Does the build keep its promises? The library as built, machines that lack something, and the packages."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fla_kda_backend import __version__, ops

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels as kernels  # noqa: E402
import build_wheel  # noqa: E402

NO_CUDA = {"CUDA_HOME": "/nonexistent"}
FOLDERS = ("csrc", "docs", "fla_kda_backend", "scripts", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
PACKAGED = (*FOLDERS, *PAGES, "setup.py", "pyproject.toml", "MANIFEST.in")


def run(command: list, cwd: Path, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def skip_or_fail(reason: str) -> None:
    """Skip; fail where kernels are demanded, as CI does."""
    if os.environ.get("FLA_KDA_TESTS_NEED_KERNELS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def library() -> ops.LibraryInfo:
    info = ops.library()
    if info is None:
        skip_or_fail(f"there is no library to test: {ops.load_error()}")
    return info


@pytest.fixture
def toolkit() -> kernels.Toolkit:
    try:
        return kernels.find_toolkit()
    except kernels.KernelsUnavailable as error:
        skip_or_fail(str(error))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The sources alone, as an archive holds them: no git, nothing built."""
    target = tmp_path / "checkout"
    target.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_C"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


# --- the library that was built ---------------------------------------------------------------------------------------


def test_library_loads_into_a_fresh_torch_and_reports_what_it_was_built_with(library):
    program = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.fla_kda_backend.build_info())"
    done = run([sys.executable, "-c", program, library.path], ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    requested = os.environ.get("FLA_KDA_CUDA_ARCHS", "auto")
    if requested not in ("auto", "all"):
        assert info["archs"] == requested.split(",")
    assert info["archs"] == list(library.archs) and set(info) == {"archs", "cuda", "torch", "for_racecheck"}
    assert info["for_racecheck"] == ("-DKDA_FOR_RACECHECK" in os.environ.get("FLA_KDA_NVCC_FLAGS", ""))
    assert re.fullmatch(r"\d+\.\d+", info["cuda"]) and re.match(r"\d+\.\d+", info["torch"])


def test_library_names_no_folder_of_the_machine_that_built_it(library):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    dynamic = subprocess.run([readelf, "-d", library.path], capture_output=True, text=True, check=True).stdout

    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert {"libtorch_cpu.so", "libc10.so"} <= needed
    unwanted = ("libcuda", "libtorch_cuda", "libpython", "libtorch_python")
    assert not [name for name in needed if name.startswith(unwanted)]


def kernel_reports(log: Path) -> list[tuple[str, str, int]]:
    """(kernel, architecture, bytes spilled) of each kernel in a compilation's log."""
    reports = []
    for section in log.read_text().split("Compiling entry function ")[1:]:
        name, arch = re.match(r"'(\w+)' for 'sm_(\w+)'", section).groups()
        stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", section).groups()
        reports.append((name, arch, int(stores) + int(loads)))
    return reports


def test_no_kernel_spills_registers_on_any_architecture(library):
    logs = sorted(kernels.object_dir(library.archs).rglob("*.cu.log"))
    if not logs:
        skip_or_fail("the library was built elsewhere: its compilation logs are not here")

    reports = [report for log in logs for report in kernel_reports(log)]

    assert {arch for _, arch, _ in reports} == set(library.archs)
    assert [report for report in reports if report[2]] == []


def test_a_spill_in_a_log_is_noticed(tmp_path):
    log = tmp_path / "kernel.cu.log"
    log.write_text(
        "ptxas info    : Compiling entry function '_Z4kernPf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z4kernPf\n"
        "    64 bytes stack frame, 96 bytes spill stores, 128 bytes spill loads\n"
    )
    assert kernel_reports(log) == [("_Z4kernPf", "90a", 224)]


# --- choosing architectures -------------------------------------------------------------------------------------------

CUDA_13 = kernels.Toolkit("nvcc", (13, 0), frozenset({75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121}))
CUDA_12_4 = kernels.Toolkit("nvcc", (12, 4), frozenset({50, 52, 60, 61, 70, 75, 80, 86, 87, 89, 90}))


def test_all_means_what_the_toolkit_knows():
    assert kernels.choose_archs("all", CUDA_13)[0] == ("80", "86", "89", "90a", "100a", "103a", "120a")
    assert kernels.choose_archs("all", CUDA_12_4)[0] == ("80", "86", "89", "90a")


def test_a_list_is_taken_as_it_is_written():
    assert kernels.choose_archs("90a, 80,90a", CUDA_13)[0] == ("90a", "80")


@pytest.mark.parametrize("request_", ["70", "hopper", "80a", "80,,95a", "90b", "sm_90"])
def test_an_architecture_that_does_not_exist_is_one_sentence(request_):
    with pytest.raises(kernels.BuildError) as refusal:
        kernels.choose_archs(request_, CUDA_13)
    assert "\n" not in str(refusal.value) and "FLA_KDA_CUDA_ARCHS" in str(refusal.value)


def test_an_architecture_that_the_toolkit_cannot_build_is_one_sentence():
    with pytest.raises(kernels.BuildError, match="toolkit 12.4 .* cannot build 100a; it can build 80, 86, 89, 90a"):
        kernels.choose_archs("80,100a", CUDA_12_4)


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine whose nvidia-smi reports the given compute capabilities."""

    def install(*capabilities):
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo {capability}\n" for capability in capabilities))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_auto_builds_for_the_gpus_of_the_machine(gpus):
    gpus("9.0", "8.0", "9.0")
    assert kernels.choose_archs("auto", CUDA_13) == (("80", "90a"), ())
    gpus("12.0")
    assert kernels.choose_archs("", CUDA_13) == (("120a",), ())


def test_auto_without_a_gpu_says_so_and_builds_the_default(monkeypatch):
    monkeypatch.setattr(kernels, "visible_archs", lambda: ())
    archs, (note,) = kernels.choose_archs("auto", CUDA_13)
    assert archs == kernels.DEFAULT_ARCHS
    assert "no GPU is visible" in note and "80, 90a" in note


def test_auto_with_gpus_that_cannot_be_served_goes_on_without_kernels(gpus):
    gpus("7.5")
    with pytest.raises(kernels.KernelsUnavailable, match="architecture 75 cannot be served"):
        kernels.choose_archs("auto", CUDA_13)
    gpus("7.5", "8.6")
    archs, (note,) = kernels.choose_archs("auto", CUDA_13)
    assert archs == ("86",) and "75" in note


def test_the_command_ends_with_one_sentence_and_no_stack_trace(toolkit):
    done = run([sys.executable, ROOT / "scripts" / "build_kernels.py", "--archs", "95a"], ROOT)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1 and "95a" in done.stderr


# --- machines that lack something -------------------------------------------------------------------------------------


@pytest.fixture
def site_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(kernels.site, "getsitepackages", lambda: [])
    return tmp_path


def test_no_torch_is_one_sentence(site_without_torch):
    with pytest.raises(kernels.KernelsUnavailable, match="install torch >= 2.10 first"):
        kernels.find_torch()


def test_torch_hidden_by_build_isolation_is_found_all_the_same(site_without_torch):
    (site_without_torch / "torch" / "include" / "torch" / "csrc" / "stable").mkdir(parents=True)
    (site_without_torch / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    assert kernels.find_torch() == kernels.Torch(site_without_torch / "torch", "2.11.0+cu130")


def test_an_old_torch_is_one_sentence(site_without_torch):
    (site_without_torch / "torch").mkdir()
    (site_without_torch / "torch" / "version.py").write_text("__version__ = '2.9.1'\n")
    with pytest.raises(kernels.KernelsUnavailable, match="torch 2.9.1 is too old"):
        kernels.find_torch()


def test_without_nvcc_the_package_is_built_without_kernels_and_says_so(checkout, tmp_path):
    done = run([sys.executable, "setup.py", "bdist_wheel", "-d", tmp_path / "wheels"], checkout, **NO_CUDA)

    assert done.returncode == 0, done.stderr
    assert "installing without CUDA kernels: no CUDA compiler is at /nonexistent/bin/nvcc" in done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"fla_kda_backend-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert "fla_kda_backend = fla_kda_backend.autoload:install" in entry_points(tmp_path / "installed")
    program = "from fla_kda_backend import ops; print(ops.library()); print(ops.load_error())"
    asked = run([sys.executable, "-c", program], tmp_path / "installed", PYTHONPATH=str(tmp_path / "installed"))
    assert asked.returncode == 0, asked.stderr
    nothing, reason = asked.stdout.splitlines()
    assert nothing == "None" and "without" in reason


BROKEN_LIBRARIES = """
import shutil, sys, tempfile
from pathlib import Path
import torch
from fla_kda_backend import chunk_kda, dispatch, log, ops
from fla_kda_backend.call import Signature
from fla_kda_backend.serve import Server

(foreign,) = sys.argv[1:]
contents = {"missing": None, "empty": b"", "garbage": b"not a library", "no library inside": b"\\x7fELF" * 99}
contents["another library"] = Path(foreign).read_bytes()
contents["half a library"] = contents["another library"][: len(contents["another library"]) // 2]
dispatch.device_facts = lambda device: dispatch.DeviceFacts("cuda", (9, 0))
bf16 = torch.zeros(1, 4, 1, 128, dtype=torch.bfloat16, device="meta")
call = dict(q=bf16, k=bf16, v=bf16, g=bf16, beta=bf16[..., 0])
for name, content in contents.items():
    ops._LIBRARY_FOLDER = Path(tempfile.mkdtemp())
    if content is not None:
        (ops._LIBRARY_FOLDER / "libfla_kda.so").write_bytes(content)
    ops._load.cache_clear()
    dispatch.library_for.cache_clear()
    log.reset()
    print(name, Server(Signature.of(chunk_kda)).call_or(lambda reason: "left to FLA", (), call), sep=": ")
    shutil.rmtree(ops._LIBRARY_FOLDER)
"""


def test_a_library_that_is_missing_or_broken_is_a_logged_fallback():
    foreign = subprocess.run(
        [sys.executable, "-c", "import _json; print(_json.__file__)"], capture_output=True, text=True
    ).stdout.strip()
    if not foreign.endswith(".so"):
        pytest.skip("this Python has no library of its own to take for a foreign one")
    done = run([sys.executable, "-c", BROKEN_LIBRARIES, foreign], ROOT, FLA_KDA_LOG="1", FLA_KDA_STRICT="0")

    assert done.returncode == 0, done.stderr
    served = done.stdout.splitlines()
    assert len(served) == 6 and all(line.endswith(": left to FLA") for line in served)
    reason = "[fla_kda_backend] chunk_kda -> Triton: no kernels are loaded: the "
    missing, *broken, damaged = [line.removeprefix(reason) for line in done.stderr.splitlines() if line.startswith(reason)]
    assert missing.startswith("package was installed without compiled kernels")
    assert damaged.startswith("compiled library is damaged: its end is missing")
    assert len(broken) == 4 and all(line.startswith("compiled library does not load: ") for line in broken)


def entry_points(folder: Path) -> str:
    (metadata,) = folder.glob("*.dist-info/entry_points.txt")
    section = metadata.read_text().partition("[torch.backends]")[2]
    return section.strip().splitlines()[0]


def test_an_earlier_library_survives_a_build_that_cannot_replace_it(tmp_path):
    folder = tmp_path / kernels.LIBRARY_DIR
    folder.mkdir(parents=True)
    (folder / kernels.LIBRARY_NAME).write_bytes(b"built earlier")

    kernels.build_or_explain(tmp_path, kernels.KernelsUnavailable("no nvcc"))

    assert [path.name for path in folder.iterdir()] == [kernels.LIBRARY_NAME]


# --- packages ---------------------------------------------------------------------------------------------------------


def test_the_source_archive_builds_without_git(checkout, tmp_path):
    archives = tmp_path / "archives"
    done = run([sys.executable, "setup.py", "sdist", "-d", archives], checkout, PATH="/nonexistent", **NO_CUDA)
    assert done.returncode == 0, done.stderr
    (archive,) = archives.iterdir()
    with tarfile.open(archive) as opened:
        # The default since Python 3.14; unknown before 3.10.12 and 3.11.4.
        opened.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = tmp_path / f"fla_kda_backend-{__version__}"
    assert archive.name == f"{unpacked.name}.tar.gz"

    for folder in FOLDERS:
        files = {path.relative_to(checkout) for path in (checkout / folder).rglob("*") if path.is_file()}
        packed = {path.relative_to(unpacked) for path in (unpacked / folder).rglob("*") if path.is_file()}
        assert packed == {path for path in files if "__pycache__" not in path.parts}
    built = run([sys.executable, "setup.py", "bdist_wheel", "-d", tmp_path / "wheels"], unpacked, **NO_CUDA)
    assert built.returncode == 0, built.stderr


def test_the_wheel_holds_the_library_and_fits_every_python(library, toolkit, tmp_path):
    # The objects of the library are still there: this only links.
    script, archs = ROOT / "scripts" / "build_wheel.py", ",".join(library.archs)
    done = run([sys.executable, script, "--archs", archs, "--output", tmp_path, "--try-with", sys.executable], ROOT)

    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.iterdir()
    assert re.fullmatch(rf"fla_kda_backend-{re.escape(__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    stated = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert stated["wheel"] == f"{wheel.name}, {wheel.stat().st_size / 2**20:.2f} MiB"
    assert stated["library"].endswith(", ".join(f"sm_{arch}" for arch in library.archs))
    assert re.fullmatch(r"glibc 2\.\d+ or newer, torch 2\.10 .*", stated["needs"])
    assert "the library loads" in stated["tried"] and "reference on cpu" in stated["tried"]


def test_a_wheel_is_not_called_good_when_its_library_does_not_load(checkout, tmp_path):
    wheel = tmp_path / f"fla_kda_backend-{__version__}-py3-none-any.whl"
    done = run([sys.executable, "setup.py", "bdist_wheel", "-d", tmp_path], checkout, **NO_CUDA)
    assert done.returncode == 0, done.stderr
    with pytest.raises(kernels.BuildError, match="holds no fla_kda_backend/_C/libfla_kda.so"):
        build_wheel.library_in(wheel)
    with pytest.raises(kernels.BuildError, match="does not work with Python .*without compiled kernels"):
        build_wheel.try_out(wheel, sys.executable, ("80", "90a"))


def test_the_glibc_that_a_library_needs_is_the_newest_that_it_names():
    names = b"\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBCXX_3.4.21\0GLIBC_2.4\0libm.so.6\0"
    assert build_wheel.newest_glibc(names) == "2.17"


def test_a_wheel_without_kernels_is_refused(tmp_path):
    done = run([sys.executable, ROOT / "scripts" / "build_wheel.py", "--output", tmp_path], ROOT, **NO_CUDA)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "no CUDA compiler is at /nonexistent/bin/nvcc" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_cubins_are_compressed_as_the_drivers_of_the_toolkit_allow():
    assert kernels.compression(CUDA_13) == "--compress-mode=size"
    for release in ((12, 4), (12, 9)):
        assert kernels.compression(kernels.Toolkit("nvcc", release, frozenset({80}))) == "-Xfatbin=-compress-all"


# --- what is compiled anew --------------------------------------------------------------------------------------------


@pytest.fixture
def small_project(tmp_path, monkeypatch, toolkit):
    """Three source files of our own kinds, and the plan to build them."""
    files = {
        "api/info.cpp": 'extern "C" const char* archs() { return FLA_KDA_ARCHS; }\n',
        "ptx/twice.cuh": "__device__ inline float twice(float x) { return 2 * x; }\n",
        "sm80/kernel.cu": '#include "ptx/twice.cuh"\n__global__ void kernel(float* x) { *x = twice(*x); }\n',
        "sm90/kernel.cu": "__global__ void hopper(float* x) { *x = 1; }\n",
    }
    for name, text in files.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    monkeypatch.setattr(kernels, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(kernels, "BUILD_DIR", tmp_path / "build")
    monkeypatch.delenv("FLA_KDA_NVCC_FLAGS", raising=False)
    return kernels.make_plan("80,90a")


def stale(plan: kernels.Plan) -> list[str]:
    commands = kernels.compile_commands(plan)
    return [str(source.relative_to(kernels.CSRC)) for source, *rest in commands if not kernels.is_fresh(source, *rest)]


def test_only_what_changed_is_compiled_anew(small_project, tmp_path, capfd):
    plan, library = small_project, tmp_path / "lib" / "libfla_kda.so"
    assert stale(plan) == ["api/info.cpp", "sm80/kernel.cu", "sm90/kernel.cu"]
    kernels.build(plan, library)
    assert library.exists() and stale(plan) == []

    (tmp_path / "csrc/ptx/twice.cuh").write_text("__device__ inline float twice(float x) { return x + x; }\n")
    assert stale(plan) == ["sm80/kernel.cu"]

    other_torch = kernels.Plan(kernels.Torch(plan.torch.folder, "2.99.0"), plan.toolkit, plan.archs)
    (kernels.object_dir(plan.archs) / "build_facts.h").write_text(kernels.build_facts(other_torch))
    assert stale(other_torch) == ["api/info.cpp", "sm80/kernel.cu"]


def test_files_of_one_architecture_are_compiled_for_it_alone(small_project):
    entries = kernels.compile_commands(small_project)
    commands = {str(source.relative_to(kernels.CSRC)): command for source, _, command in entries}
    assert [part for part in commands["sm90/kernel.cu"] if "gencode" in part] == kernels.gencode(["90a"])
    assert [part for part in commands["sm80/kernel.cu"] if "gencode" in part] == kernels.gencode(["80", "90a"])
    without_hopper = kernels.Plan(small_project.torch, small_project.toolkit, ("80",))
    assert not any("sm90" in str(source) for source, *_ in kernels.compile_commands(without_hopper))


def test_the_library_knows_which_kernel_folders_are_in_it(small_project):
    facts = kernels.build_facts(small_project)
    assert '#define FLA_KDA_ARCHS "80,90a"' in facts and "#define FLA_KDA_HAS_SM90 1" in facts
    without_hopper = kernels.Plan(small_project.torch, small_project.toolkit, ("80", "86"))
    assert "#define FLA_KDA_HAS_SM90 0" in kernels.build_facts(without_hopper)


def test_an_undefined_symbol_fails_the_build_and_not_the_user(small_project, tmp_path):
    (tmp_path / "csrc/api/info.cpp").write_text("void launch(); void call() { launch(); }\n")
    with pytest.raises(kernels.BuildError, match=r"undefined reference to .launch"):
        kernels.build(small_project, tmp_path / "libfla_kda.so")


def test_a_file_that_does_not_compile_is_named(small_project, tmp_path):
    (tmp_path / "csrc/sm80/kernel.cu").write_text("__global__ void kernel(float* x) { nonsense; }\n")
    with pytest.raises(kernels.BuildError, match=r"nvcc failed on .*sm80/kernel\.cu"):
        kernels.build(small_project, tmp_path / "libfla_kda.so")
    assert not (tmp_path / "libfla_kda.so").exists()
