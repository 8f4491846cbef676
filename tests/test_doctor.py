"""Does the doctor see what is wrong, say what to do next, and survive it? Findings from facts, probes, real processes.

Machines that are not here, such as one with an H200, are facts in a dict; environments that are broken are made for
real, and examined by `python -m fla_kda_backend doctor` in a process of its own.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from copy import deepcopy
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from fla_kda_backend import __main__ as command
from fla_kda_backend import dispatch, doctor, ops, serve
from fla_kda_backend.doctor import findings, steps
from fla_kda_backend.doctor.page import page
from fla_kda_backend.doctor.process import Worker
from tests.kdakit.fla_versions import FLA_VERSIONS, entry_point_folder
from tests.kdakit.fla_versions import folders as fla_folders

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300

# --- findings and page, from facts ------------------------------------------------------------------------------------


def ran(name: str, device: str, path: str, arch: str | None, bound: float) -> dict:
    errors = dict(o_error=bound / 3, state_error=bound / 4, bound=bound, seconds=0.2)
    return dict(name=name, device=device, status="ok", problem=None, path=path, arch=arch, **errors)


def skipped(name: str, device: str) -> dict:
    return dict(name=name, device=device, status="skipped", problem="there is no GPU to run it on")


H200 = {
    "version": "0.1.0",
    "python": "3.12.1",
    "platform": "Linux x86_64, glibc 2.36",
    "driver": "580.82.07",
    "gpu_devices": 2,
    "environment": {},
    "torch": dict(version="2.13.0+cu130", cuda="13.0", hip=None, triton="3.7.1", loads_this_package=True),
    "gpu": dict(
        available=True,
        error=None,
        driver_cuda="13.0",
        devices=[dict(index=i, name="NVIDIA H200", capability=[9, 0], memory_gib=139.8) for i in range(2)],
    ),
    "library": dict(built=True, error=None, archs=["80", "90a"], cuda="13.0", torch="2.13.0", mib=1.24),
    "fla": dict(
        version="0.6.0",
        installed=True,
        has_kda=True,
        error=None,
        registries=["fla.backends"],
        way="fla.backends",
        decodes=True,
        disabled=False,
    ),
    "probes": [
        ran("reference", "cpu", "reference", None, steps.CPU_BOUND),
        ran("fla", "cpu", "reference", None, steps.CPU_BOUND),
        ran("portable", "cuda:0", "portable", "90a", steps.CUDA_BOUND),
        ran("hopper", "cuda:0", "hopper", "90a", steps.CUDA_BOUND),
        ran("fla", "cuda:0", "hopper", "90a", steps.CUDA_BOUND),
        ran("triton", "cuda:0", "triton", None, steps.TRITON_BOUND),
    ],
}
NO_KERNELS = "the package was installed without compiled kernels: no CUDA compiler was found"
NO_GPU = dict(
    driver=None,
    gpu_devices=0,
    torch=dict(version="2.13.0+cpu", cuda=None),
    gpu=dict(available=False, driver_cuda=None, devices=[]),
    probes=[*H200["probes"][:2], *(skipped(name, "cuda") for name in ("portable", "hopper", "triton"))],
)


def changed(report: dict, changes: dict) -> dict:
    """A copy of the report with some facts replaced, in dicts by name."""
    report = deepcopy(report)
    for name, value in changes.items():
        report[name] = report[name] | value if isinstance(value, dict) and "error" not in value else value
    return report


def without_gpu(**changes) -> dict:
    return changed(changed(H200, NO_GPU), changes)


def failed(*probe: str) -> list[dict]:
    name, device = probe
    problem = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    rest = [p for p in H200["probes"] if (p["name"], p["device"]) != probe]
    return [*rest, dict(name=name, device=device, status="failed", problem=problem)]


def capability(*numbers: int) -> dict:
    return dict(devices=[dict(index=0, name="a GPU", capability=list(numbers), memory_gib=16.0)])


def gave_no_facts(error: str) -> dict:
    return {"error": error}


def library_error(error: str) -> dict:
    return H200["library"] | {"error": error, "archs": None, "cuda": None, "torch": None, "mib": None}


def fla_error(error: str, **changes) -> dict:
    return H200["fla"] | {"error": error, "way": None, "registries": []} | changes


# What was changed -> (kind, part of the sentence, part of the next step).
FINDINGS = {
    "torch missing": (
        changed(
            H200,
            dict(torch=gave_no_facts("ModuleNotFoundError: No module named 'torch'"))
            | {step: gave_no_facts("torch cannot be imported") for step in ("gpu", "library", "fla")},
        ),
        ("problem", "torch cannot be imported", "install PyTorch 2.10"),
    ),
    "torch too old": (changed(H200, dict(torch=dict(version="2.9.1"))), ("problem", "2.9.1 is too old", "2.10")),
    "torch for AMD": (
        without_gpu(torch=dict(version="2.13.0+rocm7", hip="7.0")),
        ("note", "for AMD GPUs", ""),
    ),
    "not loaded by torch": (
        changed(H200, dict(torch=dict(loads_this_package=False))),
        ("note", "no installed package declares it", "import fla_kda_backend"),
    ),
    "kept from being loaded": (
        changed(
            H200,
            dict(torch=dict(loads_this_package=False), environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        ),
        ("note", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "import fla_kda_backend"),
    ),
    "no GPU": (without_gpu(), ("note", "no NVIDIA GPU on this machine", "")),
    "a driver, but no GPU": (
        without_gpu(driver="580.82.07"),
        ("note", "driver 580.82.07 is loaded, but no GPU is given", ""),
    ),
    "GPUs hidden": (
        without_gpu(gpu_devices=1, environment={"CUDA_VISIBLE_DEVICES": ""}),
        ("note", "CUDA_VISIBLE_DEVICES hides", "unset it"),
    ),
    "torch without CUDA beside a GPU": (
        without_gpu(driver="580.82.07", gpu_devices=1),
        ("problem", "torch 2.13.0+cpu is built without CUDA", "a CUDA build of PyTorch"),
    ),
    "torch sees no GPU": (
        without_gpu(
            driver="535.54.03",
            gpu_devices=1,
            torch=dict(cuda="13.0"),
            gpu=dict(H200["gpu"], devices=[], available=False, error="the NVIDIA driver on your system is too old"),
        ),
        ("problem", "driver 535.54.03), but torch sees none: the NVIDIA driver", "must support CUDA 13.0"),
    ),
    "torch dies of the GPU": (
        changed(H200, dict(gpu=gave_no_facts("the process was killed by SIGSEGV"))),
        ("problem", "asking torch for GPUs failed: the process was killed", "nvidia-smi"),
    ),
    "GPU too old": (
        changed(H200, dict(gpu=capability(7, 5), library=dict(archs=["80"]))),
        ("problem", "compute capability 7.5", "Triton"),
    ),
    "no kernels, no GPU": (
        without_gpu(library=library_error(NO_KERNELS)),
        ("note", "without compiled kernels: no CUDA compiler", ""),
    ),
    "no kernels beside a GPU": (
        changed(H200, dict(library=library_error(NO_KERNELS))),
        ("problem", "without compiled kernels", "nvcc, then pip install"),
    ),
    "a broken library": (
        without_gpu(library=library_error("the compiled library does not load: file too short")),
        ("problem", "file too short", "build the kernels anew"),
    ),
    "a library that kills": (
        without_gpu(library=gave_no_facts("the process was killed by SIGBUS")),
        ("problem", "loading the compiled library takes the process down: the process was killed by SIGBUS", "anew"),
    ),
    "kernels for another GPU": (
        changed(H200, dict(gpu=capability(10, 0))),
        ("problem", "built for sm_80, sm_90a: none runs on cuda:0 (a GPU, sm_100)", "FLA_KDA_CUDA_ARCHS=100a "),
    ),
    "kernels for an older GPU": (
        changed(H200, dict(gpu=capability(8, 0), library=dict(archs=["86"]))),
        ("problem", "none runs on cuda:0", "FLA_KDA_CUDA_ARCHS=80 "),
    ),
    "kernels newer than the driver": (
        changed(H200, dict(gpu=dict(driver_cuda="12.8", **capability(9, 0)))),
        ("problem", "built with CUDA 13.0, the driver supports 12.8", "update the driver"),
    ),
    "switched off": (
        changed(H200, dict(environment={"FLA_KDA_BACKEND": "0"}, fla=dict(way=None))),
        ("problem", "FLA_KDA_BACKEND=0 turns the package off", "unset"),
    ),
    "FLA's dispatch switched off": (
        changed(H200, dict(fla=dict(way=None, disabled=True))),
        ("problem", "FLA_DISABLE_BACKEND_DISPATCH=1", "unset"),
    ),
    "a forced path": (
        changed(H200, dict(environment={"FLA_KDA_FORCE": "portable"})),
        ("note", "FLA_KDA_FORCE=portable", "unset"),
    ),
    "no FLA": (
        changed(H200, dict(fla=fla_error(None, installed=False, has_kda=False, version=None))),
        ("problem", "FLA is not installed", "pip install flash-linear-attention"),
    ),
    "FLA without KDA": (
        changed(H200, dict(fla=fla_error("ModuleNotFoundError: …", version="0.3.2", has_kda=False))),
        ("problem", "FLA 0.3.2 is too old", "0.4.2 or newer"),
    ),
    "FLA without Triton": (
        changed(H200, dict(fla=fla_error("ModuleNotFoundError: No module named 'triton.language'"))),
        ("problem", "its KDA cannot be used", "pip install triton"),
    ),
    "FLA that does not import": (
        changed(H200, dict(fla=fla_error("RuntimeError: 0 active drivers"))),
        ("problem", "its KDA cannot be used: RuntimeError: 0 active drivers", "pip install flash-linear-attention"),
    ),
    "FLA that kills": (
        changed(H200, dict(fla=gave_no_facts("the process was killed by SIGABRT"))),
        ("problem", "importing FLA failed: the process was killed by SIGABRT", "reinstall FLA"),
    ),
    "not registered": (
        changed(H200, dict(fla=dict(way=None))),
        ("problem", "not registered with FLA 0.6.0", "docs/troubleshooting.md"),
    ),
    "old FLA": (changed(H200, dict(fla=dict(version="0.4.1"))), ("note", "older than any that was tested", "0.4.2")),
    "new FLA": (changed(H200, dict(fla=dict(version="0.7.0"))), ("note", "newer than any that was tested", "")),
    "a wrong kernel": (
        changed(H200, dict(probes=failed("hopper", "cuda:0"))),
        ("problem", "the probe of hopper on cuda:0 failed: AcceleratorError", "FLA_KDA_FORCE=triton"),
    ),
    "a wrong CPU path": (
        changed(H200, dict(probes=failed("reference", "cpu"))),
        ("problem", "the probe of reference on cpu failed", "docs/troubleshooting.md"),
    ),
    "FLA that does not come here": (
        changed(H200, dict(probes=failed("fla", "cuda:0"))),
        ("problem", "the probe of fla on cuda:0 failed", "what stands above"),
    ),
    "Triton that fails": (
        changed(H200, dict(probes=failed("triton", "cuda:0"))),
        ("problem", "the probe of triton", "report it to FLA"),
    ),
}
# Problems that bring no other one with them.
ALONE = [name for name, (_, (kind, *_)) in FINDINGS.items() if kind == "problem"]


@pytest.mark.parametrize("case", FINDINGS)
def test_a_fault_is_named_with_its_next_step(case):
    report, (kind, what, step) = FINDINGS[case]
    found = [finding for finding in findings.find(report) if what in finding.what]
    assert [finding.kind for finding in found] == [kind], findings.find(report)
    assert step in found[0].next_step and (found[0].next_step or kind == "note")
    if kind == "note":
        assert not [finding for finding in findings.find(report) if finding.kind == "problem"]


@pytest.mark.parametrize("case", ALONE)
def test_one_fault_is_one_problem(case):
    assert sum(finding.kind == "problem" for finding in findings.find(FINDINGS[case][0])) == 1


def test_a_healthy_gpu_machine_has_nothing_to_say():
    assert findings.find(H200) == []


def test_the_hopper_kernel_that_was_not_built_is_a_note():
    for device in findings.find(changed(H200, dict(library=dict(archs=["90"])))):
        assert device.kind == "note" and "slower portable one" in device.what and "=90a" in device.next_step


def test_archs_run_where_the_dispatcher_says():
    archs = ("80", "86", "89", "90", "90a", "100", "100a", "103a", "120", "120a")
    for arch, device in product(archs, [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]):
        assert findings.runs_on(arch, list(device)) == (dispatch.arch_for(device, (arch,)) is not None), (arch, device)


def test_a_build_without_kernels_is_told_from_a_library_that_does_not_load(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "_LIBRARY_FOLDER", tmp_path)
    assert ops._load.__wrapped__()[1].startswith(findings.NO_KERNELS)
    (tmp_path / "libfla_kda.so").write_bytes(b"no library")
    assert not ops._load.__wrapped__()[1].startswith(findings.NO_KERNELS)


def test_the_versions_that_are_called_tested_are_those_of_the_tests():
    assert findings.OLDEST_FLA == findings.numbers(FLA_VERSIONS[0])
    assert findings.NEWEST_FLA == findings.numbers(FLA_VERSIONS[-1])[:2]
    assert findings.numbers("2.13.0+cpu") == (2, 13, 0) and findings.numbers("main") == ()


def as_examined(report: dict) -> dict:
    found = [dict(kind=f.kind, what=f.what, next_step=f.next_step) for f in findings.find(report)]
    return report | dict(findings=found, healthy=not any(f["kind"] == "problem" for f in found))


@pytest.mark.parametrize("case", FINDINGS)
def test_the_page_of_any_machine_shows_every_finding_and_step(case):
    report = as_examined(FINDINGS[case][0])
    text = page(report)
    for finding in report["findings"]:
        assert finding["what"] in text and finding["next_step"] in text
    assert text.splitlines()[-1].startswith("healthy" if report["healthy"] else "not healthy")
    assert len(text.splitlines()) <= 60


STEPS = ("gpu", "library", "fla")


@pytest.mark.parametrize("dead", [some for count in (1, 2, 3) for some in combinations(STEPS, count)], ids=str)
@pytest.mark.parametrize("machine", [H200, without_gpu()], ids=["H200", "no GPU"])
def test_steps_without_an_answer_are_problems_of_a_page_all_the_same(machine, dead):
    died = gave_no_facts("the process was killed by SIGSEGV")
    report = changed(machine, dict.fromkeys(dead, died))
    report["probes"] = [
        doctor._run(_DeadWorker(), report, *probe) for probe in doctor._plan(report, with_triton=False)
    ]
    report = as_examined(report)
    text = page(report)
    assert not report["healthy"] and text.count("killed by SIGSEGV") >= 2 * len(dead)
    json.dumps(report, allow_nan=False)


class _DeadWorker(Worker):
    """Every step kills its process."""

    def ask(self, step, seconds, **arguments):
        return gave_no_facts("the process was killed by SIGSEGV")


def test_the_page_of_a_gpu_machine():
    text = page(as_examined(H200))
    assert "cuda:0, cuda:1: NVIDIA H200, compute capability 9.0, 139.8 GiB" in text
    assert "580.82.07, supports CUDA 13.0" in text and "sm_80, sm_90a; CUDA 13.0" in text
    assert "alive: chunk_kda asks fla.backends" in text
    assert "ok       hopper     cuda:0  1.7e-03 1.3e-03, bound 5e-03, 0.20 s  served by hopper (sm_90a)" in text
    assert text.endswith("\nhealthy")


@pytest.mark.parametrize(
    "facts, shown",
    [
        (dict(way="attribute", registries=[]), "none in this version"),
        (dict(way="attribute", registries=["fla.ops.backends"]), "dead: fla.ops.backends is there, but"),
        (dict(way="fla.ops.backends", registries=["fla.ops.backends"]), "alive: chunk_kda asks fla.ops.backends"),
        (dict(way=None, disabled=True), "off: FLA_DISABLE_BACKEND_DISPATCH=1"),
    ],
)
def test_the_page_says_whether_the_dispatch_of_fla_is_alive(facts, shown):
    (line,) = [x for x in page(as_examined(changed(H200, dict(fla=facts)))).splitlines() if x.startswith("FLA's disp")]
    assert shown in line


# --- which probes run -------------------------------------------------------------------------------------------------


def planned(report: dict, with_triton: bool = True) -> dict:
    return {(name, device): skipped for name, device, skipped in doctor._plan(report, with_triton)}


def test_every_path_is_tried_where_it_can_run():
    plan = planned(H200)
    assert [key for key, skipped in plan.items() if skipped is None] == [
        *(("reference", "cpu"), ("fla", "cpu"), ("portable", "cuda:0"), ("hopper", "cuda:0"), ("fla", "cuda:0")),
        ("triton", "cuda:0"),
    ]
    assert planned(H200, with_triton=False)["triton", "cuda:0"] == "left out by --no-triton"


def test_a_probe_that_cannot_run_says_why():
    assert planned(without_gpu())["hopper", "cuda"] == "there is no GPU to run it on"
    assert planned(without_gpu())["reference", "cpu"] is None
    ada = planned(changed(H200, dict(gpu=capability(8, 9))))
    assert ada["hopper", "cuda:0"] == "for compute capability 9.0 only" and ada["portable", "cuda:0"] is None
    blackwell = planned(changed(H200, dict(gpu=capability(10, 0))))
    assert blackwell["portable", "cuda:0"] == "the kernels were not built for this GPU"
    plain = planned(changed(H200, dict(library=dict(archs=["90"]))))
    assert plain["hopper", "cuda:0"] == "not built: sm_90a is missing" and plain["portable", "cuda:0"] is None
    without_kernels = planned(changed(H200, dict(library=library_error(NO_KERNELS))))
    assert without_kernels["portable", "cuda:0"] == "no kernels are loaded"
    assert planned(FINDINGS["no FLA"][0])["fla", "cpu"] == "FLA is not installed"
    assert planned(FINDINGS["not registered"][0])["fla", "cuda:0"] == "this package is not registered with FLA"
    reasons = set(planned(FINDINGS["torch missing"][0]).values())
    assert reasons == {"torch cannot be imported", "there is no GPU to run it on"}


def test_one_gpu_of_each_kind_is_tried():
    devices = [*H200["gpu"]["devices"], dict(index=2, name="NVIDIA L4", capability=[8, 9], memory_gib=22.0)]
    report = changed(H200, dict(gpu=dict(devices=devices)))
    assert {device for _, device in planned(report)} == {"cpu", "cuda:0", "cuda:2"}


# --- probes -----------------------------------------------------------------------------------------------------------


def test_the_cpu_path_passes_its_probe():
    facts = steps.probe("reference", "cpu")
    assert facts["problem"] is None and facts["path"] == "reference" and facts["bound"] == steps.CPU_BOUND
    assert 0 < facts["o_error"] < steps.CPU_BOUND and 0 < facts["state_error"] < steps.CPU_BOUND


@pytest.mark.parametrize("fault", [lambda o: o * 1.001, lambda o: o.roll(1, dims=1), lambda o: o * float("nan")])
def test_a_wrong_result_fails_the_probe(monkeypatch, fault):
    right = serve.RUNNERS["reference"]

    def wrong(call):
        o, state = right(call)
        return fault(o), state

    monkeypatch.setitem(serve.RUNNERS, "reference", wrong)
    facts = steps.probe("reference", "cpu")
    assert facts["problem"].startswith("o is wrong")
    json.loads(json.dumps(facts), parse_constant=pytest.fail)


def test_a_wrong_state_fails_the_probe(monkeypatch):
    right = serve.RUNNERS["reference"]
    monkeypatch.setitem(serve.RUNNERS, "reference", lambda call: (right(call)[0], right(call)[1].mT))
    assert steps.probe("reference", "cpu")["problem"].startswith("state is wrong")


def test_a_probe_that_another_path_has_served_fails():
    assert steps.probe("hopper", "cpu")["problem"].startswith("the call ran on reference instead")


def test_a_probe_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("FLA_KDA_BACKEND", "0")
    monkeypatch.setenv("FLA_KDA_FORCE", "triton")
    monkeypatch.delenv("FLA_KDA_STRICT", raising=False)
    assert steps.probe("reference", "cpu")["problem"] is None
    assert os.environ["FLA_KDA_BACKEND"] == "0" and os.environ["FLA_KDA_FORCE"] == "triton"
    assert "FLA_KDA_STRICT" not in os.environ


# --- processes that die -----------------------------------------------------------------------------------------------


def worker_with_torch(folder: Path, code: str) -> Worker:
    """A worker that imports this code as torch."""
    (folder / "torch.py").write_text(textwrap.dedent(code))
    return Worker(os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])})


@pytest.mark.parametrize(
    "code, told",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process was killed by SIGSEGV"),
        ("import os, sys; print('no driver', file=sys.stderr); os._exit(3)", "ended with status 3: no driver"),
        ("import time; time.sleep(60)", "no answer within 2 seconds"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
        ("print('noise on stdout'); raise SystemExit(5)", "SystemExit: 5"),
    ],
)
def test_a_torch_that_kills_hangs_or_raises_is_an_answer(tmp_path, code, told):
    seconds = 2 if "sleep" in code else 60
    with worker_with_torch(tmp_path, code) as worker:
        for _ in range(2):  # and the next step gets a new process
            assert told in worker.ask("torch", seconds)["error"]


def test_the_driver_is_read_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_version() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 550.54.15\n")
    smi.chmod(0o755)
    assert doctor.driver_version() == "550.54.15"
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert doctor.driver_version() is None
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (root@host)\n"
    )
    assert doctor.driver_version() == "580.82.07"
    monkeypatch.setattr(doctor, "DEVICE_FOLDER", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert len(doctor.gpu_device_files()) == 2


@pytest.mark.parametrize(
    "text, shown",
    [
        ("OSError: /home/ann/secret/_C/libfla_kda.so: file too short", "OSError: …/libfla_kda.so: file too short"),
        ("in '/opt/x/y.py'", "in '…/y.py'"),
        ("see https://github.com/fla-org/x for CUDA 13.0", "see https://github.com/fla-org/x for CUDA 13.0"),
        ("and/or", "and/or"),
        ("x" * 1000, "x" * (doctor.MAX_SENTENCE - 1) + "…"),
    ],
)
def test_folders_of_the_machine_are_not_shown(text, shown):
    assert doctor.modest({"a": [text]}) == {"a": [shown]}


# --- whole examinations -----------------------------------------------------------------------------------------------


def examine(folder: Path, *first_on_path: Path, **environment: str) -> tuple[int, dict]:
    """Exit status and report of the doctor of the package in `folder`, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FLA_", "TORCH_DEVICE"))}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, [*first_on_path, entry_point_folder(), folder]))
    done = subprocess.run(
        [sys.executable, "-m", "fla_kda_backend", "doctor", "--json", "--no-triton"],
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    assert page(report) and (done.returncode == 0) == report["healthy"]
    return done.returncode, report


def problems(report: dict) -> list[str]:
    return [finding["what"] for finding in report["findings"] if finding["kind"] == "problem"]


def statuses(report: dict) -> dict:
    return {(probe["name"], probe["device"]): probe["status"] for probe in report["probes"] if probe["device"] == "cpu"}


BOTH_OK = {("reference", "cpu"): "ok", ("fla", "cpu"): "ok"}
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="without kernels a GPU machine is not healthy")


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with the package, without a library."""
    folder = tmp_path / "site"
    source = ROOT / "fla_kda_backend"
    shutil.copytree(source, folder / "fla_kda_backend", ignore=shutil.ignore_patterns("__pycache__", "_C"))
    (folder / "fla_kda_backend" / "_C").mkdir()
    return folder


@pytest.fixture
def hidden(tmp_path):
    """A folder that, first on the path, hides a package as if it were not installed."""

    def hide(name: str) -> Path:
        folder = tmp_path / "hidden"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{name!r}] = None\n")
        return folder

    return hide


@no_gpu_here
def test_a_machine_without_gpu_and_kernels_is_healthy_on_its_cpu_path(package):
    status, report = examine(package)
    assert status == 0 and problems(report) == [] and statuses(report) == BOTH_OK
    assert report["fla"]["way"] == "fla.backends" and report["torch"]["loads_this_package"]
    assert any("no NVIDIA GPU" in finding["what"] for finding in report["findings"])
    assert any("without compiled kernels" in finding["what"] for finding in report["findings"])
    assert "healthy, without a GPU" in page(report)


@pytest.mark.parametrize(
    "version, way, registries",
    [("0.4.2", "attribute", []), ("0.5.0", "fla.ops.backends", ["fla.ops.backends"])],
)
def test_older_versions_of_fla_are_told_apart(package, version, way, registries):
    _, report = examine(package, *fla_folders(version))
    assert report["fla"]["version"] == version and statuses(report) == BOTH_OK
    assert (report["fla"]["way"], report["fla"]["registries"]) == (way, registries)


def test_a_broken_library_is_a_problem_and_the_cpu_path_still_works(package, tmp_path):
    (package / "fla_kda_backend" / "_C" / "libfla_kda.so").write_bytes(b"\x7fELF garbage" * 100)
    status, report = examine(package)
    assert status == 1 and statuses(report) == BOTH_OK
    assert problems(report)[0].startswith("the compiled library does not load: ")
    text = json.dumps(report)
    for private in (str(tmp_path), str(Path.home()) + "/", platform.node()):
        assert private not in text


def test_a_library_that_kills_the_process_is_a_problem_and_the_cpu_path_still_works(package):
    library = ops.library()
    if library is None:
        pytest.skip(f"there is no library to cut short: {ops.load_error()}")
    # The headers are whole, what they point to is missing: mapping it works, touching it does not.
    cut = Path(library.path).read_bytes()[: 2**17]
    (package / "fla_kda_backend" / "_C" / "libfla_kda.so").write_bytes(cut)
    status, report = examine(package)
    assert status == 1 and statuses(report) == BOTH_OK
    assert "the compiled library" in problems(report)[0]


def test_a_missing_fla_is_a_problem(package, hidden):
    status, report = examine(package, hidden("fla"))
    assert status == 1 and any(what.startswith("FLA is not installed") for what in problems(report))
    assert statuses(report) == {("reference", "cpu"): "ok", ("fla", "cpu"): "skipped"}


def test_an_fla_without_kda_is_too_old(package, tmp_path):
    old = tmp_path / "old"
    for name in ("fla", "fla/ops"):
        (old / name).mkdir(parents=True)
        (old / name / "__init__.py").write_text("__version__ = '0.3.2'\n")
    status, report = examine(package, old)
    assert status == 1 and any("FLA 0.3.2 is too old" in what for what in problems(report))
    assert statuses(report)["reference", "cpu"] == "ok"


def test_a_missing_torch_is_one_sentence(package, hidden):
    status, report = examine(package, hidden("torch"))
    assert status == 1 and len(problems(report)) == 1 and "torch cannot be imported" in problems(report)[0]
    assert all(probe["status"] == "skipped" for probe in report["probes"])


def test_the_command_prints_the_page_or_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda with_triton: as_examined(H200))
    assert command.main(["doctor"]) == 0
    assert capsys.readouterr().out == page(as_examined(H200)) + "\n"
    monkeypatch.setattr(doctor, "examine", lambda with_triton: as_examined(FINDINGS["no FLA"][0]))
    assert command.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False
    with pytest.raises(SystemExit) as usage:
        command.main([])
    assert usage.value.code == 2
