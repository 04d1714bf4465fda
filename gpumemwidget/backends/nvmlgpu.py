"""What NVML answers about one GPU or MIG instance, and what it means when it does not.

Drivers lack what is younger than they are, instances lack what whole GPUs have, and a GPU may be
lost at any moment: each question falls back on what there is, and says why where there is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gpumemwidget.backends.visible import Gpu

__all__ = ["LIBRARY_NOT_FOUND", "NO_PERMISSION", "Questions", "explain"]

_T = TypeVar("_T")

# nvmlReturn_t: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html
_UNINITIALIZED = 1
NO_PERMISSION = 4
LIBRARY_NOT_FOUND = 12
_NOT_FOUND = 13
_CAUSES = {
    _UNINITIALIZED: "something else in this process has shut the driver's library down",
    3: "the device does not support it",
    NO_PERMISSION: "this user has no permission for it",
    9: "the NVIDIA driver is not loaded",
    10: "the driver did not answer in time",
    _NOT_FOUND: "the driver is too old for it",
    15: "the GPU is lost and does not answer any more (nvidia-smi tells more)",
    16: "the GPU has to be reset first",
    18: "the driver and its library are of different versions (a reboot mends that)",
    999: "the driver gives no reason",
}
#: What is said to a call, or to a version of one, that the driver or the device does not have:
#: an invalid argument, not supported, no such function, another version of the argument.
_LACKING = (2, 3, _NOT_FOUND, 25)
#: The instance of a process that is in none, and bytes that are not told.
_NO_INSTANCE = 0xFFFFFFFF
_NO_BYTES = 0xFFFFFFFFFFFFFFFF
#: The lists of those who compute; of those who draw, and who compute by NVIDIA's multi-process
#: service. The binding's newer functions need a newer driver, and its plain ones raise an error of
#: another kind where that is missing, so the newest that there is comes first.
_COMPUTING = "nvmlDeviceGetComputeRunningProcesses"
_OTHERS = ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
_VERSIONS = ("_v3", "_v2")


class Questions:
    """Asks NVML about GPUs.

    Args:
        library: the module ``pynvml``, or what stands in for it.
        note: is told of each failure; the same one may come again.
    """

    def __init__(self, library: Any, note: Callable[[str], None]) -> None:
        self._library = library
        self._note = note
        self._lacks_v2 = False

    def describe(self, handle: Any, where: str) -> Gpu:
        """A GPU or instance with its name, UUID and total, as far as they can be had."""
        nvml = self._library
        gpu = Gpu(handle, "", None, None)
        gpu.name = self.ask(gpu, where, "name", nvml.nvmlDeviceGetName) or "NVIDIA GPU"
        gpu.uuid = self.ask(gpu, where, "UUID", nvml.nvmlDeviceGetUUID)
        memory = self.ask(gpu, where, "total memory", self.read_memory)
        gpu.total_bytes = None if memory is None else int(memory.total)
        # What counts from now on is whether it answers later.
        gpu.failures.clear()
        return gpu

    def read_memory(self, handle: Any) -> Any:
        """The memory's figures in their second version, which tells apart what the driver has.

        In the first, before driver 510, that is among what is used.
        """
        nvml = self._library
        version = getattr(nvml, "nvmlMemory_v2", None)
        if version is not None and not self._lacks_v2:
            try:
                return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except nvml.NVMLError as error:
                if error.value not in _LACKING:
                    raise
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                # It answers to this one, so it is the version that is missing, for all GPUs.
                self._lacks_v2 = True
                return memory
        return nvml.nvmlDeviceGetMemoryInfo(handle)

    def list_processes(self, gpu: Gpu, where: str) -> tuple[tuple[int, int | None], ...] | None:
        """The processes on it, each once, by number; ``None`` where these are not told."""
        listed = self._list_computing(gpu, where)
        if listed is None:
            return None
        found: dict[int, int | None] = {}
        for process in (*listed, *self._list_more(gpu)):
            if not _is_elsewhere(process, gpu):
                # Who computes and draws stands in two lists, each time with all its bytes.
                each = (process.usedGpuMemory, found.get(process.pid))
                told = [int(n_bytes) for n_bytes in each if n_bytes not in (None, _NO_BYTES)]
                found[int(process.pid)] = max(told, default=None)
        return tuple(sorted(found.items()))

    def _list_computing(self, gpu: Gpu, where: str) -> Sequence[Any] | None:
        question = self._find_list(_COMPUTING)
        parent, instance_id = gpu.parent, gpu.instance_id
        if parent is None or instance_id is None:
            return self.ask(gpu, where, "processes", question)
        try:
            return question(gpu.handle)
        except self._library.NVMLError:
            # The instance does not tell. The GPU may, with the instance of each process.
            asked = Gpu(parent.handle, gpu.name, parent.uuid, None, failures=gpu.failures)
            listed = self.ask(asked, where, "processes", question)
            if listed is None:
                return None
            return [each for each in listed if _get_instance(each) == instance_id]

    def _list_more(self, gpu: Gpu) -> Iterator[Any]:
        """Those of the other lists; not every device has them, and then they hold nobody."""
        for name in _OTHERS:
            if name in gpu.lacks:
                continue
            try:
                yield from self._find_list(name)(gpu.handle)
            except self._library.NVMLError as error:
                # Else it is asked again: who is on no list is within what is of no listed process.
                if error.value in _LACKING:
                    gpu.lacks.add(name)

    def _find_list(self, name: str) -> Callable[[Any], Sequence[Any]]:
        """A question for a list, in the newest version that binding and driver have."""
        nvml = self._library
        versions = [
            function
            for each in _VERSIONS
            if (function := getattr(nvml, name + each, None)) is not None
        ]
        if not versions and hasattr(nvml, name):
            versions = [getattr(nvml, name)]

        def ask(handle: Any) -> Sequence[Any]:
            for function in versions:
                try:
                    listed: Sequence[Any] = function(handle)
                except nvml.NVMLError as error:
                    if error.value != _NOT_FOUND:
                        raise
                else:
                    return listed
            raise nvml.NVMLError(_NOT_FOUND)

        return ask

    def find_instance_id(self, handle: Any) -> int | None:
        """An instance's number on its GPU; ``None`` where it is not told."""
        nvml = self._library
        try:
            return int(nvml.nvmlDeviceGetGpuInstanceId(handle))
        except (nvml.NVMLError, AttributeError):
            return None  # an older binding: then its own handle must tell what is on it

    def ask(self, gpu: Gpu, where: str, what: str, question: Callable[[Any], _T]) -> _T | None:
        """An answer; ``None`` where there is none, with a note why."""
        error_type = self._library.NVMLError
        try:
            try:
                answer = question(gpu.handle)
            except error_type as error:
                if error.value != _UNINITIALIZED or gpu.uuid is None:
                    raise
                # The user's own code has called nvmlShutdown once too often. Begin again.
                self._library.nvmlInit()
                gpu.handle = self._library.nvmlDeviceGetHandleByUUID(gpu.uuid)
                answer = question(gpu.handle)
        except error_type as error:
            gpu.failures[what] = f"{where}: {what} can't be read: {explain(error)}."
            self._note(gpu.failures[what])
            return None
        gpu.failures.pop(what, None)
        return answer


def explain(error: Any) -> str:
    """An error of NVML as the reason in a sentence."""
    return _CAUSES.get(error.value, f"NVML says {str(error)!r}")


def _get_instance(process: Any) -> int | None:
    """The instance that a process is on; ``None`` where it is in none, or that is not told."""
    instance_id = getattr(process, "gpuInstanceId", None)
    return None if instance_id in (None, _NO_INSTANCE) else int(instance_id)


def _is_elsewhere(process: Any, gpu: Gpu) -> bool:
    """Whether a process is known to be on another instance than this one."""
    return gpu.instance_id is not None and _get_instance(process) not in (None, gpu.instance_id)
