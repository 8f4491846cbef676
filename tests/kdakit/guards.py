"""Does a call stay within its memory? Inputs and outputs between margins that hold NaN, compared afterwards.

    inputs = guards.guard_all(arguments, offset=1)  # copies between margins, one element after an aligned address
    with guards.GuardedOutputs() as outputs:        # what is allocated meanwhile lies between margins, and is NaN
        o, state = run(inputs.tensors)
    inputs.check(), outputs.check()

A read outside shows as NaN in a result, a write outside as a changed margin, a write to an input as a changed input.
"""

from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode

# More than the largest tile that a kernel reads or writes at once, 128 x 128 floats.
MARGIN_BYTES = 1 << 17
# NaN in every floating-point format, -1 in every integer one.
PATTERN = 0xFF
_ALLOCATES = {torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided}


@dataclass
class Guarded:
    """A tensor between two margins of one buffer of bytes."""

    name: str
    tensor: torch.Tensor
    buffer: torch.Tensor
    start: int
    stop: int

    @classmethod
    def like(cls, name: str, tensor: torch.Tensor, offset: int = 0) -> "Guarded":
        """Room for a dense tensor of this shape and these strides, `offset` elements after an aligned address."""
        size = tensor.numel() * tensor.element_size()
        start = MARGIN_BYTES + offset * tensor.element_size()
        buffer = torch.full((start + size + MARGIN_BYTES,), PATTERN, dtype=torch.uint8, device=tensor.device)
        # A view of bytes as larger elements needs a multiple of them.
        whole = buffer[: buffer.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        view = whole.as_strided(tensor.shape, tensor.stride(), start // tensor.element_size())
        return cls(name, view, buffer, start, start + size)

    def margins_are_whole(self) -> bool:
        return bool((self.buffer[: self.start] == PATTERN).all() and (self.buffer[self.stop :] == PATTERN).all())


@dataclass
class GuardedInputs:
    """The arguments of a call, every tensor of them copied between margins."""

    tensors: dict
    guarded: list[Guarded] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)

    def check(self) -> None:
        """Fail when anything has been written to, in an input or beside it."""
        pairs = zip(self.guarded, self.before, strict=True)
        changed = [one.name for one, before in pairs if not torch.equal(one.buffer, before)]
        assert not changed, f"written to, or beside: {changed}"


def guard_all(arguments: dict, offset: int = 0) -> GuardedInputs:
    """The same arguments with dense copies of the tensors, each `offset` elements after an aligned address."""
    inputs = GuardedInputs(dict(arguments))
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        one = Guarded.like(name, value.contiguous(), offset)
        one.tensor.copy_(value)
        inputs.tensors[name] = one.tensor
        inputs.guarded.append(one)
        inputs.before.append(one.buffer.clone())
    return inputs


class GuardedOutputs(TorchFunctionMode):
    """Inside, memory that is allocated without being initialised lies between margins and starts as NaN."""

    def __init__(self):
        super().__init__()
        self.guarded: list[Guarded] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in _ALLOCATES or result.numel() == 0 or not result.is_contiguous():
            return result
        self.guarded.append(Guarded.like(f"output {len(self.guarded)}", result))
        return self.guarded[-1].tensor

    def check(self) -> None:
        """Fail when a margin has been written to, or when nothing was allocated at all."""
        assert self.guarded, "no output was allocated under guard"
        changed = [one for one in self.guarded if not one.margins_are_whole()]
        written = [f"{one.name} {list(one.tensor.shape)}" for one in changed]
        assert not written, f"written beside: {written}"
