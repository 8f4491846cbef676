"""How is a report shown to a person? One page of plain text that can be pasted into a bug report."""

from __future__ import annotations

from typing import Any

_NAME_WIDTH = 17
_PROBE_WIDTH = 11


def page(report: dict[str, Any]) -> str:
    """The page of a report of `examine`."""
    lines = ["fla_kda_backend doctor", ""]
    facts = {
        "fla_kda_backend": report["version"],
        "python": f"{report['python']}, {report['platform']}",
        "torch": _torch(report["torch"]),
        "triton": report["torch"].get("triton") or "none",
        "driver": _driver(report),
        "GPU": _gpus(report["gpu"]),
        "kernels": _library(report["library"]),
        "FLA": _fla(report["fla"]),
        "FLA's dispatch": _dispatch(report["fla"]),
        "registered": _registered(report),
        "environment": " ".join(f"{name}={value}" for name, value in report["environment"].items()) or "nothing set",
    }
    lines += [f"{name:{_NAME_WIDTH}}{value}" for name, value in facts.items()]
    lines += ["", "probes: relative L2 error of o and of the state from the recurrence in float64"]
    lines += [f"  {_probe(probe)}" for probe in report["probes"]]
    for kind in ("problem", "note"):
        found = [finding for finding in report["findings"] if finding["kind"] == kind]
        lines += ["", f"{kind}s: none" if not found else f"{kind}s:"]
        for index, finding in enumerate(found, 1):
            lines.append(f"  {index}. {finding['what']}")
            if finding["next_step"]:
                lines.append(f"     next step: {finding['next_step']}")
    return "\n".join([*lines, "", _verdict(report)])


def _torch(torch: dict[str, Any]) -> str:
    if torch.get("error"):
        return f"cannot be imported: {torch['error']}"
    if torch["hip"]:
        return f"{torch['version']}, for AMD GPUs (HIP {torch['hip']})"
    return f"{torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA")


def _driver(report: dict[str, Any]) -> str:
    if report["driver"] is None:
        return "none"
    cuda = report["gpu"].get("driver_cuda")
    return report["driver"] + (f", supports CUDA {cuda}" if cuda else "")


def _gpus(gpu: dict[str, Any]) -> str:
    if "devices" not in gpu:
        return f"unknown: {gpu['error']}"
    shown: dict[str, list[str]] = {}
    for device in gpu["devices"]:
        major, minor = device["capability"]
        name = f"{device['name']}, compute capability {major}.{minor}, {device['memory_gib']} GiB"
        shown.setdefault(name, []).append(f"cuda:{device['index']}")
    return "; ".join(f"{', '.join(indices)}: {name}" for name, indices in shown.items()) or "none that torch sees"


def _library(library: dict[str, Any]) -> str:
    if library.get("error"):
        return f"none: {library['error']}"
    archs = ", ".join(f"sm_{arch}" for arch in library["archs"])
    return f"{archs}; CUDA {library['cuda']}, built against torch {library['torch']}, {library['mib']} MiB"


def _fla(fla: dict[str, Any]) -> str:
    if "installed" not in fla:
        return f"unknown: {fla['error']}"
    if not fla["installed"]:
        return "not installed"
    return f"{fla['version']}" + (f", but {fla['error']}" if fla["error"] else "")


def _dispatch(fla: dict[str, Any]) -> str:
    if not fla.get("has_kda"):
        return "–"
    if fla["disabled"]:
        return "off: FLA_DISABLE_BACKEND_DISPATCH=1"
    if fla["way"] in fla["registries"]:
        return f"alive: chunk_kda asks {fla['way']}"
    if fla["way"] is None:
        return "unknown"
    if fla["registries"]:
        return f"dead: {', '.join(fla['registries'])} is there, but chunk_kda does not ask it"
    return "none in this version"


def _registered(report: dict[str, Any]) -> str:
    fla = report["fla"]
    way = fla.get("way")
    if way is None:
        return "no"
    how = "in place of fla.ops.kda.chunk_kda" if way == "attribute" else f"with {way}"
    decode = ", decode on CPU tensors too" if fla["decodes"] else ""
    by_itself = ", by itself when torch is imported" if report["torch"].get("loads_this_package") else ""
    return how + decode + by_itself


def _probe(probe: dict[str, Any]) -> str:
    head = f"{probe['status']:8} {probe['name']:{_PROBE_WIDTH}}"
    if probe["status"] == "skipped":
        return f"{head}{probe['problem']}"
    head += f"{probe['device']:8}"
    if probe["status"] == "failed":
        return f"{head}{probe['problem']}"
    served = probe["path"] + (f" (sm_{probe['arch']})" if probe["arch"] else "")
    served = f"  served by {served}" if probe["name"] != probe["path"] or probe["arch"] else ""
    errors = f"{probe['o_error']:.1e} {probe['state_error']:.1e}, bound {probe['bound']:.0e}"
    return f"{head}{errors}, {probe['seconds']:.2f} s{served}"


def _verdict(report: dict[str, Any]) -> str:
    count = sum(finding["kind"] == "problem" for finding in report["findings"])
    if count:
        return f"not healthy: {count} problem{'s' if count > 1 else ''}"
    if not report["gpu"]["devices"]:
        return "healthy, without a GPU: KDA runs on the CPU path"
    return "healthy"
