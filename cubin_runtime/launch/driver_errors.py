"""The one error of a failed driver call, and what is known about each code."""

from __future__ import annotations

from ..errors import DriverError
from .history import LaunchRecord

# Raised by work that ran earlier; the context is unusable afterwards.
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})

_CAUSES = {
    1: "an argument is outside what the driver accepts",
    2: "device memory is exhausted; other processes and caching allocators hold some of it",
    3: "the driver was not initialised in this process (a forked child must not use the parent's CUDA)",
    4: "the process is shutting down and the driver is already gone",
    34: "the libcuda found is the toolkit's stub, not the driver's own library",
    36: "the driver is older than this call",
    46: "another process holds the device exclusively",
    100: "no CUDA device is visible (see CUDA_VISIBLE_DEVICES and whether the container got a device)",
    101: "no such device ordinal",
    200: "the bytes are not a cubin that this driver can read",
    201: "no context is current on this thread, or another one than the handle belongs to",
    209: "the cubin was built for another architecture than the device's",
    222: "the driver is older than the toolkit that built the kernel",
    400: "a handle is stale or belongs to another context",
    500: "the module has no symbol of that name",
    600: "the work is not finished yet",
    700: "a kernel read or wrote memory that is not allocated: a pointer, a page id or a length was wrong",
    701: "the kernel needs more registers or shared memory for this block size than a multiprocessor has",
    702: "a kernel ran longer than the watchdog allows",
    709: "the context was destroyed by other code, or by an earlier fault",
    710: "a device-side assertion failed",
    714: "a kernel overflowed its stack",
    715: "a kernel met an illegal instruction, for instance one that needs another architecture",
    716: "a kernel used a misaligned address: a pointer or stride has less alignment than promised",
    717: "a kernel used an address of the wrong memory space",
    718: "a kernel jumped outside its code",
    719: "a kernel failed without a more specific error",
    720: "a cooperative grid is larger than what can be resident at once",
    721: "a kernel left tensor memory allocated",
    801: "the device or driver does not support this operation",
    802: "the system's fabric manager or driver services are not ready",
    803: "the loaded libcuda and the kernel module differ in version",
    804: "the forward-compatibility libcuda does not support this device",
    900: "this call is not permitted while a stream is capturing",
    901: "an earlier call broke the capture",
    904: "work forked from the capturing stream was not joined",
    906: "the legacy default stream was used while another stream captures",
    908: "the capture was begun on another thread",
    912: "the cluster does not fit the device; above 8 blocks it needs the non-portable attribute",
}


class DriverCallError(DriverError):
    """A driver call returned an error.

    ``call`` is the function, ``code`` the CUresult, ``name`` and ``text`` as the driver reports them,
    ``cause`` the likely cause or "", ``sticky`` whether the fault comes from earlier asynchronous work and the
    context is lost; then ``launches`` are the last ones, newest last, and ``first_seen`` names the call that
    failed first.
    """

    def __init__(
        self,
        call: str,
        code: int,
        name: str,
        text: str,
        launches: tuple[LaunchRecord, ...] = (),
        first_seen: str = "",
    ) -> None:
        self.call = call
        self.code = code
        self.name = name
        self.text = text
        self.cause = _CAUSES.get(code, "")
        self.sticky = code in STICKY
        self.launches = launches
        self.first_seen = first_seen
        super().__init__(self._message())

    def _message(self) -> str:
        said = f"{self.call} returned {self.code} {self.name} ({self.text})"
        cause = f"; likely cause: {self.cause}" if self.cause else ""
        if not self.sticky:
            return said + cause
        seen = f", first seen at {self.first_seen}" if self.first_seen not in ("", self.call) else ""
        out = f"{said}: a fault of earlier asynchronous work{seen}, not of this call{cause}; context is lost"
        if self.launches:
            out += "\nlast launches, newest last:\n" + "\n".join(f"  {line}" for line in self.launches)
        return out


class DriverLibraryError(DriverError):
    """libcuda cannot be opened, or lacks a function; the message says what was tried."""
