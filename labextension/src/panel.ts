// The panel beside the notebook: the dashboard of the notebook that has the focus.

import type { NotebookPanel } from "@jupyterlab/notebook";
import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import type { Message } from "@lumino/messaging";
import { PanelLayout, Widget } from "@lumino/widgets";

import { make, type KernelsList } from "./kernels";
import type { Link } from "./link";
import type { Links } from "./links";

const VIEW_MIME = "application/vnd.jupyter.widget-view+json";

/** Why there is no dashboard. */
const SENTENCES = {
  unknown: "Waiting for the kernel: where a cell runs, the dashboard comes when it has ended.",
  unloaded: "This notebook is not recorded.",
  restarted: "The kernel was restarted: it is not recorded any more.",
  gone: "The notebook has no kernel.",
  shared: "Another notebook in this page has the same kernel: the dashboard is shown with that one.",
  foreign: "The notebook's kernel is not Python: its memory is not recorded.",
};

export class MemoryPanel extends Widget {
  private readonly head = new Widget();
  private readonly message = new Widget();
  /** The view of the dashboard, and the model and the notebook that it belongs to. */
  private view: Widget | null = null;
  private viewed = "";
  /** The views that have been drawn to the end. */
  private readonly drawn = new WeakSet<Widget>();
  private readonly words = make("span", {});
  private readonly loadButton = make("button", {
    type: "button", class: "gml-load", title: "Runs %load_ext gpumemwidget in the notebook's kernel",
  }, "Load gpumemwidget") as HTMLButtonElement;
  /** The line that was asked for its dashboard last. */
  private asked: Link | null = null;

  constructor(
    private readonly links: Links,
    private readonly kernels: KernelsList,
  ) {
    super();
    this.addClass("gml-panel");
    this.head.addClass("gml-head");
    this.message.addClass("gml-message");
    this.message.node.setAttribute("role", "status");
    this.loadButton.addEventListener("click", () => void links.current?.load());
    this.message.node.append(this.words, this.loadButton);
    const layout = new PanelLayout();
    this.layout = layout;
    for (const part of [this.head, kernels, this.message]) layout.addWidget(part);
    links.changed.connect(() => this.update());
    links.ran.connect((_, link) => {
      // What failed before may go well after another cell.
      if (link === this.asked && link.known.failures.dashboard) this.asked = null;
      this.update();
    });
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
    const text = this.describeReason(panel, current);
    this.words.textContent = text;
    this.loadButton.hidden = !panel || !current?.canLoad;
    this.loadButton.disabled = Boolean(current?.isBusy);
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
    const viewed = `${panel.id} ${current.known.modelId}`;
    if (this.viewed !== viewed) {
      this.dropView();
      if (current.known.modelId) {
        this.viewed = viewed;
        void this.showView(panel, current.known.modelId);
      }
    }
  }

  private describeReason(panel: NotebookPanel | null, link: Link | null): string {
    if (!panel || !link) return "Open a notebook: its memory is shown here.";
    if (link.canLoad && link.known.failures.load) return `It can't be loaded: ${link.known.failures.load}`;
    if (link.reason) return SENTENCES[link.reason];
    if (link.known.modelId) return "";
    if (link.known.failures.dashboard) return `The dashboard can't be shown: ${link.known.failures.dashboard}`;
    return link.isBusy ? "The kernel is busy: the dashboard comes when the cell ends." : "The dashboard is on its way.";
  }

  /** Draw the model as the notebook does in its own outputs. */
  private async showView(panel: NotebookPanel, modelId: string): Promise<void> {
    const { rendermime } = panel.content;
    let renderer: IRenderMime.IRenderer;
    try {
      renderer = rendermime.createRenderer(VIEW_MIME);
    } catch {
      this.words.textContent = "This JupyterLab can't show widgets: install jupyterlab_widgets.";
      this.message.setHidden(false);
      return;
    }
    const data = { [VIEW_MIME]: { version_major: 2, version_minor: 0, model_id: modelId } };
    renderer.addClass("gml-view");
    this.view = renderer;
    (this.layout as PanelLayout).addWidget(renderer);
    try {
      await renderer.renderModel(rendermime.createModel({ data, metadata: {} }));
    } finally {
      this.drawn.add(renderer);
      if (this.view !== renderer) renderer.dispose();
    }
  }

  /** Take the view away; one that is still being drawn is disposed of when that is done. */
  private dropView(): void {
    const { view } = this;
    this.view = null;
    this.viewed = "";
    if (!view) return;
    view.parent = null;
    if (this.drawn.has(view)) view.dispose();
  }
}
