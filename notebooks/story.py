"""What GPUs said while a notebook ran on them: the file that keeps it, and how it is played.

A recording of gpumemwidget's own has the counters, the driver's figures and the processes; beside
it stand, for each moment that the notebook shows, who owned what, and what was printed.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpumemwidget.backends.hardware import Hardware, use_hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.devices import HOST, Limit, LimitRequest
from gpumemwidget.model.ownership import (
    BlockNames,
    DeviceAccount,
    MemoryAccount,
    Variable,
)
from gpumemwidget.ownership import account as entries

# The folder of the checkout, which a notebook's kernel does not have on its path.
sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.recordings import Recording, RecordingPlayer, ReplayBackend, ReplayMonitor
from tools.recordings.recording import decode_recording, encode_recording

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
        """Write it into a file: JSON that is compressed by gzip."""
        told = {
            "heard": self.heard,
            "moments": _leave_out(self.moments),
            "recording": json.loads(encode_recording(self.recording)),
        }
        path.write_bytes(gzip.compress(json.dumps(told).encode(), mtime=0))


def read_story(path: Path) -> Story:
    """Read one from a file."""
    told = json.loads(gzip.decompress(path.read_bytes()))
    recording = decode_recording(json.dumps(told["recording"]).encode())
    return Story(recording, _fill_up(told["moments"]), told["heard"])


def describe_owners(account: MemoryAccount, names: Mapping[str, BlockNames]) -> dict[str, Any]:
    """Who owned what on the GPUs, for a moment."""
    return {
        "accounts": [_format_account(each) for each in account.devices if each.device != HOST],
        "variables": msgspec.to_builtins(account.variables),
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

    def __init__(self, player: RecordingPlayer) -> None:
        super().__init__(player)
        self._set: dict[str, int | None] = {}

    def set_limit(self, device: str, request: LimitRequest) -> None:
        """Say that it is so."""
        total = next(each.total_bytes for each in self.list_devices() if each.device == device)
        is_share = request.share is not None and total
        self._set[device] = round(request.share * total) if is_share else request.limit_bytes

    def read_limits(self) -> tuple[Limit, ...]:
        """Those that were set here, and those of the recording."""
        reserved = {each.device: each.reserved_bytes for each in self.read()}
        return tuple(
            Limit(each.device, self._set[each.device], each.total_bytes, reserved[each.device])
            for each in self.list_devices()
            if each.device in self._set
        ) + tuple(each for each in super().read_limits() if each.device not in self._set)


def play(player: RecordingPlayer, find_moment: Callable[[], dict[str, Any]]) -> None:
    """Have the extension take a recording for this machine's GPUs, and for who owns what there."""
    take_account, take_blocks = entries.take_memory_account, entries.take_block_account

    def detect() -> Hardware:
        return Hardware([_PlayedBackend(player), HostBackend()], ReplayMonitor(player))

    def add_played(account: MemoryAccount) -> MemoryAccount:
        moment = find_moment()
        played = msgspec.convert(moment["accounts"], tuple[DeviceAccount, ...])
        host = tuple(each for each in account.devices if each.device == HOST)
        return dataclasses.replace(
            account,
            devices=(*played, *host),
            variables=msgspec.convert(moment["variables"], tuple[Variable, ...]),
        )

    def play_account(*args: Any, **options: Any) -> MemoryAccount:
        return add_played(take_account(*args, **options))

    def play_blocks(*args: Any, **options: Any) -> Any:
        account, names = take_blocks(*args, **options)
        played = {
            device: {address: (kind, path) for address, kind, path in blocks}
            for device, blocks in find_moment()["names"].items()
        }
        return add_played(account), {**names, **played}

    use_hardware(detect)
    entries.take_memory_account = play_account
    entries.take_block_account = play_blocks


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
    """As msgspec reads it; what is as it is by default is left out."""
    fields: dict[str, Any] = msgspec.to_builtins(account)
    for owned in fields["owned"]:
        for name in [name for name, value in owned.items() if value is None or value is False]:
            del owned[name]
    return fields
