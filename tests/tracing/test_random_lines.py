"""Random programs over lines, loops, functions, generators and errors: each line has its truth."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tracing.test_lines import Heap, run

_N_FUNCTIONS = 3

#: What a line does: how much it takes or gives back, in units of 4 KiB.
_amounts = st.integers(-20, 20).filter(bool)
_simple = st.one_of(
    st.tuples(st.just("take"), _amounts),
    st.tuples(st.just("both"), _amounts, _amounts),
    st.tuples(st.just("call"), st.integers(0, _N_FUNCTIONS - 1), _amounts),
    st.just(("fail",)),
)


def _nest(blocks: st.SearchStrategy[Sequence[Any]]) -> st.SearchStrategy[Sequence[Any]]:
    """Blocks whose statements may hold some of ``blocks``."""
    statements = st.one_of(
        _simple,
        st.tuples(st.just("loop"), st.integers(0, 3), blocks),
        st.tuples(st.just("generate"), st.integers(0, 3), _amounts, blocks),
        st.tuples(st.just("try"), blocks, blocks),
    )
    return st.lists(statements, min_size=1, max_size=3)


_blocks = _nest(_nest(st.lists(_simple, min_size=1, max_size=3)))


def _write(block: Sequence[Any], indent: str, *, n_functions: int) -> list[str]:
    """A block as source. Functions call those before them alone, so that each program ends."""
    lines = []
    for kind, *arguments in block:
        if kind == "take":
            lines.append(f"{indent}take({arguments[0]})")
        elif kind == "both":
            lines.append(f"{indent}take({arguments[0]}); take({arguments[1]})")
        elif kind == "call":
            number, amount = arguments
            call = f"f{number}()" if number < n_functions else "abs(1)"
            lines.append(f"{indent}{call}; take({amount})")
        elif kind == "loop":
            n, body = arguments
            lines.append(f"{indent}for _ in range({n}):")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
        elif kind == "generate":
            n, amount, body = arguments
            lines.append(f"{indent}for _ in (take({amount}) for _ in range({n})):")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
        elif kind == "try":
            body, handler = arguments
            lines.append(f"{indent}try:")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
            lines.append(f"{indent}except ValueError:")
            lines += _write(handler, f"{indent}    ", n_functions=n_functions)
        else:
            lines.append(f"{indent}raise ValueError")
    return lines


@given(st.lists(_blocks, min_size=_N_FUNCTIONS, max_size=_N_FUNCTIONS), _blocks)
def test_each_line_has_what_it_took(functions: Sequence[Any], cell: Sequence[Any]) -> None:
    """By the frame that called: what each line changed; and what lines still hold adds up."""
    lines: list[str] = []
    for number, body in enumerate(functions):
        lines.append(f"def f{number}():")
        lines += _write(body, "    ", n_functions=number)
    lines += _write(cell, "", n_functions=_N_FUNCTIONS)
    source = "\n".join(lines) + "\n"
    heap = Heap(1 << 40)
    truth: Counter[int] = Counter()

    def take(amount: int) -> None:
        heap.in_use_bytes += amount * 4096
        truth[sys._getframe(1).f_lineno] += amount * 4096

    ran = run(source, heap, names={"take": take})

    assert ran.error is None or isinstance(ran.error, ValueError)
    told = {line.line: line.net_bytes for line in ran.host.lines if line.net_bytes}
    assert told == {line: n_bytes for line, n_bytes in truth.items() if n_bytes}
    assert ran.host.after_bytes - ran.host.before_bytes == sum(truth.values())
    assert (ran.host.outside_bytes, ran.host.unread_bytes) == (0, 0)
