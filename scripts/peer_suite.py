"""Does FLA's own test suite pass with this package installed, and are the calls that we should serve served?

    python scripts/peer_suite.py --fla-source PATH [--json peer_suite.json] [-k EXPRESSION | --all] [--tune]

PATH is a checkout of flash-linear-attention; its tests/ops/test_kda.py and tests/models/test_modeling_kda.py are run,
as they are, against the FLA that is installed. Nothing is fetched, and nothing of theirs is kept. Every call of
`chunk_kda` is recorded with the path that it took, and compared with a plain statement of what should be served
(`should_be_served`). Tests that fail are run again with our backend off: only one that passes then is held against us.

FLA skips the tests of its FlashKDA backend where the package `flash_kda` is not installed. An empty module of that
name stands in for it: ours comes before it, so that nothing in it is ever called, and if it were the test would fail.

FLA's Triton kernels take the first configuration that works instead of tuning (minutes for every head count), unless
`--tune` is given. The default selection needs about three minutes on an H200; --all an hour.

The record is {source_sha256, gpu, versions, selection, tests: [{test, outcome, seconds, calls, reasons}], calls: {path:
number}, wrong: [...], groups, counts, complete}. Exits with 1 when a test fails through us or a call went another way
than it should, with 2 where the suite cannot be run.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402

FILES = ("tests/ops/test_kda.py", "tests/models/test_modeling_kda.py")
# What we serve (their tests of FlashKDA), what is refused, and what is declined: intermediate states, fp16, gradients.
SELECTION = (
    "flash_kda or invalid_chunk_size or intermediate_states or (varlen_prefill and D128) "
    "or (test_chunk[ and HV8-D128 and bfloat16) or (test_modeling[ and l2False and bsNone)"
)
MAX_REASONS = 5


# --- what should be served --------------------------------------------------------------------------------------------


def should_be_served(arguments: dict) -> bool:
    """Whether a call of `chunk_kda`, by its arguments' names, is ours: what the README promises, in a few lines.

    Kept apart from the package's own rules on purpose. It knows calls as FLA's tests make them, well-formed ones.
    """
    import torch

    q, v, A_log = arguments["q"], arguments["v"], arguments.get("A_log")
    if arguments.get("chunk_size", 64) not in (32, 64) or arguments.get("cp_context") is not None:
        return False
    if arguments.get("use_gate_in_kernel") and A_log is None and arguments.get("lower_bound") is None:
        return False
    if q.device.type == "cpu":
        return True
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    bf16, both = (torch.bfloat16,), (torch.bfloat16, torch.float32)
    dtypes = {"q": bf16, "k": bf16, "v": bf16, "g": both, "beta": both}
    return (
        q.shape[-1] == v.shape[-1] == 128
        and all(arguments[name].dtype in allowed for name, allowed in dtypes.items())
        and not arguments.get("return_intermediate_states")
    )


# --- recording --------------------------------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin: the outcome of each test, and each call of `chunk_kda` that it made."""

    def __init__(self):
        self.test: str | None = None
        self.outcomes: dict[str, dict] = {}
        self.wrong: list[dict] = []

    def watch(self) -> None:
        """Look over the shoulder of whatever decides about a call."""
        from fla_kda_backend.dispatch import SERVED_BY_US
        from fla_kda_backend.serve import Server

        decide = Server.decide

        def watched(server, args, kwargs):
            call, decision, error = decide(server, args, kwargs)
            given = dict(zip(server.signature.positional, args)) | kwargs
            self.saw(decision.path, decision.reason, should_be_served(given), decision.path in SERVED_BY_US)
            return call, decision, error

        Server.decide = watched

    def saw(self, path: str, reason: str, expected: bool, served: bool) -> None:
        entry = self.entry()
        entry["calls"][path] += 1
        if reason and reason not in entry["reasons"] and len(entry["reasons"]) < MAX_REASONS:
            entry["reasons"].append(reason)
        if expected != served:
            side = "ours" if expected else "FLA"
            self.wrong.append({"test": self.test, "path": path, "reason": reason, "expected": side})

    def entry(self) -> dict:
        blank = {"test": self.test, "outcome": "passed", "seconds": 0.0, "calls": Counter(), "reasons": []}
        return self.outcomes.setdefault(self.test, blank)

    def pytest_runtest_logstart(self, nodeid, location):
        self.test = nodeid

    def pytest_runtest_logreport(self, report):
        entry = self.entry()
        entry["seconds"] += report.duration
        if report.failed:
            entry["outcome"] = "failed"
            entry["message"] = str(report.longrepr)[-2000:]
        elif report.skipped:
            entry["outcome"] = "skipped"

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid] = {
                "test": report.nodeid, "outcome": "failed", "seconds": 0.0, "calls": Counter(), "reasons": [],
                "message": str(report.longrepr)[-2000:],
            }  # fmt: skip


def take_the_first_configuration_that_works() -> None:
    """Have Triton's autotuner try a kernel's configurations only until one runs."""
    from triton.runtime.autotuner import Autotuner

    run, bench = Autotuner.run, Autotuner._bench

    def run_with_first(self, *args, **kwargs):
        self.one_works = False
        return run(self, *args, **kwargs)

    def bench_until_one_works(self, *args, **kwargs):
        if self.one_works:
            return [float("inf")] * 3
        times = bench(self, *args, **kwargs)
        first = times[0] if isinstance(times, (list, tuple)) else times
        self.one_works = first != float("inf")
        return times

    Autotuner.run, Autotuner._bench = run_with_first, bench_until_one_works


# --- the run ----------------------------------------------------------------------------------------------------------


def run_suite(source: Path, selection: list[str], recorder, folder: Path) -> int:
    """pytest over their files, with nothing of our configuration or theirs but their conftest.py."""
    import pytest

    configuration = folder / "pytest.ini"
    configuration.write_text("[pytest]\n")
    arguments = ["-c", str(configuration), f"--rootdir={source}", "-q", "--tb=short", "-p", "no:cacheprovider"]
    return int(pytest.main([*arguments, *selection], plugins=[recorder]))


def stand_in_for_flash_kda(folder: Path) -> None:
    if importlib.util.find_spec("flash_kda") is None:
        (folder / "flash_kda.py").write_text('"""Empty: it is there to be found."""\n')
        sys.path.insert(0, str(folder))
        os.environ["FLA_FLASH_KDA"] = "0"  # which their tests of it switch on


def held_against_us(recorder: Recorder, source: Path, folder: Path) -> set[str]:
    """The failed tests that pass with our backend off."""
    import fla_kda_backend

    failed = [name for name, entry in recorder.outcomes.items() if entry["outcome"] == "failed" and "::" in name]
    if not failed:
        return set()
    print(f"\n{len(failed)} failed; once more with our backend off", flush=True)
    fla_kda_backend.disable()
    without = Recorder()
    try:
        run_suite(source, [str(source / name) for name in failed], without, folder)
    finally:
        fla_kda_backend.enable()
    return {name for name in failed if without.outcomes.get(name, {}).get("outcome") != "failed"}


def make_record(facts: dict, recorder: Recorder, ours: set[str], complete: bool) -> dict:
    """The record; a test that fails without us as well is counted as skipped, and listed."""
    groups: dict[str, Counter] = {}
    calls: Counter = Counter()
    for name, entry in recorder.outcomes.items():
        group = f"peer/{Path(name.split('::')[0]).stem}"
        outcome = entry["outcome"]
        if outcome == "failed" and "::" in name and name not in ours:
            entry["outcome"], outcome = "failed without us, too", "skipped"
        groups.setdefault(group, Counter())[outcome] += 1
        calls.update(entry["calls"])
    wrongly = {"passed": 0, "failed": len(recorder.wrong), "skipped": 0}
    wrongly["passed"] = calls.total() - len(recorder.wrong)
    return facts | {
        "tests": [
            entry | {"seconds": round(entry["seconds"], 1), "calls": dict(entry["calls"])}
            for entry in recorder.outcomes.values()
        ],
        "calls": dict(calls),
        "wrong": recorder.wrong,
        "groups": gpu_check.outcomes_of(groups) | {"peer/paths of calls": wrongly},
        "counts": {
            "peer tests passed": sum(counts["passed"] for counts in groups.values()),
            "peer calls served": calls.total() - calls["triton"],
            "peer calls left to FLA": calls["triton"],
        },
        "complete": complete,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Run FLA's own tests of KDA with this package in force.")
    parser.add_argument("--fla-source", type=Path, required=True, help="a checkout of flash-linear-attention")
    parser.add_argument("--json", type=Path, default=Path("peer_suite.json"), help="where the record goes")
    parser.add_argument("-k", dest="selection", default=SELECTION, help="pytest's expression (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="every test of both files")
    parser.add_argument("--tune", action="store_true", help="let FLA's Triton kernels tune themselves")
    options = parser.parse_args()
    source = options.fla_source.resolve()
    missing = [name for name in FILES if not (source / name).exists()]
    if missing:
        print(f"peer_suite: {source} has no {' and no '.join(missing)}", file=sys.stderr)
        return 2

    if not options.tune:
        os.environ["FLA_CACHE_RESULTS"] = "0"  # what was not tuned must not be kept
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_in_for_flash_kda(folder)
        if not options.tune:
            take_the_first_configuration_that_works()
        try:
            import fla.ops.kda
        except ImportError as problem:
            print(f"peer_suite: flash-linear-attention is not installed: {problem}", file=sys.stderr)
            return 2
        return run(options, source, folder, fla)


def run(options, source: Path, folder: Path, fla) -> int:
    import torch

    import fla_kda_backend

    if Path(fla.__file__).is_relative_to(source):
        print(f"peer_suite: the FLA that is imported lies in {source}; the installed one is meant", file=sys.stderr)
        return 2
    way = fla_kda_backend.enable()
    if way is None:
        print("peer_suite: our backend is not registered with FLA", file=sys.stderr)
        return 2
    facts = {
        "source_sha256": gpu_check.source_hash(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"torch": torch.__version__, "fla": fla.__version__, "registration": way},
        "selection": None if options.all else options.selection,
    }
    recorder = Recorder()
    recorder.watch()
    began = time.monotonic()
    chosen = [] if options.all else ["-k", options.selection]
    status = run_suite(source, [*chosen, *(str(source / name) for name in FILES)], recorder, folder)
    ours = held_against_us(recorder, source, folder)
    facts["seconds"] = round(time.monotonic() - began, 1)
    record = make_record(facts, recorder, ours, complete=status in (0, 1))
    gpu_check.write_json(record, options.json)

    for entry in record["tests"]:
        print(f"{entry['outcome']:22s} {entry['seconds']:6.1f} s {entry['calls']} {entry['test']}")
    for wrong in record["wrong"]:
        print(f"WRONG PATH {wrong}")
    print(f"{record['counts']}, {facts['seconds']:.0f} s, written to {options.json}")
    failed = any(group["failed"] for group in record["groups"].values())
    return 1 if failed or status not in (0, 1) or not record["counts"]["peer calls served"] else 0


if __name__ == "__main__":
    sys.exit(main())
