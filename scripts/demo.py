"""Do unchanged Kimi models run on this package, are they right, and how much faster are they?

    python scripts/demo.py [--device auto|cpu|cuda] [--json PATH] [--size real|tiny]

Two models with random weights at the widths of Kimi-Linear-48B (2304 wide, 32 linear heads of 128): transformers' own
`KimiLinearForCausalLM` and FLA's `KDAForCausalLM`. Each one prefills a prompt and generates greedily: with the plugin,
without it, and with the KDA operator replaced by the fp64 recurrence, which judges the other two. The lines that
start with `[fla_kda_backend]` are the plugin's own log (FLA_KDA_LOG=1).

Without the plugin means FLA's Triton kernels on a GPU. On a CPU FLA cannot run at all; there transformers' own
PyTorch code is what the plugin is compared with.

Exit status: 0, or 1 when a call did not run on our path, logits are further from the exact ones than `LOGITS`, or a
greedy token differs where the exact logits leave no doubt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

os.environ.setdefault("FLA_KDA_LOG", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import fla_kda_backend  # noqa: E402
from scripts import demo_models as models  # noqa: E402
from tests.kdakit.run import dispatch_off  # noqa: E402

SEED = 20
OPERATORS = ("chunk_kda", "fused_recurrent_kda")

# Relative L2 error of the logits against the same model with exact KDA. bf16: KDA's o is off by about 4e-3 a layer,
# and each of the roundings to bf16 after it (2e-3 each, a dozen a layer) falls differently; they add in quadrature
# over the layers. fp32: the same with 2^-24.
LOGITS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
# Ours may not be further from the exact logits than the kernels that it replaces, up to chance.
WORSE_THAN_WITHOUT = 1.5
# A greedy token may differ where the two candidates' exact logits are closer than this many root-mean-square errors.
DOUBT = 6.0


@dataclass
class Size:
    """What is run on one kind of device. `kept`: how many of the prompt's last positions have their logits compared."""

    dtype: torch.dtype
    tokens: int
    kept: int
    new_tokens: int
    repeats: int
    kimi_widths: dict
    kimi_layers: list[str]
    kimi_vocabulary: int
    kda_widths: dict
    kda_layers: int
    kda_vocabulary: int


_LINEAR, _FULL = "linear_attention", "full_attention"
SIZES = {
    ("real", "cuda"): Size(
        dtype=torch.bfloat16, tokens=8192, kept=512, new_tokens=32, repeats=5,
        kimi_widths=models.KIMI_LINEAR_WIDTHS, kimi_layers=[_LINEAR, _LINEAR, _LINEAR, _FULL], kimi_vocabulary=163840,
        kda_widths=models.KDA_WIDTHS, kda_layers=3, kda_vocabulary=32000,
    ),
    ("real", "cpu"): Size(
        dtype=torch.float32, tokens=256, kept=256, new_tokens=32, repeats=1,
        kimi_widths=models.KIMI_LINEAR_WIDTHS, kimi_layers=[_LINEAR, _FULL, _LINEAR], kimi_vocabulary=8192,
        kda_widths=models.KDA_WIDTHS, kda_layers=2, kda_vocabulary=8192,
    ),
    ("tiny", "cpu"): Size(
        dtype=torch.float32, tokens=80, kept=80, new_tokens=8, repeats=1,
        kimi_widths=models.TINY_KIMI_LINEAR_WIDTHS, kimi_layers=[_LINEAR, _FULL, _LINEAR], kimi_vocabulary=512,
        kda_widths=models.TINY_KDA_WIDTHS, kda_layers=2, kda_vocabulary=512,
    ),
}  # fmt: skip


@dataclass
class Run:
    """One model with one KDA operator. Errors and agreement are against the run with exact KDA."""

    operator: str  # "plugin", "FLA Triton", "transformers torch", "fp64 recurrence"
    paths: dict[str, dict[str, int]]  # calls by operator and path, as the plugin counted them
    prefill_ms: float | None  # none for the judge: a token at a time in fp64 is no time to compare with
    kda_ms: float | None  # of the prefill, inside KDA; on a GPU only
    error_logits: float | None = None
    tokens_agree: int | None = None
    first_difference: str | None = None


@dataclass
class Report:
    """One model's runs and the verdict on ours."""

    model: str
    dtype: str
    layers: list[str] | int
    prompt_tokens: int
    new_tokens: int
    runs: list[Run] = field(default_factory=list)
    prefill_speedup: float | None = None
    kda_speedup: float | None = None
    fla_alone: str | None = None
    tolerance_logits: float = 0.0
    failures: list[str] = field(default_factory=list)


_started = time.monotonic()


def say(text: str = "") -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {text}" if text else "", flush=True)


# --- Running one model -----------------------------------------------------------------------------


@dataclass
class Outcome:
    run: Run
    logits: torch.Tensor  # [kept, vocabulary], of the prompt's last positions
    tokens: list[int]  # generated
    steps: torch.Tensor  # [new_tokens, vocabulary], the logits that each generated token was chosen from


@torch.no_grad()
def execute(model, generate: Callable, ids: torch.Tensor, size: Size, operator: str, timed: bool = True) -> Outcome:
    """Prefill (timed after one untimed call on a GPU), then generate; whatever KDA operator is in place."""
    on_gpu = ids.device.type == "cuda"
    before = _counts()
    run = Run(operator, {}, None, None)

    def prefill() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=size.kept).logits

    logits = prefill() if on_gpu or not timed else None
    if timed:
        walls, inside = [], []
        for _ in range(size.repeats):
            with _kda_timer(model, on_gpu) as kda:
                start = _now(on_gpu)
                logits = prefill()
                walls.append(1e3 * (_now(on_gpu) - start))
            inside.append(kda())
        run.prefill_ms = sorted(walls)[len(walls) // 2]
        run.kda_ms = sorted(inside)[len(inside) // 2] if on_gpu else None
        say(f"  {operator}: prefill of {ids.shape[1]} tokens in {run.prefill_ms:.1f} ms")
    start = time.monotonic()
    tokens, steps = generate(model, ids, size.new_tokens)
    say(f"  {operator}: {len(tokens)} tokens generated in {time.monotonic() - start:.1f} s")
    after = _counts()
    run.paths = {
        name: {path: after[name][path] - n for path, n in before[name].items() if after[name][path] > n}
        for name in OPERATORS
    }
    return Outcome(run, logits[0], tokens, steps)


def generate_with_transformers(model, ids, new_tokens: int) -> tuple[list[int], torch.Tensor]:
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences[0, ids.shape[1]:].tolist(), torch.cat(output.logits)


def generate_with_cache(model, ids, new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy by hand: transformers 5.24 hands its cache over under a name that FLA 0.6.0's models do not read."""
    tokens, steps, cache, token = [], [], None, ids
    for _ in range(new_tokens):
        output = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        steps.append(output.logits[0, -1:])
        token = steps[-1].argmax(-1, keepdim=True)
        tokens.append(int(token))
    return tokens, torch.cat(steps)


def _counts() -> dict[str, dict[str, int]]:
    return {name: dict(fla_kda_backend.dispatch_counts(name)) for name in OPERATORS}


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _kda_timer(model, on_gpu: bool) -> Iterator[Callable[[], float]]:
    """Time between CUDA events around every prefill call of KDA; yields a function giving their sum in ms."""
    if not on_gpu:
        yield lambda: 0.0
        return
    events = []
    prefill, decode = models.kda_operators(model)

    def recorded(*args, **kwargs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = prefill(*args, **kwargs)
        end.record()
        events.append((start, end))
        return result

    def total() -> float:
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events)

    with models.kda_replaced(model, recorded, decode):
        yield total


# --- Judging ---------------------------------------------------------------------------------------


def judge(outcome: Outcome, exact: Outcome) -> None:
    """Fill in the errors of a run: of the logits, and of the greedy tokens."""
    run = outcome.run
    difference = outcome.logits.double() - exact.logits.double()
    run.error_logits = (difference.norm() / exact.logits.double().norm()).item()
    pairs = zip(outcome.tokens, exact.tokens)
    run.tokens_agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(exact.tokens))
    if run.tokens_agree < len(exact.tokens):
        step = run.tokens_agree
        gap = _gap(outcome, exact)
        run.first_difference = (
            f"token {step}: {outcome.tokens[step]} instead of {exact.tokens[step]}, whose exact logits differ by "
            f"{gap:.2e} (root-mean-square error of the logits: {_rms_error(outcome, exact):.2e})"
        )


def _gap(outcome: Outcome, exact: Outcome) -> float:
    """Between the exact logits of the two candidates where the greedy tokens part."""
    step = outcome.run.tokens_agree
    logits = exact.steps[step].double()
    return abs(logits[exact.tokens[step]] - logits[outcome.tokens[step]]).item()


def _rms_error(outcome: Outcome, exact: Outcome) -> float:
    return (outcome.logits.double() - exact.logits.double()).square().mean().sqrt().item()


def failures_of(ours: Outcome, without: Outcome | None, exact: Outcome, report: Report, device: str) -> list[str]:
    """Everything that is wrong with the run with the plugin, in sentences."""
    failures = []
    ours_only = {"cuda": ("portable", "hopper"), "cpu": ("reference",)}[device]
    kda_layers = report.layers if isinstance(report.layers, int) else report.layers.count(_LINEAR)
    prefill = ours.run.paths["chunk_kda"]
    if not prefill or any(path not in ours_only for path in prefill) or sum(prefill.values()) % kda_layers:
        failures.append(f"chunk_kda took the paths {prefill or 'none'}, not only {' or '.join(ours_only)}")
    decode = ours.run.paths["fused_recurrent_kda"]
    if device == "cpu" and decode != {"reference": kda_layers * (report.new_tokens - 1)}:
        failures.append(f"fused_recurrent_kda took the paths {decode or 'none'}")
    for other in (without, exact):
        if other is not None and any(path in ours_only for path in other.run.paths["chunk_kda"]):
            failures.append(f"the run '{other.run.operator}' called our kernels: nothing was compared")
    error = ours.run.error_logits
    if not exact.logits.isfinite().all() or exact.logits.float().std() < 1e-2:
        failures.append("the exact logits are degenerate: nothing was compared")
    if not error <= report.tolerance_logits:
        failures.append(f"the logits' error {error:.2e} is above {report.tolerance_logits:.0e}")
    if without is not None and not error <= max(
        WORSE_THAN_WITHOUT * without.run.error_logits, 0.1 * report.tolerance_logits
    ):
        failures.append(f"the logits' error {error:.2e} is above that of {without.run.operator}")
    if ours.run.tokens_agree < report.new_tokens and _gap(ours, exact) > DOUBT * _rms_error(ours, exact):
        failures.append(f"greedy tokens differ without doubt: {ours.run.first_difference}")
    return failures


# --- The two models --------------------------------------------------------------------------------


def demonstrate(report: Report, model, generate: Callable, size: Size, vocabulary: int, device: str) -> Report:
    """All runs of one model, their judgement, and a table."""
    random = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, vocabulary, (1, size.tokens), generator=random).to(device)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    say(f"{report.model}: {parameters:.0f} M parameters, {report.dtype}, layers {report.layers}")

    ours = execute(model, generate, ids, size, "plugin")
    without = None
    if device == "cuda":
        with dispatch_off():
            say("  without the plugin FLA tunes its Triton kernels at the first call, which may take minutes")
            without = execute(model, generate, ids, size, "FLA Triton")
    else:
        report.fla_alone = _fla_alone(model, ids)
        say(f"  without the plugin, FLA on this CPU: {report.fla_alone}")
        if models.has_torch_only(model):
            with models.torch_only(model):
                without = execute(model, generate, ids, size, "transformers torch")
    say("  the same model with KDA as the fp64 recurrence, token by token")
    with models.exact(model):
        exact = execute(model, generate, ids, size, "fp64 recurrence", timed=False)

    outcomes = [ours, exact] if without is None else [ours, without, exact]
    for outcome in outcomes:
        judge(outcome, exact)
        report.runs.append(outcome.run)
    if without is not None and device == "cuda":
        report.prefill_speedup = without.run.prefill_ms / ours.run.prefill_ms
        report.kda_speedup = without.run.kda_ms / ours.run.kda_ms
    report.failures = failures_of(ours, without, exact, report, device)
    show(report)
    return report


def _fla_alone(model, ids) -> str:
    """What becomes of a prefill on the CPU when the plugin is off."""
    with dispatch_off(), torch.no_grad():
        try:
            model(ids, use_cache=False)
        except Exception as error:  # whatever Triton raises where it has no driver
            return f"cannot run ({type(error).__name__}: {str(error).splitlines()[0]})"
    return "runs"


def show(report: Report) -> None:
    say()
    print(f"{report.model}, {report.dtype}")
    print(f"  a prompt of {report.prompt_tokens} tokens, {report.new_tokens} generated greedily")
    print(f"  {'KDA operator':<20}{'path':<22}{'prefill ms':>11}{'KDA ms':>9}{'logits error':>14}{'tokens agree':>14}")
    for run in report.runs:
        path = ", ".join(sorted({path for counts in run.paths.values() for path in counts})) or "-"
        cells = (
            f"{run.operator:<20}{path:<22}{_number(run.prefill_ms, '.1f'):>11}{_number(run.kda_ms, '.2f'):>9}"
            f"{_number(run.error_logits, '.2e'):>14}{f'{run.tokens_agree} of {report.new_tokens}':>14}"
        )
        print(f"  {cells}")
        if run.first_difference:
            print(f"    {run.first_difference}")
    if report.prefill_speedup is not None:
        print(f"  speed-up of the prefill {report.prefill_speedup:.2f}x, of KDA inside it {report.kda_speedup:.2f}x")
    if report.fla_alone:
        print(f"  FLA alone: {report.fla_alone}")
    for failure in report.failures:
        print(f"  FAILED: {failure}")
    print(flush=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def kimi_linear_report(size: Size, device: str) -> Report:
    name = "transformers KimiLinearForCausalLM"
    say(f"building {name}")
    model = models.kimi_linear(
        size.kimi_widths, layer_types=size.kimi_layers, vocab_size=size.kimi_vocabulary, device=device,
        dtype=size.dtype, seed=SEED,
    )  # fmt: skip
    report = _report(name, size, size.kimi_layers)
    return demonstrate(report, model, generate_with_transformers, size, size.kimi_vocabulary, device)


def kda_report(size: Size, device: str) -> Report:
    name = "FLA KDAForCausalLM (KimiDeltaAttention)"
    say(f"building {name}")
    if device == "cpu":
        say("  its short convolution, gated norm and SwiGLU are Triton-only: plain PyTorch takes their place on a CPU")
    model = models.fla_kda(
        size.kda_widths, num_layers=size.kda_layers, vocab_size=size.kda_vocabulary, device=device, dtype=size.dtype,
        seed=SEED,
    )  # fmt: skip
    report = _report(name, size, size.kda_layers)
    return demonstrate(report, model, generate_with_cache, size, size.kda_vocabulary, device)


def _report(name: str, size: Size, layers) -> Report:
    dtype = str(size.dtype).removeprefix("torch.")
    return Report(name, dtype, layers, size.tokens, size.new_tokens, tolerance_logits=LOGITS[size.dtype])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "fla_kda_backend": fla_kda_backend.__version__}
    for package in ("torch", "triton", "transformers", "fla-core", "flash-linear-attention"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("real", "tiny"), default="real", help="tiny: checks the demo itself (CPU)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and arguments.size == "real" else "cpu"
    if (arguments.size, device) not in SIZES:
        parser.error(f"--size {arguments.size} is not for --device {device}")
    size = SIZES[arguments.size, device]

    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    say(f"device {gpu or f'CPU, {torch.get_num_threads()} threads'}")
    say(", ".join(f"{package} {version}" for package, version in versions().items()))
    way = None
    if os.environ.get("FLA_KDA_BACKEND") != "0" and os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1":
        import fla.ops.kda  # noqa: F401  the plugin registers itself as soon as FLA's KDA is imported

        way = fla_kda_backend.enable()
    if way is None:
        say("FAILED: the plugin is off; unset FLA_KDA_BACKEND=0 and FLA_DISABLE_BACKEND_DISPATCH=1")
        return 1
    from transformers.utils import logging

    logging.set_verbosity_error()
    say(f"the plugin serves FLA's KDA by way of {way}")
    say()
    with torch.cuda.device(0) if device == "cuda" else nullcontext():
        reports = [kimi_linear_report(size, device), kda_report(size, device)]

    failed = [failure for report in reports for failure in report.failures]
    if arguments.json:
        record = {
            "device": gpu or "CPU",
            "versions": versions(),
            "seed": SEED,
            "size": arguments.size,
            "models": [asdict(report) | {"passed": not report.failures} for report in reports],
            "passed": not failed,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
        say(f"written: {arguments.json}")
    say("FAILED" if failed else "passed: both models ran on this package and agree with the exact recurrence")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
