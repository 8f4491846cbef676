"""Do unchanged models run on a CPU through the plugin, and are their results right?

transformers' own `KimiLinearForCausalLM`, and FLA's `KDAForCausalLM` with its Triton-only modules (short convolution,
gated norm, SwiGLU) in plain PyTorch. FLA alone can run neither here. Every test asserts that our paths served the
calls.
"""

import os

import pytest
import torch

pytest.importorskip("transformers.models.kimi_linear", reason="transformers with Kimi-Linear is not installed")
pytest.importorskip("fla.backends", reason="decode is served with the registries of FLA 0.6.0 and newer only")
if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
    pytest.skip("FLA_DISABLE_BACKEND_DISPATCH=1 keeps every backend away", allow_module_level=True)

import fla_kda_backend  # noqa: E402
from scripts import demo_models as models  # noqa: E402
from tests.kdakit.compare import assert_close, relative_l2  # noqa: E402

VOCABULARY = 211
PROMPT = 80  # above the 64 tokens up to which FLA's layer prefills with its decode operator
NEW_TOKENS = 12

# Two fp32 evaluations of one model: some hundred ulps after a few layers.
FLOAT32_LOGITS = 2e-5
# transformers computes the gates in fp32 whatever the model's dtype; beyond that everything is fp64.
FLOAT64_LOGITS = 1e-10
FLOAT32_GRADIENTS = 1e-4


@pytest.fixture(autouse=True)
def plugin():
    assert fla_kda_backend.enable() is not None
    yield
    fla_kda_backend.enable()


@pytest.fixture(scope="module")
def kimi_linear():
    return models.kimi_linear(
        models.TINY_KIMI_LINEAR_WIDTHS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        vocab_size=VOCABULARY, device="cpu", dtype=torch.float32, seed=0,
    )  # fmt: skip


def prompt(batch=1, tokens=PROMPT):
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


class Served:
    """Counts of the calls inside a `with`, by operator; every one of them must have been the reference's."""

    def __enter__(self):
        self._before = self._counts()
        return self

    def __exit__(self, *_):
        after = self._counts()
        self.calls = {}
        for operator, counts in after.items():
            new = {path: counts[path] - self._before[operator][path] for path in counts}
            assert all(n == 0 for path, n in new.items() if path != "reference"), (operator, new)
            self.calls[operator] = new["reference"]

    @staticmethod
    def _counts():
        return {name: fla_kda_backend.dispatch_counts(name) for name in ("chunk_kda", "fused_recurrent_kda")}


@torch.no_grad()
def test_prefill_of_kimi_linear(kimi_linear):
    ids = prompt()
    with Served() as served:
        logits = kimi_linear(ids).logits
    assert served.calls == {"chunk_kda": 2, "fused_recurrent_kda": 0}
    last = fla_kda_backend.last_dispatch()
    assert (last.path, last.gate, last.T, last.H) == ("reference", "given", PROMPT, 2)
    with Served() as served, models.exact(kimi_linear):
        exact = kimi_linear(ids).logits
    with models.torch_only(kimi_linear):
        theirs = kimi_linear(ids).logits
    assert served.calls["chunk_kda"] == 0  # what we are judged by did not come from us
    assert exact.std() > 0.05
    assert_close(logits, exact, FLOAT32_LOGITS, "logits")
    assert_close(theirs, exact, FLOAT32_LOGITS, "transformers' own logits")


@torch.no_grad()
def test_prefill_in_float64():
    model = models.kimi_linear(
        models.TINY_KIMI_LINEAR_WIDTHS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        vocab_size=VOCABULARY, device="cpu", dtype=torch.float64, seed=1,
    )  # fmt: skip
    model.set_experts_implementation("eager")  # torch has no grouped product in float64
    ids = prompt(tokens=130)
    with Served() as served:
        logits = model(ids).logits
    assert served.calls["chunk_kda"] == 2 and logits.dtype == torch.float64
    with models.exact(model):
        assert_close(logits, model(ids).logits, FLOAT64_LOGITS, "logits")


@torch.no_grad()
def test_generate_with_kimi_linear(kimi_linear):
    ids = prompt()
    kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    with Served() as served:
        tokens = kimi_linear.generate(ids, **kwargs)
    # Two KDA layers: one prefill each, then one decode for every token but the first.
    assert served.calls == {"chunk_kda": 2, "fused_recurrent_kda": 2 * (NEW_TOKENS - 1)}
    assert tokens.shape == (1, PROMPT + NEW_TOKENS)
    for replaced in (models.torch_only, models.exact):
        with replaced(kimi_linear):
            assert torch.equal(tokens, kimi_linear.generate(ids, **kwargs))


@torch.no_grad()
def test_padded_batch_generates_what_each_prompt_does_alone(kimi_linear):
    ids, short = prompt(), prompt(tokens=31)
    padded = torch.cat((torch.zeros(1, PROMPT - 31, dtype=torch.long), short), 1)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, : PROMPT - 31] = 0
    kwargs = dict(max_new_tokens=4, do_sample=False)
    with Served() as served:
        batch = kimi_linear.generate(torch.cat((ids, padded)), attention_mask=mask, **kwargs)
    assert served.calls["chunk_kda"] == 2
    assert torch.equal(batch[0], kimi_linear.generate(ids, **kwargs)[0])
    with models.exact(kimi_linear):
        assert torch.equal(batch, kimi_linear.generate(torch.cat((ids, padded)), attention_mask=mask, **kwargs))


@torch.no_grad()
def test_prefill_in_parts_with_a_cache(kimi_linear):
    ids = prompt(tokens=2 * PROMPT + 1)
    whole = kimi_linear(ids).logits
    cache, parts = None, []
    with Served() as served:
        for part in ids.split([PROMPT, PROMPT, 1], 1):
            output = kimi_linear(part, cache=cache, use_cache=True)
            cache = output.cache
            parts.append(output.logits)
    assert served.calls == {"chunk_kda": 4, "fused_recurrent_kda": 2}
    assert fla_kda_backend.last_dispatch().state == "k_first"
    assert_close(torch.cat(parts, 1), whole, FLOAT32_LOGITS, "logits")


def test_training_step_of_kimi_linear(kimi_linear):
    ids = prompt()

    def gradients():
        kimi_linear.zero_grad()
        kimi_linear(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in kimi_linear.named_parameters() if p.grad is not None}

    with Served() as served:
        ours = gradients()
    assert served.calls["chunk_kda"] == 2
    with models.exact(kimi_linear):
        exact = gradients()
    kimi_linear.zero_grad()
    assert ours.keys() == exact.keys()
    gate = [name for name in ours if name.endswith(("A_log", "dt_bias"))]
    assert len(gate) == 4 and all(ours[name].any() for name in gate)
    for name, gradient in ours.items():
        assert_close(gradient, exact[name], FLOAT32_GRADIENTS, f"gradient of {name}")


def fla_model(**options):
    return models.fla_kda(
        models.TINY_KDA_WIDTHS, num_layers=2, vocab_size=VOCABULARY, device="cpu", dtype=torch.float32, seed=0,
        **options,
    )  # fmt: skip


FLA_OPTIONS = {
    "default": {},
    "neg-eigval": dict(allow_neg_eigval=True),
    "safe-gate": dict(safe_gate=True, lower_bound=-5.0),
    "gva": dict(num_v_heads=4),
}


@pytest.mark.parametrize("options", FLA_OPTIONS.values(), ids=FLA_OPTIONS.keys())
@torch.no_grad()
def test_prefill_and_decode_of_fla_layers(options):
    model, ids = fla_model(**options), prompt()
    with Served() as served:
        output = model(ids, use_cache=True)
        logits, cache = output.logits, output.past_key_values
        token = logits[:, -1:].argmax(-1)
        next_logits = model(token, past_key_values=cache, use_cache=True).logits
    assert served.calls == {"chunk_kda": 2, "fused_recurrent_kda": 2}
    last = fla_kda_backend.last_dispatch()
    assert last.gate == ("bounded" if "lower_bound" in options else "softplus")
    assert last.beta == ("2sigmoid" if "allow_neg_eigval" in options else "sigmoid")
    assert (last.state, last.HV) == ("v_first", options.get("num_v_heads", 2))
    with models.exact(model):
        exact = model(torch.cat((ids, token), 1)).logits
    assert_close(logits, exact[:, :-1], FLOAT32_LOGITS, "logits")
    assert_close(next_logits, exact[:, -1:], FLOAT32_LOGITS, "logits of the decoded token")


@torch.no_grad()
def test_padded_batch_of_fla_layers_is_packed():
    model, ids = fla_model(), prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with Served() as served:
        logits = model(ids, attention_mask=mask).logits
    assert served.calls["chunk_kda"] == 2
    last = fla_kda_backend.last_dispatch()
    assert (last.varlen, last.B, last.T) == (2, 1, 2 * PROMPT - 30)
    with models.exact(model):
        assert_close(logits[0], model(ids[:1]).logits[0], FLOAT32_LOGITS, "logits of the full row")
        assert_close(logits[1, 30:], model(ids[1:, 30:]).logits[0], FLOAT32_LOGITS, "logits of the padded row")


def test_training_step_of_fla_layers():
    model, ids = fla_model().train(), prompt()

    def gradients():
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with Served() as served:
        ours = gradients()
    assert served.calls["chunk_kda"] == 2
    with models.exact(model):
        exact = gradients()
    for name, gradient in ours.items():
        assert_close(gradient, exact[name], FLOAT32_GRADIENTS, f"gradient of {name}")


@torch.no_grad()
def test_without_the_plugin_fla_cannot_run_here(kimi_linear):
    if torch.cuda.is_available():
        pytest.skip("Triton finds a driver on this machine")
    fla_kda_backend.disable()
    with pytest.raises(RuntimeError, match="driver"):
        kimi_linear(prompt())
    fla_kda_backend.enable()
    with Served() as served:
        logits = kimi_linear(prompt()).logits
    assert served.calls["chunk_kda"] == 2 and logits.isfinite().all()


@torch.no_grad()
def test_the_comparison_can_tell_a_wrong_operator(kimi_linear):
    """What the tests above accept is not so loose that a KDA without its gates would pass."""

    def without_gates(q, k, v, g, beta, **keywords):
        return models._exact_kda(q, k, v, torch.zeros_like(g), beta, **keywords)

    ids = prompt()
    with models.exact(kimi_linear):
        exact = kimi_linear(ids).logits
    with models.kda_replaced(kimi_linear, without_gates, without_gates):
        assert relative_l2(kimi_linear(ids).logits, exact) > 100 * FLOAT32_LOGITS
