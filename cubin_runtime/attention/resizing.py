"""The launches of calls that differ from one in numbers of requests and query tokens alone, planned in little time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from ..errors import UsageError
from ..kernels.native.launches import NativeLaunch
from .attention_operator import AttentionCall
from .operator import Resizer
from .paged_cache import KV_SCALES

ProblemT = TypeVar("ProblemT")
SelectionsT = TypeVar("SelectionsT", bound=Sequence[Any])
Launches = Sequence[NativeLaunch[Any]]
# A first dimension: so many for each query token, for each request, and in all.
_Count = tuple[int, int, int]

_ROWS = ("q", "q_rope", "out", "lse")  # of each token where their number differs, else of each request
_OF_REQUESTS = ("page_table", "seq_lens", "global_seq_lens")
_WRITTEN = ("out", "lse")


class Sizes(TypedDict):
    """The fields of problems and shapes that are sizes; ``q_len`` is a bound on a request's tokens, or their number."""

    batch: int
    tokens: int
    q_len: int


def with_two_requests(call: AttentionCall, check: Callable[[Any], None]) -> AttentionCall | None:
    """The call with two requests over pages, whose strides are those of any number; None: ``check`` refuses it, or more
    tokens could share addresses.

    Strides between the tokens, or requests, of a call that has one are never used, and may be any.
    """
    written = [call.tensors[name].strides for name in _WRITTEN if name in call.tensors]
    if any(max(strides) > strides[0] for strides in written):
        return None
    tokens = 2 if call.ragged else 2 * call.q_len
    sizes = {name: _size(count, tokens, 2) for name, count in _counts(call).items()}
    other = AttentionCall(call.tensors.resized(sizes), call.options)
    try:
        check(other)
    except UsageError:
        return None
    return other


def resizer_of(
    call: AttentionCall,
    fits: Callable[[Sizes], bool],
    select: Callable[[Sizes], tuple[SelectionsT, ProblemT]],
    plan: Callable[[SelectionsT, ProblemT], Launches],
    resize: Callable[[Launches, SelectionsT, ProblemT], Launches | None],
) -> Resizer:
    """The resizer for calls like one of ``with_two_requests``.

    Args:
        call: its tensors.
        fits: whether an operator takes sizes that fit each other.
        select: the selections and the problem of these sizes.
        plan: their launches.
        resize: the same made of those of other sizes with the same kernels; None: it has to be ``plan``.
    """
    counts, ragged, q_len = tuple(_counts(call).items()), call.ragged, call.q_len
    scales = [call.tensors[name].shape for name in KV_SCALES if name in call.tensors]
    least = 2 if (2, 1) in scales else 1  # the only scale of a call has no strides
    kept = dict[tuple[str, ...], Launches]()

    def resized(first: Mapping[str, int]) -> Launches | None:
        batch = first["seq_lens"]
        tokens = first["q"] if ragged else batch * q_len
        if [name for name, count in counts if first[name] != _size(count, tokens, batch)]:
            return None
        sizes = Sizes(batch=batch, tokens=tokens, q_len=first.get("max_q_len", tokens) if ragged else q_len)
        if batch < least or not fits(sizes):
            return None
        selections, problem = select(sizes)
        kernels = tuple([selection.kernel.symbol for selection in selections])
        launches = resize(kept[kernels], selections, problem) if kernels in kept else None
        if launches is None:
            launches = kept[kernels] = plan(selections, problem)
        return launches

    return resized


def _size(count: _Count, tokens: int, batch: int) -> int:
    of_token, of_request, fixed = count
    return of_token * tokens + of_request * batch + fixed


def _counts(call: AttentionCall) -> dict[str, _Count]:
    """The unit of each first dimension; those that are neither tokens nor requests stay as they are."""
    tensors = call.tensors
    of_rows = (1, 0, 0) if call.ragged else (0, 1, 0)
    counts = {
        **dict.fromkeys(_ROWS, of_rows),
        **dict.fromkeys(_OF_REQUESTS, (0, 1, 0)),
        "q_cu_seq_lens": (0, 1, 1),
        "mask": (0, 1, 0) if "mask" in tensors and len(tensors["mask"].shape) == 3 else (1, 0, 0),
        **{name: (0, 1, 0) for name in KV_SCALES if name in tensors and len(tensors[name].shape) == 2},
    }
    return {name: counts.get(name, (0, 0, size)) for name, size in tensors.sized.items()}
