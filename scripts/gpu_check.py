"""Does everything that needs a GPU work on this one? One command, under ten minutes, one JSON record.

    python scripts/gpu_check.py [--json PATH] [--parity-json PATH] [--minutes 9.5]
    python scripts/gpu_check.py --only two_gpus --json PATH     the tests with a marker, and nothing else
    python scripts/gpu_check.py --parts hopper --json PATH      a part, so that several run side by side, to be joined
    python scripts/gpu_check.py --join RECORD... --json PATH    one record of several; needs neither a GPU nor torch
    python scripts/gpu_check.py --source-hash                   the hash of csrc/ and the package; needs no torch

Runs tests/gpu once for each kernel that runs on the GPU, file by file as groups, then the full comparison of
scripts/parity.py (of which tests/gpu/test_parity.py has the callers' forms too, left out here), in one process. The
record is {source_sha256, gpu, versions, groups: {name: {passed, failed, skipped}}, counts: {name: number}, faults:
[kind], seconds, complete}; it is rewritten after each group, so that a run that is cut short leaves what it had. Exits
with 1 when anything failed or nothing passed.

`counts` are of what tests did beyond being a test, and only of those that passed: a test reports n of something by
`record_property("count:something", n)`; "two-GPU tests" carry the marker `two_gpus`; `faults` are the kinds named by
the marker `fault("kind")`, "fault kinds" their number. Joined records are this script's own and those of sanitize.py,
peer_suite.py and whatever else writes {source_sha256, groups, counts}; all must be of the same sources, those here.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASHED_FOLDERS = ("csrc", "fla_kda_backend")
# The same cases, bounds and checks as the table of scripts/parity.py, which finds the exact result once for both kernels.
IN_THE_TABLE = "tests/gpu/test_parity.py::test_caller_form_is_served_and_matches_the_recurrence"
COMPARISONS = "comparisons"
PARTS = ("portable", "hopper", COMPARISONS)
# Kept back for what follows the last group.
RESERVE_SECONDS = 15


def source_hash() -> str:
    """sha256 over the names and contents of the sources that a GPU run depends on, built files left out."""
    digest = hashlib.sha256()
    paths = (path for folder in HASHED_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: path.relative_to(ROOT).as_posix()):
        relative = path.relative_to(ROOT)
        if {"__pycache__", "_C"} & set(relative.parts) or path.suffix in (".so", ".pyc"):
            continue
        digest.update(relative.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict:
    """The versions that a result depends on; None for what is not there."""
    import torch

    from fla_kda_backend import __version__, ops

    def module_version(name):
        try:
            return __import__(name).__version__
        except Exception:
            return None

    library = ops.library()
    return {
        "fla_kda_backend": __version__,
        "library_archs": list(library.archs),
        "library_cuda": library.cuda,
        "library_torch": library.torch,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": module_version("triton"),
        "fla": module_version("fla"),
        "python": platform.python_version(),
    }


class GroupCounter:
    """A pytest plugin that counts outcomes per test file, and what the tests counted, and reports after each file."""

    def __init__(self, record: "Record", path: str):
        self.record, self.path = record, path
        self.current = None
        self.faults: dict[str, list[str]] = {}
        self.on_two_gpus: set[str] = set()

    def pytest_collection_modifyitems(self, items):
        for item in items:
            self.faults[item.nodeid] = [kind for marker in item.iter_markers("fault") for kind in marker.args]
            if item.get_closest_marker("two_gpus"):
                self.on_two_gpus.add(item.nodeid)

    def pytest_runtest_logreport(self, report):
        group = f"{self.path}/{Path(report.nodeid.split('::')[0]).stem}"
        if group != self.current:
            self.record.start(group)
            self.current = group
        if report.failed:
            self.record.add(group, "failed")
        elif report.skipped:
            self.record.add(group, "skipped")
        elif report.when == "call":
            self.record.add(group, "passed")
            self.count(report)

    def count(self, report) -> None:
        for name, value in report.user_properties:
            if name.startswith("count:"):
                self.record.counts[name.removeprefix("count:")] += value
        self.record.counts["two-GPU tests"] += report.nodeid in self.on_two_gpus
        self.record.faults.update(self.faults.get(report.nodeid, ()))

    def pytest_collectreport(self, report):
        if report.failed:
            self.record.add("collection", "failed")


class Record:
    """The JSON record, kept on disk as it grows."""

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts, self.began = path, facts, time.monotonic()
        self.groups: dict[str, Counter] = {}
        self.counts: Counter = Counter()
        self.faults: set[str] = set()

    def start(self, group: str) -> None:
        self.groups.setdefault(group, Counter())
        self.write()
        print(f"\n[{self.seconds():4.0f} s] {group}", flush=True)

    def add(self, group: str, outcome: str) -> None:
        self.groups.setdefault(group, Counter())[outcome] += 1

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def failed(self) -> bool:
        """Whether anything failed, or nothing passed: tests that were all skipped have shown nothing."""
        counts = sum(self.groups.values(), Counter())
        return counts["failed"] > 0 or counts["passed"] == 0

    def write(self, complete: bool = False) -> None:
        record = self.facts | {
            "groups": outcomes_of(self.groups),
            "counts": dict(self.counts) | {"fault kinds": len(self.faults)},
            "faults": sorted(self.faults),
            "seconds": round(self.seconds(), 1),
            "complete": complete,
        }
        write_json(record, self.path)

    def print_groups(self) -> None:
        for name, counts in self.groups.items():
            outcomes = " ".join(f"{counts[outcome]:5d} {outcome}" for outcome in ("passed", "failed", "skipped"))
            print(f"{name:36s} {outcomes}")
        for name, number in self.counts.items():
            print(f"{name:36s} {number:5d}")


def outcomes_of(groups: dict[str, Counter]) -> dict[str, dict[str, int]]:
    """The groups of a record, each with all three outcomes."""
    return {
        name: {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
        for name, counts in groups.items()
    }


def write_json(record: dict | list, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


class CannotJoin(ValueError):
    """Records that do not belong together; the message says which and why."""


def join(records: dict[str, dict], source_sha256: str) -> dict:
    """One record of several, by the names of their files; the first gives the GPU and the versions.

    Groups are put side by side, counts added, faults united. `parts` names the files, their GPU, time and completeness.

    Raises:
        CannotJoin: other sources, a group that two records have, or something that is no record.
    """
    joined: dict = {"groups": {}, "counts": Counter(), "faults": set()}
    parts = []
    for name, record in records.items():
        if not isinstance(record, dict) or not {"source_sha256", "groups"} <= record.keys():
            raise CannotJoin(f"{name} is not a record of a check")
        if record["source_sha256"] != source_sha256:
            raise CannotJoin(f"{name} was made from other sources than those here")
        twice = sorted(joined["groups"].keys() & record["groups"].keys())
        if twice:
            raise CannotJoin(f"{name} has groups that another record has: {', '.join(twice)}")
        joined["groups"].update(record["groups"])
        joined["counts"].update(record.get("counts", {}))
        joined["faults"].update(record.get("faults", ()))
        part = {"file": Path(name).name, "gpu": record.get("gpu"), "gpus": record.get("gpus", 1)}
        parts.append(part | {"seconds": record.get("seconds"), "complete": bool(record.get("complete"))})
    first = next(iter(records.values()))
    return {key: first.get(key) for key in ("source_sha256", "gpu", "versions")} | {
        "groups": joined["groups"],
        "counts": dict(joined["counts"]) | {"fault kinds": len(joined["faults"])},
        "faults": sorted(joined["faults"]),
        "seconds": round(sum(part["seconds"] or 0 for part in parts), 1),
        "parts": parts,
        "complete": all(part["complete"] for part in parts),
    }


def join_files(paths: list[Path], output: Path) -> int:
    try:
        record = join({str(path): json.loads(path.read_text()) for path in paths}, source_hash())
    except (OSError, ValueError) as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    write_json(record, output)
    for name, number in record["counts"].items():
        print(f"{name:36s} {number:5d}")
    failed = sum(group["failed"] for group in record["groups"].values())
    print(f"{len(record['groups'])} groups, {failed} failed, written to {output}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU and record it.")
    parser.add_argument("--source-hash", action="store_true", help="print the hash of the sources and stop")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the record goes")
    parser.add_argument("--parity-json", type=Path, help="where the parity table goes (default: parity.json beside it)")
    parser.add_argument("--minutes", type=float, default=9.5, help="time to stay within; comparisons with FLA give way")
    parser.add_argument("--only", metavar="MARKER", help="run the tests with this marker alone, and no comparison")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tests of a kernel, or the comparisons")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RECORD", help="join these records, and run nothing")
    options = parser.parse_args()
    if options.source_hash:
        print(source_hash())
        return 0
    if options.join:
        return join_files(options.join, options.json)

    sys.path.insert(0, str(ROOT))
    import parity
    import pytest
    import torch

    from tests.kdakit.run import environment, kernel_paths

    problem = parity.why_not_here()
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2

    facts = {"source_sha256": source_hash(), "gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    facts["versions"] = versions()
    print(json.dumps(facts, indent=2), flush=True)
    record = Record(options.json, facts)
    arguments = [str(ROOT / "tests" / "gpu"), "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    arguments += ["-m", options.only] if options.only else ["--deselect", IN_THE_TABLE]
    for path in [path for path in kernel_paths() if path in options.parts]:
        plugin = GroupCounter(record, f"{options.only}/{path}" if options.only else path)
        with environment("FLA_KDA_FORCE", path):
            status = pytest.main([*arguments, f"--rootdir={ROOT}"], plugins=[plugin])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            record.add("collection", "failed")

    if not options.only and COMPARISONS in options.parts:
        parity_json = options.parity_json or options.json.with_name("parity.json")
        compare_with_everything(record, parity_json, options.minutes)
    record.write(complete=True)
    record.print_groups()
    print(f"{record.seconds():.0f} s, written to {options.json}")
    return 1 if record.failed() else 0


def compare_with_everything(record: Record, parity_json: Path, minutes: float) -> None:
    """The comparisons of scripts/parity.py, as two groups of the record."""
    import parity

    record.start("parity")
    deadline = time.monotonic() + minutes * 60 - record.seconds() - RESERVE_SECONDS
    rows, accuracy = parity.compare_all(deadline=deadline)
    parity.write(rows, accuracy, parity_json)
    parity.print_tables(rows, accuracy)
    for row in rows:
        record.add("parity", "passed" if row["passed"] else "failed")
    record.start("accuracy")
    for row in accuracy:
        record.add("accuracy", "passed" if row["passed"] else "failed")
    print(f"the comparison is written to {parity_json}")


if __name__ == "__main__":
    sys.exit(main())
