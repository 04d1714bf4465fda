"""Hardware whose readings a test sets, and what builds such readings."""

from __future__ import annotations

from collections.abc import Callable

from gpumemwidget.model.devices import HOST, BytesByDevice, Reading


def gpu(
    allocated: int | None,
    *,
    reserved: int | None = None,
    peak: int | None = None,
    device: str = "cuda:0",
    retries: int | None = 0,
    ooms: int | None = 0,
) -> Reading:
    """A GPU's reading; *reserved* and the peaks are as *allocated* unless said otherwise."""
    reserved = allocated if reserved is None else reserved
    return Reading(
        device,
        allocated,
        reserved,
        allocated if peak is None else peak,
        reserved if peak is None else max(peak, reserved or 0),
        "exact",
        retries,
        ooms,
    )


def host(allocated: int | None, *, reserved: int | None = None, peak: int | None = None) -> Reading:
    """The host's reading; it counts neither retries nor OOMs."""
    return gpu(allocated, reserved=reserved, peak=peak, device=HOST, retries=None, ooms=None)


class ScriptedHardware:
    """Answers with ``readings``, or raises ``failure`` while there is one.

    ``on_ask`` is called with the method's name before each answer.
    """

    def __init__(self, *readings: Reading) -> None:
        self.readings = readings
        self.failure: BaseException | None = None
        self.asked: list[str] = []
        self.on_ask: Callable[[str], None] | None = None
        #: What the driver lists for this process on cuda:0; whether other libraries may be there.
        self.own_bytes: int | None = None
        self.has_others = False

    def read(self) -> tuple[Reading, ...]:
        return self._answer("read")

    def start_span(self) -> tuple[Reading, ...]:
        return self._answer("start_span")

    def read_exact(self) -> tuple[Reading, ...]:
        return self._answer("read_exact")

    def read_own_uses(self) -> BytesByDevice:
        return () if self.own_bytes is None else (("cuda:0", self.own_bytes),)

    def has_other_libraries(self) -> bool:
        return self.has_others

    def close(self) -> None:
        self.asked.append("close")

    def _answer(self, method: str) -> tuple[Reading, ...]:
        self.asked.append(method)
        if self.on_ask is not None:
            self.on_ask(method)
        if self.failure is not None:
            raise self.failure
        return self.readings
