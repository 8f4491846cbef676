"""Do NVIDIA's checkers find anything in our kernels? compute-sanitizer over small cases of every kernel, recorded.

    python scripts/sanitize.py [--json sanitizer.json] [--tools memcheck,...] [--cases NAME;...] [--kernels hopper,...]
                               [--seconds 150] [--sanitizer PATH]

memcheck (accesses out of bounds or misaligned), initcheck (reads of global memory that nobody wrote), synccheck (wrong
use of barriers) and racecheck (hazards in shared memory). Each tool runs one small process of PyTorch and our operator
alone, through all cases, each judged by the fp64 recurrence so that a case that computes nothing cannot pass. Every
tensor is an allocation of its own there, between other allocations of nobody.

racecheck does not see every order that barriers make, as rings of one place between two warps show
(scripts/racecheck_ring.cu): neither that of the arrival of one lane for its warp, after __syncwarp, nor that of
`barrier.arrive` right after the accesses. So it needs kernels in which each lane arrives, and waits before:

    FLA_KDA_NVCC_FLAGS=-DKDA_FOR_RACECHECK python scripts/build_kernels.py

The record is {source_sha256, gpu, sanitizer, library_for_racecheck, tools: {tool: {status, errors, warnings, seconds,
note}}, rows: [{tool, kernel, case, status, errors, warnings, seconds, error_o, segments, turns, first}], groups, counts,
seconds, complete}.
The status of a tool is "finished", "out of time", "unavailable" (it does not run on this machine; `note` says why) or
"broken"; that of a row is "clean", "errors", "failed" (wrong results or an exception), or "not run". Warnings are
counted and are no errors. Exits with 1 for errors or failures, with 3 where a tool is unavailable or did not finish,
with 2 without a GPU.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402

# What each tool is given beside its name. Errors that CUDA's functions return are PyTorch's business: it asks for
# things that may not be there. Ours reach the caller as exceptions.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "initcheck": (),
    "synccheck": (),
    "racecheck": ("--racecheck-report", "analysis"),
}
PRINT_LIMIT = "2000"
MARK = "@@case"
# Reports are written by the sanitizer's own process: what belongs to a case is given this long to arrive.
DRAIN_SECONDS = 0.2


@dataclass(frozen=True)
class SmallCase:
    """A call small enough for a checker that slows kernels down a hundred times.

    caller, layout, gate: of tests/kdakit/cases.py. kernels: that it is for. segments, turns: whether the sequences are
    to be cut, side by side or in turns, although they are short. ranked: whether they are to be taken longest first.
    """

    caller: str
    layout: str
    gate: str
    tokens: int
    heads: int = 2
    kernels: tuple[str, ...] = ("hopper", "portable")
    segments: bool = False
    turns: bool = False
    ranked: bool = False


_HOPPER = ("hopper",)
CASES = {
    # Two heads leave multiprocessors to spare, so that two blocks of the Hopper kernel share a head.
    "fp32 gates, a tail": SmallCase("1-kimi-linear", "dense-tail", "mixed", 40),
    "bf16 gates, a tail": SmallCase("3-kimi-k3", "dense-tail", "randn", 40),
    "many heads, fp32 gates": SmallCase("1-kimi-linear", "dense-tail", "randn", 24, heads=72),
    "many heads, bf16 gates": SmallCase("3-kimi-k3", "dense-tail", "randn", 24, heads=72, kernels=_HOPPER),
    "steep gates": SmallCase("5-fla-gva", "dense-tail", "steep-some", 40),
    "packed, empty sequences": SmallCase("1-kimi-linear-first", "varlen-empty", "mixed", 48),
    "packed, uncovered rows": SmallCase("5-fla-default", "varlen-uncovered", "randn", 48),
    "packed, no states": SmallCase("10-megatron-lm", "varlen-many", "randn", 30),
    # As short convolutions over time leave q, k and v: they are transposed by a kernel of their own.
    "tokens side by side": SmallCase("2-transformers", "dense-tail", "randn", 40),
    # More sequences x heads than multiprocessors: another kernel finds which are the longest.
    "packed, longest first": SmallCase("3-kimi-k3", "varlen-many", "randn", 30, 20, _HOPPER, ranked=True),
    "segments, fp32 gates": SmallCase("1-kimi-linear", "dense-tail", "long-memory", 240, 2, _HOPPER, segments=True),
    "segments, packed": SmallCase("4-fla-safe-gate", "varlen", "randn", 500, 2, _HOPPER, segments=True),
    "turns, bf16 gates": SmallCase("5-fla-default", "dense-tail", "randn", 70, 72, _HOPPER, turns=True),
}


# --- the worker -------------------------------------------------------------------------------------------------------


def work(chosen: list[tuple[str, str]]) -> int:
    """Run the cases, one after the other, announcing each on stdout. The process that a checker watches."""
    import torch

    from fla_kda_backend import ops

    if ops.library() is None:
        sys.exit(ops.load_error())
    print(f"{MARK} ready", flush=True)
    for kernel, name in chosen:
        print(f"{MARK} begin {json.dumps({'kernel': kernel, 'case': name})}", flush=True)
        began = time.monotonic()
        try:
            facts = run_case(CASES[name], kernel, ops)
        except Exception as error:
            facts = {"failed": " ".join(str(error).split())[:300]}
        torch.cuda.synchronize()
        time.sleep(DRAIN_SECONDS)
        facts |= {"kernel": kernel, "case": name, "seconds": round(time.monotonic() - began, 2)}
        print(f"{MARK} end {json.dumps(facts)}", flush=True)
    return 0


def run_case(case: SmallCase, kernel: str, ops) -> dict:
    """Run one case on one kernel and judge it on the CPU; {segments, turns, error_o}."""
    from fla_kda_backend.call import Call
    from tests.kdakit import cases, compare
    from tests.kdakit.run import OperatorCalls, run_exactly

    form = cases.caller(case.caller)
    built = cases.build(cases.Case(form, case.layout, case.gate), tokens=case.tokens, heads=case.heads, seed=1)
    as_laid_out = ("q", "k", "v") if form.split_views else ()
    inputs = built.judge | {name: built.arguments[name] for name in as_laid_out}
    arguments = {name: cases.to_device(value, "cuda") for name, value in inputs.items()}
    limits = dict(MIN_SEGMENTED_TOKENS=32, MIN_SEGMENT_TOKENS=32, MIN_TURN_TOKENS=32)
    cut = mock.patch.multiple(ops, **limits) if case.segments or case.turns else nullcontext()
    with cut, OperatorCalls() as operator:
        o, state = ops.chunk_kda_forward(Call(**arguments, scale=cases.HEAD_DIM**-0.5), kernel)
    (called,) = operator.calls
    ways = (called["kernel"], called["segments"] > 1, called["turns"] > 1, called["order"] is not None)
    if ways != (ops.KERNELS[kernel], case.segments, case.turns, case.ranked):
        raise AssertionError(f"another way was taken: kernel, segments, turns and ranking are {ways}")
    exact_o, exact_state = run_exactly(built.judge)
    tolerance = compare.CUDA_FORWARD_FEW_TERMS
    compare.assert_close(o.cpu()[:, : built.covered], exact_o[:, : built.covered], tolerance.o, "o")
    if exact_state is not None:
        compare.assert_close(state.cpu(), exact_state, tolerance.state, "final_state")
    error = compare.relative_l2(o.cpu()[:, : built.covered], exact_o[:, : built.covered])
    return {"segments": called["segments"], "turns": called["turns"], "error_o": error}


# --- what a checker says ----------------------------------------------------------------------------------------------

_PREFIX = "========="
_SUMMARY = re.compile(
    r"ERROR SUMMARY: (?P<errors>\d+) errors?"
    r"|RACECHECK SUMMARY: .*\((?P<race_errors>\d+) errors?, (?P<race_warnings>\d+) warnings?\)"
)
# Lines of the checker that are neither a report nor a part of one.
_NOT_A_REPORT = re.compile(
    r"COMPUTE-SANITIZER|LEAK SUMMARY|\d+ errors? (was|were) not printed|Target application|No kernel"
)
_CANNOT = re.compile(r"Device not supported|not supported on|Unable to|Failed to initialize", re.IGNORECASE)
REPORT_LINES = 4


@dataclass
class Finding:
    """One report of a checker: whether it is an error, and its first lines."""

    error: bool
    text: str


@dataclass
class Output:
    """A checker's output, taken apart.

    cases: (kernel, case) -> the facts that the worker gave and the findings in between. stray: findings outside every
    case. summary: (errors, warnings) by the checker's own count, None where it did not get that far.
    """

    cases: dict[tuple[str, str], tuple[dict, list[Finding]]]
    stray: list[Finding]
    summary: tuple[int, int] | None
    cannot: str | None
    ready: bool

    @classmethod
    def parse(cls, text: str) -> "Output":
        output = cls({}, [], None, None, False)
        current, findings = None, output.stray
        for line in text.splitlines():
            if line.startswith(f"{MARK} ready"):
                output.ready = True
            elif line.startswith(f"{MARK} begin "):
                facts = json.loads(line.removeprefix(f"{MARK} begin "))
                current, findings = (facts["kernel"], facts["case"]), []
                output.cases[current] = ({}, findings)
            elif line.startswith(f"{MARK} end "):
                output.cases[current] = (json.loads(line.removeprefix(f"{MARK} end ")), findings)
                current, findings = None, output.stray
            elif line.startswith(_PREFIX):
                output._take(line.removeprefix(_PREFIX), findings)
        return output

    def _take(self, line: str, findings: list[Finding]) -> None:
        summary = _SUMMARY.search(line)
        if summary is not None:
            errors = int(summary["errors"] or summary["race_errors"] or 0)
            self.summary = (errors, int(summary["race_warnings"] or 0))
        elif _CANNOT.search(line):
            self.cannot = " ".join(line.split())
        elif _NOT_A_REPORT.search(line) or not line.strip():
            pass
        elif line.startswith("  "):  # a detail of the report before it
            if findings and findings[-1].text.count("\n") < REPORT_LINES - 1:
                findings[-1].text += "\n" + line.strip()
        else:
            findings.append(Finding(not line.strip().lower().startswith("warning"), line.strip()))


def rows_of(tool: str, chosen: list[tuple[str, str]], output: Output) -> list[dict]:
    """A row for each case of a tool."""
    rows = []
    for kernel, name in chosen:
        facts, findings = output.cases.get((kernel, name), ({}, []))
        errors = sum(finding.error for finding in findings)
        if "failed" in facts:
            status = "failed"
        elif errors:
            status = "errors"
        else:
            status = "clean" if facts else "not run"
        first = facts.get("failed") or next((one.text for one in findings if one.error), None)
        first = first or next((one.text for one in findings), None)
        rows.append(
            {"tool": tool, "kernel": kernel, "case": name, "status": status, "errors": errors}
            | {"warnings": len(findings) - errors, "seconds": facts.get("seconds"), "error_o": facts.get("error_o")}
            | {"segments": facts.get("segments"), "turns": facts.get("turns"), "first": first}
        )
    return rows


def judge_tool(output: Output, returncode: int | None, seconds: float, rows: list[dict]) -> dict:
    """{status, errors, warnings, seconds, note} of a tool; `returncode` is None for one that was stopped."""
    counted = (sum(row["errors"] for row in rows), sum(row["warnings"] for row in rows))
    note = None
    if returncode is None:
        status, note = "out of time", "stopped at its time limit"
    elif not output.ready:
        status, note = "unavailable", output.cannot or f"the process ended with {returncode} before it began"
    elif output.summary is None or any(row["status"] == "not run" for row in rows):
        status, note = "broken", output.cannot or f"the process ended with {returncode}"
    else:
        status = "finished"
    if output.stray:
        note = f"{note + '; ' if note else ''}outside every case: {output.stray[0].text}"
    errors, warnings = output.summary or counted
    return {
        "status": status,
        "errors": max(errors, counted[0] + sum(one.error for one in output.stray)),
        "warnings": max(warnings, counted[1]),
        "seconds": round(seconds, 1),
        "note": note,
    }


# --- the whole --------------------------------------------------------------------------------------------------------


def find_sanitizer() -> str | None:
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    candidates = [shutil.which("compute-sanitizer"), *(f"{home}/bin/compute-sanitizer" for home in homes if home)]
    candidates += [f"{home}/compute-sanitizer/compute-sanitizer" for home in homes if home]
    return next((path for path in candidates if path and Path(path).exists()), None)


def run_tool(tool: str, chosen: list[tuple[str, str]], sanitizer: str, seconds: float) -> tuple[str, int | None, float]:
    """(output, exit status or None when the time was over, seconds)."""
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--print-limit", PRINT_LIMIT]
    command += [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(chosen)]
    # Without the caching allocator every tensor has bounds, and memory that was never written to is new each time.
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "2"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
        return text, process.returncode, time.monotonic() - began
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the checker and the process that it watches
        text, _ = process.communicate()
        return text, None, time.monotonic() - began


def summarise(facts: dict, tools: dict[str, dict], rows: list[dict], complete: bool) -> dict:
    """The record, with the groups and counts that scripts/gpu_check.py joins."""
    groups: dict[str, Counter] = {}
    outcomes = {"clean": "passed", "errors": "failed", "failed": "failed", "not run": "skipped"}
    for row in rows:
        groups.setdefault(f"sanitizer/{row['tool']}", Counter())[outcomes[row["status"]]] += 1
    for tool, result in tools.items():
        # Errors outside every case, or more than were printed, are errors all the same.
        group = groups.setdefault(f"sanitizer/{tool}", Counter())
        if result["status"] == "broken" or (result["errors"] and not group["failed"]):
            group["failed"] += 1
    return facts | {
        "tools": tools,
        "rows": rows,
        "groups": gpu_check.outcomes_of(groups),
        "counts": {
            "sanitizer tools": sum(result["status"] == "finished" for result in tools.values()),
            "sanitizer cases": sum(row["status"] in ("clean", "errors") for row in rows),
        },
        "seconds": round(sum(result["seconds"] for result in tools.values()), 1),
        "complete": complete,
    }


def exit_status(record: dict) -> int:
    if any(group["failed"] for group in record["groups"].values()):
        return 1
    return 0 if all(result["status"] == "finished" for result in record["tools"].values()) else 3


def choose(cases: str | None, kernels: tuple[str, ...]) -> list[tuple[str, str]]:
    """(kernel, case) of every chosen case on each kernel that it is for. `cases`: parts of names, with semicolons."""
    wanted = [part.strip() for part in cases.split(";")] if cases else [""]
    names = [name for name in CASES if any(part in name for part in wanted)]
    return [(kernel, name) for kernel in kernels for name in names if kernel in CASES[name].kernels]


def versions_of(sanitizer: str) -> str:
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, timeout=60)
    return next((line.strip() for line in done.stdout.splitlines() if "ersion" in line), "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run compute-sanitizer over small cases of every kernel.")
    parser.add_argument("--json", type=Path, default=Path("sanitizer.json"), help="where the record goes")
    parser.add_argument("--tools", default=",".join(TOOLS), help="(default: %(default)s)")
    parser.add_argument("--cases", help="parts of names of cases, separated by semicolons (default: all)")
    parser.add_argument("--kernels", help="hopper, portable (default: all that run here)")
    parser.add_argument("--seconds", type=float, default=150, help="time limit of each tool (default: %(default)s)")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work([tuple(pair) for pair in json.loads(options.worker)])

    import torch

    from fla_kda_backend import ops
    from tests.conftest import reason_without_kernels
    from tests.kdakit.run import kernel_paths

    sanitizer = options.sanitizer or find_sanitizer()
    problem = reason_without_kernels() or (None if sanitizer else "compute-sanitizer is not installed")
    if problem is not None:
        print(f"sanitize: {problem}", file=sys.stderr)
        return 2
    kernels = tuple(options.kernels.split(",")) if options.kernels else kernel_paths()
    chosen = choose(options.cases, kernels)
    facts = {"source_sha256": gpu_check.source_hash(), "gpu": torch.cuda.get_device_name()}
    facts |= {"sanitizer": versions_of(sanitizer), "library_for_racecheck": ops.library().for_racecheck}
    tools: dict[str, dict] = {}
    rows: list[dict] = []
    wanted = options.tools.split(",")
    if "racecheck" in wanted and not ops.library().for_racecheck:
        print("this library is not the build for racecheck, which will report what is no race", flush=True)
    for tool in wanted:
        print(f"{tool} over {len(chosen)} cases ...", flush=True)
        text, returncode, seconds = run_tool(tool, chosen, sanitizer, options.seconds)
        output = Output.parse(text)
        some = rows_of(tool, chosen, output)
        tools[tool] = judge_tool(output, returncode, seconds, some)
        rows += some
        record = summarise(facts, tools, rows, complete=tool == wanted[-1])
        gpu_check.write_json(record, options.json)
        print(f"  {tools[tool]}", flush=True)
        for row in some:
            if row["status"] != "clean" or row["warnings"]:
                print(f"  {row}", flush=True)
        if tools[tool]["status"] in ("unavailable", "broken"):
            print("\n".join(text.splitlines()[-30:]), flush=True)
    return exit_status(record)


if __name__ == "__main__":
    sys.exit(main())
