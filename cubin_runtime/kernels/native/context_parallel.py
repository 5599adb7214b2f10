"""The keys of a request that a rank holds with context parallelism, and the fields of a struct that tell a kernel."""

from __future__ import annotations

from ...launch.fastmoddiv import FastModDiv
from ...launch.structs import Field
from ...values import dataclass

GLOBAL_LENS_FIELD = Field(
    "global_seq_lens",
    "ptr",
    "int32 [batch], keys of each request on all ranks, of which seq_lens counts this rank's; null: it has all",
)
DEALING_FIELDS = (
    Field("cp_round", "FastModDiv", "keys dealt to all ranks in a round, at least 2; used with global_seq_lens"),
    Field("cp_begin", "int32", "the first key of a round that is this rank's; likewise"),
    Field("cp_interleave", "int32", "keys of a round that are this rank's; likewise"),
)


@dataclass(frozen=True, slots=True)
class Dealing:
    """Keys are dealt to ``world`` ranks in rounds, ``interleave`` neighbouring keys to each; ``rank`` is this one."""

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def values(self) -> dict[str, object]:
        """The fields of a struct."""
        return {
            "cp_round": FastModDiv.of(self.world * self.interleave),
            "cp_begin": self.rank * self.interleave,
            "cp_interleave": self.interleave,
        }
