// The panel beside the notebook: the dashboard of the notebook that has the focus.

import type { NotebookPanel } from "@jupyterlab/notebook";
import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import type { Message } from "@lumino/messaging";
import { PanelLayout, Widget } from "@lumino/widgets";

import type { KernelsList } from "./kernels";
import type { Link } from "./link";
import type { Links } from "./links";

const VIEW_MIME = "application/vnd.jupyter.widget-view+json";
/** The dashboard's narrowest layout. */
const MIN_WIDTH_PX = 320;
const LOAD = "Run %load_ext gpumemwidget in the notebook.";

/** What stands in the place of the dashboard where there is none. */
const LACKS = {
  unloaded: LOAD,
  restarted: `The kernel was restarted. ${LOAD}`,
  gone: "The notebook has no kernel.",
};

export class MemoryPanel extends Widget {
  private readonly head = new Widget();
  private readonly message = new Widget();
  /** The view of the dashboard, and the model and the notebook that it belongs to. */
  private view: Widget | null = null;
  private viewed = "";
  /** The line that was asked for its dashboard last. */
  private asked: Link | null = null;

  constructor(
    private readonly links: Links,
    private readonly kernels: KernelsList,
  ) {
    super();
    this.addClass("gml-panel");
    // The shell reads it before style sheets have come.
    this.node.style.minWidth = `${MIN_WIDTH_PX}px`;
    this.head.addClass("gml-head");
    this.message.addClass("gml-message");
    this.message.node.setAttribute("role", "status");
    const layout = new PanelLayout();
    this.layout = layout;
    for (const part of [this.head, this.message, kernels]) layout.addWidget(part);
    links.changed.connect(() => this.update());
  }

  protected override onAfterShow(_: Message): void {
    this.kernels.follow(true);
    this.update();
  }

  protected override onAfterAttach(_: Message): void {
    if (this.isVisible) this.onAfterShow(_);
  }

  /** A panel that is not seen costs the kernel nothing. */
  protected override onAfterHide(_: Message): void {
    this.kernels.follow(false);
    this.asked = null;
    this.dropView();
  }

  protected override onUpdateRequest(_: Message): void {
    if (!this.isVisible) return;
    const { panel, current } = this.links;
    this.head.node.textContent = panel?.title.label ?? "";
    const text = this.describeLack(panel, current);
    this.message.node.textContent = text;
    this.message.setHidden(text === "");
    if (!panel || !current?.isOpen) {
      this.asked = null;
      this.dropView();
      return;
    }
    if (this.asked !== current) {
      this.asked = current;
      current.askDashboard();
    }
    const viewed = `${panel.id} ${current.modelId}`;
    if (this.viewed !== viewed) {
      this.dropView();
      if (current.modelId) {
        this.viewed = viewed;
        void this.showView(panel, current.modelId, viewed);
      }
    }
  }

  private describeLack(panel: NotebookPanel | null, link: Link | null): string {
    if (!panel || !link) return "Open a notebook: its memory is shown here.";
    if (link.lack) return link.isBusy && link.lack !== "gone" ? `${LACKS[link.lack]} The kernel is busy.` : LACKS[link.lack];
    if (link.failure) return link.failure;
    if (link.modelId) return "";
    return link.isBusy ? "The kernel is busy: the dashboard comes when the cell ends." : "The dashboard is on its way.";
  }

  /** Draw the model as the notebook does in its own outputs. */
  private async showView(panel: NotebookPanel, modelId: string, viewed: string): Promise<void> {
    const { rendermime } = panel.content;
    let renderer: IRenderMime.IRenderer;
    try {
      renderer = rendermime.createRenderer(VIEW_MIME);
    } catch {
      this.message.node.textContent = "This JupyterLab can't show widgets: install jupyterlab_widgets.";
      this.message.setHidden(false);
      return;
    }
    const data = { [VIEW_MIME]: { version_major: 2, version_minor: 0, model_id: modelId } };
    renderer.addClass("gml-view");
    this.view = renderer;
    (this.layout as PanelLayout).insertWidget(2, renderer);
    await renderer.renderModel(rendermime.createModel({ data, metadata: {} }));
    if (this.viewed !== viewed) renderer.dispose();
  }

  private dropView(): void {
    this.view?.dispose();
    this.view = null;
    this.viewed = "";
  }
}
