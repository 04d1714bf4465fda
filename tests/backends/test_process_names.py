"""What processes are called: as a person would, and without what nobody else should see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.driver.processes import name_process


@pytest.mark.parametrize(
    ("command", "short", "arguments"),
    [
        ("/usr/bin/python3.11 /home/me/train.py --lr 0.1", "python train.py", " --lr 0.1"),
        ("python -u -m torch.distributed.run --n 2", "python -m torch.distributed.run", " --n 2"),
        ("python -X dev -W error -Bs work.py x", "python work.py", " x"),
        ("python3", "python", ""),
        ("/x/bin/python /x/bin/torchrun --n 2 train.py", "python torchrun", " --n 2 train.py"),
        ("/usr/bin/Xorg -core :0", "Xorg", " -core :0"),
        (r"C:\Python\python.exe C:\work\train.py", "python train.py", ""),
    ],
)
def test_program_and_script_are_the_name(command: str, short: str, arguments: str) -> None:
    """Folders and Python's own options are left out; arguments are shown of ours alone."""
    words = command.split()

    assert name_process(words, "python") == short
    assert name_process(words, "python", with_arguments=True) == short + arguments


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--token=abc", "…"),
        ("--api-key abc", "…"),
        ("HF_TOKEN=abc", "…"),
        ("--db postgres://me:pw@host/db --n 1", "--db …"),
        ("--n 1 --Password abc", "--n 1 …"),
    ],
)
def test_secrets_are_left_out(argument: str, shown: str) -> None:
    """With all that comes behind them, for the value may be the next word."""
    name = name_process(["python", "train.py", *argument.split()], with_arguments=True)

    assert name == f"python train.py {shown}"
    assert "abc" not in name
    assert "pw" not in name


def test_secrets_within_code_are_left_out() -> None:
    """As in a string that a shell gave to Python."""
    words = ["python", "-c", "import hub; hub.login(token='abc'); hub.run()"]

    assert name_process(words, with_arguments=True) == "python -c import hub; …"


def test_code_on_the_command_line() -> None:
    """Of others' code nothing is shown."""
    command = ["/usr/bin/python3", "-c", "import time; time.sleep(1)", "-x"]

    assert name_process(command, with_arguments=True) == "python -c import time; time.sleep(1) -x"
    assert name_process(command) == "python -c"


def test_workers_of_a_data_loader_are_told_by_their_thread() -> None:
    """PyTorch names it; the main thread's name of other processes says nothing more."""
    command = ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"]

    assert name_process(command, "pt_data_worker", is_forked=True) == "pt_data_worker"
    assert name_process(command, "pt_main_thread") == "python -m ipykernel_launcher"


def test_what_was_forked_is_named_after_what_it_was_forked_from() -> None:
    """In no more than 60 characters."""
    long = name_process(["y" * 80], is_forked=True)

    assert name_process(["python", "a.py"], is_forked=True) == "python a.py (forked)"
    assert long == "y" * 50 + "… (forked)"
    assert len(long) == 60


def test_titles_that_programs_give_themselves() -> None:
    """One text instead of words; a thread of the system has its name alone."""
    title = "ray::train(step=3) --key abc"

    assert name_process([title], with_arguments=True) == "ray::train(step=3) …"
    assert name_process([title]) == "ray::train(step=3) …"
    assert name_process([], "kworker/0:1") == "kworker/0:1"
    assert name_process([], "") is None


@given(st.lists(st.text(max_size=90), max_size=6), st.text(max_size=15), st.booleans())
def test_any_command_gives_one_short_line(
    command: list[str], thread_name: str, with_arguments: bool
) -> None:
    """Whatever stands there, also nothing: printable, one line, 60 characters at most."""
    name = name_process(command, thread_name, with_arguments=with_arguments)

    assert name is None or (0 < len(name) <= 60 and name.isprintable())
