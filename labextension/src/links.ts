// All notebooks' lines to their kernels, and which notebook has the focus.

import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import type { ISessionContext } from "@jupyterlab/apputils";
import { UUID } from "@lumino/coreutils";
import { Signal } from "@lumino/signaling";

import { Link } from "./link";

/** Milliseconds between two words to the kernel that somebody looks; it waits 25 s for one. */
const LOOK_MS = 10_000;

export class Links {
  /** Emitted when another notebook has the focus, and when any notebook's line has changed. */
  readonly changed = new Signal<this, Link | null>(this);
  private readonly links = new Map<ISessionContext, Link>();
  private readonly pageId = UUID.uuid4();
  private seen: Link | null = null;

  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach((panel) => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => this.turn());
    document.addEventListener("visibilitychange", () => this.turn());
    window.addEventListener("pagehide", () => this.seen?.look(false));
    window.setInterval(() => this.seen?.look(true), LOOK_MS);
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

  private add(panel: NotebookPanel): void {
    const { sessionContext } = panel;
    if (!this.links.has(sessionContext)) {
      const link = new Link(sessionContext, this.pageId);
      this.links.set(sessionContext, link);
      link.changed.connect(() => this.turn(link));
      sessionContext.disposed.connect(() => {
        this.links.delete(sessionContext);
        link.dispose();
        this.turn();
      });
    }
    this.turn();
  }

  /** Let the kernel of the notebook that is seen tell its memory, and no other. */
  private turn(changed: Link | null = null): void {
    const { current } = this;
    const seen = document.visibilityState !== "hidden" && current?.isOpen ? current : null;
    if (seen !== this.seen) {
      this.seen?.look(false);
      this.seen = seen;
      seen?.look(true);
    }
    this.changed.emit(changed);
  }
}
