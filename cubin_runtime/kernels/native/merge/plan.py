"""A merge of partial results as a launch plan: grid, and every parameter that does not come with a run."""

from __future__ import annotations

from ....launch.plan import LaunchAttributes
from ....values import dataclass
from ..constants import MERGE_TYPES
from ..launches import KernelFile, NativeLaunch, native_plan
from ..problem import LOG2_E
from .select import MergeSelection, MergeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProblem:
    """A merge; strides in elements: of tokens, parts (of ``v`` and ``s``) and heads. ``lse_base_e``: base e, not 2."""

    shape: MergeShape
    parts: int
    out_dtype: str
    v_strides: tuple[int, int, int]
    s_strides: tuple[int, int, int]
    v_other_strides: tuple[int, int]
    s_other_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    lse_base_e: bool = False
    programmatic_serialization: bool = False

    def values(self) -> dict[str, object]:
        """The fields of the struct that are not pointers."""
        strides: dict[str, object] = {}
        for name in ("v", "s"):
            token, part, head = getattr(self, f"{name}_strides")
            strides |= {f"{name}_token_stride": token, f"{name}_part_stride": part, f"{name}_head_stride": head}
        for name in ("v_other", "s_other", "out", "lse"):
            token, head = getattr(self, f"{name}_strides")
            strides |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
        return {
            **strides,
            "tokens": self.shape.tokens,
            "heads": self.shape.heads,
            "parts": self.parts,
            "units": self.shape.units,
            "lanes_log2": self.shape.lanes.bit_length() - 1,
            "out_type": MERGE_TYPES[self.out_dtype],
            "lse_to_log2": LOG2_E if self.lse_base_e else 1.0,
            "lse_from_log2": 1 / LOG2_E if self.lse_base_e else 1.0,
        }


def merge_launch(selection: MergeSelection, problem: MergeProblem, file: KernelFile) -> NativeLaunch[MergeSelection]:
    """The launch of a merge; a run's values are the tensors' addresses by name."""
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values=problem.values(),
        why=selection,
        numbers=(),
    )
    return NativeLaunch(selection, plan, ())
