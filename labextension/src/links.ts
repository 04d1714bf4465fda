// All notebooks' lines to their kernels, and which notebook has the focus.

import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import type { ISessionContext } from "@jupyterlab/apputils";
import { UUID } from "@lumino/coreutils";
import { Signal } from "@lumino/signaling";

import { Link } from "./link";

export class Links {
  /** Emitted when another notebook has the focus, and when any notebook's line has changed. */
  readonly changed = new Signal<this, Link | null>(this);
  /** Emitted when a cell of any notebook has ended. */
  readonly ran = new Signal<this, Link>(this);
  private readonly links = new Map<ISessionContext, Link>();
  private readonly pageId = UUID.uuid4();
  /** The line whose memory this page shows; null while the page can't be seen. */
  private seen: Link | null = null;

  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach((panel) => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => this.updateSeen());
    document.addEventListener("visibilitychange", () => this.updateSeen());
    window.addEventListener("pagehide", () => this.seen?.tellSeen(false));
  }

  /** The notebook that has the focus, or had it last. */
  get panel(): NotebookPanel | null {
    return this.tracker.currentWidget;
  }

  /** The line to that notebook's kernel. */
  get current(): Link | null {
    const { panel } = this;
    return panel ? (this.links.get(panel.sessionContext) ?? null) : null;
  }

  /** The lines of all notebooks that are open in this page. */
  get all(): Link[] {
    return [...this.links.values()];
  }

  /** The line of the notebook that an element is part of; of the one with the focus for a view elsewhere. */
  find(element: Node): Link | null {
    const panel = this.tracker.find((each) => each.node.contains(element)) ?? this.panel;
    return panel ? (this.links.get(panel.sessionContext) ?? null) : null;
  }

  private add(panel: NotebookPanel): void {
    const { sessionContext } = panel;
    if (!this.links.has(sessionContext)) {
      const link = new Link(sessionContext, this.pageId);
      this.links.set(sessionContext, link);
      link.changed.connect(() => this.updateSeen(link));
      link.ran.connect(() => {
        // After each cell the kernel wants to hear that this page is still there.
        if (link === this.seen) link.tellSeen(true);
        this.ran.emit(link);
      });
      sessionContext.disposed.connect(() => {
        this.links.delete(sessionContext);
        link.dispose();
        this.updateSeen();
      });
    }
    this.updateSeen();
  }

  /** Let the kernel of the notebook that is seen report its memory, and no other. */
  private updateSeen(changed: Link | null = null): void {
    const { current } = this;
    const seen = document.visibilityState !== "hidden" && current?.isOpen ? current : null;
    if (seen !== this.seen) {
      this.seen?.tellSeen(false);
      this.seen = seen;
      seen?.tellSeen(true);
    }
    this.changed.emit(changed);
  }
}
