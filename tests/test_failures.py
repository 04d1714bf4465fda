"""A failure in one line, told once; functions of other modules replaced and put back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from gpumemwidget.backends.hooks import Patch
from gpumemwidget.errors import Notes


def test_a_note_is_told_once_and_their_number_is_bounded() -> None:
    """A sentence that was told is not told again, and what comes after the last is dropped."""
    notes = Notes(max_sentences=2)

    assert [notes.add("a"), notes.add("a"), notes.add("b"), notes.add("c")] == [
        *(True, False),
        *(True, False),
    ]
    assert notes.take() == ("a", "b")
    notes.add("a")
    assert notes.take() == ()


def test_a_patch_is_undone_unless_somebody_has_patched_since() -> None:
    """Ours is taken away where it is still in its place, and stays beneath another's."""

    def add_one(original: Callable[[], int]) -> Callable[[], int]:
        return lambda: original() + 1

    def one() -> int:
        return 1

    module = SimpleNamespace(first=one, second=one)
    patch = Patch()
    for name in ("first", "second", "missing"):
        patch.replace(module, name, add_one)
    assert (module.first(), module.second(), hasattr(module, "missing")) == (2, 2, False)
    assert module.first.__name__ == "first"
    theirs = module.second = add_one(module.second)

    patch.undo()
    patch.undo()

    assert module.first is one
    assert module.second is theirs
    assert not patch.is_applied
