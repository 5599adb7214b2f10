"""A batch of prompt chunks and decodes: our two launches, in turn or beside each other, and two of the peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from decode.cases import Case
from decode.peers import MAKERS, describe
from decode.problem import Pool, Problem

from cubin_runtime.attention import Runtime, plan_paged_decode

from .cases import PrefillCase
from .peers import flashinfer_call
from .problem import PrefillProblem

CHUNKS = PrefillCase("mixed", "4 chunks of 512 of 8192", 128, (512,) * 4, (8192,) * 4, page=64)
DECODES = Case("mixed", "60 x 8192", (8192,) * 60, q_heads=32, peers=("xqa", "fa2"))
# Multiprocessors that the chunks get where both launches run beside each other; the decodes get the others.
SHARES = (64, 80, 96, 108)
BAR = 1.0
Call = Callable[[], Any]


class MixedProblem:
    """The tensors of both, and calls that compute both."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.chunks = PrefillProblem(CHUNKS)
        self.decodes = Problem(DECODES, Pool(DECODES.kv_bytes))
        self.side = torch.cuda.Stream()

    def ours(self, stream: torch.cuda.Stream) -> dict[str, Call]:
        """By how they share the device, for ``stream``, which is current."""
        chunks, decodes = self.chunks.ours(self.runtime), self._decode_call(None, stream)
        calls = {
            "ours, chunks alone": chunks,
            "ours, decodes alone": lambda: decodes(stream.cuda_stream),
            "ours, one after the other": lambda: (chunks(), decodes(stream.cuda_stream)),
            "ours, two streams": self._beside(chunks, decodes),
        }
        facts = self.runtime.driver.device(0)
        for share in SHARES:
            some = replace(facts, multiprocessors=share)
            others = replace(facts, multiprocessors=facts.multiprocessors - share)
            calls[f"ours, {share} multiprocessors for the chunks"] = self._beside(
                self.chunks.ours(self.runtime, device_facts=some), self._decode_call(others, stream)
            )
        return calls

    def plans(self) -> tuple[Any, ...]:
        """The plans of both launches, one after the other."""
        return self.chunks.planned(self.runtime)[0], self._decode_plan(None)

    def peers(self) -> tuple[dict[str, Call], dict[str, str]]:
        """The peers' two launches by their names, and why one has none."""
        calls: dict[str, Call] = {}
        errors: dict[str, str] = {}
        for of_chunks in ("fa3", "fa2"):
            for of_decodes in DECODES.peers:
                name = f"{of_chunks} + {of_decodes}"
                try:
                    first = flashinfer_call(self.chunks, of_chunks)
                    second = MAKERS[of_decodes](self.decodes)[0]
                    first(), second()
                    torch.cuda.synchronize()
                    calls[name] = lambda first=first, second=second: (first(), second())
                except Exception as error:
                    errors[name] = describe(error)
        return calls, errors

    def _decode_call(self, facts: Any, stream: torch.cuda.Stream) -> Callable[[int], None]:
        given, plan = self._decode_tensors(), self._decode_plan(facts)
        workspaces = {handle: plan.prepare(handle) for handle in (stream.cuda_stream, self.side.cuda_stream)}
        return lambda stream: plan.run(*given, workspace=workspaces[stream], stream=stream)

    def _decode_tensors(self) -> tuple[torch.Tensor, ...]:
        p, kv = self.decodes, self.decodes.kv
        return p.q, kv[:, 0], kv[:, 1], p.tables[0], p.lens, p.out

    def _decode_plan(self, facts: Any) -> Any:
        bound = DECODES.longest
        return plan_paged_decode(*self._decode_tensors(), max_seq_len=bound, runtime=self.runtime, device_facts=facts)

    def _beside(self, chunks: Call, decodes: Callable[[int], None]) -> Call:
        def call() -> None:
            self.side.wait_stream(torch.cuda.current_stream())
            decodes(self.side.cuda_stream)
            chunks()
            torch.cuda.current_stream().wait_stream(self.side)

        return call
