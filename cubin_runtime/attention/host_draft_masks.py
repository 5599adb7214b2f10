"""Draft masks of trees on the host, packed by numpy: a word of 64 bits for each query token until the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..tensor import is_torch
from .checks import integer
from .decode_rules import MASK_ELEMENTS, mask_words
from .paged_cache import MAX_QUERIES

if TYPE_CHECKING:
    from numpy import uint16, uint64
    from numpy.typing import NDArray


def is_on_host(tree: Any) -> bool:
    """Return whether ``tree`` is a sequence, a numpy array or a torch tensor of the CPU."""
    if is_torch(tree):
        return bool(tree.device.type == "cpu")
    return isinstance(tree, Sequence) or hasattr(tree, "__array_interface__")


def pack_on_host(parents: Any, allowed: Any, max_q_len: int | None) -> Any:
    """``draft_mask`` of a tree on the host: ``[batch, q_len, 2 * words]``, or ``[tokens, 2 * words]`` where requests
    have query tokens of different number.

    Raises:
        UsageError: a parent does not come before its token, the tree has another shape, or a request has more tokens
            than ``max_q_len`` or 64.
    """
    if parents is not None and allowed is not None:
        raise UsageError("given with parents, expected one of them", argument="allowed")
    packed = _packed(parents, allowed, max_q_len)
    if not is_torch(parents if allowed is None else allowed):
        return packed
    import torch

    return torch.from_numpy(packed)


def _packed(parents: Any, allowed: Any, max_q_len: int | None) -> NDArray[uint16]:
    if allowed is not None:
        array = _array("allowed", allowed, "booleans [batch, q_len, q_len]", 3, "biu")
        bound = _bound(max_q_len, array.shape[1])
        return _halves(_row_words(array), bound)
    requests = parents if isinstance(parents, Sequence) else ()
    lengths = {len(request) for request in requests if isinstance(request, Sequence)}
    if len(lengths) < 2:
        array = _array("parents", parents, "integers [batch, q_len]", 2, "iu")
        bound = _bound(max_q_len, array.shape[1])
        return _halves(_tree_words(array), bound)
    import numpy

    bound = _bound(max_q_len, max(lengths))
    arrays = [_array("parents", [request], "integers", 2, "iu") for request in requests if len(request)]
    return _halves(numpy.concatenate([_tree_words(array)[0] for array in arrays]), bound)


def _array(name: str, tree: Any, form: str, dimensions: int, kinds: str) -> NDArray[Any]:
    import numpy

    try:
        array = numpy.asarray(tree)
    except (RuntimeError, TypeError, ValueError) as error:  # torch raises the first
        raise UsageError(f"got {type(tree).__name__}, expected {form} ({error})", argument=name) from None
    if array.ndim != dimensions or not array.size or array.dtype.kind not in kinds:
        raise UsageError(f"{array.dtype} of shape {array.shape}, expected {form} of 1 or more", argument=name)
    return array


def _bound(max_q_len: int | None, most: int) -> int:
    bound = most if max_q_len is None else integer("max_q_len", max_q_len)
    if not most <= bound <= MAX_QUERIES:
        raise UsageError(
            f"expected {most}, the query tokens of a request, to {MAX_QUERIES}", argument="max_q_len", value=bound
        )
    return bound


def _halves(words: NDArray[uint64], bound: int) -> NDArray[uint16]:
    import numpy

    halves = numpy.ascontiguousarray(words.astype("<u8", copy=False)).view("<u2").reshape(*words.shape, 4)
    return numpy.ascontiguousarray(halves[..., : mask_words(bound) * MASK_ELEMENTS["uint16"]])


def _row_words(allowed: NDArray[Any]) -> NDArray[uint64]:
    import numpy

    batch, rows, columns = allowed.shape
    if rows != columns or (allowed.dtype.kind != "b" and (allowed >> 1 != 0).any()):
        raise UsageError(
            f"{allowed.dtype} of shape {allowed.shape}, expected booleans [batch, q_len, q_len]", argument="allowed"
        )
    padded = numpy.zeros((batch, rows, MAX_QUERIES), dtype=bool)
    padded[..., :columns] = allowed
    return numpy.packbits(padded, bitorder="little").view("<u8").reshape(batch, rows)


def _tree_words(parents: NDArray[Any]) -> NDArray[uint64]:
    """Each token and its ancestors; after round n, 2^n of them are known, the token included, and ``above`` is next."""
    import numpy

    batch, q_len = parents.shape
    columns = parents + 1  # a column in front of the tokens is above all roots, and sees nothing
    if (columns.astype(numpy.uint64) > numpy.arange(q_len, dtype=numpy.uint64)).any():
        wrong = (parents < -1) | (parents >= numpy.arange(q_len))
        request, token = (int(index[0]) for index in wrong.nonzero())
        name = f"parents[{request}][{token}]"
        raise UsageError(f"expected -1 to {token - 1}", argument=name, value=parents[request, token])
    above = numpy.zeros((batch, q_len + 1), dtype=numpy.intp)
    above[:, 1:] = columns
    above += numpy.arange(0, above.size, q_len + 1)[:, None]
    above = above.reshape(-1)
    seen = numpy.zeros((batch, q_len + 1), dtype=numpy.uint64)
    seen[:, 1:] = numpy.uint64(1) << numpy.arange(q_len, dtype=numpy.uint64)
    flat = seen.reshape(-1)
    for _ in range((q_len - 1).bit_length()):
        flat |= flat.take(above)
        above = above.take(above)
    return seen[:, 1:]
