"""Find cells that end with more memory each time they run."""

from __future__ import annotations

import ast
import functools
import re
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gpumemwidget.leaks.levels import MIN_GROWTH_BYTES
from gpumemwidget.leaks.survey import Gain, Survey, find_gains
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.leaks import UnexplainedGrowth
from gpumemwidget.recording.limits import strip_magics

#: Number of runs in a row that must have grown. Two happen by chance: a name that the first run
#: binds, and a cache that the second one fills.
MIN_RUNS = 3

#: The least that a run has added, as a share of the median: what is added anew each time is alike,
#: and warm-up is not.
_MIN_ALIKE = 0.5

#: Maximum number of cells that are followed, those that ran last.
_MAX_CELLS = 64

#: A comment, or a string, in which a ``#`` begins no comment. A string without an end goes to the
#: end of its line, or of the text, so that each character is looked at once. Each alternative
#: begins with a literal character, which lets ``re`` skip all other text four times as fast.
_COMMENT_OR_STRING = re.compile(
    r"#[^\n]*"
    r'|""".*?(?:"""|\Z)|"(?:\\.|[^"\\\n])*+"?'
    r"|'''.*?(?:'''|\Z)|'(?:\\.|[^'\\\n])*+'?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class RunGrowth:
    """Growth over the last runs of a cell on one device: the median of what they have added."""

    device: str
    each_bytes: int
    #: Number of runs in a row that have added some.
    n_runs: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cell whose next growing run would be a leak."""

    #: The one that grows, and what was in use there at the end of the cell's last run.
    device: str
    last_bytes: int
    #: Whether it is still to be found which line adds it.
    needs_line: bool


@dataclass(slots=True)
class _Added:
    """The bytes that the last growing runs in a row have added on one device."""

    n_runs: int = 0
    last_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=MIN_RUNS))


@dataclass(slots=True)
class _Cell:
    """The runs of one cell."""

    #: In use at the end of the last run, in bytes, by device.
    last_bytes: dict[str, int] = field(default_factory=dict)
    #: By device; and by GPU what this process has there outside PyTorch.
    added: dict[str, _Added] = field(default_factory=dict)
    outside: dict[str, _Added] = field(default_factory=dict)
    #: Devices whose growth no tensor explains.
    unexplained: set[str] = field(default_factory=set)
    #: ``In [7]``, of its last run.
    name: str = ""
    survey: Survey | None = None
    #: ``False`` once the line is known, or there is nothing to report.
    needs_line: bool = True


class RepeatedCells:
    """The cells that ran, and what each run has added to the memory in use.

    Cells are the same if their code is, comments and the magics above aside: one that was edited
    does something else.
    """

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def add(self, source: str, record: CellRecord) -> list[RunGrowth]:
        """Note how a run of a cell has ended; return the growth of at least two runs in a row.

        A run that failed says nothing, and is left out.
        """
        if record.status != "ok" or record.is_only_own_magics:
            return []
        cell = self._find(source)
        cell.name = f"In [{record.execution_count}]"
        growths = []
        for device in record.devices:
            _add_run(cell.outside, device.device, device.outside_change_bytes)
            after_bytes, change_bytes = device.allocated.after_bytes, device.allocated.change_bytes
            if after_bytes is None or change_bytes is None:
                continue
            # Between two runs other cells may have freed what this one took.
            before_bytes = cell.last_bytes.get(device.device)
            if before_bytes is not None:
                change_bytes = min(change_bytes, after_bytes - before_bytes)
            cell.last_bytes[device.device] = after_bytes
            growth = _add_run(cell.added, device.device, change_bytes)
            if growth is not None:
                growths.append(growth)
        if not growths:
            cell.survey = None
        return growths

    def list_unexplained(self) -> tuple[UnexplainedGrowth, ...]:
        """Return the growth of repeated cells that no tensor explains, the most first."""
        found = [
            UnexplainedGrowth(cell.name, device, growth.each_bytes, growth.n_runs, is_outside)
            for cell in self._cells.values()
            for is_outside, growing in ((False, cell.added), (True, cell.outside))
            for device, added in growing.items()
            if (growth := _describe(device, added)) and growth.n_runs >= MIN_RUNS
            if is_outside or device in cell.unexplained
        ]
        return tuple(sorted(found, key=lambda growth: -growth.each_bytes))

    def find_suspect(self, source: str) -> Suspect | None:
        """Return what is known of a cell whose next growing run would be a leak; else ``None``."""
        cell = self._cells.get(make_cell_key(source))
        device = None if cell is None else _find_device(cell)
        if cell is None or device is None:
            return None
        return Suspect(device, cell.last_bytes[device], cell.needs_line)

    def has_grown(self, source: str) -> bool:
        """Return whether the last run of a cell has added memory."""
        cell = self._cells.get(make_cell_key(source))
        return cell is not None and bool(cell.added)

    def note_survey(self, source: str, survey: Survey) -> None:
        """Keep who holds what at a cell's end, or as it begins if others have changed it since."""
        self._find(source).survey = survey

    def note_unexplained(self, source: str, device: str) -> None:
        """Note that no tensor can explain what grows on a device: there are none."""
        self._find(source).unexplained.add(device)

    def compare(self, source: str, survey: Survey, growth: RunGrowth) -> list[Gain]:
        """Return what has grown since the survey that was kept last.

        What has gained bytes and no storages is a value that was replaced by a larger one: it
        counts only if the cell makes it of itself, as in ``seen = torch.cat([seen, new])``.

        Returns:
            The holders that explain the growth, the one that grew the most first; none before
            ``MIN_RUNS`` runs.
        """
        if growth.n_runs < MIN_RUNS:
            return []
        cell = self._find(source)
        gains = find_gains(cell.survey, survey, growth.device, growth.each_bytes)
        gains = [
            gain
            for gain in gains
            if gain.n_storages > 0 or _grows_itself(source, gain.group.holder)
        ]
        gained_bytes = survey.count_bytes(growth.device)
        gained_bytes -= cell.survey.count_bytes(growth.device) if cell.survey else 0
        is_explained = gained_bytes >= growth.each_bytes * _MIN_ALIKE
        (cell.unexplained.discard if is_explained else cell.unexplained.add)(growth.device)
        return gains

    def note_line(self, source: str, *, is_needed: bool) -> None:
        """Note whether the line of a cell's growth is still to be found."""
        self._find(source).needs_line = is_needed

    def _find(self, source: str) -> _Cell:
        key = make_cell_key(source)
        cell = self._cells.pop(key, None) or _Cell()
        self._cells[key] = cell
        while len(self._cells) > _MAX_CELLS:
            del self._cells[next(iter(self._cells))]
        return cell


def _add_run(growing: dict[str, _Added], device: str, change_bytes: int) -> RunGrowth | None:
    """Note what a run has added on a device; return the growth of at least two runs in a row."""
    if change_bytes < MIN_GROWTH_BYTES:
        growing.pop(device, None)
        return None
    added = growing.setdefault(device, _Added())
    added.n_runs += 1
    added.last_bytes.append(change_bytes)
    return _describe(device, added)


def _find_device(cell: _Cell) -> str | None:
    found = (name for name, added in cell.added.items() if added.n_runs >= MIN_RUNS - 1)
    return next(found, None)


def _describe(device: str, added: _Added) -> RunGrowth | None:
    if added.n_runs < MIN_RUNS - 1:
        return None
    each_bytes = round(median(added.last_bytes))
    is_alike = min(added.last_bytes) >= _MIN_ALIKE * each_bytes
    return RunGrowth(device, each_bytes, added.n_runs if is_alike else MIN_RUNS - 1)


def _grows_itself(source: str, holder: str) -> bool:
    """Return whether a cell binds a name, or an attribute, to a value that is made of it."""
    try:
        tree = ast.parse(strip_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and holder in map(ast.unparse, node.targets):
            read = (part for part in ast.walk(node.value) if isinstance(part, ast.expr))
            if holder in map(ast.unparse, read):
                return True
    return False


@functools.lru_cache(maxsize=_MAX_CELLS)
def make_cell_key(source: str) -> str:
    """Return a text that is the same for cells that differ in comments and blank lines alone.

    Cells that differ in blank lines within a string, or behind a ``#`` within quotes that an
    f-string nests, may have the same text, too.
    """
    # Not by ``ast.parse``: it would take longer than all the rest of recording a cell.
    text = _COMMENT_OR_STRING.sub(
        lambda found: "" if found[0].startswith("#") else found[0], source
    )
    lines = strip_magics(text).splitlines()
    return "\n".join(filter(None, map(str.rstrip, lines)))
