"""What attention got and gave for some requests, so that one knows where the bits of a request part in a crowd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Row = tuple[int, int, int]  # digests of a token's queries, of the keys and values up to it, and of its output


class Trace:
    """Digests of the rows of requests that were known when they ran alone, by request, layer and position.

    A request is known by the digest of its first page in the first layer, so each has to fill that.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._pages: dict[int, int] = {}  # of this step: the first page of a known request
        self._first_layer = ""
        self._rows: dict[tuple[int, str, int], Row] | None = None
        self._alone: dict[tuple[int, str, int], Row] = {}
        self._learns = False

    def wrap(self, layer_class: Any) -> None:
        """Note the forward passes of a class of layers."""
        inner: Callable[..., Any] = layer_class.forward

        def forward(own: Any, layer: Any, query: Any, key: Any, value: Any, *given: Any, **named: Any) -> Any:
            result = inner(own, layer, query, key, value, *given, **named)
            kv_cache, step = given[:2]
            if self._rows is not None and step is not None:
                self._note(layer.layer_name, query, kv_cache, step, named["output"])
            return result

        layer_class.forward = forward

    def alone(self) -> None:
        """The requests to come run alone, and are to be known."""
        self._known, self._alone, self._learns = set(), {}, True
        self._rows = self._alone

    def crowd(self) -> None:
        """The requests to come run together."""
        self._rows, self._learns = {}, False

    def parted(self) -> dict[str, int]:
        """Rows of both runs; those whose output alone differs; and those whose queries, keys or values do."""
        both = [(self._alone[key], row) for key, row in (self._rows or {}).items() if key in self._alone]
        self._rows = None
        return {
            "rows": len(both),
            "attention": sum(one[:2] == other[:2] and one != other for one, other in both),
            "before": sum(one[:2] != other[:2] for one, other in both),
        }

    def _note(self, layer: str, query: Any, cache: Any, step: Any, out: Any) -> None:
        self._first_layer = self._first_layer or layer
        for part in filter(None, (step.decodes, step.prefills)):
            pages = part.table[:, 0].tolist()
            if layer == self._first_layer:
                self._pages = self._pages if part is step.prefills and step.decodes else {}
                self._pages |= dict(zip(pages, _digests(cache[part.table[:, 0].long()].flatten(1)), strict=True))
                if self._learns:
                    self._known.update(self._pages.values())
            for request, page in enumerate(pages):
                if self._pages.get(page) in self._known:
                    self._note_request(layer, self._pages[page], part, request, query, cache, out)

    def _note_request(self, layer: str, name: int, part: Any, request: int, query: Any, cache: Any, out: Any) -> None:
        length = int(part.lengths[request])
        begin, end = _rows_of(part, request)
        used = part.table[request, : -(-length // cache.shape[2])].long()
        keys = cache[used].transpose(1, 2).flatten(0, 1)[:length].flatten(1)
        ends = _running(keys)[length - (end - begin) :]
        digests = zip(_digests(query[begin:end].flatten(1)), ends, _digests(out[begin:end].flatten(1)), strict=True)
        assert self._rows is not None
        for position, row in enumerate(digests, length - (end - begin)):
            self._rows[name, layer, position] = row


def _rows_of(part: Any, request: int) -> tuple[int, int]:
    if part.sums is None:
        return part.first_row + request * part.max_q_len, part.first_row + (request + 1) * part.max_q_len
    begin, end = part.sums[request : request + 2].tolist()
    return part.first_row + begin, part.first_row + end


def weights(count: int, device: Any) -> Any:
    """Odd numbers of 63 bits, always the same."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 1 << 62, (count,), generator=generator).to(device) | 1


def digests(rows: Any) -> Any:
    """A number of 64 bits for each row ``[rows, values]`` of 16-bit values or of bytes, which wraps."""
    import torch

    bits = rows.contiguous().view(torch.int16).long()
    return (bits * weights(bits.shape[1], bits.device)).sum(1)


def _digests(rows: Any) -> Iterator[int]:
    numbers: list[int] = digests(rows).tolist()
    return iter(numbers)


def _running(rows: Any) -> list[int]:
    """For each row a number of all rows up to it."""
    sums = digests(rows)
    numbers: list[int] = (sums * weights(sums.shape[0], sums.device)).cumsum(0).tolist()
    return numbers
