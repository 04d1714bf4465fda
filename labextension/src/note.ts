// What stands below a cell with %memdash --side: where the dashboard is.

import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import { Widget } from "@lumino/widgets";

/** gpumemwidget/widgets/lab.py has the same. */
const MIME = "application/vnd.gpumemwidget.side+json";
/** Before the widget itself, whose factory has rank -10. */
export const NOTE_RANK = -20;

class Note extends Widget implements IRenderMime.IRenderer {
  constructor(private readonly onShow: () => void) {
    super();
    this.addClass("gml-note");
  }

  async renderModel(): Promise<void> {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show it";
    button.addEventListener("click", this.onShow);
    this.node.replaceChildren("The dashboard is beside the notebook. ", button);
  }
}

/** Make the factory for the output of %memdash --side. */
export function makeNoteFactory(onShow: () => void): IRenderMime.IRendererFactory {
  return { safe: true, mimeTypes: [MIME], createRenderer: () => new Note(onShow) };
}
