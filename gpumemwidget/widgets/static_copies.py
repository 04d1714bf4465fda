"""The static copy below a live widget: what a saved notebook shows when the kernel is gone.

JupyterLab prefers a widget to any HTML in the same output, and draws "Error displaying widget"
where the widget's kernel is gone. So the copy is an output of its own, directly below the widget's.
While the widget lives, its view hides the copy with a style sheet; where there is no view, the
copy's own style sheet hides the output above it.

A notebook that is not trusted draws no widget and keeps no style sheet: there the widget's output
shows its text, which is empty, and the copy is shown as it is.
"""

from __future__ import annotations

from string import Template

__all__ = ["NOTHING", "wrap_copy"]

#: An output that takes no room in a page.
NOTHING = {"text/plain": "", "text/html": ""}

#: JupyterLab, Notebook 7 and nbconvert give an output the class ``jp-OutputArea-child``, and what
#: it draws ``jp-OutputArea-output``; that of a widget which can't be drawn has ``jupyter-widgets``.
#: While JupyterLab still loads the widget, the copy waits a moment, so that nothing flickers.
_STYLE = Template(
    ".jp-OutputArea-child:has(+ .jp-OutputArea-child .$copy):not(:has(.$view)){display:none}"
    ".jp-OutputArea-child:has(> .jp-OutputArea-output:not(.jp-RenderedText,.jupyter-widgets))"
    " + .jp-OutputArea-child .$copy{animation:gmw-wait 2s}"
    "@keyframes gmw-wait{from,99%{height:0;opacity:0;overflow:hidden}}"
)


def wrap_copy(html: str, *, copy_class: str, view_class: str) -> str:
    """Return the HTML of a static copy, to be displayed directly below the live widget.

    Args:
        html: what the copy shows.
        copy_class: the class of this widget's copies alone: the live view hides what has it.
        view_class: a class that the widget's live view has.
    """
    style = _STYLE.substitute(copy=copy_class, view=view_class)
    return f'<div class="{copy_class}"><style>{style}</style>{html}</div>'
