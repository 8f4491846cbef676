"""How fast is the forward, against FLA's Triton kernels and against the floor that memory sets?

    python scripts/benchmark.py [--json PATH] [--rows main|sweeps|all|steep] [--minutes 9] [--no-fla]
    python scripts/benchmark.py --draw PATH.json       the figures from a record; needs no GPU

Times are medians of triton.testing.do_bench, in ms, on random inputs, which take turns where one set would fit the
GPU's cache. Ours and FLA's (with our dispatch off) run in one process, and the copy bandwidth behind the floor is
measured when it starts. Every timed call of ours is witnessed on the path that the record names. Rows are those of
benchmark_rows.py: all of them on our kernels first, then the main ones on the portable kernel, then FLA, whose kernels
tune themselves for about 100 s at a new head count, gate mode or layout unless TRITON_CACHE_DIR holds the outcome;
what the time does not suffice for is left out, with a note.

--json writes a list of {B, T, H, seqlens, gate, call, path, ours_ms, fla_ms, floor_ms, goal_ms, portable_ms, fla_note,
gpu, date}, null where there is none, and beside it, with the same stem, the same as .csv, the figures as .png and
-rows.png (of other rows than the steep ones), and .run.json with what belongs to the whole run: versions, copy
bandwidth, host time of a call. All but the figures are rewritten after every row. Exits with 1 when a row has no time
of ours, with 2 where there is no GPU or no kernels.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import fla_kda_backend  # noqa: E402
from fla_kda_backend.dispatch import CUDA_PATHS  # noqa: E402
from scripts import benchmark_rows as table  # noqa: E402
from scripts.benchmark_fla import Tuning  # noqa: E402
from scripts.benchmark_rows import Row  # noqa: E402
from tests.kdakit.run import dispatch_off, environment  # noqa: E402

DEVICE = "cuda"
FIELDS = ("B", "T", "H", "seqlens", "gate", "call", "path", "ours_ms", "fla_ms", "floor_ms", "goal_ms", "portable_ms")
FIELDS += ("fla_note", "gpu", "date")

# Kept back for the figures and the way out.
RESERVE_SECONDS = 15
# Timing one row of ours, its inputs included, with a margin.
ROW_SECONDS = 3
# A median of fewer repetitions than this is not one.
MIN_REPETITIONS = 10
COPY_BYTES = 2**31
HOST_ROW = Row(1, 64, 4)
HOST_CALLS, HOST_CALLS_WARM, HOST_CALLS_A_BATCH = 3000, 300, 50


class Budget:
    """The time of the whole run."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.began, self.seconds = clock, clock(), minutes * 60

    def spent(self) -> float:
        return self.clock() - self.began

    def left(self) -> float:
        return self.seconds - RESERVE_SECONDS - self.spent()

    def allows(self, seconds: float) -> bool:
        return self.left() >= seconds


class Results:
    """A record for each row, on disk as they grow. `facts` are of the whole run."""

    def __init__(self, path: Path, rows: Iterable[Row], facts: dict, bytes_per_second: float):
        self.path, self.facts = path, facts
        self.records = {row: self._record(row, table.floor_ms(row, bytes_per_second)) for row in rows}

    def _record(self, row: Row, floor_ms: float) -> dict:
        record = dict.fromkeys(FIELDS)
        record |= {name: getattr(row, name) for name in ("B", "T", "H", "gate", "call", "goal_ms")}
        record["seqlens"] = None if row.seqlens is None else list(row.seqlens)
        return record | {"floor_ms": round(floor_ms, 5), "gpu": self.facts["gpu"], "date": self.facts["date"]}

    def update(self, row: Row, **values) -> None:
        assert values.keys() <= set(FIELDS), values
        self.records[row].update(values)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = list(self.records.values())
        self._replace(".json", "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
        self._replace(".run.json", json.dumps(self.facts, indent=2) + "\n")
        lines = [FIELDS]
        for record in records:
            shown = record | {"seqlens": table.sequences_label(record["seqlens"])}
            lines.append(["" if shown[name] is None else shown[name] for name in FIELDS])
        self._replace(".csv", lines)

    def _replace(self, suffix: str, content: str | list) -> None:
        """Never leave half a file: a run may be cut short at any moment."""
        scratch = self.path.with_suffix(suffix + ".part")
        with scratch.open("w", newline="") as file:
            if isinstance(content, str):
                file.write(content)
            else:
                csv.writer(file, lineterminator="\n").writerows(content)
        scratch.replace(self.path.with_suffix(suffix))


class GpuTimer:
    """Times one row in one way. The only part that needs a GPU."""

    def __init__(self):
        self.cache_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size

    @staticmethod
    def median_ms(function: Callable[[], object]) -> float:
        from triton.testing import do_bench

        milliseconds = do_bench(function, return_mode="median")
        if milliseconds * MIN_REPETITIONS > 100:  # do_bench's own time for repetitions
            milliseconds = do_bench(function, rep=milliseconds * (MIN_REPETITIONS + 1), return_mode="median")
        return milliseconds

    def copy_bytes_per_second(self) -> float:
        """Bytes read plus bytes written per second by a large copy."""
        source = torch.empty(COPY_BYTES // 4, device=DEVICE).normal_()
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / (self.median_ms(lambda: target.copy_(source)) * 1e-3)

    def input_sets(self, row: Row) -> list[dict]:
        first = table.inputs(row, device=DEVICE)
        count = table.sets_to_rotate(table.input_bytes(first), self.cache_bytes)
        return [first] + [table.inputs(row, device=DEVICE, seed=seed) for seed in range(1, count)]

    def ours(self, row: Row) -> tuple[str, float]:
        """(path that served every call, ms)."""
        turns, calls = itertools.cycle(self.input_sets(row)), itertools.count()
        before = dict(fla_kda_backend.dispatch_counts())

        def call():
            next(calls)
            return fla_kda_backend.chunk_kda(**next(turns))

        with torch.no_grad(), environment("FLA_KDA_STRICT", "1"):
            milliseconds = self.median_ms(call)
        torch.cuda.synchronize()
        path = fla_kda_backend.last_dispatch().path
        served = fla_kda_backend.dispatch_counts()[path] - before.get(path, 0)
        assert path in CUDA_PATHS and served == next(calls), f"only {served} calls ran on {path}"
        return path, milliseconds

    def portable(self, row: Row) -> float:
        with environment("FLA_KDA_FORCE", "portable"):
            path, milliseconds = self.ours(row)
        assert path == "portable", f"the call ran on {path} instead of portable"
        return milliseconds

    def fla(self, row: Row) -> float:
        """FLA's Triton kernels, which may tune in here first."""
        import fla.ops.kda

        turns = itertools.cycle(self.input_sets(row))
        before = dict(fla_kda_backend.dispatch_counts())
        with dispatch_off(), torch.no_grad():
            milliseconds = self.median_ms(lambda: fla.ops.kda.chunk_kda(**next(turns)))
        torch.cuda.synchronize()
        assert fla_kda_backend.dispatch_counts() == before, "FLA's calls were dispatched to us"
        return milliseconds

    def host_microseconds(self, through_fla: bool) -> dict[str, float]:
        """From a Python call to its return, by the function that is called, for calls that we serve."""
        functions = {"fla_kda_backend.chunk_kda": fla_kda_backend.chunk_kda}
        if through_fla:
            try:
                import fla.ops.kda
            except ImportError as problem:
                print(f"FLA cannot be imported: {problem}", flush=True)
            else:
                # Without a registration FLA's kernels would serve, and tune.
                if fla_kda_backend.status()["registration"] is not None:
                    functions["fla.ops.kda.chunk_kda"] = fla.ops.kda.chunk_kda
        arguments = table.inputs(HOST_ROW, device=DEVICE)
        with torch.no_grad(), environment("FLA_KDA_STRICT", "1"):
            return {
                name: host_microseconds(partial(function, **arguments), torch.cuda.synchronize)
                for name, function in functions.items()
            }


def host_microseconds(
    function: Callable[[], object], synchronize: Callable[[], None], clock: Callable[[], int] = time.perf_counter_ns
) -> float:
    """Median time of a call that launches and returns. The GPU is waited for, outside of the measured time, before its
    queue fills up and holds launches back."""
    taken = []
    for index in range(HOST_CALLS_WARM + HOST_CALLS):
        if index % HOST_CALLS_A_BATCH == 0:
            synchronize()
        began = clock()
        function()
        taken.append(clock() - began)
    synchronize()
    return statistics.median(taken[HOST_CALLS_WARM:]) / 1e3


def measure(rows: list[Row], timer, budget: Budget, results: Results, tuning: Tuning | None) -> None:
    """Time everything that the budget allows: our kernels on all rows, the portable one on the main rows, and FLA
    unless `tuning` is None. Whatever fails is printed, and costs its own number alone."""
    paths = {}

    def progress(what: str, row: Row, found: str) -> None:
        print(f"[{budget.spent():4.0f} s] {what:8s} {row}: {found}", flush=True)

    def attempt(what: str, row: Row, function: Callable, fields: tuple[str, ...]) -> str | None:
        """Update the row's record with the results; what went wrong, if anything did."""
        try:
            found = function(row)
        except Exception as error:
            sentence = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            progress(what, row, sentence)
            return sentence
        values = dict(zip(fields, found if isinstance(found, tuple) else (found,), strict=True))
        values = {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
        results.update(row, **values)
        floor = results.records[row]["floor_ms"]
        progress(what, row, ", ".join(map(str, values.values())) + f" ms (floor {floor:.3f})")
        return None

    for row in rows:
        if not budget.allows(ROW_SECONDS):
            progress("ours", row, "no time left")
            continue
        attempt("ours", row, timer.ours, ("path", "ours_ms"))
        paths[row] = results.records[row]["path"]
    for row in rows:
        if row.goal_ms is None or paths.get(row) is None:
            continue
        if paths[row] == "portable":
            results.update(row, portable_ms=results.records[row]["ours_ms"])
        elif budget.allows(ROW_SECONDS):
            attempt("portable", row, timer.portable, ("portable_ms",))
        else:
            progress("portable", row, "no time left")
    if tuning is not None:
        measure_fla(rows, timer, budget, results, tuning, attempt, progress)


def measure_fla(rows, timer, budget, results, tuning, attempt, progress) -> None:
    """What need not be tuned first, then the main rows, then the others, each the quickest first."""
    pending = list(rows)

    def urgency(row: Row) -> tuple:
        return bool(tuning.missing(row)), row.goal_ms is None, tuning.seconds(row)

    while pending:
        row = min(pending, key=urgency)
        pending.remove(row)
        seconds, kernels = tuning.seconds(row), len(tuning.missing(row))
        if not budget.allows(seconds):
            why = f"{kernels} kernels to tune" if kernels else "no tuning"
            note = f"left out: about {seconds:.0f} s ({why}) with {max(budget.left(), 0):.0f} s left"
            progress("FLA", row, note)
            results.update(row, fla_note=note)
            continue
        if kernels:
            progress("FLA", row, f"{kernels} kernels to tune, about {seconds:.0f} s ...")
        problem = attempt("FLA", row, timer.fla, ("fla_ms",))
        if problem is None:
            tuning.ran(row)
        else:
            results.update(row, fla_note=problem)


def print_summary(records: list[dict]) -> None:
    widths = {"ours": 8, "goal": 6, "floor": 7, "FLA": 8, "of floor": 8, "speed-up": 8}
    titles = " ".join(f"{title:>{width}s}" for title, width in widths.items())
    print(f"\n{'row':62s} {'path':8s} {titles}")
    for record in records:
        label = table.shape_label(record["B"], record["T"], record["H"], record["seqlens"])
        label = f"{label}, {record['call']}, {record['gate']}"
        ours, fla, floor, goal = (record[name] for name in ("ours_ms", "fla_ms", "floor_ms", "goal_ms"))
        columns = [
            "-" if ours is None else f"{ours:.3f}",
            "-" if goal is None else f"{goal:.2f}",
            f"{floor:.3f}",
            "-" if fla is None else f"{fla:.3f}",
            "-" if ours is None else f"{floor / ours:.0%}",
            "-" if ours is None or fla is None else f"{fla / ours:.2f}x",
        ]
        shown = " ".join(f"{column:>{width}s}" for column, width in zip(columns, widths.values(), strict=True))
        print(f"{label:62s} {record['path'] or '-':8s} {shown}")
    print(flush=True)


def draw(path: Path) -> None:
    """The figures of a record, beside it; a sentence where matplotlib is missing."""
    try:
        from scripts import benchmark_figures
    except ImportError as problem:
        print(f"no figures: {problem}; install fla-kda-backend[benchmark], then --draw {path}", flush=True)
        return
    for written in benchmark_figures.draw(path):
        print(f"drew {written}")


def run(options: argparse.Namespace) -> int:
    from scripts import gpu_check

    budget, timer, rows = Budget(options.minutes), GpuTimer(), table.select(options.rows)
    facts = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    facts |= {"source_sha256": gpu_check.source_hash(), "versions": gpu_check.versions()}
    facts["copy_bytes_per_second"] = timer.copy_bytes_per_second()
    facts["host_microseconds"] = timer.host_microseconds(through_fla=not options.no_fla)
    facts["complete"] = False
    print(json.dumps(facts, indent=2), flush=True)

    results = Results(options.json, rows, facts, facts["copy_bytes_per_second"])
    results.write()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's and FLA's, at every row
        measure(rows, timer, budget, results, None if options.no_fla else Tuning())
    facts |= {"seconds": round(budget.spent(), 1), "complete": True}
    results.write()
    records = list(results.records.values())
    print_summary(records)
    if options.rows != "steep":
        draw(options.json)
    print(f"{budget.spent():.0f} s, written to {options.json}", flush=True)
    return 0 if all(record["ours_ms"] is not None for record in records) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the forward against FLA's Triton kernels and the floor.")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="where the records go")
    parser.add_argument("--rows", choices=("main", "sweeps", "all", "steep"), default="all")
    parser.add_argument("--minutes", type=float, default=9.0, help="time to stay within; FLA's rows give way first")
    parser.add_argument("--no-fla", action="store_true", help="our kernels and the floor alone")
    parser.add_argument("--draw", type=Path, metavar="PATH.json", help="draw the figures of a record and stop")
    options = parser.parse_args()
    if options.draw is not None:
        draw(options.draw)
        return 0
    from tests.conftest import reason_without_kernels

    problem = reason_without_kernels()
    if problem is not None:
        print(f"benchmark: {problem}", file=sys.stderr)
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
