"""Preparation of layers before an engine's first request: loaded kernels, and scratch that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..attention.operator_plan import OperatorPlan
from ..attention.runtime import Runtime, default_runtime
from ..errors import WorkspaceError
from ..launch.workspace import SemaphoreWorkspace, Workspace, scratch_sizes

if TYPE_CHECKING:
    from ..attention.memory import TensorMemory
    from ..launch.driver import Driver


# Prompts whose requests have at most so many keys are launched for that, not for the model's bound: the fewer keys
# there may be, the fewer parts they are split into, which have to be merged. More bounds would need more fast paths.
_SHORTER_BOUNDS = (1024, 4096)


def prompt_bound(longest: int, bound: int) -> int:
    """The bound on keys that prompts are launched for, of which the longest has so many; ``bound`` is the model's."""
    return next((shorter for shorter in _SHORTER_BOUNDS if longest <= shorter < bound), bound)


def are_few(keys: int) -> bool:
    """Return whether a bound on the keys of a request is so low that they are not split into many parts."""
    return keys <= max(_SHORTER_BOUNDS)


class Limits(NamedTuple):
    """The most that a step of an engine has: requests, query tokens, keys of a request, tokens of one that decodes."""

    requests: int
    tokens: int
    keys: int
    decode_tokens: int = 1

    @property
    def prompt_sizes(self) -> set[tuple[int, int]]:
        """Query tokens and requests of prompts whose launches have the kernels and the most scratch of all.

        The keys of a single token are split, with scratch for any number of parts.
        """
        return {(1, 1), (self.tokens, 1), (self.tokens, min(self.requests, self.tokens))}

    @property
    def prompt_bounds(self) -> set[int]:
        """The bounds on keys that prompts are launched for."""
        return {prompt_bound(longest, self.keys) for longest in (*_SHORTER_BOUNDS, self.keys)}


class SharedScratch:
    """Scratch for launches that follow one another on a stream of a device.

    An engine runs its layers in turn, so one buffer for each of its streams serves all of them: for the stream that was
    current when this was made, and for those that ``serve`` names. Launches on another stream, a captured one among
    them, do not get it.
    """

    def __init__(self, device: int, memory: TensorMemory, driver: Driver) -> None:
        """``memory`` and ``driver`` are those of the runtime that launches."""
        self._device, self._memory, self._driver = device, memory, driver
        self._streams = [memory.current_stream(device)]
        self._sizes = (0, 0)
        self._limits: Limits = Limits(0, 0, 0)
        self._workspaces: dict[int, SemaphoreWorkspace] = {}
        self.lent = 0  # bytes that a launch takes of the engine's memory beside, at most
        self.ready: set[Hashable] = set()  # the work that layers noted as done

    def serve(self, stream: int) -> None:
        """Have scratch for another stream too, on which no graph is captured."""
        if stream in self._streams:
            return
        self._streams.append(stream)
        if self._workspaces:  # of layers that later ones like them do not cover again
            self._workspaces[stream] = self._made_for(stream)

    def serve_current(self) -> None:
        """The same for the current stream."""
        self.serve(self._memory.current_stream(self._device))

    def serves_current(self) -> bool:
        """Return whether launches on the current stream get scratch."""
        return self._memory.current_stream(self._device) in self._workspaces

    def cover(self, plans: Iterable[OperatorPlan], limits: Limits) -> None:
        """Grow to what these plans need, which are those of all launches within ``limits``.

        Later launches get it within the most of all limits: layers, and backends for several numbers of draft tokens,
        differ in theirs. Call it where no work and no graph uses the scratch, such as while the engine measures its
        memory.
        """
        sizes = self._sizes
        for plan in plans:
            zeroed, other = scratch_sizes([region for region in plan.regions if not region.lent])
            sizes = max(sizes[0], zeroed), max(sizes[1], other)
        self._limits = Limits(*map(max, self._limits, limits))
        if sizes != self._sizes or self._workspaces.keys() != {*self._streams}:
            self._sizes = sizes
            self._workspaces = {stream: self._made_for(stream) for stream in self._streams}

    def of_launch(self, requests: int, tokens: int, keys: int) -> SemaphoreWorkspace | None:
        """The scratch for a launch on the current stream; None: there is none for it, or it is over the limits."""
        limits = self._limits
        if requests > limits.requests or tokens > limits.tokens or keys > limits.keys:
            return None
        return self._workspaces.get(self._memory.current_stream(self._device))

    def _made_for(self, stream: int) -> SemaphoreWorkspace:
        # Of the driver, as an engine may discard what torch's allocator gives out while it loads a model.
        driver, (semaphores, scratch) = self._driver, self._sizes
        zeroed = -(-semaphores // 256) * 256
        memory = Workspace.allocate(driver, driver.primary_context(self._device), zeroed + scratch, stream)
        places = (memory.address, zeroed), (memory.address + zeroed, scratch)
        return SemaphoreWorkspace(*places, memory.context, owner=memory)


_SHARED: WeakKeyDictionary[Runtime, dict[int, SharedScratch]] = WeakKeyDictionary()


def shared_scratch(device: int) -> SharedScratch:
    """The scratch of the process's default runtime on a device, for the stream that is current when it is made."""
    runtime = default_runtime()
    of_devices = _SHARED.setdefault(runtime, {})
    if device not in of_devices:
        of_devices[device] = SharedScratch(device, runtime.memory, runtime.driver)
    return of_devices[device]


def scratch_of_layers(device: int) -> SharedScratch:
    """The same while layers are prepared: also for the stream that is current, as engines of a process have others."""
    scratch = shared_scratch(device)
    scratch.serve_current()
    return scratch


def launch(operator: Callable[..., Any], workspace: SemaphoreWorkspace | None, *states: Any, **arguments: Any) -> None:
    """Call ``operator`` with scratch that layers share; a launch that nobody foresaw may need more, and has its own."""
    try:
        operator(*states, **arguments, workspace=workspace)
    except WorkspaceError:
        if workspace is None:
            raise
        operator(*states, **arguments)


def load(plans: Sequence[OperatorPlan]) -> tuple[str, ...]:
    """Load the kernels of plans; their names, each once."""
    names = dict[str, None]()
    for plan in plans:
        kernels = [launch.selection.kernel.name for launch in plan.launches]
        if not names.keys() >= set(kernels):
            plan.preload()
        names |= dict.fromkeys(kernels)
    return tuple(names)
