"""What GPUs said while a notebook ran on them: the file that keeps it, and how it is played.

A recording of gpumemwidget's own has the counters, the driver's figures and the processes; beside
it stand, for each moment that the notebook shows, who owned what, and what was printed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.recording import Recording, format_recording, parse_recording
from gpumemwidget.backends.replay import Playback, ReplayBackend, ReplayMonitor
from gpumemwidget.devices import Limit
from gpumemwidget.jupyter import extension
from gpumemwidget.owners import entries
from gpumemwidget.records import HOST, DeviceAccount, Holding, MemoryAccount, Owned
from gpumemwidget.traces import BlockNames

__all__ = ["Story", "describe_owners", "drop_host", "play", "read_story"]


@dataclasses.dataclass
class Story:
    """What was said."""

    recording: Recording
    #: Each with its name, its event in the recording, its figures and owners.
    moments: list[dict[str, Any]]
    #: What was printed, by its name.
    heard: dict[str, str]

    def write(self, path: Path) -> None:
        """Write it into a file: one line a moment, and a line an event of the recording."""
        lines = ",\n".join(
            json.dumps(each, separators=(",", ":")) for each in _leave_out(self.moments)
        )
        path.write_text(
            f'{{"heard": {json.dumps(self.heard, indent=1)},\n"moments": [\n{lines}\n],\n'
            f'"recording": {format_recording(self.recording)}}}\n',
            encoding="utf-8",
        )


def read_story(path: Path) -> Story:
    """Read one from a file."""
    told = json.loads(path.read_text(encoding="utf-8"))
    recording = parse_recording(json.dumps(told["recording"]))
    return Story(recording, _fill_up(told["moments"]), told["heard"])


def describe_owners(account: MemoryAccount, names: Mapping[str, BlockNames]) -> dict[str, Any]:
    """Who owned what on the GPUs, for a moment."""
    return {
        "accounts": [_format_account(each) for each in account.devices if each.device != HOST],
        "holdings": [dataclasses.asdict(each) for each in account.holdings],
        "names": {
            device: [[address, *name] for address, name in blocks.items()]
            for device, blocks in names.items()
        },
    }


def drop_host(recording: Recording) -> Recording:
    """A recording without the host: where it is played, there is another one."""
    return dataclasses.replace(
        recording,
        devices=tuple(each for each in recording.devices if each.device != HOST),
        events=tuple(
            dataclasses.replace(
                event, readings=tuple(each for each in event.readings if each.device != HOST)
            )
            for event in recording.events
        ),
    )


class _PlayedBackend(ReplayBackend):
    """A recording in which limits can be set: what that did stands in it from the next moment."""

    def __init__(self, playback: Playback) -> None:
        super().__init__(playback)
        self._set: dict[str, int | None] = {}

    def set_limit(
        self, device: str, limit_bytes: int | None, *, share: float | None = None
    ) -> None:
        """Say that it is so."""
        total = next(each.total_bytes for each in self.list_devices() if each.device == device)
        self._set[device] = round(share * total) if share is not None and total else limit_bytes

    def read_limits(self) -> tuple[Limit, ...]:
        """Those that were set here, and those of the recording."""
        reserved = {each.device: each.reserved_bytes for each in self.read()}
        return tuple(
            Limit(each.device, self._set[each.device], each.total_bytes, reserved[each.device])
            for each in self.list_devices()
            if each.device in self._set
        ) + tuple(each for each in super().read_limits() if each.device not in self._set)


def play(playback: Playback, find_moment: Callable[[], dict[str, Any]]) -> None:
    """Have the extension take a recording for this machine's GPUs, and for who owns what there."""
    take_account, name_blocks = entries.take_memory_account, entries.name_blocks

    def detect() -> Hardware:
        return Hardware([_PlayedBackend(playback), HostBackend()], ReplayMonitor(playback))

    def play_account(*args: Any, **options: Any) -> MemoryAccount:
        account = take_account(*args, **options)
        moment = find_moment()
        played = tuple(map(_parse_account, moment["accounts"]))
        host = tuple(each for each in account.devices if each.device == HOST)
        return dataclasses.replace(
            account,
            devices=(*played, *host),
            holdings=tuple(map(_parse_holding, moment["holdings"])),
        )

    def play_names(*args: Any, **options: Any) -> Any:
        played = {
            device: {address: (kind, path) for address, kind, path in blocks}
            for device, blocks in find_moment()["names"].items()
        }
        return {**name_blocks(*args, **options), **played}

    vars(extension)["detect_hardware"] = detect
    entries.take_memory_account = play_account
    entries.name_blocks = play_names
    entries.take_block_account = lambda *args, **options: (
        play_account(*args, **options),
        play_names(*args, **options),
    )


def _fill_up(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moments each with all: what a file leaves out is as it was at the moment before."""
    filled: list[dict[str, Any]] = []
    for each in moments:
        filled.append({**(filled[-1] if filled else {}), **each})
    return filled


def _leave_out(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The opposite."""
    before: dict[str, Any] = {}
    left = []
    for each in moments:
        left.append({name: value for name, value in each.items() if value != before.get(name)})
        before = each
    return left


def _format_account(account: DeviceAccount) -> dict[str, Any]:
    """As ``_parse_account`` reads it; what is as it is by default is left out."""
    fields = dataclasses.asdict(account)
    for owned in fields["owned"]:
        for name in [name for name, value in owned.items() if value is None or value is False]:
            del owned[name]
    return fields


def _parse_account(fields: dict[str, Any]) -> DeviceAccount:
    owned = (
        Owned(**{**each, "steps": tuple(each["steps"]), "rows": tuple(each.get("rows", ()))})
        for each in fields["owned"]
    )
    return DeviceAccount(fields["device"], fields["allocated_bytes"], tuple(owned))


def _parse_holding(fields: dict[str, Any]) -> Holding:
    pairs = {
        name: tuple((device, n_bytes) for device, n_bytes in fields[name])
        for name in ("held_bytes", "frees_bytes")
    }
    shape = fields["shape"]
    lists = {
        "shape": None if shape is None else tuple(shape),
        "shared_with": tuple(fields["shared_with"]),
    }
    return Holding(**{**fields, **pairs, **lists})
