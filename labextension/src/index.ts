// The JupyterLab extension of gpumemwidget: a panel beside the notebook, and the focused notebook's
// GPU memory in the status bar. All figures come from the notebook's kernel (link.ts).

import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette } from "@jupyterlab/apputils";
import { INotebookTracker } from "@jupyterlab/notebook";
import { IRenderMimeRegistry } from "@jupyterlab/rendermime";
import { IStatusBar } from "@jupyterlab/statusbar";
import { LabIcon } from "@jupyterlab/ui-components";

import { KernelsList } from "./kernels";
import { Links } from "./links";
import { makeNoteFactory, NOTE_RANK } from "./note";
import { MemoryPanel } from "./panel";
import { StatusItem } from "./status";

const PANEL_ID = "gpumemwidget-panel";
const COMMAND = "gpumemwidget:show";
const WIDTH_PX = 340;
const LABEL = "GPU memory";

const icon = new LabIcon({
  name: "gpumemwidget:memory",
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="16"><path class="jp-icon3" fill="#616161" d="M3 7h18v10h-4v3h-2v-3h-2v3h-2v-3H9v3H7v-3H3V7zm2 2v6h14V9H5zm1.5 1.5h3v3h-3v-3zm4 0h3v3h-3v-3zm4 0h3v3h-3v-3zM7 4h2v2H7V4zm4 0h2v2h-2V4zm4 0h2v2h-2V4z"/></svg>',
});

const plugin: JupyterFrontEndPlugin<void> = {
  id: "gpumemwidget-lab:plugin",
  description: "The memory of the focused notebook, beside it and in the status bar.",
  autoStart: true,
  requires: [INotebookTracker, IRenderMimeRegistry],
  optional: [ILabShell, IStatusBar, ILayoutRestorer, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    rendermime: IRenderMimeRegistry,
    labShell: ILabShell | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
  ) => {
    const links = new Links(tracker);
    const kernels = new KernelsList(links, app.serviceManager.sessions);
    const panel = new MemoryPanel(links, kernels);
    panel.id = PANEL_ID;
    panel.title.icon = icon;
    panel.title.caption = LABEL;
    // JupyterLab makes the area as wide as this when it opens it first; Notebook 7 does not.
    if (labShell) panel.node.style.minWidth = `${WIDTH_PX}px`;
    app.shell.add(panel, "right", { rank: 600 });
    restorer?.add(panel, PANEL_ID);

    const show = (): void => app.shell.activateById(PANEL_ID);
    app.commands.addCommand(COMMAND, { label: `Show ${LABEL}`, caption: "Show the dashboard beside the notebook", icon, execute: show });
    palette?.addItem({ command: COMMAND, category: "Notebook Operations" });
    rendermime.addFactory(makeNoteFactory(links, show), NOTE_RANK);

    const item = new StatusItem(links, kernels, show);
    if (statusBar) {
      statusBar.registerStatusItem("gpumemwidget-lab:status", {
        item, align: "left", rank: 600, isActive: () => item.isActive, activeStateChanged: item.drawn,
      });
    } else {
      // Notebook 7 has no status bar.
      item.id = "gpumemwidget-status";
      app.shell.add(item, "menu", { rank: 1_000 });
    }
    openWhenAsked(links, show);
    // The card of an OOM has a button for it (js/cards.js).
    document.body.dataset.gmlRunsCells = "";
    document.addEventListener("gpumemwidget:run-cell", (event) => {
      const notebook = tracker.currentWidget?.content;
      const place = notebook?.widgets.findIndex((cell) => cell.node.contains(event.target as Node)) ?? -1;
      if (!notebook || place < 0) return;
      notebook.deselectAll();
      notebook.activeCellIndex = place;
      void app.commands.execute("notebook:run-cell");
    });
  },
};

/** Open the panel once for each run of %memdash --side, not again after the page is loaded anew. */
function openWhenAsked(links: Links, show: () => void): void {
  links.changed.connect((_, link) => {
    if (!link || link.known.nShown === 0) return;
    const key = `gpumemwidget:shown:${link.commId}`;
    if (Number(sessionStorage.getItem(key)) >= link.known.nShown) return;
    sessionStorage.setItem(key, String(link.known.nShown));
    show();
  });
}

export default plugin;
