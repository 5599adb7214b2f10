"""Packing draft masks as a launch plan: grid, and every parameter that does not come with a run."""

from __future__ import annotations

from ....launch.plan import LaunchAttributes
from ....values import dataclass
from ..launches import STATUS, KernelFile, NativeLaunch, native_plan
from .select import DraftMaskSelection, DraftMaskShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMaskProblem:
    """A packing of masks; ``parents_stride`` in elements between tokens, ``allowed_strides`` in bytes between tokens
    and between columns.
    """

    shape: DraftMaskShape
    tokens: int
    words: int
    parents_stride: int = 0
    allowed_strides: tuple[int, int] = (0, 0)
    programmatic_serialization: bool = False

    def values(self) -> dict[str, object]:
        """The fields of the struct that are not pointers."""
        return {
            "parents_stride": self.parents_stride,
            "allowed_token_stride": self.allowed_strides[0],
            "allowed_column_stride": self.allowed_strides[1],
            "tokens": self.tokens,
            "q_len": self.shape.q_len,
            "words": self.words,
        }


def draft_mask_launch(
    selection: DraftMaskSelection, problem: DraftMaskProblem, file: KernelFile
) -> NativeLaunch[DraftMaskSelection]:
    """The launch; a run's values are the tensors' addresses by name, and that of the status word."""
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem.shape),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values=problem.values(),
        regions=(STATUS,),
        why=selection,
        numbers=(),
    )
    return NativeLaunch(selection, plan, (STATUS,))
