"""A real kernel, and the outputs of a cell as a notebook would show them."""

from __future__ import annotations

import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

__all__ = ["Cell", "Notebook", "open_notebook"]

_TIMEOUT_S = 60.0


@dataclass
class Cell:
    """What one run of a cell left in the notebook."""

    #: Of the reply: ``ok``, ``error``, ``aborted``.
    status: str = ""
    execution_count: int | None = None
    #: As nbformat has them, after updates and clears.
    outputs: list[dict[str, Any]] = field(default_factory=list)
    #: Every message, with the time at which it came.
    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Everything as plain text, in the order of the outputs."""
        return "\n".join(_to_text(output) for output in self.outputs)

    @property
    def kinds(self) -> list[str]:
        return [output["output_type"] for output in self.outputs]

    def list_messages(self, kind: str) -> list[dict[str, Any]]:
        return [each for _, each in self.messages if each["msg_type"] == kind]


class Notebook:
    """Runs cells in a kernel, as JupyterLab does."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self._n_cells = 0

    def run(self, code: str, **options: Any) -> Cell:
        """Run a cell to its end; again where the kernel aborted it, as behind an error."""
        while (cell := self.finish(self.start(code, **options))).status == "aborted":
            pass
        return cell

    def start(
        self, code: str, *, store_history: bool = True, silent: bool = False, subshell: str = ""
    ) -> str:
        """Send a cell to the kernel; its message's id."""
        self._n_cells += 1
        message = self.client.session.msg(
            "execute_request",
            {
                "code": code,
                "silent": silent,
                "store_history": store_history,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": True,
            },
        )
        message["metadata"]["cellId"] = f"cell-{self._n_cells}"
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        msg_id: str = message["header"]["msg_id"]
        return msg_id

    def finish(self, msg_id: str) -> Cell:
        """Collect a cell's outputs to its end."""
        cell = Cell()
        area = _OutputArea(cell.outputs)
        for message in self._listen(msg_id):
            cell.messages.append((time.monotonic(), message))
            area.take(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        reply = self._get_reply(msg_id)
        cell.reply = reply["content"]
        cell.status = cell.reply["status"]
        cell.execution_count = cell.reply.get("execution_count")
        return cell

    def finish_aborted(self, msg_id: str) -> str:
        """The status of a cell that may not have been run at all."""
        status: str = self._get_reply(msg_id)["content"]["status"]
        return status

    def is_complete(self, code: str) -> str:
        status: str = self._get_reply(self.client.is_complete(code))["content"]["status"]
        return status

    def wait_for_output(self, msg_id: str, text: str) -> None:
        """Wait until a running cell has printed ``text``; its messages up to there are dropped."""
        for message in self._listen(msg_id):
            if message["msg_type"] == "stream" and text in message["content"]["text"]:
                return

    def wait_until_busy(self, msg_id: str) -> None:
        """Wait until the kernel has taken up a cell, and a moment for it to get to its body."""
        for message in self._listen(msg_id):
            if message["msg_type"] == "execute_input":
                time.sleep(0.5)
                return

    def create_subshell(self) -> str | None:
        """A subshell's id; ``None`` where the kernel has none."""
        features = self._request("kernel_info_request")
        if "kernel subshells" not in features.get("supported_features", []):
            return None
        subshell: str = self._request("create_subshell_request")["subshell_id"]
        return subshell

    def delete_subshell(self, subshell: str) -> None:
        self._request("delete_subshell_request", subshell_id=subshell)

    def _request(self, kind: str, **content: Any) -> dict[str, Any]:
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        while True:
            answer = self.client.get_control_msg(timeout=_TIMEOUT_S)
            if answer["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                reply: dict[str, Any] = answer["content"]
                return reply

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def interrupt_until(self, is_done: Callable[[], bool]) -> None:
        """Interrupt the kernel between two messages again and again until something is so."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            # Time enough for the kernel to become idle, and to begin what waits for that.
            time.sleep(0.5)
            self.interrupt()
            if is_done():
                return
            assert time.monotonic() < deadline, "the interrupt did not help"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the kernel, without a cell."""
        while True:
            msg_id = self.client.execute(
                "",
                silent=True,
                store_history=False,
                user_expressions={"value": f"repr({expression})"},
            )
            content = self._get_reply(msg_id)["content"]
            # ipykernel 6.17 refuses what arrives within a tenth of a second after an error.
            if content["status"] != "aborted":
                break
        value = content["user_expressions"]["value"]
        assert value["status"] == "ok", value
        text = eval(value["data"]["text/plain"])  # a repr of a repr, of plain data
        return eval(text)

    def listen_until(self, msg_id: str, is_done: Callable[[], bool]) -> list[dict[str, Any]]:
        """What belongs to a cell that has ended, up to when something is so."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_done():
            assert time.monotonic() < deadline, "it never came to be so"
            time.sleep(0.1)
        # All that the kernel has sent before this cell.
        marker = self.start("None", store_history=False)
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=_TIMEOUT_S)
            parent = message["parent_header"].get("msg_id")
            if parent == msg_id:
                found.append(message)
            elif parent == marker and message["content"].get("execution_state") == "idle":
                self._get_reply(marker)
                return found

    def list_comms(self, target: str) -> list[str]:
        """The ids of the kernel's comms of a target."""
        reply = self._get_reply(self.client.comm_info(target_name=target))
        return list(reply["content"]["comms"])

    def send_to_comm(self, comm_id: str, data: dict[str, Any]) -> None:
        """Send a comm a message, as a page does."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        self.client.shell_channel.send(message)

    def _listen(self, msg_id: str) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError("the cell did not end") from None
            if message["parent_header"].get("msg_id") == msg_id:
                yield message

    def _get_reply(self, msg_id: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = self.client.get_shell_msg(timeout=_TIMEOUT_S)
            if message["parent_header"].get("msg_id") == msg_id:
                return message


class _OutputArea:
    """JupyterLab's rules for a cell's outputs."""

    def __init__(self, outputs: list[dict[str, Any]]) -> None:
        self._outputs = outputs
        self._displays: dict[str, list[dict[str, Any]]] = {}
        self._clears_next = False

    def take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            if content["wait"]:
                self._clears_next = True
            else:
                self._clear()
        elif kind == "update_display_data":
            for output in self._displays.get(content["transient"]["display_id"], []):
                output["data"] = content["data"]
        elif kind in ("display_data", "execute_result", "stream", "error"):
            if self._clears_next:
                self._clear()
            output = {"output_type": kind, **content}
            last = self._outputs[-1] if self._outputs else {}
            if kind == "stream" and last.get("name") == content["name"]:
                last["text"] += content["text"]
                return
            self._outputs.append(output)
            display_id = content.get("transient", {}).get("display_id")
            if display_id is not None:
                self._displays.setdefault(display_id, []).append(output)

    def _clear(self) -> None:
        self._clears_next = False
        self._outputs.clear()
        self._displays.clear()


def _to_text(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return str(output["text"])
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    return str(output["data"].get("text/plain", ""))


@contextmanager
def open_notebook(folder: Path, *, ignores_sigint: bool = False) -> Iterator[Notebook]:
    """A kernel of this interpreter.

    Args:
        folder: where its files go, but for its sockets.
        ignores_sigint: start it with SIGINT ignored, as ``nohup`` and a shell's background do.
    """
    # The kernel's channels are socket files, whose paths must be short: another program may take a
    # port that was free before the kernel does.
    with tempfile.TemporaryDirectory() as sockets:
        manager = KernelManager(
            connection_file=str(folder / "kernel.json"), transport="ipc", ip=f"{sockets}/kernel"
        )
        # The kernelspec that is found may be another environment's.
        manager.kernel_spec.argv = [
            *(sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher"),
            *("-f", "{connection_file}"),
        ]
        if ignores_sigint:
            shell = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
            manager.kernel_spec.argv = [*shell, *manager.kernel_spec.argv]
        extra = ["--HistoryManager.enabled=False"]
        manager.start_kernel(env=_make_env(folder), cwd=str(folder), extra_arguments=extra)
        client = manager.blocking_client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=_TIMEOUT_S)
            yield Notebook(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()


def _make_env(folder: Path) -> dict[str, str]:
    import os

    own = {
        name: str(folder / name.lower())
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    return {**os.environ, **own}
