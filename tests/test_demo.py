"""Does the demo end to end, and does it fail when it should?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.models.kimi_linear", reason="transformers with Kimi-Linear is not installed")
pytest.importorskip("fla.backends", reason="generate on a CPU needs FLA 0.6.0 or newer")

from scripts import demo  # noqa: E402

ROOT = Path(__file__).parent.parent
NEW_TOKENS, VOCABULARY, KDA_LAYERS = 4, 50, 2


def run_demo(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--size", "tiny", *arguments],
        capture_output=True, text=True, timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith("FLA_")} | environment,
    )  # fmt: skip


def test_runs_and_records_what_it_found(tmp_path):
    path = tmp_path / "results" / "demo.json"
    finished = run_demo("--device", "cpu", "--json", str(path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "[fla_kda_backend] chunk_kda -> torch reference B=1 T=80" in finished.stderr
    record = json.loads(path.read_text())
    assert record["passed"] and [model["passed"] for model in record["models"]] == [True, True]
    for model in record["models"]:
        ours = model["runs"][0]
        assert ours["operator"] == "plugin" and set(ours["paths"]["chunk_kda"]) == {"reference"}
        assert 0 < ours["error_logits"] < model["tolerance_logits"]
        assert ours["tokens_agree"] == model["new_tokens"]
        if not torch.cuda.is_available():
            assert model["fla_alone"].startswith("cannot run")


@pytest.mark.parametrize("switch", [{"FLA_KDA_BACKEND": "0"}, {"FLA_DISABLE_BACKEND_DISPATCH": "1"}], ids=str)
def test_fails_when_the_plugin_is_off(switch):
    finished = run_demo("--device", "cpu", **switch)
    assert finished.returncode == 1
    assert "the plugin is off" in finished.stdout


def outcome(operator="plugin", path="reference", noise=0.0, seed=0):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(10, VOCABULARY, generator=random)
    logits = logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    paths = {"chunk_kda": {}, "fused_recurrent_kda": {}}
    if path:
        paths = {"chunk_kda": {path: KDA_LAYERS}, "fused_recurrent_kda": {path: KDA_LAYERS * (NEW_TOKENS - 1)}}
    steps = logits[:NEW_TOKENS].clone()
    run = demo.Run(operator, paths, prefill_ms=1.0, kda_ms=None)
    return demo.Outcome(run, logits, steps.argmax(-1).tolist(), steps)


def failures(ours, without=None, exact=None):
    exact = exact or outcome("fp64 recurrence", path=None)
    report = demo.Report("model", "float32", KDA_LAYERS, 10, NEW_TOKENS, tolerance_logits=1e-4)
    for one in (ours, without):
        if one is not None:
            demo.judge(one, exact)
    return " ".join(demo.failures_of(ours, without, exact, report, "cpu"))


def test_accepts_a_close_run():
    assert failures(outcome(noise=1e-6), outcome("transformers torch", path=None, noise=1e-6, seed=1)) == ""


def test_refuses_another_path():
    assert "took the paths {'triton': 2}" in failures(outcome(path="triton"))
    assert "took the paths none" in failures(outcome(path=None))


def test_refuses_a_comparison_with_itself():
    assert "nothing was compared" in failures(outcome(), without=outcome("transformers torch"))
    assert "nothing was compared" in failures(outcome(), exact=outcome("fp64 recurrence"))


def test_refuses_degenerate_logits():
    exact = outcome("fp64 recurrence", path=None)
    exact.logits = torch.zeros_like(exact.logits)
    assert "degenerate" in failures(outcome(), exact=exact)


@pytest.mark.parametrize("noise", [1e-3, float("nan")])
def test_refuses_an_error_above_the_tolerance(noise):
    assert "is above 1e-04" in failures(outcome(noise=noise))


def test_refuses_to_be_worse_than_what_it_replaces():
    ours, without = outcome(noise=5e-5), outcome("transformers torch", path=None, noise=1e-6, seed=1)
    assert "above that of transformers torch" in failures(ours, without)


def test_refuses_another_greedy_token_unless_the_candidates_are_close():
    ours = outcome(noise=1e-6)
    ours.tokens[2] = int(ours.steps[2].argmin())
    assert "greedy tokens differ without doubt: token 2" in failures(ours)
    exact = outcome("fp64 recurrence", path=None)
    second = int(exact.steps[2].topk(2).indices[1])
    exact.steps[2, second] = exact.steps[2].max() - 1e-6
    ours.tokens[2] = second
    assert failures(ours, exact=exact) == ""
    assert ours.run.tokens_agree == 2 and "token 2" in ours.run.first_difference
