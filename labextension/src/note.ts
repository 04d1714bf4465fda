// What stands below a cell with %memdash --side: where the dashboard is. Where the notebook has no
// line to a kernel it is empty, and the static copy below it is shown instead.

import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import { Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import { make } from "./kernels";
import type { Links } from "./links";

/** gpumemwidget/widgets/lab.py has the same. */
const MIME = "application/vnd.gpumemwidget.side+json";
/** Before the widget itself, whose factory has rank -10. */
export const NOTE_RANK = -20;

class Note extends Widget implements IRenderMime.IRenderer {
  private dashboardId = "";

  constructor(
    private readonly links: Links,
    private readonly onShow: () => void,
  ) {
    super();
    links.changed.connect(this.draw, this);
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.dashboardId = (model.data[MIME] as { dashboard_id?: string }).dashboard_id ?? "";
    this.draw();
  }

  override dispose(): void {
    Signal.disconnectReceiver(this);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this.draw();
  }

  private draw(): void {
    const isOpen = this.isAttached && Boolean(this.links.find(this.node)?.isOpen);
    // Once it was shown it keeps its place: the copy would push the cells below it far down.
    if (!isOpen && !this.hasClass("gml-note")) return;
    this.addClass("gml-note");
    const style = make("style", {}, `.gmw-copy-${this.dashboardId} { display: none !important }`);
    const button = make("button", { type: "button" }, "Show it");
    button.addEventListener("click", this.onShow);
    const words = isOpen ? ["The dashboard is beside the notebook. ", button] : ["The dashboard's kernel has ended. Run %load_ext gpumemwidget and %memdash --side again."];
    this.node.replaceChildren(style, ...words);
  }
}

/** Make the factory for the output of %memdash --side. */
export function makeNoteFactory(links: Links, onShow: () => void): IRenderMime.IRendererFactory {
  return { safe: true, mimeTypes: [MIME], createRenderer: () => new Note(links, onShow) };
}
