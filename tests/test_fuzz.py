"""Is the generator of random calls to be relied on? The same calls from the same seed, printable, and made smaller."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kdakit import fuzz

DOMAINS = {"cpu": fuzz.CPU, "gpu": fuzz.GPU, "large-gpu": fuzz.LARGE_GPU}
ORDER = dict.fromkeys(("q", "k", "v", "g", "beta", "scale", "initial_state"))


@pytest.mark.parametrize("domain", DOMAINS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_recipe_depends_on_the_seed_alone_and_prints_as_the_python_that_makes_it(domain, seed):
    recipe = fuzz.generate(Random(seed), DOMAINS[domain])
    again = fuzz.generate(Random(seed), DOMAINS[domain])
    assert repr(again) == repr(recipe)
    assert repr(eval(repr(recipe), {"fuzz": fuzz, "nan": float("nan"), "inf": float("inf")})) == repr(recipe)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), positional=st.integers(0, 9))
def test_a_recipe_builds_the_same_call_twice_and_shares_no_memory(seed, positional):
    recipe = fuzz.Recipe(fuzz.generate(Random(seed), fuzz.CPU, mishaps=False).keywords, positional=positional)
    args, kwargs = recipe.build(ORDER)
    assert len(args) == min(positional, len(ORDER))
    assert dict(zip(ORDER, args)).keys().isdisjoint(kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.numel()]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    again_args, again_kwargs = recipe.build(ORDER)
    for x, y in zip((*args, *kwargs.values()), (*again_args, *again_kwargs.values())):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(), y.nan_to_num()) and x.stride() == y.stride()
        else:
            assert x == y


@pytest.mark.parametrize("layout", fuzz.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1), (5,), ()])
def test_the_layout_of_a_tensor_does_not_change_its_values(layout, shape):
    plain = fuzz.Tensor(shape, seed=3).build()
    laid_out = fuzz.Tensor(shape, layout=layout, seed=3).build()
    assert torch.equal(plain, laid_out)
    if layout and len(shape) > 2:
        assert not laid_out.is_contiguous() or laid_out.storage_offset(), "a layout that is the plain one"


def test_every_mishap_changes_something():
    shape = (1, 4, 2, 8)
    keywords = dict.fromkeys(("q", "k", "v", "g"), fuzz.Tensor(shape)) | dict(beta=fuzz.Tensor(shape[:3]))
    keywords |= dict(cu_seqlens=fuzz.Tensor((3,), "int64", "values", (0, 2, 4)), A_log=fuzz.Tensor((2,)))
    recipe = fuzz.Recipe(keywords)
    for mishap in set(fuzz.MISHAPS):
        changed = {repr(mishap(recipe, Random(seed))) for seed in range(10)} - {repr(recipe)}
        assert changed, mishap.__name__


def test_a_failure_is_made_as_small_as_it_goes():
    recipe = fuzz.generate(Random(5), fuzz.CPU)
    recipe = fuzz.Recipe(recipe.keywords | {"lower_bound": 7.0}, positional=3, grad_mode="inference")

    def fails(candidate: fuzz.Recipe) -> bool:
        g = candidate.keywords.get("g")
        return candidate.keywords.get("lower_bound") == 7.0 and isinstance(g, fuzz.Tensor) and g.shape[-1] >= 2

    assert fails(recipe)
    small = fuzz.shrink(recipe, fails)
    assert fails(small)
    assert small.keywords.keys() == {"g", "lower_bound"} and small.positional == 0 and small.grad_mode == "grad"
    assert max(small.keywords["g"].shape) == 2
