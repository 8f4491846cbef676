"""The compiled operators: finding and loading the library, and calling it.

Nothing here decides whether a call is served; that is dispatch.py's work. Importing this module loads nothing.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from .call import Call

_LIBRARY_FOLDER = Path(__file__).parent / "_C"
# The operator reads these inputs, or their rows, in 16-byte pieces.
_ALIGNMENT = 16
# Paths that end in the operator, and the numbers that it knows them by.
KERNELS = {"portable": 0, "hopper": 1}
# Two segments would do the work of a whole sequence one after the other.
MIN_SEGMENTS = 3
MIN_SEGMENTED_TOKENS = 4096
MIN_SEGMENT_TOKENS = 256
# Each turn is one more launch and one more trip of the states through memory.
MAX_TURNS = 6
MIN_TURN_TOKENS = 1024
# Up to so many packed sequences are taken longest first.
MAX_ORDERED_SEQUENCES = 1024


@dataclass(frozen=True)
class LibraryInfo:
    """What the loaded library was built for and with."""

    path: str
    archs: tuple[str, ...]  # such as ("80", "90a")
    cuda: str
    torch: str
    for_racecheck: bool  # slower, and with every order spelt out that NVIDIA's racecheck would not see


def _is_cut_short(library: Path) -> bool:
    """Whether the ELF file ends before the section headers that its header announces: loading it would kill the process."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False

    def number(start: int, end: int) -> int:
        return int.from_bytes(header[start:end], "little")

    return library.stat().st_size < number(40, 48) + number(58, 60) * number(60, 62)


@cache
def _load() -> tuple[LibraryInfo | None, str | None]:
    candidates = sorted(_LIBRARY_FOLDER.glob("*.so"))
    if not candidates:
        note = _LIBRARY_FOLDER / "no_kernels.txt"  # the build's own words
        reason = note.read_text().strip() if note.exists() else "nothing was built"
        return None, f"the package was installed without compiled kernels: {reason}"
    path = str(candidates[0])
    if _is_cut_short(candidates[0]):
        return None, "the compiled library is damaged: its end is missing"
    try:
        torch.ops.load_library(path)
        facts = json.loads(torch.ops.fla_kda_backend.build_info())
        info = LibraryInfo(path, tuple(facts["archs"]), facts["cuda"], facts["torch"], facts["for_racecheck"])
        for operator in ("chunk_kda_fwd", "transpose_tokens"):
            torch.library.register_fake(f"fla_kda_backend::{operator}", lambda *args: None)
    except Exception as error:  # whatever is wrong with the library, calls must still reach Triton
        return None, f"the compiled library does not load: {' '.join(str(error).split())}"
    return info, None


def library() -> LibraryInfo | None:
    """The loaded library, or None; loads it the first time."""
    return _load()[0]


def load_error() -> str | None:
    """One sentence saying why there is no library, or None."""
    return _load()[1]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_segments(heads: int, tokens: int, multiprocessors: int) -> int:
    """How many segments of each sequence the Hopper kernel should run side by side; 1 where it should run them whole.

    Segments need the maps of the inner ones first, two each, so that a call of n segments runs 2n - 3 and then n - 1
    segments a head, each of about 1/n of the chunks, instead of one whole sequence. That pays where both passes fit the
    device at once, and where the segments are long enough to outweigh two more launches and the states that travel
    between them.

    Args:
        heads: sequences x value heads. tokens: of a sequence (their mean in a packed call).
        multiprocessors: of the device.
    """
    if heads == 0 or tokens < MIN_SEGMENTED_TOKENS:
        return 1
    # Two blocks, each for half of V, for the first segment, beside one for each map; and then two for each of the n - 1.
    fitting = multiprocessors // (2 * heads) + 1
    longest = tokens // MIN_SEGMENT_TOKENS
    segments = min(fitting, longest)
    return segments if segments >= MIN_SEGMENTS else 1


def count_turns(heads: int, tokens: int, multiprocessors: int) -> int:
    """In how many turns all heads should have two blocks of the Hopper kernel: 1, at once; 0, never.

    With more than one, every turn runs the next segment of all sequences, with two blocks for as many heads as there are
    multiprocessors to spare: others each turn, and their segments are the longer ones. That pays where the heads fill more
    than half of the device, but not all of it.

    Args:
        heads: sequences x value heads. tokens: of a sequence (their mean in a packed call).
        multiprocessors: of the device.
    """
    spare = multiprocessors - heads
    if heads <= spare:
        return 1
    turns = -(-heads // spare) if spare > 0 else 0
    return turns if turns <= MAX_TURNS and tokens >= turns * MIN_TURN_TOKENS else 0


def _packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or a copy of it where it is not contiguous or not aligned."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The [B, T, heads, K] tensor, or a copy of it where its rows are not contiguous or not aligned."""
    aligned = tensor.data_ptr() % _ALIGNMENT == 0
    if tensor.is_contiguous():
        return tensor if aligned else tensor.clone()
    size = tensor.element_size()
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        aligned = aligned and (length == 1 or stride * size % _ALIGNMENT == 0)
    if aligned and tensor.stride(-1) == 1:
        return tensor
    if tensor.stride(1) == 1 and tensor.dtype == torch.bfloat16:  # as short convolutions over time leave q, k and v
        rows = tensor.new_empty(tensor.shape)
        torch.ops.fla_kda_backend.transpose_tokens(tensor, rows)
        return rows
    return tensor.contiguous()


def _modes(call: Call) -> int:
    """How the operator is to understand its inputs, as csrc/api/chunk_kda_fwd.h says."""
    modes = 0
    if call.use_gate_in_kernel:
        modes += 1 if call.lower_bound is None else 2
    if call.use_beta_sigmoid_in_kernel:
        modes += 8 if call.allow_neg_eigval else 4
    if call.use_qk_l2norm_in_kernel:
        modes += 16
    if call.state_v_first:
        modes += 32
    return modes


def chunk_kda_forward(call: Call, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs an accepted call on the CUDA kernels, on the tensors' device and that device's current stream.

    Args:
        call: a call that the dispatcher accepted: K = V = 128; q, k, v bfloat16; g and beta bfloat16 or float32; no
            gradients.
        path: the kernel that the dispatcher chose, a key of `KERNELS`.

    Returns:
        o [B, T, HV, V] in q's dtype, and final_state float32 [N, HV, K, V] ([N, HV, V, K] if ``call.state_v_first``),
        or None.
    """
    v = call.v
    B, T, HV, V = v.shape
    # Quicker than new_empty, which reads the sizes out of Python.
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    K = call.k.shape[-1]
    N = B if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    segments, turns, scratch, order = 1, 0, None, None
    if path == "hopper":
        multiprocessors, heads = _multiprocessors(v.device), N * HV
        tokens = T if call.cu_seqlens is None else T // max(N, 1)
        turns = count_turns(heads, tokens, multiprocessors)
        if turns == 1:
            segments = count_segments(heads, tokens, multiprocessors)
        if call.cu_seqlens is not None and N > 1 and heads > multiprocessors:
            order = v.new_empty(1 + (N if N <= MAX_ORDERED_SEQUENCES else 0), dtype=torch.int32)
        if segments > 1:
            scratch = v.new_empty((N, segments, HV, 2, V, K), dtype=torch.float32)
        elif turns > 1:
            scratch = v.new_empty((N, HV, V, K), dtype=torch.float32)
    initial_state, final_state = call.initial_state, None
    if call.output_final_state:
        if type(initial_state) is torch.Tensor:  # of the same shape, which is quicker than to give it
            final_state = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        else:
            final_state = v.new_empty((N, HV, V, K) if call.state_v_first else (N, HV, K, V), dtype=torch.float32)
    torch.ops.fla_kda_backend.chunk_kda_fwd(
        _rows(call.q),
        _rows(call.k),
        _rows(v),
        _rows(call.g),
        call.beta,
        _packed(call.A_log),
        _packed(call.dt_bias),
        _packed(initial_state),
        _packed(call.cu_seqlens),
        o,
        final_state,
        call.scale,
        call.lower_bound or 0.0,
        _modes(call),
        KERNELS[path],
        segments,
        turns,
        scratch,
        order,
    )
    return o, final_state
