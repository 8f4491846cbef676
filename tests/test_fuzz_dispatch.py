"""Do random calls mean the same with the plugin as without, beside every FLA version? And calls that once did not.

tests/kdakit/differential.py says what has to agree; scripts/fuzz.py makes as many calls as one has time for.
"""

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest

from scripts import fuzz as script
from scripts import gpu_check
from tests.kdakit import differential, fuzz
from tests.kdakit.fla_versions import FLA_VERSIONS, run

# Of each version. With the time that imports take, a minute of one core in all.
CALLS = {"cpu": 100, "pretended": 60, "public": 50}
SEED = "every time the same"
# What has to come of random calls at least, lest a generator gone wrong tests nothing.
OUTCOMES = {
    "cpu": {"served", "left to FLA", "refused by FLA", "refused"},
    "pretended": {"served", "left to FLA", "refused by FLA", "strict"},
    "public": {"served", "refused by FLA", "refused"},
}
T = fuzz.Tensor


def small(**changes) -> dict:
    """Keywords of a small call, with changes; a change to None leaves the keyword out."""
    shape = (1, 2, 1, 4)
    keywords = dict(
        q=T(shape, kind="unit"), k=T(shape, kind="unit", seed=1), v=T(shape, seed=2), g=T(shape, kind="decay"),
        beta=T(shape[:3], kind="step"),
    )  # fmt: skip
    return {name: value for name, value in (keywords | changes).items() if value is not None}


def small_on_a_gpu(**changes) -> dict:
    """The same of a size and in dtypes that the kernels take."""
    keywords = {}
    for name, x in small().items():
        keywords[name] = replace(x, shape=tuple(128 if n == 4 else n for n in x.shape), dtype="bfloat16")
    return keywords | changes


BORDERS = T((2,), "int64", "values", (0, 2))
# Calls that were found by fuzzing to mean something else with the plugin: (place, whether the public function, recipe).
ONCE_WRONG = {
    "a copy of the boundaries that is a list was looked into for its shape": (
        "cpu", False, fuzz.Recipe(small(cu_seqlens=BORDERS, cu_seqlens_cpu=[0]))
    ),
    "the same on a GPU": (
        "pretended", False, fuzz.Recipe(small_on_a_gpu(cu_seqlens=BORDERS, cu_seqlens_cpu=[0, 2]))
    ),
    "a copy of the boundaries without values was read": (
        "cpu", False, fuzz.Recipe(small(cu_seqlens=BORDERS, cu_seqlens_cpu=replace(BORDERS, device="meta")))
    ),
    "a chunk size of 64.0 was served": ("cpu", False, fuzz.Recipe(small(chunk_size=64.0))),
    "boundaries without dimensions, beside a state, got an error of ours instead of FLA's": (
        "cpu", False, fuzz.Recipe(small(cu_seqlens=T((), "int64", "values", (0,)), initial_state=T((1, 1, 4, 4))))
    ),
    "intermediate states were served with disable_recompute=0, which FLA does not take for False": (
        "cpu", False,
        fuzz.Recipe(small(return_intermediate_states=True, disable_recompute=0), grad_mode="inference"),
    ),
    "a flag that is no bool was accepted, and failed in the binding of the operator": (
        "pretended", False, fuzz.Recipe(small_on_a_gpu(use_qk_l2norm_in_kernel="yes"))
    ),
    "values of three dimensions got an error of ours where an older FLA has its own": (
        "cpu", False, fuzz.Recipe(small(v=T((1, 2, 1))))
    ),
    "both names of the state layout, the old one False, passed through the public function": (
        "cpu", True, fuzz.Recipe(small(state_v_first=True, transpose_state_layout=False))
    ),
    "the old name's warning was lost when the public function left a call to FLA": (
        "cpu", True, fuzz.Recipe(small(transpose_state_layout=False, cp_context=fuzz.Context(BORDERS)))
    ),
}  # fmt: skip

IN_ONE_PROCESS = """
import torch
torch.set_num_threads(1)
from tests import test_fuzz_dispatch as tests
from tests.kdakit import differential
report(**{{place: differential.record(place, calls, {seed!r}) for place, calls in {calls!r}.items()}})
report(once_wrong=tests.problems_with_once_wrong())
if {planted}:
    report(planted=tests.find_planted_faults(), failure=tests.program_of_a_failure())
"""


def problems_with_once_wrong() -> dict[str, str | None]:
    """What is wrong with each call of `ONCE_WRONG` beside the installed FLA, None where nothing is."""
    found = {}
    for name, (place, public, recipe) in ONCE_WRONG.items():
        with differential.installed(place) as fla_installed:
            found[name] = differential.verdict_on(fla_installed, recipe, public)[1]
    return found


# Versions run two by two from the first test on: each spends most of its time importing.
_pool = ThreadPoolExecutor(2)


@cache
def _started() -> dict[str, Future]:
    return {version: _pool.submit(_run, version) for version in FLA_VERSIONS}


def _run(version: str) -> dict:
    return run(version, IN_ONE_PROCESS.format(seed=SEED, calls=CALLS, planted=version == "0.6.0"))


@pytest.mark.parametrize("version", FLA_VERSIONS)
def test_random_calls_mean_the_same_with_the_plugin_as_without(version):
    facts = _started()[version].result()
    for place, calls in CALLS.items():
        record = facts[place]
        assert record["fla"] == version
        assert not record["failures"], json.dumps(record["failures"], indent=2)
        assert sum(record["outcomes"].values()) == calls
        assert record["outcomes"].keys() >= OUTCOMES[place], "calls of one kind are missing"


@pytest.mark.parametrize("version", FLA_VERSIONS)
def test_calls_that_once_meant_something_else_do_not_any_more(version):
    problems = _started()[version].result()["once_wrong"]
    assert problems.keys() == ONCE_WRONG.keys()
    assert not any(problems.values()), problems


# --- faults planted into the product, which random calls have to find -------------------------------------------------


def _planted() -> dict:
    """Ways to break the product: (place, a context manager)."""
    from unittest import mock

    import torch

    from fla_kda_backend import dispatch, serve

    def without(group: str, rule: str):
        rules = getattr(dispatch, group)
        kept = tuple(r for r in rules if r.__name__ != rule)
        assert len(kept) == len(rules) - 1, f"{group} has no {rule}"
        return mock.patch.object(dispatch, group, kept)

    def reading(**changes):
        """Served calls are understood differently: each field through its function."""
        runners = {}
        for path, runner in serve.RUNNERS.items():
            runners[path] = lambda call, runner=runner: runner(
                replace(call, **{name: change(getattr(call, name)) for name, change in changes.items()})
            )
        return mock.patch.dict(serve.RUNNERS, runners)

    def around(wrong):
        return mock.patch.dict(serve.RUNNERS, {path: wrong(runner) for path, runner in serve.RUNNERS.items()})

    def writing(runner):
        def run(call):
            result = runner(call)
            with torch.no_grad():
                call.v.mul_(1)
            return result

        return run

    def cutting_the_graph(runner):
        return lambda call: tuple(None if x is None else x.detach() for x in runner(call))

    return {
        "negative eigenvalues forgotten": ("cpu", reading(allow_neg_eigval=lambda given: False)),
        "raw step sizes": ("cpu", reading(use_beta_sigmoid_in_kernel=lambda given: False)),
        "a scale of one": ("cpu", reading(scale=lambda given: 1.0)),
        "layouts confused": ("cpu", reading(state_v_first=lambda given: not given)),
        "no bias of the gate": ("cpu", reading(dt_bias=lambda given: None)),
        "an input written to": ("cpu", around(writing)),
        "gradients cut off": ("cpu", around(cutting_the_graph)),
        "unknown keywords swallowed": ("cpu", without("READABLE", "unknown_keywords")),
        "no check of boundaries": ("cpu", without("CPU_DOES_NOT", "cpu_sequence_values")),
        "no check of states": ("cpu", without("MALFORMED", "state_fits")),
        "no check of FLA's shapes": ("cpu", without("FLA_REFUSES", "fla_shapes")),
        "any dtype on a GPU": ("pretended", without("CUDA_DOES_NOT", "cuda_dtypes")),
        "any head dim on a GPU": ("pretended", without("CUDA_DOES_NOT", "cuda_head_dim")),
        "any bound on a GPU": ("pretended", without("CUDA_DOES_NOT", "cuda_lower_bound")),
        "any device": ("pretended", without("MALFORMED", "one_device")),
        "sizes of gate parameters": ("pretended", without("MALFORMED", "gate_parameters_fit")),
    }


def program_of_a_failure() -> dict[str, str]:
    """A planted fault's failure made small, the program that is printed for it, and what that program ends in."""
    with _planted()["a scale of one"][1]:
        _, failures = differential.run("cpu", CALLS_PER_FAULT, SEED_OF_FAULTS, most_failures=1)
        program = differential.as_python(failures[0])
        try:
            exec(program, {})
            ending = "nothing"
        except differential.Mismatch as mismatch:
            ending = str(mismatch)
    return dict(problem=failures[0].problem, program=program, ending=ending)


# Calls within which each planted fault has to be found. With this seed each is found within 150.
CALLS_PER_FAULT, SEED_OF_FAULTS = 2000, 10


def find_planted_faults() -> dict[str, str | None]:
    """What the first failing call says about each planted fault, None where none was found."""
    found = {}
    for name, (place, fault) in _planted().items():
        with fault:
            _, failures = differential.run(place, CALLS_PER_FAULT, SEED_OF_FAULTS, most_failures=1, make_small=False)
        found[name] = failures[0].problem if failures else None
    return found


def test_random_calls_find_faults_that_are_planted():
    planted = _started()["0.6.0"].result()["planted"]
    assert len(planted) > 10 and not [name for name, problem in planted.items() if problem is None], planted


def test_a_failure_is_printed_as_a_small_program_that_fails_again():
    failure = _started()["0.6.0"].result()["failure"]
    assert failure["ending"] == failure["problem"] and failure["problem"].startswith("o: error")
    # The five inputs of a plain call, and nothing else.
    assert failure["program"].count("fuzz.Tensor(") == 5 and "scale" not in failure["program"]


# --- the script -------------------------------------------------------------------------------------------------------


def run_script(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    return script.main()


def test_the_script_prints_its_seed_and_records_what_came_of_the_calls(monkeypatch, capsys, tmp_path):
    path = tmp_path / "results" / "fuzz.json"
    arguments = ("--calls", "30", "--seed", "7", "--fla", "0.6.0", "--place", "cpu", "--json", str(path))
    assert run_script(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.startswith("seed 7\n")
    record = json.loads(path.read_text())
    (entry,) = record["runs"]
    assert record["seed"] == "7" and record["complete"] and record["counts"]["fuzz calls"] == 30
    assert record["groups"] == {"fuzz/0.6.0 cpu": dict(passed=30, failed=0, skipped=0)}
    assert gpu_check.join({"fuzz.json": record}, gpu_check.source_hash())["counts"]["fuzz calls"] == 30
    assert entry["fla"] == "0.6.0" and entry["place"] == "cpu" and sum(entry["outcomes"].values()) == 30


def test_the_script_shows_failures_and_exits_with_one(monkeypatch, capsys):
    def failing(version, place, calls, seed, jobs):
        failure = dict(number=4, problem="something else", python="print(1)")
        outcomes = dict(failed=1, served=4)
        return dict(place=place, fla=version, calls=5, outcomes=outcomes, seconds=0.1, failures=[failure])

    monkeypatch.setattr(script, "run_beside", failing)
    assert run_script(monkeypatch, "--seed", "7", "--fla", "0.6.0", "--place", "public") == 1
    out = capsys.readouterr().out
    assert "call 4: something else\nprint(1)" in out and "5 calls, 1 failed, seed 7" in out
