"""Which calls of `chunk_kda` might somebody make? Random ones, right and wrong, each a small printable recipe.

    recipe = fuzz.generate(random.Random(7), fuzz.CPU)
    args, kwargs = recipe.build(order)         # order: the positional parameters of the function to be called
    print(recipe)                              # Python that makes the same recipe
    fuzz.shrink(recipe, still_fails)           # the smallest recipe found that still fails

A call begins as a right one, of sizes, dtypes, layouts and options that go together, and then suffers up to three
mishaps: arguments that are missing, surplus, of another size, dtype, type or device, given twice or by an old name.
Everything depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

REQUIRED = ("q", "k", "v", "g", "beta")
FLOATS = ("bfloat16", "float16", "float32", "float64")
LAYOUTS = ("", "transposed", "sliced", "offset", "every-other")
GRAD_MODES = ("grad", "no_grad", "inference")
FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "safe_gate", "disable_recompute", "return_intermediate_states", "state_v_first",
    "transpose_state_layout", "use_graph",
)  # fmt: skip
PLAIN_DEFAULTS = {
    "scale": None, "initial_state": None, "lower_bound": None, "cu_seqlens": None, "cu_seqlens_cpu": None,
    "cp_context": None, "max_num_seqs": None, "chunk_size": 64, "A_log": None, "dt_bias": None,
}  # fmt: skip
SURPLUS = {"head_first": False, "window": 4, "use_qk_l2norm": True, "foo": None, "initial_state_indices": None, "B": 1}


class _Subclass(torch.Tensor):
    """A tensor that is not a plain one."""


def _short(item: Any, prefix: str = "fuzz.") -> str:
    """The Python that makes a dataclass, without the fields that have their defaults."""
    given = []
    for f in fields(item):
        value = getattr(item, f.name)
        if f.name != "keywords" and value == f.default:
            continue
        given.append(f"{f.name}={value!r}")
    return f"{prefix}{type(item).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Tensor:
    """A tensor that a recipe asks for.

    kind: what it holds; "normal", "unit" (rows of length one), "decay" (log-decays in [-4, 0]), "steep" (log-decays,
        some of -80), "step" (in [0, 1)), or "values" (those in `values`).
    layout: "" (contiguous), "transposed" storage, "sliced" out of a wider one, "offset" by one element, "every-other"
        row of a longer one. The values do not depend on it.
    nan_from: rows of dimension 1 from here on are NaN; None for none.
    wrap: "", "parameter" or "subclass". device: "" is the device of the call.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str = "normal"
    values: tuple | None = None
    layout: str = ""
    nan_from: int | None = None
    requires_grad: bool = False
    wrap: str = ""
    device: str = ""
    seed: int = 0

    def __repr__(self) -> str:
        return _short(self)

    def build(self, device: str = "cpu") -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        x = self._content(torch.Generator().manual_seed(self.seed)).to(dtype)
        if self.nan_from is not None and x.is_floating_point() and x.dim() > 1:
            x[:, self.nan_from:] = float("nan")
        x = self._laid_out(x.to(self.device or device))
        if self.wrap == "parameter" and (x.is_floating_point() or x.is_complex()):
            return torch.nn.Parameter(x, requires_grad=self.requires_grad)
        if self.wrap == "subclass":
            x = x.as_subclass(_Subclass)
        if self.requires_grad and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        return x

    def _content(self, random: torch.Generator) -> torch.Tensor:
        if self.kind == "values":
            return torch.tensor(self.values, dtype=torch.float64).reshape(self.shape)
        x = torch.randn(self.shape, generator=random)
        if self.kind == "unit" and x.dim():
            return x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt()
        if self.kind == "decay":
            return -4 * x.sigmoid()
        if self.kind == "steep":
            return torch.where(x > 1, -80.0, -x.sigmoid())
        if self.kind == "step":
            return x.sigmoid()
        return x

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "transposed":
            order = list(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)
        if self.layout == "sliced" and x.dim():
            return torch.cat([x, torch.full_like(x, 3)], dim=-1)[..., : x.shape[-1]]
        if self.layout == "offset":
            storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
            storage[1:] = x.flatten()
            return storage[1:].view(x.shape)
        if self.layout == "every-other" and x.dim() > 1:
            return x.repeat_interleave(2, dim=1)[:, ::2]
        return x


@dataclass(frozen=True)
class Context:
    """Something with the attributes that FLA reads from a `cp_context`."""

    cu_seqlens: Any = None
    cu_seqlens_cpu: Any = None

    def __repr__(self) -> str:
        return _short(self)


@dataclass(frozen=True)
class Recipe:
    """One call and what it is made under.

    keywords: arguments by name: plain values, `Tensor`s and `Context`s.
    positional: how many of them, in the order of the called function, are given by position.
    surplus_positional: how many more are given than the function has. twice: an argument that is given by name although
        it has been given by position.
    """

    keywords: dict[str, Any] = field(default_factory=dict)
    positional: int = 0
    surplus_positional: int = 0
    twice: str = ""
    grad_mode: str = "grad"
    autocast: bool = False
    strict: bool = False

    def __repr__(self) -> str:
        return _short(self)

    def build(self, order: dict[str, Any], device: str = "cpu") -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs). `order` maps the positional parameters to their defaults (those of q to beta do not count).

        Equal tensors are made once for each name: no two arguments share memory.
        """
        named = {name: _built(value, device) for name, value in self.keywords.items()}
        args = []
        names = list(order)
        count = len(names) if self.surplus_positional else min(self.positional, len(names))
        for name in names[:count]:
            if name not in named and name in REQUIRED and not self.surplus_positional:
                break  # what follows cannot be given by position
            args.append(named.pop(name, None if name in REQUIRED else order[name]))
        args += [None] * self.surplus_positional
        if self.twice and self.twice in names[: len(args)]:
            named[self.twice] = args[names.index(self.twice)]
        return tuple(args), named


def _built(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.build(device)
    if isinstance(value, Context):
        return SimpleNamespace(
            cu_seqlens=_built(value.cu_seqlens, device), cu_seqlens_cpu=_built(value.cu_seqlens_cpu, "cpu")
        )
    return value


# --- right calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Domain:
    """From what sizes and dtypes calls are made: what the path under test serves, and some of what it does not."""

    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    second_dtypes: tuple[str, ...]  # of g and beta, beside that of q
    lengths: tuple[int, ...] = (0, 1, 2, 3, 15, 16, 17, 33)
    heads: tuple[int, ...] = (1, 1, 2, 3)
    odd_share: float = 0.1  # of the calls: head dims and dtypes from everywhere


CPU = Domain(head_dims=(1, 2, 5, 8, 16, 33), dtypes=FLOATS, second_dtypes=("float32", "bfloat16"))
# What the CUDA kernels serve.
GPU = Domain((128,), ("bfloat16",), ("float32", "bfloat16"), lengths=(0, 1, 2, 15, 17, 64, 65))
# What a GPU can take in one go, around the borders of 16-token tiles, 64-token chunks and segments of sequences.
LARGE_GPU = replace(GPU, lengths=(1, 7, 16, 63, 64, 65, 127, 200, 500), heads=(1, 2, 3, 4, 8))


def generate(random: Random, domain: Domain, mishaps: bool = True) -> Recipe:
    """A random call, with none to three mishaps unless these are not wanted."""
    recipe = _right(random, domain)
    if not mishaps:
        return recipe
    for _ in range(random.choices((0, 1, 2, 3), weights=(40, 40, 14, 6))[0]):
        recipe = random.choice(MISHAPS)(recipe, random)
    return recipe


def _right(random: Random, domain: Domain) -> Recipe:
    def chance(share: float) -> bool:
        return random.random() < share

    odd = chance(domain.odd_share)
    dtype = random.choice(FLOATS if odd else domain.dtypes)
    K, V = (random.choice((4, 64, 100, 128) if odd else domain.head_dims) for _ in range(2))
    H = random.choice(domain.heads)
    HV = H * random.choice((1, 1, 1, 2, 3))
    packed = chance(0.45)
    lengths = [random.choice(domain.lengths) for _ in range(random.randint(1, 5))]
    B, T = (1, sum(lengths)) if packed else (random.choice((1, 1, 2, 3)), lengths[0])
    N = len(lengths) if packed else B
    uncovered = random.choice((0, 0, 0, 4)) if packed else 0
    T += uncovered
    nan_from = T - uncovered if uncovered and chance(0.7) else None

    def tensor(*shape: int, dtype: str, kind: str = "normal") -> Tensor:
        layout = random.choice(LAYOUTS) if chance(0.2) else ""
        return Tensor(shape, dtype, kind, layout=layout, seed=random.randrange(1000))

    def second() -> str:
        return random.choice(FLOATS if odd else (*domain.second_dtypes, dtype))

    kw: dict[str, Any] = {}
    norm, gate, sigmoid = chance(0.6), chance(0.5), chance(0.5)
    for name in ("q", "k"):
        kw[name] = tensor(B, T, H, K, dtype=dtype, kind="normal" if norm else "unit")
    kw["v"] = tensor(B, T, HV, V, dtype=dtype)
    kw["g"] = tensor(B, T, HV, K, dtype=second(), kind="normal" if gate else random.choice(("decay", "steep")))
    kw["beta"] = tensor(B, T, HV, dtype=second(), kind="normal" if sigmoid else "step")
    if nan_from is not None:
        kw = {name: replace(x, nan_from=nan_from) for name, x in kw.items()}
    if norm:
        kw["use_qk_l2norm_in_kernel"] = True
    if gate:
        kw["use_gate_in_kernel"] = True
        bounded = chance(0.5)
        if not bounded or chance(0.8):
            kw["A_log"] = tensor(*random.choice(((HV,), (HV,), (1, 1, HV, 1), (HV, 1))), dtype=second())
        if chance(0.7):
            kw["dt_bias"] = tensor(*random.choice(((HV * K,), (HV, K))), dtype=second())
        if bounded:
            kw["lower_bound"] = random.choice((-5.0, -5, -0.5, -2.25))
            if chance(0.6):
                kw["safe_gate"] = True
    elif chance(0.1):
        kw["safe_gate"] = True
    if sigmoid:
        kw["use_beta_sigmoid_in_kernel"] = True
        if chance(0.3):
            kw["allow_neg_eigval"] = True
    v_first = chance(0.4)
    if v_first:
        kw[random.choice(("state_v_first", "transpose_state_layout"))] = True
    if chance(0.5):
        kw["initial_state"] = tensor(N, HV, *((V, K) if v_first else (K, V)), dtype="float32")
    if chance(0.6):
        kw["output_final_state"] = True
    if packed:
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        integer = random.choice(("int32", "int64"))
        kw["cu_seqlens"] = Tensor((N + 1,), integer, "values", tuple(borders), layout=random.choice(("", "", "offset")))
        if chance(0.2):
            kw["cu_seqlens_cpu"] = replace(kw["cu_seqlens"], dtype="int64", layout="", device="cpu")
        if chance(0.15):
            kw["use_graph"] = True
            if chance(0.6):
                kw["max_num_seqs"] = N
    if chance(0.2):
        kw["scale"] = random.choice((None, 1, 0.25, -1.0, K**-0.5))
    if chance(0.1):
        kw["disable_recompute"] = True
    if chance(0.1):
        kw["chunk_size"] = random.choice((32, 64))
    mode = random.choices(GRAD_MODES, weights=(2, 1, 1))[0]
    if chance(0.1):
        kw["return_intermediate_states"] = True
        mode = "inference"
        kw.pop("disable_recompute", None)
    if mode == "grad" and chance(0.4):
        for name, value in kw.items():
            if isinstance(value, Tensor) and value.kind != "values" and chance(0.4):
                kw[name] = replace(value, requires_grad=True, wrap=random.choice(("", "", "parameter")))
    for name in FLAGS:
        if chance(0.04):
            kw.setdefault(name, False)
    for name, default in PLAIN_DEFAULTS.items():
        if chance(0.04):
            kw.setdefault(name, default)
    positional = random.choice((0, 0, 0, 5, 5, random.randint(1, 24)))
    return Recipe(kw, positional, grad_mode=mode, autocast=chance(0.04), strict=chance(0.08))


# --- mishaps ----------------------------------------------------------------------------------------------------------


def _with(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, keywords=recipe.keywords | changes)


def _some_tensor(recipe: Recipe, random: Random) -> str | None:
    names = [name for name, value in recipe.keywords.items() if isinstance(value, Tensor)]
    return random.choice(names) if names else None


def _dropped(recipe: Recipe, random: Random) -> Recipe:
    gone = random.choice(list(recipe.keywords)) if recipe.keywords else None
    return replace(recipe, keywords={name: value for name, value in recipe.keywords.items() if name != gone})


def _other_value(recipe: Recipe, random: Random) -> Recipe:
    if not recipe.keywords:
        return recipe
    return _with(recipe, **{random.choice(list(recipe.keywords)): random.choice((None, None, 3, 1.5, "text", []))})


def _surplus(recipe: Recipe, random: Random) -> Recipe:
    name = random.choice(list(SURPLUS))
    return _with(recipe, **{name: SURPLUS[name]})


def _flag(recipe: Recipe, random: Random) -> Recipe:
    values = (True, True, True, True, False, 1, 0, None, "yes", 1.0, Tensor((), "bool", "values", (1,)))
    return _with(recipe, **{random.choice(FLAGS): random.choice(values)})


def _other_size(recipe: Recipe, random: Random) -> Recipe:
    name = _some_tensor(recipe, random)
    if name is None:
        return recipe
    tensor = recipe.keywords[name]
    shape, at = list(tensor.shape), random.randrange(max(1, len(tensor.shape)))
    kind = random.choice(("more", "less", "none", "double", "drop", "add", "swap", "one"))
    if not shape or kind == "add":
        shape.insert(at, 1)
    elif kind == "drop":
        del shape[at]
    elif kind == "swap":
        shape[at], shape[-1] = shape[-1], shape[at]
    else:
        size = shape[at]
        shape[at] = {"more": size + 1, "less": max(0, size - 1), "none": 0, "double": 2 * size, "one": 1}[kind]
    count = 1
    for size in shape:
        count *= size
    values = None if tensor.values is None else (tensor.values * (count + 1))[:count]
    return _with(recipe, **{name: replace(tensor, shape=tuple(shape), values=values)})


def _large_key_dim(recipe: Recipe, random: Random) -> Recipe:
    names = [name for name in ("q", "k", "g") if isinstance(recipe.keywords.get(name), Tensor)]
    resized = {}
    for name in names:
        tensor = recipe.keywords[name]
        resized[name] = replace(tensor, shape=(*tensor.shape[:-1], random.choice((256, 257))))
    return _with(recipe, **resized)


def _other_dtype(recipe: Recipe, random: Random) -> Recipe:
    name = _some_tensor(recipe, random)
    if name is None:
        return recipe
    dtype = random.choice((*FLOATS, "int32", "int64", "int16", "bool", "complex64"))
    return _with(recipe, **{name: replace(recipe.keywords[name], dtype=dtype)})


def _other_device(recipe: Recipe, random: Random) -> Recipe:
    name = _some_tensor(recipe, random)
    return recipe if name is None else _with(recipe, **{name: replace(recipe.keywords[name], device="meta")})


def _other_class(recipe: Recipe, random: Random) -> Recipe:
    name = _some_tensor(recipe, random)
    wrap = random.choice(("parameter", "subclass"))
    return recipe if name is None else _with(recipe, **{name: replace(recipe.keywords[name], wrap=wrap)})


def _both_layout_names(recipe: Recipe, random: Random) -> Recipe:
    new, old = random.choice((True, False)), random.choice((True, False))
    return _with(recipe, state_v_first=new, transpose_state_layout=old)


def _strange_cu_seqlens(recipe: Recipe, random: Random) -> Recipe:
    q = recipe.keywords.get("q")
    T = q.shape[1] if isinstance(q, Tensor) and len(q.shape) > 1 else 4
    borders = random.choice((
        (0, T), (0, T, T), (0, 0), (0,), (), (1, T), (-1, T), (0, T, 1), (0, T + 1), (T, 0), (0, 2**31 - 1),
        (0, T // 2, T),
    ))  # fmt: skip
    dtype = random.choice(("int32", "int64", "int64", "int16", "float32", "bool"))
    count = len(borders)
    shape: tuple = random.choice(((count,), (count,), (count,), (1, count), (count, 1)))
    device = random.choice(("", "", "", "meta"))
    value: Any = Tensor(shape, dtype, "values", borders, device=device)
    name = random.choice(("cu_seqlens", "cu_seqlens", "cu_seqlens", "cu_seqlens_cpu"))
    return _with(recipe, **{name: random.choice((value, value, value, list(borders)))})


def _lying_cu_seqlens(recipe: Recipe, random: Random) -> Recipe:
    """Boundaries of a right shape and dtype that are not those of any sequences."""
    given, q = recipe.keywords.get("cu_seqlens"), recipe.keywords.get("q")
    if not isinstance(given, Tensor) or not isinstance(q, Tensor) or len(q.shape) < 2 or len(given.values) < 2:
        return recipe
    values, at = list(given.values), random.randrange(len(given.values))
    values[at] = random.choice((-1, 1, q.shape[1] + 1, 10**6, values[at] + 1, values[at - 1]))
    return _with(recipe, cu_seqlens=replace(given, values=tuple(values)))


def _gate_parameter_size(recipe: Recipe, random: Random) -> Recipe:
    names = [name for name in ("A_log", "dt_bias") if isinstance(recipe.keywords.get(name), Tensor)]
    if not names:
        return recipe
    name = random.choice(names)
    tensor = recipe.keywords[name]
    other = (max(1, tensor.shape[0] // 2), tensor.shape[0] + 1, 2 * tensor.shape[0], 1)
    return _with(recipe, **{name: replace(tensor, shape=(random.choice(other), *tensor.shape[1:]))})


def _strange_chunk_size(recipe: Recipe, random: Random) -> Recipe:
    return _with(recipe, chunk_size=random.choice((0, 16, 31, 32, 128, 64.0, "64", None, True)))


def _strange_lower_bound(recipe: Recipe, random: Random) -> Recipe:
    tensor = Tensor((), kind="values", values=(-5,))
    values = (None, -5.0001, -6, 0, 0.0, 1.0, float("nan"), float("-inf"), "-5", True, tensor)
    return _with(recipe, lower_bound=random.choice(values))


def _strange_scale(recipe: Recipe, random: Random) -> Recipe:
    tensor = Tensor((), kind="values", values=(0.5,))
    return _with(recipe, scale=random.choice((0, 0.0, True, "1", float("nan"), tensor)))


def _context_parallel(recipe: Recipe, random: Random) -> Recipe:
    given = recipe.keywords.get("cu_seqlens")
    borders = given if isinstance(given, Tensor) else Tensor((2,), "int64", "values", (0, 2))
    context = random.choice((Context(), Context(borders), Context(borders, replace(borders, device="cpu"))))
    changed = _with(recipe, cp_context=context)
    if random.random() < 0.5:
        kept = {name: x for name, x in changed.keywords.items() if name not in ("initial_state", "output_final_state")}
        changed = replace(changed, keywords=kept)
    return changed


def _strange_max_num_seqs(recipe: Recipe, random: Random) -> Recipe:
    count = random.choice((0, 1, 2, 7, 1.0, "3"))
    return _with(recipe, use_graph=random.choice((True, True, False)), max_num_seqs=count)


def _given_twice(recipe: Recipe, random: Random) -> Recipe:
    return replace(recipe, positional=max(5, recipe.positional), twice=random.choice((*REQUIRED, "scale")))


def _too_many(recipe: Recipe, random: Random) -> Recipe:
    return replace(recipe, surplus_positional=random.randint(1, 3))


MISHAPS: tuple[Callable[[Recipe, Random], Recipe], ...] = (
    _dropped, _dropped, _other_value, _surplus, _flag, _flag, _other_size, _other_size, _other_size, _large_key_dim,
    _other_dtype, _other_dtype, _other_device, _other_class, _both_layout_names, _strange_cu_seqlens,
    _strange_cu_seqlens, _lying_cu_seqlens, _gate_parameter_size, _strange_chunk_size, _strange_lower_bound,
    _strange_scale, _context_parallel, _strange_max_num_seqs, _given_twice, _too_many,
)  # fmt: skip


# --- smaller ones -----------------------------------------------------------------------------------------------------


def shrink(recipe: Recipe, still_fails: Callable[[Recipe], bool], most_tries: int = 400) -> Recipe:
    """The smallest recipe found, by simplifying one thing after another, for which `still_fails` is true."""
    tries = 0
    progress = True
    while progress and tries < most_tries:
        progress = False
        for smaller in _simpler(recipe):
            tries += 1
            if still_fails(smaller):
                recipe, progress = smaller, True
                break
            if tries >= most_tries:
                break
    return recipe


def _simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that differ from this one by a single simplification, the boldest first."""
    plain = Recipe(recipe.keywords)
    for f in fields(Recipe):
        if f.name != "keywords" and getattr(recipe, f.name) != getattr(plain, f.name):
            yield replace(recipe, **{f.name: getattr(plain, f.name)})
    for name in recipe.keywords:
        yield replace(recipe, keywords={other: x for other, x in recipe.keywords.items() if other != name})
    tensors = {name: x for name, x in recipe.keywords.items() if isinstance(x, Tensor)}
    # One size wherever it appears: K, V, heads or tokens become smaller together.
    sizes = {size for x in tensors.values() if x.kind != "values" for size in x.shape}
    for size in sorted(sizes, reverse=True):
        for smaller in sorted({1, 2, size // 2, size - 1} - {0, size, -1}):
            if smaller < size:
                resized = {
                    name: replace(x, shape=tuple(smaller if n == size else n for n in x.shape), nan_from=None)
                    for name, x in tensors.items()
                    if x.kind != "values"
                }
                yield replace(recipe, keywords=recipe.keywords | resized)
    for name, x in tensors.items():
        plain_tensor = Tensor(x.shape, x.dtype, x.kind, x.values)
        for f in fields(Tensor):
            if f.name in ("shape", "dtype", "kind", "values"):
                continue
            if getattr(x, f.name) != getattr(plain_tensor, f.name):
                simpler = replace(x, **{f.name: getattr(plain_tensor, f.name)})
                yield replace(recipe, keywords=recipe.keywords | {name: simpler})
        if x.kind == "values" and len(x.values) > 2 and len(x.shape) == 1:
            shorter = replace(x, values=x.values[:-1], shape=(len(x.values) - 1,))
            yield replace(recipe, keywords=recipe.keywords | {name: shorter})
