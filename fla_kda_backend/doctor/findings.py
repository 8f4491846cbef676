"""What is wrong, and what is the next step? Pure functions from the facts of an examination to findings.

A problem makes the environment unhealthy: something that should work here does not. A note does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MINIMUM_TORCH = (2, 10)
MINIMUM_CAPABILITY = [8, 0]
HOPPER = [9, 0]
# The FLA versions that the tests run against, the oldest and the newest.
OLDEST_FLA, NEWEST_FLA = (0, 4, 2), (0, 6)
REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."
INSTALL_FLA = "pip install flash-linear-attention (0.4.2 or newer)"
REPORT = "report it with this page: docs/troubleshooting.md says how"
# The start of the sentence by which ops.load_error tells a build without kernels from a library that does not load.
NO_KERNELS = "the package was installed without compiled kernels"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know: `kind` is "problem" or "note"; `next_step` may be empty for a note."""

    kind: str
    what: str
    next_step: str = ""


def problem(what: str, next_step: str) -> Finding:
    return Finding("problem", what, next_step)


def note(what: str, next_step: str = "") -> Finding:
    return Finding("note", what, next_step)


def find(report: dict[str, Any]) -> list[Finding]:
    """What there is to say about a report, in the order in which it is best mended. `examine` explains the keys."""
    torch = report["torch"]
    if torch.get("error"):
        return [problem(f"torch cannot be imported: {torch['error']}", "install PyTorch 2.10 or newer")]
    parts = (_torch, _gpu, _library, _switches, _fla, _probes)
    return [finding for part in parts for finding in part(report)]


def _torch(report: dict[str, Any]) -> list[Finding]:
    torch, findings = report["torch"], []
    if numbers(torch["version"])[:2] < MINIMUM_TORCH:
        findings.append(problem(f"torch {torch['version']} is too old", "install PyTorch 2.10 or newer"))
    if torch["hip"] is not None:
        findings.append(note("this torch is for AMD GPUs, the kernels are for NVIDIA's: GPU calls stay on Triton"))
    if not torch["loads_this_package"]:
        if report["environment"].get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            cause, mend = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading this package", "unset it"
        else:
            cause = "torch does not load this package by itself: no installed package declares it to torch"
            mend = "install it with pip"
        findings.append(note(cause, f"{mend}, or `import fla_kda_backend` before the model"))
    return findings


def _gpu(report: dict[str, Any]) -> list[Finding]:
    torch, gpu, driver = report["torch"], report["gpu"], report["driver"]
    if gpu.get("error") and "devices" not in gpu:
        return [problem(f"asking torch for GPUs failed: {gpu['error']}", "check `nvidia-smi`, then reinstall torch")]
    if gpu["devices"]:
        return [
            problem(
                f"cuda:{device['index']} ({device['name']}) has compute capability "
                f"{'.'.join(map(str, device['capability']))}, the kernels need 8.0 or newer",
                "nothing to install: KDA runs on FLA's Triton on this GPU",
            )
            for device in gpu["devices"]
            if device["capability"] < MINIMUM_CAPABILITY
        ]
    if not report["gpu_devices"]:
        where = "" if driver is None else f" (the NVIDIA driver {driver} is loaded, but no GPU is given to this system)"
        return [note(f"there is no NVIDIA GPU on this machine{where}: KDA runs on the CPU path")]
    here = f"this machine has an NVIDIA GPU (driver {driver or 'unknown'})"
    if report["environment"].get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [note(f"{here}, which CUDA_VISIBLE_DEVICES hides: KDA runs on the CPU path", "unset it")]
    if torch["cuda"] is None:
        what = f"{here}, but torch {torch['version']} is built without CUDA"
        return [problem(what, "install a CUDA build of PyTorch")]
    what = f"{here}, but torch sees none: {gpu['error'] or 'it gives no reason'}"
    step = f"check `nvidia-smi`; the driver must support CUDA {torch['cuda']}, as which torch was built, or be updated"
    return [problem(what, step)]


def _library(report: dict[str, Any]) -> list[Finding]:
    library, gpu = report["library"], report["gpu"]
    devices = gpu.get("devices") or []
    error = library.get("error")
    if "archs" not in library:
        error = f"loading the compiled library takes the process down: {error}"
    if error:
        if error.startswith(NO_KERNELS) and not devices:
            return [note(f"{error}; without a GPU none are needed")]
        if error.startswith(NO_KERNELS):
            return [problem(error, f"install a CUDA toolkit with nvcc, then {REINSTALL}")]
        return [problem(error, f"build the kernels anew for this machine: {REINSTALL}")]
    findings = []
    archs, driver_cuda = library["archs"], gpu.get("driver_cuda")
    if devices and driver_cuda is not None and numbers(driver_cuda)[0] < numbers(library["cuda"])[0]:
        findings.append(
            problem(
                f"the kernels were built with CUDA {library['cuda']}, the driver supports {driver_cuda} at most",
                f"update the driver, or build with a CUDA {numbers(driver_cuda)[0]} toolkit: {REINSTALL}",
            )
        )
    for device in devices:
        capability = device["capability"]
        name = f"cuda:{device['index']} ({device['name']}, sm_{capability[0]}{capability[1]})"
        wanted = f"{capability[0]}{capability[1]}{'a' if capability >= HOPPER else ''}"
        if not any(runs_on(arch, capability) for arch in archs) and capability >= MINIMUM_CAPABILITY:
            built = ", ".join(f"sm_{arch}" for arch in archs)
            what = f"the kernels were built for {built}: none runs on {name}"
            findings.append(problem(what, f"FLA_KDA_CUDA_ARCHS={wanted} {REINSTALL}"))
        elif capability == HOPPER and "90a" not in archs:
            what = f"the Hopper kernel was not built for {name}: the slower portable one runs"
            findings.append(note(what, f"FLA_KDA_CUDA_ARCHS=90a {REINSTALL}"))
    return findings


def runs_on(arch: str, capability: list[int]) -> bool:
    """Whether a built architecture such as "80" or "90a" runs on a device; with the suffix "a" on no other one."""
    digits = arch.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if arch.endswith("a"):
        return [major, minor] == capability
    return major == capability[0] and minor <= capability[1]


def _switches(report: dict[str, Any]) -> list[Finding]:
    environment, findings = report["environment"], []
    if environment.get("FLA_KDA_BACKEND") == "0":
        findings.append(problem("FLA_KDA_BACKEND=0 turns the package off", "unset it"))
    if report["fla"].get("disabled"):
        findings.append(problem("FLA_DISABLE_BACKEND_DISPATCH=1 turns every backend of FLA off", "unset it"))
    if environment.get("FLA_KDA_FORCE"):
        findings.append(note(f"FLA_KDA_FORCE={environment['FLA_KDA_FORCE']} chooses the path of GPU calls", "unset it"))
    return findings


def _fla(report: dict[str, Any]) -> list[Finding]:
    fla = report["fla"]
    version, error = fla.get("version"), fla.get("error")
    if "installed" not in fla:
        return [problem(f"importing FLA failed: {error}", "reinstall FLA and the Triton that it asks for")]
    if not fla["installed"]:
        what = "FLA is not installed: no model reaches this package, only fla_kda_backend.chunk_kda does"
        return [problem(what, INSTALL_FLA)]
    if not fla["has_kda"]:
        return [problem(f"FLA {version} is too old: it has no fla.ops.kda", INSTALL_FLA)]
    off = report["environment"].get("FLA_KDA_BACKEND") == "0" or fla["disabled"]
    if error and fla["way"] is None:
        missing = re.search(r"No module named '([\w.]+)'", error)
        step = f"pip install {missing[1].split('.')[0]}" if missing else f"{INSTALL_FLA}; if it stays, {REPORT}"
        return [problem(f"FLA {version} is installed, but its KDA cannot be used: {error}", step)]
    if fla["way"] is None and not off:
        return [problem(f"this package is not registered with FLA {version}", REPORT)]
    known = numbers(version or "")
    if known and known < OLDEST_FLA:
        return [note(f"FLA {version} is older than any that was tested (0.4.2)", INSTALL_FLA)]
    if known and known[:2] > NEWEST_FLA:
        return [note(f"FLA {version} is newer than any that was tested (0.6)")]
    return []


def _probes(report: dict[str, Any]) -> list[Finding]:
    findings = []
    for probe in report["probes"]:
        if probe["status"] != "failed":
            continue
        what = f"the probe of {probe['name']} on {probe['device']} failed: {probe['problem']}"
        if probe["name"] == "triton":
            step = "calls that are left to FLA fail, too: reinstall FLA and Triton, or report it to FLA"
        elif probe["name"] == "fla":
            step = f"mend what stands above; if nothing does, {REPORT}"
        elif probe["name"] == "reference":
            step = REPORT
        else:
            step = f"FLA_KDA_FORCE=triton keeps GPU calls on FLA's kernels meanwhile; {REPORT}"
        findings.append(problem(what, step))
    return findings


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for "2.13.0+cpu"; empty where there are none."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()
