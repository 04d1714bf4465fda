"""What a person would call a process, from what it was started with.

Command lines may hold passwords, and what we show is saved with notebooks: of the processes of
others the program and its script are all that is said, and secrets are left out everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath, PureWindowsPath

__all__ = ["name_process"]

_LONGEST = 60
_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?", re.IGNORECASE)
#: Options of Python's that are followed by a value of their own.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SECRET = re.compile(r"token|passw|passphrase|secret|key|credential|auth|://[^/]*@", re.IGNORECASE)
#: What ``python -c`` is followed by in the processes that multiprocessing starts.
_MULTIPROCESSING = {
    "from multiprocessing.spawn import spawn_main": "multiprocessing spawn",
    "from multiprocessing.forkserver import main": "multiprocessing fork server",
    "from multiprocessing.resource_tracker import main": "multiprocessing resource tracker",
    "from multiprocessing.semaphore_tracker import main": "multiprocessing resource tracker",
}
#: What PyTorch calls the main thread of a process, where that says more than its command does.
_TELLING_THREADS = ("pt_data_worker",)


def name_process(
    command: Sequence[str],
    thread_name: str = "",
    *,
    with_arguments: bool = False,
    forked_from: str | None = None,
) -> str | None:
    """A process's name in some 60 characters: ``python train.py --lr 0.1``.

    Args:
        command: what it was started with.
        thread_name: its main thread's, which PyTorch's workers give themselves.
        with_arguments: what comes after the script too.
        forked_from: the name of the process above it, if it has that one's command.

    Returns:
        ``None`` where there is nothing to name it by.
    """
    if thread_name in _TELLING_THREADS:
        return thread_name
    if forked_from is not None:
        suffix = " (forked)"
        return _shorten(forked_from.removesuffix(suffix), _LONGEST - len(suffix)) + suffix
    words = [_clean(word) for word in command]
    if not any(words):
        # A thread of the system's kernel, or a process of which no more is to be seen.
        return _shorten(_clean(thread_name)) or None
    # Whoever starts a program may leave its name out.
    program, rest = words[0] if words[0].strip() else _clean(thread_name), words[1:]
    if not rest and " " in program.strip():
        # A title that the program has given itself.
        return _shorten(_leave_out_secrets(program.split()))
    program = _strip_folders(program)
    if not _PYTHON.fullmatch(program):
        return _join([program], rest if with_arguments else [])
    return _name_python(rest, with_arguments=with_arguments)


def _name_python(words: Sequence[str], *, with_arguments: bool) -> str | None:
    started, arguments = _split_python(words)
    if started and started[0] == "-c":
        code = started[1] if len(started) > 1 else ""
        for beginning, name in _MULTIPROCESSING.items():
            if code.startswith(beginning):
                return name
        # A person knows it by what they typed; others get no more than that it is code.
        started = ["-c", _leave_out_secrets(code.split())] if with_arguments else ["-c"]
    if started and started[0][:1].isalpha() and "." not in started[0]:
        # Installed as a command, which is a script of Python's: ``torchrun``, ``jupyter-lab``.
        return _join(started, arguments if with_arguments else [])
    return _join(["python", *started], arguments if with_arguments else [])


def _split_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What Python runs, and the arguments behind that; its own options are left out."""
    place = 0
    while place < len(words):
        word = words[place]
        if word in ("-m", "-c"):
            return list(words[place : place + 2]), list(words[place + 2 :])
        if word in _WITH_VALUE:
            place += 2
        elif word.startswith("-") and word != "-":
            place += 1
        else:
            return [_strip_folders(word)], list(words[place + 1 :])
    return [], []


def _join(started: Sequence[str], arguments: Sequence[str]) -> str | None:
    return _shorten(" ".join([*started, *filter(None, [_leave_out_secrets(arguments)])])) or None


def _leave_out_secrets(words: Sequence[str]) -> str:
    """The words up to the first that may be, or announce, a secret."""
    for place, word in enumerate(words):
        if _SECRET.search(word):
            return " ".join([*words[:place], "…"])
    return " ".join(words)


def _strip_folders(path: str) -> str:
    name = PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
    return name or path


def _clean(word: str) -> str:
    """Without line breaks and other characters that have no shape."""
    return "".join(each if each.isprintable() else " " for each in word)


def _shorten(text: str, longest: int = _LONGEST) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
