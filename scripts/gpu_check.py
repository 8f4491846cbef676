"""Does everything that needs a GPU work on this one? One command, under ten minutes, one JSON record.

    python scripts/gpu_check.py [--json PATH] [--parity-json PATH] [--minutes 9.5]
    python scripts/gpu_check.py --source-hash        the hash of csrc/ and the package; needs no torch

Runs tests/gpu once for each kernel that runs on the GPU, file by file as groups, then the full comparison of
scripts/parity.py, in one process. The record is {source_sha256, gpu, versions, groups: {name: {passed, failed,
skipped}}, seconds, complete}; it is rewritten after each group, so that a run that is cut short leaves what it had.
Exits with 1 when anything failed.
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
    """A pytest plugin that counts outcomes per test file and reports after each."""

    def __init__(self, record: "Record", path: str):
        self.record, self.path = record, path
        self.current = None

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

    def pytest_collectreport(self, report):
        if report.failed:
            self.record.add("collection", "failed")


class Record:
    """The JSON record, kept on disk as it grows."""

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts, self.began = path, facts, time.monotonic()
        self.groups: dict[str, Counter] = {}

    def start(self, group: str) -> None:
        self.groups.setdefault(group, Counter())
        self.write()
        print(f"\n[{self.seconds():4.0f} s] {group}", flush=True)

    def add(self, group: str, outcome: str) -> None:
        self.groups.setdefault(group, Counter())[outcome] += 1

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def failed(self) -> bool:
        return any(counts["failed"] for counts in self.groups.values()) or not self.groups

    def write(self, complete: bool = False) -> None:
        groups = {
            name: {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
            for name, counts in self.groups.items()
        }
        record = self.facts | {"groups": groups, "seconds": round(self.seconds(), 1), "complete": complete}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU and record it.")
    parser.add_argument("--source-hash", action="store_true", help="print the hash of the sources and stop")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the record goes")
    parser.add_argument("--parity-json", type=Path, help="where the parity table goes (default: parity.json beside it)")
    parser.add_argument("--minutes", type=float, default=9.5, help="time to stay within; comparisons with FLA give way")
    options = parser.parse_args()
    if options.source_hash:
        print(source_hash())
        return 0

    sys.path.insert(0, str(ROOT))
    import parity
    import pytest
    import torch

    from tests.kdakit.run import environment, kernel_paths

    problem = parity.why_not_here()
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2

    facts = {"source_sha256": source_hash(), "gpu": torch.cuda.get_device_name(), "versions": versions()}
    print(json.dumps(facts, indent=2), flush=True)
    record = Record(options.json, facts)
    arguments = [str(ROOT / "tests" / "gpu"), "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    for path in kernel_paths():
        with environment("FLA_KDA_FORCE", path):
            status = pytest.main([*arguments, f"--rootdir={ROOT}"], plugins=[GroupCounter(record, path)])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            record.add("collection", "failed")

    record.start("parity")
    parity_json = options.parity_json or options.json.with_name("parity.json")
    deadline = time.monotonic() + options.minutes * 60 - record.seconds() - RESERVE_SECONDS
    rows, accuracy = parity.compare_all(deadline=deadline)
    parity.write(rows, accuracy, parity_json)
    parity.print_tables(rows, accuracy)
    for row in rows:
        record.add("parity", "passed" if row["passed"] else "failed")
    record.start("accuracy")
    for row in accuracy:
        record.add("accuracy", "passed" if row["passed"] else "failed")
    record.write(complete=True)
    for name, counts in record.groups.items():
        print(f"{name:28s} {counts['passed']:5d} passed {counts['failed']:4d} failed {counts['skipped']:4d} skipped")
    print(f"{record.seconds():.0f} s, written to {options.json} and {parity_json}")
    return 1 if record.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
