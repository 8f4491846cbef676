"""Is the package healthy here? `python -m fla_kda_backend doctor`: facts, a probe of each path, and the next steps.

    process.py    runs each step in a child process, so that no fault of a library or driver can end the examination
    steps.py      the steps: facts, and the probes with their bounds
    findings.py   what is wrong, and the next step for it
    page.py       the report as a page of text

This process imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fla_kda_backend import switches
from fla_kda_backend._version import __version__
from fla_kda_backend.doctor import findings
from fla_kda_backend.doctor.page import page
from fla_kda_backend.doctor.process import Worker

# Importing torch and FLA on a busy machine, or the first launch on a GPU, takes seconds.
STEP_SECONDS = 180
# FLA's Triton kernels tune themselves at the first call, about 100 seconds were measured.
TRITON_SECONDS = 420
DEVICE_FOLDER = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
MAX_SENTENCE = 300
# Further variables that decide what is seen and loaded; none of them holds a secret.
VARIABLES = (*switches.VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")


def main(as_json: bool = False, with_triton: bool = True) -> int:
    """Examine this environment, print the result to stdout; 0 when healthy, 1 when not."""
    report = examine(with_triton)
    print(json.dumps(report, indent=2) if as_json else page(report))
    return 0 if report["healthy"] else 1


def examine(with_triton: bool = True) -> dict[str, Any]:
    """The report on this environment; never raises for anything that is wrong with it.

    Args:
        with_triton: whether to run FLA's own kernels where there is a GPU, which takes a minute or two to tune.

    Returns:
        healthy: no finding is a problem. version: of this package. python, platform. torch, gpu, library, fla: the
        facts of `steps.py`, or {"error": sentence}. driver: version of the NVIDIA driver, or None. gpu_devices: how
        many NVIDIA GPUs the system has, whatever torch sees of them. environment: the variables that are set. probes:
        one dict each: name, device, status ("ok", "failed" or "skipped"), problem (why not ok), and for those that ran
        path, arch, o_error, state_error, bound, seconds. findings: dicts of kind ("problem" or "note"), what,
        next_step. No path of the machine but the names of files, no user, no host.
    """
    report: dict[str, Any] = {
        "healthy": False,
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(", "),
        "driver": driver_version(),
        "gpu_devices": len(gpu_device_files()),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    with Worker() as worker:
        report["torch"] = _facts(worker, "torch")
        for step in ("gpu", "library", "fla"):
            usable = "error" not in report["torch"]
            report[step] = _facts(worker, step) if usable else {"error": "torch cannot be imported"}
        report["probes"] = [_run(worker, report, *probe) for probe in _plan(report, with_triton)]
    found = findings.find(report)
    report["findings"] = [asdict(finding) for finding in found]
    report["healthy"] = all(finding.kind != "problem" for finding in found)
    return modest(report)


def _facts(worker: Worker, step: str) -> dict[str, Any]:
    answer = worker.ask(step, STEP_SECONDS)
    return answer.get("facts") or {"error": answer["error"]}


def _plan(report: dict[str, Any], with_triton: bool) -> list[tuple[str, str, str | None]]:
    """(name, device, why it is skipped or None) of each probe: on the CPU, and on one GPU of each kind."""
    unusable = "torch cannot be imported" if "error" in report["torch"] else None
    no_fla = unusable or _why_without_fla(report)
    plan = [("reference", "cpu", unusable), ("fla", "cpu", no_fla)]
    devices = report["gpu"].get("devices") or []
    if not devices:
        return plan + [(name, "cuda", "there is no GPU to run it on") for name in ("portable", "hopper", "triton")]
    archs = report["library"].get("archs")
    for device in {str((device["name"], device["capability"])): device for device in reversed(devices)}.values():
        name, capability = f"cuda:{device['index']}", device["capability"]
        none = "no kernels are loaded" if archs is None else None
        if archs is not None and not any(findings.runs_on(arch, capability) for arch in archs):
            none = "the kernels were not built for this GPU"
        hopper = none
        if capability != findings.HOPPER:
            hopper = "for compute capability 9.0 only"
        elif archs is not None and "90a" not in archs:
            hopper = "not built: sm_90a is missing"
        plan += [("portable", name, none), ("hopper", name, hopper), ("fla", name, no_fla or none)]
        left_out = None if with_triton else "left out by --no-triton"
        plan.append(("triton", name, no_fla if report["fla"].get("way") is None else left_out))
    return plan


def _why_without_fla(report: dict[str, Any]) -> str | None:
    fla = report["fla"]
    if not fla.get("installed"):
        return "FLA is not installed" if "installed" in fla else "FLA cannot be imported"
    if fla["way"] is None:
        return "this package is not registered with FLA"
    if report["environment"].get("FLA_KDA_BACKEND") == "0":
        return "FLA_KDA_BACKEND=0"
    return None


def _run(worker: Worker, report: dict[str, Any], name: str, device: str, skipped: str | None) -> dict[str, Any]:
    probe: dict[str, Any] = {"name": name, "device": device}
    if skipped is not None:
        return probe | {"status": "skipped", "problem": skipped}
    if name == "triton":
        print("FLA's Triton kernels tune themselves: a minute or two (--no-triton leaves them out)", file=sys.stderr)
    answer = worker.ask("probe", TRITON_SECONDS if name == "triton" else STEP_SECONDS, path=name, device=device)
    facts = answer.get("facts") or {"problem": answer["error"]}
    failed = facts["problem"] is not None
    if failed:
        worker.end()  # a fault on a GPU stays with its process
    return probe | {"status": "failed" if failed else "ok"} | facts


def driver_version() -> str | None:
    """The version of the NVIDIA driver, from the kernel module or nvidia-smi; None where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", DRIVER_FILE.read_text())
        if found:
            return found[1]
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+\.[\d.]+", listing.stdout)
    return found[0] if found and listing.returncode == 0 else None


def gpu_device_files() -> list[Path]:
    """The files through which this system reaches NVIDIA GPUs; a container that is given none has none."""
    return [*DEVICE_FOLDER.glob("nvidia[0-9]*"), *DEVICE_FOLDER.glob("dxg")]  # the latter under WSL


def modest(value: Any) -> Any:
    """The same report with no folder of this machine in it, and no sentence longer than `MAX_SENTENCE`."""
    if isinstance(value, dict):
        return {name: modest(part) for name, part in value.items()}
    if isinstance(value, list):
        return [modest(part) for part in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"()]+/)+([^\s/:'\"()]+)", r"…/\1", value)
    return text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 1] + "…"
