"""Check that memory does not grow from step to step or from end to end; hold tests to limits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from gpumemwidget.backends.hardware import Hardware, keep_hardware
from gpumemwidget.backends.hooks import OptimizerStepHook, find_torch
from gpumemwidget.errors import BadInputError, GpuMemError, name_type, read_first_line
from gpumemwidget.leaks.survey import Survey, find_gains, make_holders, take_survey
from gpumemwidget.model.devices import HOST, check_device
from gpumemwidget.model.leaks import Leak
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.remote.writer.program import ProgramShell
from gpumemwidget.report.render.wording import count
from gpumemwidget.session.session import borrow_plain_hardware, find_session
from gpumemwidget.units import parse_bytes

if TYPE_CHECKING:
    import pytest

#: Seconds that the search for the holders of what has grown may take: the check has failed then.
#: And those of the look at who holds what before, which each check with steps takes.
_SURVEY_S, _LOOK_S = 10.0, 1.0
#: Maximum number of holders that are named.
_MAX_HOLDERS = 3

_T = TypeVar("_T")


def parse_allowed(amount: object) -> int:
    """Return an amount of memory that is allowed, in bytes.

    Raises:
        BadInputError: it is neither a number of bytes nor text such as ``"1MiB"``.
    """
    if type(amount) is str:
        return parse_bytes(amount)
    if type(amount) is not int or amount < 0:
        what = amount if type(amount) is int else f"of type {name_type(amount)}"
        raise BadInputError(
            f"a limit can't be {what}: give bytes as an int, 0 or more, or text as in '1MiB'"
        )
    return amount


def check_warmups(warmups: object) -> int:
    """Return the number of warm-ups.

    Raises:
        BadInputError: it is no whole number, or negative.
    """
    if type(warmups) is not int or warmups < 0:
        what = warmups if type(warmups) is int else f"a value of type {name_type(warmups)}"
        raise BadInputError(f"warmups must be a number of steps, 0 or more, not {what}")
    return warmups


@contextmanager
def assert_no_growth(limit: int | str, *, warmups: int, device: str | None) -> Iterator[None]:
    """Raise an ``AssertionError`` if a block leaves more; see ``gpumemwidget.assert_no_growth``."""
    allowed_bytes = parse_allowed(limit)
    with following_growth(allowed_bytes, warmups=check_warmups(warmups), device=device) as growth:
        yield
        excess = growth.describe_excess()
        if excess is not None:
            raise AssertionError(excess)


@contextmanager
def following_growth(
    limit_bytes: int, *, warmups: int = 0, device: str | None = None, counts_steps: bool = True
) -> Iterator[BlockGrowth]:
    """Yield the growth of memory in the ``with`` block, to be asked at its end.

    Args:
        limit_bytes: the growth that is allowed.
        warmups: number of steps that do not count.
        device: the device that counts; ``None``: each GPU in use, or else the host.
        counts_steps: compare the ends of steps, if the block makes some.

    Raises:
        BadInputError: there is no such device.
    """
    session = find_session()
    with ExitStack() as stack:
        if session is None:
            hardware = stack.enter_context(borrow_plain_hardware())
        else:
            hardware = session.hardware
        check_device(device, [info.device for info in hardware.list_all_devices()])
        growth = BlockGrowth(hardware, device, limit_bytes, warmups, counts_steps=counts_steps)
        if counts_steps:
            stack.enter_context(growth.counting_steps())
        yield growth


class BlockGrowth:
    """The memory that a block adds: from its beginning on, or from the end of one of its steps."""

    def __init__(
        self,
        hardware: Hardware,
        device: str | None,
        limit_bytes: int,
        warmups: int,
        *,
        counts_steps: bool,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._warmups = warmups
        self._n_steps = 0
        self._hardware = hardware
        self._device = device
        self._thread_id = threading.get_ident()
        self._has_loop = False
        #: The survey after the warm-ups, if steps are counted.
        self._survey = _look() if counts_steps and not warmups else None
        self._begin = self._first = self._last = self._read_collected()

    # -- Steps -------------------------------------------------------------------------------------

    @contextmanager
    def counting_steps(self) -> Iterator[None]:
        """Count optimizers' steps and those of watched loops, in the ``with`` block."""
        hook = OptimizerStepHook(self._end_optimizer_step)
        hook.open()
        _counting.append(self)
        try:
            yield
        finally:
            _counting.remove(self)
            hook.close()

    @contextmanager
    def watch_loop(self) -> Iterator[Callable[[], None]]:
        """Yield what ends a step of a watched loop. With the first loop optimizers' steps go."""
        if not self._has_loop and self._is_own_thread():
            self._has_loop = True
            self._n_steps = 0
            self._first = self._last = self._begin
        yield self._end_step

    def _end_optimizer_step(self, _optimizer: object) -> None:
        if not self._has_loop:
            self._end_step()

    def _end_step(self) -> None:
        if not self._is_own_thread():
            return
        self._n_steps += 1
        if self._n_steps == self._warmups:
            self._survey = _look()
            self._first = self._read_collected()
        elif self._n_steps > self._warmups:
            self._last = self._read()
            if max(self._subtract_first().values()) > self._limit_bytes:
                # What waits for the collector now can't be distinguished later from what the code
                # behind the loop leaves to it.
                self._last = self._read_collected()

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread_id

    # -- Growth ------------------------------------------------------------------------------------

    def describe_excess(self) -> str | None:
        """Return the growth until now and who holds it, in sentences; ``None`` within the limit.

        Raises:
            BadInputError: all steps were warm-up, or nobody knows what is in use.
        """
        if not self._n_steps:
            self._last = self._read_collected()
        elif self._n_steps <= self._warmups:
            raise BadInputError(
                f"nothing was compared: the block made {count(self._n_steps, 'step')}, which "
                f"warmups={self._warmups} leaves out; make more steps, or give fewer warmups"
            )
        growth = self._subtract_first()
        device = max(growth, key=lambda name: growth[name])
        if growth[device] <= self._limit_bytes:
            return None
        from gpumemwidget.report.leaks import describe_growth  # noqa: PLC0415 - when it is used

        n_counted = max(0, self._n_steps - self._warmups)
        return describe_growth(
            device,
            growth[device],
            self._limit_bytes,
            n_steps=n_counted,
            n_warmups=self._warmups,
            leak=self._find_leak(device, n_counted, growth[device]) if n_counted else None,
            holders=list_holders(device),
        )

    def _subtract_first(self) -> dict[str, int]:
        """Return by how many bytes each device has grown since the first level that counts."""
        return {name: n_bytes - self._first.get(name, 0) for name, n_bytes in self._last.items()}

    def _find_leak(self, device: str, n_counted: int, growth_bytes: int) -> Leak | None:
        """Return the holder that has gained the most since the warm-ups, a tensor from each step.

        An autograd graph goes first: the tensors that lead to it may be meant to be kept.
        """
        gains = find_gains(self._survey, _look(), device, growth_bytes)
        gains = [gain for gain in gains if gain.is_of_most(n_counted)]
        if not gains:
            return None
        gain = max(gains, key=lambda gain: (gain.group.in_graph, gain.n_bytes))
        return Leak(
            device=device,
            unit="step",
            each_bytes=growth_bytes // n_counted,
            n_seen=n_counted,
            holders=make_holders([gain], n_counted),
            since=self._warmups,
        )

    def _read_collected(self) -> dict[str, int]:
        gc.collect()
        return self._read()

    def _read(self) -> dict[str, int]:
        """Return the bytes in use on each device that counts: one at least."""
        if self._device != HOST:
            readings = [reading for reading in self._hardware.read() if reading.device != HOST]
            in_use = {reading.device: reading.allocated_bytes or 0 for reading in readings}
            if self._device is not None:
                return {self._device: in_use.get(self._device, 0)}
            if in_use:
                return in_use
        counter = self._hardware.find_host_counter()
        if counter is None:
            raise BadInputError(
                "no GPU is in use, and this process's malloc does not say what it has handed "
                "out: use a GPU, or another malloc"
            )
        return {HOST: counter()}


# -- Who holds it ----------------------------------------------------------------------------------


def list_holders(device: str) -> list[tuple[str, int]]:
    """Return the paths and bytes of what holds most on a device now, biggest first."""
    survey = take_survey(_find_shell(), budget_s=_SURVEY_S, depth="holders")
    groups = () if survey is None else survey.groups.values()
    found = [(group.holder, group.n_bytes) for group in groups if group.device == device]
    return sorted(found, key=lambda pair: -pair[1])[:_MAX_HOLDERS]


def _look() -> Survey | None:
    return take_survey(_find_shell(), budget_s=_LOOK_S, depth="names")


def _find_shell() -> Shell:
    session = find_session()
    return ProgramShell() if session is None else session.shell


# -- Watched loops ---------------------------------------------------------------------------------

#: The blocks that count steps now, outer ones first.
_counting: list[BlockGrowth] = []


class WatchedLoop(Generic[_T]):
    """The items of a loop whose steps are marked: the end of each item's turn is that of a step."""

    def __init__(self, items: Iterable[_T]) -> None:
        self._items = items

    def __len__(self) -> int:
        n_items: int = len(self._items)  # type: ignore[arg-type] # a loop without one has none here
        return n_items

    def __iter__(self) -> Iterator[_T]:
        with ExitStack() as stack:
            ends = [stack.enter_context(watch_loop()) for watch_loop in _list_watchers()]
            iterator = iter(self._items)
            while True:
                try:
                    # No variable here has the item: it would live until the end of the step.
                    yield next(iterator)
                except StopIteration:
                    return
                for end in ends:
                    end()


def _list_watchers() -> Iterator[Callable[[], Any]]:
    session = find_session()
    if session is not None:
        from gpumemwidget.session.leak_watch import LeakWatch  # noqa: PLC0415 - when it is used

        yield session.attach(LeakWatch).watch_loop
    for growth in _counting:
        yield growth.watch_loop


# -- Marked tests ----------------------------------------------------------------------------------


class LimitError(Exception):
    """A test goes beyond the limit of a marker, or the marker has none."""


class UnpredictableError(Exception):
    """Without a GPU it can't be known whether a test stays within its limit."""


def run_limited(
    function: Callable[..., object],
    memory: pytest.Mark | None,
    growth: pytest.Mark | None,
    /,
    **fixtures: Any,
) -> object:
    """Call a test's function as often as its markers ask, and fail the test beyond a limit."""
    limit_bytes = None if memory is None else _read_marker(_read_memory_limit, memory)
    growth_limit = None if growth is None else _read_marker(_read_growth_limit, growth)

    def call() -> object:
        if growth_limit is None:
            return function(**fixtures)
        return _run_growing(function, fixtures, *growth_limit)

    if limit_bytes is None:
        return call()
    hardware = keep_hardware("checks")
    if _has_gpu(hardware):
        return _run_measured(hardware, call, limit_bytes)
    _check_prediction(function, fixtures, limit_bytes)
    return None


def _read_marker(read: Callable[..., Any], marker: pytest.Mark) -> Any:
    try:
        return read(*marker.args, **marker.kwargs)
    except BadInputError as exc:
        why = str(exc)
    except TypeError as exc:
        # Python's words on a missing or an unknown argument name the function first.
        why = str(exc).partition("() ")[2] or str(exc)
    raise LimitError(f"{marker.name}: {why}")


def _read_memory_limit(limit: object) -> int:
    return parse_allowed(limit)


def _read_growth_limit(limit: object, warmups: object = 1) -> tuple[int, int]:
    return parse_allowed(limit), check_warmups(warmups)


def _has_gpu(hardware: Hardware) -> bool:
    """Return whether a test can run on a GPU here."""
    torch: Any = find_torch()
    if any(info.device != HOST for info in hardware.list_devices()):
        return True
    if torch is not None:
        return bool(torch.cuda.is_available())
    return any(info.device != HOST for info in hardware.list_all_devices())


def _run_growing(
    function: Callable[..., object], fixtures: dict[str, Any], limit_bytes: int, warmups: int
) -> object:
    for _ in range(warmups):
        function(**fixtures)
    with following_growth(limit_bytes, counts_steps=False) as growth:
        returned = function(**fixtures)
        excess = growth.describe_excess()
    if excess is not None:
        raise LimitError(excess)
    return returned


def _run_measured(hardware: Hardware, call: Callable[[], object], limit_bytes: int) -> object:
    gc.collect()
    before = {reading.device: reading.allocated_bytes or 0 for reading in hardware.start_span()}
    try:
        returned = call()
    finally:
        readings = hardware.read_exact()
    peaks = {
        reading.device: reading.allocated_peak_bytes - before.get(reading.device, 0)
        for reading in readings
        if reading.device != HOST and reading.allocated_peak_bytes is not None
    }
    device = max(peaks, key=lambda name: peaks[name], default=None)
    if device is not None and peaks[device] > limit_bytes:
        _refuse_peak(device, peaks[device], limit_bytes, list_holders(device), is_predicted=False)
    return returned


def _check_prediction(
    function: Callable[..., object], fixtures: dict[str, Any], limit_bytes: int
) -> None:
    from gpumemwidget.session.step_predictions import predict  # noqa: PLC0415 - when it is used

    try:
        record = predict(
            function, (), fixtures, device=None, on=None, steps=1, remedies=False
        ).record
    except GpuMemError as exc:
        why = f"no GPU here, and the peak can't be predicted: {read_first_line(exc)}"
        raise UnpredictableError(why) from None
    # The fixtures' memory is on the device before the test begins.
    peak_bytes = record.allocated.expected - (record.trace.allocated.before_bytes or 0)
    if peak_bytes > limit_bytes:
        holders = [
            (f"{owner.kind} {owner.path}".strip(), owner.n_bytes)
            for owner in record.owners
            if owner.phase is not None
        ]
        shown = holders[:_MAX_HOLDERS]
        _refuse_peak(record.device.name, peak_bytes, limit_bytes, shown, is_predicted=True)


def _refuse_peak(
    device: str,
    peak_bytes: int,
    limit_bytes: int,
    holders: list[tuple[str, int]],
    *,
    is_predicted: bool,
) -> NoReturn:
    from gpumemwidget.report.leaks import describe_peak  # noqa: PLC0415 - when it is used

    words = describe_peak(device, peak_bytes, limit_bytes, holders, is_predicted=is_predicted)
    raise LimitError(words)
