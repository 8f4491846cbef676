"""Does the benchmark measure what it says, within its time, and lose nothing? Everything but the timing itself."""

import itertools
import json
import math
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fla_kda_backend
from scripts import benchmark, benchmark_fla
from scripts import benchmark_rows as table
from scripts.benchmark_rows import Row
from tests.kdakit import cases

ROOT = Path(__file__).resolve().parent.parent
RECORD_NAMES = {"B", "T", "H", "seqlens", "gate", "call", "path", "ours_ms", "fla_ms", "floor_ms", "goal_ms"}
RECORD_NAMES |= {"portable_ms", "fla_note", "gpu", "date"}

UNEVEN = (1300, 547, 2048, 963, 271, 3063)
# What an H200 copies, read plus written, and the published table of rows: B, T, H, sequences, call, floor, goal in ms.
H200_BYTES_PER_SECOND = 4.27e12
PUBLISHED = [
    (1, 8192, 96, None, "k3", 0.237, 0.42),
    (1, 8192, 96, UNEVEN, "k3", 0.252, 0.42),
    (1, 8192, 96, (1024,) * 8, "k3", 0.258, 0.40),
    (1, 8192, 64, None, "k3", 0.158, 0.32),
    (1, 8192, 32, None, "k3", 0.079, 0.20),
    (8, 2048, 32, None, "k3", 0.164, 0.28),
    (1, 8192, 8, None, "k3", 0.020, 0.08),
    (1, 32768, 8, None, "k3", 0.078, 0.25),
    (1, 131072, 8, None, "k3", 0.312, 0.9),
    (1, 65536, 4, None, "k3", 0.078, 0.25),
    (1, 1048576, 4, None, "k3", 1.25, 4),
    (1, 8192, 32, (32,) * 256, "k3", 0.328, 0.5),
    (1, 8192, 8, (4,) * 2048, "k3", 0.519, 0.8),
    (1, 8192, 32, None, "kimi_linear", 0.10, 0.25),
]
# The published floors are rounded to two digits and count some of the small tensors.
FLOOR_TOLERANCE = 0.1


# --- Rows and inputs --------------------------------------------------------------------------------------------------


def test_main_rows_are_the_published_ones_with_every_gate():
    expected = [(*row[:5], row[6], gate) for row in PUBLISHED for gate in ("short", "long", "softplus")]
    assert [(r.B, r.T, r.H, r.seqlens, r.call, r.goal_ms, r.gate) for r in table.main_rows()] == expected
    assert all(row.seqlens is None or sum(row.seqlens) == row.T for row in table.main_rows())


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: f"{row[:3]}-{row[4]}")
def test_floors_are_the_published_ones(published):
    B, T, H, seqlens, call, floor, _ = published
    row = Row(B, T, H, seqlens, call=call)
    assert table.floor_ms(row, H200_BYTES_PER_SECOND) == pytest.approx(floor, rel=FLOOR_TOLERANCE)


def test_sweeps_cover_tokens_and_heads_and_share_the_main_rows():
    rows = table.select("all")
    assert rows[: len(table.main_rows())] == table.main_rows()
    shapes = [(row.B, row.T, row.H, row.seqlens, row.gate, row.call) for row in rows]
    assert len(set(shapes)) == len(shapes)
    short = {(row.T, row.H) for row in table.select("sweeps") if (row.gate, row.call, row.B) == ("short", "k3", 1)}
    assert {(1024 * 2**power, heads) for power in range(8) for heads in (8, 32)} <= short
    assert {(8192, heads) for heads in (4, 8, 16, 32, 48, 64, 96)} <= short


@pytest.mark.parametrize("gate", table.STEEP)
def test_steep_gates_leave_the_exponents_of_fp32_within_16_tokens(gate):
    arguments = table.inputs(Row(1, 48, 2, gate=gate, call="kimi_linear"), device="cpu")
    g = arguments["g"].float()
    steepest = g[:, :16].sum(1).min(dim=-1).values
    assert (steepest * math.log2(math.e) < -126).all()
    mild = (g > -5).float().mean()
    assert 0.8 < mild < 0.9 if gate == "steep-some" else mild < (0.3 if gate == "steep-mixed" else 1e-9)


def test_steep_rows_stand_beside_mild_ones_of_the_same_shape():
    rows = table.select("steep")
    shapes = {(row.B, row.T, row.H, row.seqlens, row.call) for row in rows if row.gate == "short"}
    assert {(row.B, row.T, row.H, row.seqlens, row.call) for row in rows if row.gate in table.STEEP} == shapes
    assert {row.gate for row in rows} == {"short", *table.STEEP}


@pytest.mark.parametrize("call, caller", [("k3", "3-kimi-k3"), ("kimi_linear", "1-kimi-linear")])
@pytest.mark.parametrize("seqlens", [None, (20, 12)], ids=["dense", "varlen"])
def test_inputs_are_those_of_the_caller(call, caller, seqlens):
    built = cases.build(cases.Case(cases.caller(caller), "varlen" if seqlens else "dense", "randn"), tokens=32, heads=3)
    expected = {name.replace("transpose_state_layout", "state_v_first"): x for name, x in built.arguments.items()}
    arguments = table.inputs(Row(1, 32, 3, seqlens, call=call), device="cpu")
    assert arguments.keys() == expected.keys()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected[name].dtype and value.is_contiguous(), name
            assert value.count_nonzero() > 0.9 * (value.numel() - 1), f"{name} is mostly zeros"
        else:
            assert value == expected[name], name


@pytest.mark.parametrize("gate", table.GATES)
@pytest.mark.parametrize("call", table.FORMS)
def test_inputs_are_accepted_and_remember_as_long_as_they_say(call, gate):
    arguments = table.inputs(Row(2, 48, 2, gate=gate, call=call), device="cpu")
    o, state = fla_kda_backend.chunk_kda(**arguments)
    assert fla_kda_backend.last_dispatch().path == "reference"
    assert o.isfinite().all() and state.isfinite().all()
    if call == "kimi_linear":
        decay = arguments["g"]
    else:
        raw = arguments["g"].float() + arguments["dt_bias"].view(2, -1)
        rate = arguments["A_log"].exp()[:, None]
        if gate == "softplus":
            assert "lower_bound" not in arguments and "safe_gate" not in arguments
            decay = -rate * torch.nn.functional.softplus(raw)
        else:
            decay = arguments["lower_bound"] * torch.sigmoid(rate * raw)
    typical = decay.float().median().item()
    low, high = {"short": (-5, -1.5), "long": (-0.1, -1e-6), "softplus": (-2, -1e-3)}[gate]
    assert low < typical < high


def test_inputs_differ_by_seed_and_repeat_by_seed():
    row = Row(1, 16, 1)
    first, again, other = (table.inputs(row, device="cpu", seed=seed)["q"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_small_inputs_take_turns_until_they_overflow_the_cache():
    cache = 60 * 2**20
    assert table.sets_to_rotate(cache + 1, cache) == 1
    for size in (cache, cache - 1, cache // 7, 2**20):
        count = table.sets_to_rotate(size, cache)
        assert count >= 2 and count * size >= 2 * cache > (count - 1) * size


# --- Time, and what is done with it -----------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeTimer:
    """Takes `seconds` of the clock for everything, and what `tuning` foretells for FLA."""

    def __init__(self, clock, tuning=None, path="hopper", seconds=1.0, broken=()):
        self.clock, self.tuning, self.path, self.seconds, self.broken = clock, tuning, path, seconds, broken
        self.log = []

    def _run(self, what, row, seconds):
        self.clock.now += seconds
        self.log.append((what, row))
        if (what, row) in self.broken:
            raise RuntimeError(f"{what} is\nbroken")

    def ours(self, row):
        self._run("ours", row, self.seconds)
        return self.path, 0.5

    def portable(self, row):
        self._run("portable", row, self.seconds)
        return 2.0

    def fla(self, row):
        self._run("fla", row, self.tuning.seconds(row))
        return 4.0


@pytest.fixture
def bench(tmp_path):
    """run(rows, minutes, ...) -> (timer, records by row, clock's seconds)."""

    def run(rows, minutes, cached=(), fla=True, **options):
        clock = Clock()
        budget = benchmark.Budget(minutes, clock)
        results = benchmark.Results(tmp_path / "record.json", rows, {"gpu": "a GPU", "date": "today"}, 1e12)
        tuning = benchmark_fla.Tuning(tmp_path / "no-cache")
        for row in cached:
            tuning.tuned.update(benchmark_fla.kernels_of(row))
        timer = FakeTimer(clock, tuning, **options)
        benchmark.measure(rows, timer, budget, results, tuning if fla else None)
        on_disk = json.loads((tmp_path / "record.json").read_text())
        assert on_disk == list(results.records.values())
        return timer, results.records, budget.spent()

    return run


def test_everything_is_measured_when_time_suffices(bench):
    rows = table.select("all")
    timer, records, _ = bench(rows, minutes=1000)
    for row, record in records.items():
        assert (record["path"], record["ours_ms"], record["fla_ms"]) == ("hopper", 0.5, 4.0)
        assert record["portable_ms"] == (None if row.goal_ms is None else 2.0)
    kinds = [what for what, _ in timer.log]
    assert kinds == sorted(kinds, key=("ours", "portable", "fla").index), "ours is to be measured first"
    assert [row for what, row in timer.log if what == "ours"] == rows


def test_what_is_tuned_comes_first_and_what_takes_too_long_is_left_out_with_a_note(bench):
    known, unknown, sweep = Row(1, 8192, 96, goal_ms=0.4), Row(1, 8192, 64, goal_ms=0.3), Row(1, 8192, 48)
    rows = [unknown, sweep, known]
    timer, records, seconds = bench(rows, minutes=1, cached=[known])
    assert [row for what, row in timer.log if what == "fla"] == [known]
    assert records[known]["fla_note"] is None
    for row in (unknown, sweep):
        assert records[row]["ours_ms"] == 0.5 and records[row]["fla_ms"] is None
        assert "7 kernels to tune" in records[row]["fla_note"]
    assert seconds <= 60

    timer, records, seconds = bench(rows, minutes=4, cached=[known])
    assert [row for what, row in timer.log if what == "fla"] == [known, unknown]
    assert "to tune" in records[sweep]["fla_note"] and seconds <= 240


@pytest.mark.parametrize("minutes", [0.0, 0.5, 1.0, 2.5, 6.0, 12.0])
def test_the_budget_is_kept(bench, minutes):
    _, records, seconds = bench(table.select("all"), minutes)
    assert seconds <= minutes * 60
    untimed = [record for record in records.values() if record["fla_ms"] is None]
    assert untimed and all(record["fla_note"] for record in untimed)


def test_rows_that_are_tuned_elsewhere_are_not_tuned_for_the_main_rows(bench):
    """The variants that a cache for H 96 (bounded) and H 32 (bounded, activated) holds fit a short run."""
    cached = [Row(1, 8192, 96), Row(1, 8192, 32), Row(1, 8192, 32, call="kimi_linear")]
    timer, records, seconds = bench(table.select("main"), minutes=2.5, cached=cached, seconds=0.5)
    timed = {row for what, row in timer.log if what == "fla"}
    dense = [row for row in table.main_rows() if row.seqlens is None and row.B == 1]
    assert {row for row in dense if row.H == 96 and row.gate != "softplus"} <= timed
    assert {row for row in dense if row.H == 32} <= timed
    assert seconds <= 150
    assert all(record["ours_ms"] and record["portable_ms"] for record in records.values())


def test_without_fla_nothing_of_it_is_called(bench):
    timer, records, _ = bench(table.select("main"), minutes=100, fla=False)
    assert "fla" not in {what for what, _ in timer.log}
    assert all(record["fla_ms"] is None for record in records.values())


def test_a_failure_costs_its_own_number_alone(bench):
    first, second = Row(1, 8192, 96, goal_ms=0.4), Row(1, 8192, 64, goal_ms=0.3)
    _, records, _ = bench([first, second], minutes=100, broken=[("ours", first), ("fla", second)])
    assert (records[first]["ours_ms"], records[first]["path"], records[first]["fla_ms"]) == (None, None, 4.0)
    assert (records[second]["ours_ms"], records[second]["portable_ms"], records[second]["fla_ms"]) == (0.5, 2.0, None)
    assert records[second]["fla_note"] == "RuntimeError: fla is broken"


def test_a_portable_path_is_not_measured_twice(bench):
    row = Row(1, 8192, 96, goal_ms=0.4)
    timer, records, _ = bench([row], minutes=100, path="portable")
    assert records[row]["portable_ms"] == records[row]["ours_ms"] == 0.5
    assert "portable" not in {what for what, _ in timer.log}


@pytest.fixture
def cpu_timer(monkeypatch):
    """The GPU's timer on a CPU, where each function is called a few times and takes 0.25 ms."""
    testing = types.ModuleType("triton.testing")
    testing.do_bench = lambda function, **_: [function() for _ in range(3)] and 0.25
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = object.__new__(benchmark.GpuTimer)
    timer.cache_bytes = 2**20
    return timer


def test_a_time_counts_only_where_every_call_ran_on_our_kernels(cpu_timer, monkeypatch):
    row = Row(1, 32, 1)
    with pytest.raises(AssertionError, match="reference"):  # not a kernel
        cpu_timer.ours(row)
    monkeypatch.setattr(benchmark, "CUDA_PATHS", ("reference",))
    assert cpu_timer.ours(row) == ("reference", 0.25)

    calls = itertools.count()
    real = fla_kda_backend.chunk_kda
    monkeypatch.setattr(fla_kda_backend, "chunk_kda", lambda **x: real(**x) if next(calls) % 2 == 0 else None)
    with pytest.raises(AssertionError, match="only 2 calls"):
        cpu_timer.ours(row)


def test_inputs_of_a_timed_row_take_turns(cpu_timer):
    sets = cpu_timer.input_sets(Row(1, 64, 1))
    assert len(sets) > 1 and not torch.equal(sets[0]["q"], sets[1]["q"])
    assert sum(map(table.input_bytes, sets)) >= 2 * cpu_timer.cache_bytes


def test_host_time_is_a_median_without_the_waiting(monkeypatch):
    monkeypatch.setattr(benchmark, "HOST_CALLS_A_BATCH", 1)
    now, calls = [0], itertools.count()

    def call():
        now[0] += 7_000_000 if next(calls) % 3 == 0 else 30_000

    def wait():
        now[0] += 10**9

    assert benchmark.host_microseconds(call, wait, clock=lambda: now[0]) == 30.0


# --- FLA's tuning -----------------------------------------------------------------------------------------------------


def test_tuning_is_known_from_tritons_cache(tmp_path):
    row = Row(1, 8192, 96)
    assert len(benchmark_fla.Tuning(tmp_path).missing(row)) == 7
    for index, (name, key) in enumerate(benchmark_fla.kernels_of(row)):
        path = tmp_path / f"HASH{index}" / f"{name}.autotune.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"key": [*key, "torch.bfloat16"], "configs_timings": []}))
    (tmp_path / "HASH0" / "cut_short.autotune.json").write_text('{"key": [')
    tuning = benchmark_fla.Tuning(tmp_path)
    assert tuning.missing(row) == tuning.missing(replace(row, gate="long")) == []
    names = lambda row: [name for name, _ in tuning.missing(row)]  # noqa: E731
    assert names(replace(row, T=16384)) == ["l2norm_fwd_kernel"]
    assert names(replace(row, gate="softplus")) == ["chunk_kda_fwd_kernel_intra_token_parallel"]
    assert names(replace(row, seqlens=UNEVEN)) == [
        "kda_gate_chunk_cumsum_vector_kernel",
        "recompute_w_u_fwd_kda_kernel",
    ]
    assert len(names(replace(row, H=64))) == 7
    assert tuning.seconds(replace(row, H=64)) > 90 > 20 > tuning.seconds(row)


def test_what_ran_is_tuned_and_compiled(tmp_path):
    tuning, row = benchmark_fla.Tuning(tmp_path), Row(1, 8192, 8)
    before = tuning.seconds(row)
    tuning.ran(row)
    assert tuning.missing(row) == [] and tuning.seconds(row) == benchmark_fla.TIMING_SECONDS < before


def test_tuned_kernels_are_named_as_in_fla():
    pytest.importorskip("fla.backends", reason="the kernels are those of FLA 0.6.0 and newer")
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h
    from fla.ops.gla import chunk as gla_chunk
    from fla.ops.kda import chunk_intra, chunk_intra_token_parallel, gate, wy_fast
    from fla.ops.utils import cumsum

    homes = (l2norm, chunk_delta_h, gla_chunk, chunk_intra, chunk_intra_token_parallel, gate, wy_fast, cumsum)
    for name in benchmark_fla.TUNING_SECONDS:
        assert any(hasattr(home, name) for home in homes), name
    for row in table.main_rows():
        assert {name for name, _ in benchmark_fla.kernels_of(row)} <= benchmark_fla.TUNING_SECONDS.keys()


# --- Records and figures ----------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    """write(rows, with_fla) -> path of a record with plausible times."""

    def write(rows, with_fla=True):
        facts = {"gpu": "NVIDIA H200", "date": "2026-01-31", "complete": False}
        results = benchmark.Results(tmp_path / "out" / "benchmark.json", rows, facts, H200_BYTES_PER_SECOND)
        for row, values in results.records.items():
            ours = 0.05 + 1.7 * values["floor_ms"]
            values |= {"path": "hopper", "ours_ms": ours, "fla_ms": 1.2 + 10 * ours if with_fla else None}
        results.write()
        return results.path

    return write


def test_records_have_their_shape(record):
    path = record(table.select("all"))
    records = json.loads(path.read_text())
    assert len(records) == len(table.select("all"))
    for entry in records:
        assert entry.keys() == RECORD_NAMES
        assert entry["gate"] in ("short", "long", "softplus") and entry["call"] in ("k3", "kimi_linear")
        assert entry["seqlens"] is None or sum(entry["seqlens"]) == entry["T"]
        assert (entry["gpu"], entry["date"], entry["portable_ms"]) == ("NVIDIA H200", "2026-01-31", None)
    lines = path.with_suffix(".csv").read_text().splitlines()
    assert set(lines[0].split(",")) == RECORD_NAMES and len(lines) == 1 + len(records)
    assert any(",[4]x2048," in line for line in lines)
    assert json.loads(path.with_suffix(".run.json").read_text())["complete"] is False
    assert {file.name for file in path.parent.iterdir()} == {"benchmark.json", "benchmark.csv", "benchmark.run.json"}


def run_script(folder, *arguments):
    command = [sys.executable, ROOT / "scripts" / "benchmark.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("which, with_fla", [("all", True), ("all", False), ("main", True)])
def test_figures_are_drawn_from_the_json_alone(record, which, with_fla):
    image = pytest.importorskip("matplotlib.image", reason="the extra `benchmark` is not installed")
    path = record(table.select(which), with_fla)
    for suffix in (".csv", ".run.json"):
        path.with_suffix(suffix).unlink()
    done = run_script(path.parent, "--draw", path)
    assert done.returncode == 0, done.stderr
    for name in ("benchmark.png", "benchmark-rows.png"):
        pixels = image.imread(path.with_name(name))
        assert pixels.shape[0] > 400 and pixels.shape[1] > 1000 and pixels.std() > 0.05


def test_figures_show_every_time_and_where_it_comes_from(record):
    pytest.importorskip("matplotlib", reason="the extra `benchmark` is not installed")
    from scripts import benchmark_figures as figures

    records = json.loads(record(table.select("all")).read_text())
    records[0]["ours_ms"] = None  # a row that was not reached
    sweeps, rows = figures.draw_sweeps(records), figures.draw_rows(records)
    try:
        titles = [axis.get_title() for axis in sweeps.axes]
        assert titles == ["H = 8", "H = 32", "T = 8192"]
        fla, ours, floor = sweeps.axes[0].get_lines()
        tokens = [1024 * 2**power for power in range(8)]
        assert list(fla.get_xdata()) == list(ours.get_xdata()) == list(floor.get_xdata()) == tokens
        swept = [x for x in records if (x["gate"], x["call"], x["B"], x["seqlens"]) == ("short", "k3", 1, None)]
        times = {(x["T"], x["H"]): x["ours_ms"] for x in swept}
        assert list(ours.get_ydata()) == [times[count, 8] for count in tokens]
        for figure in (sweeps, rows):
            assert "NVIDIA H200, 2026-01-31" in figure.get_suptitle()
        dots = [line for line in rows.axes[0].get_lines() if line.get_linestyle() == "None"]
        assert len(dots) == len(table.main_rows()) - 1
    finally:
        figures.plt.close("all")


def test_a_record_without_times_has_no_figures(record):
    pytest.importorskip("matplotlib", reason="the extra `benchmark` is not installed")
    from scripts import benchmark_figures

    path = record(table.select("all"))
    records = [entry | {"ours_ms": None} for entry in json.loads(path.read_text())]
    path.write_text(json.dumps(records))
    assert benchmark_figures.draw(path) == []


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "benchmark: no CUDA GPU is visible to torch"
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
