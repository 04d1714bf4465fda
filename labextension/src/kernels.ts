// The notebooks whose kernels take memory of the GPUs: in one line, and as a list with a way to shut
// one down.

import { Dialog, showDialog, showErrorMessage } from "@jupyterlab/apputils";
import type { Session } from "@jupyterlab/services";
import { Widget } from "@lumino/widgets";

import type { IGpu } from "./link";
import type { Links } from "./links";

/** A GPU, and for each kernel what it takes and when that was read, in milliseconds since the epoch. */
type JoinedGpu = Omit<IGpu, "kernels"> & { kernels: Record<string, { nBytes: number | null; at: number }> };

/** Number of notebooks that the line names. */
const MOST_NAMED = 3;
/** Milliseconds between two questions to a kernel: one that is idle answers for those that are busy. */
const ASK_MS = 3_000;
/** Milliseconds for which a kernel is busy before its figures are marked as old: a message is short. */
const BUSY_MS = 1_500;

export class KernelsList extends Widget {
  /** What all notebooks take of the GPUs, in one line; empty where none is known to take any. */
  line = "";
  private readonly details = document.createElement("details");
  private timer = 0;
  /** The next drawing, once a kernel that just became busy has been so for long. */
  private later = 0;
  private drawn = "";
  /** The sessions that are being shut down. */
  private readonly ending = new Set<string>();

  constructor(
    private readonly links: Links,
    private readonly sessions: Session.IManager,
  ) {
    super();
    this.addClass("gml-kernels");
    this.node.append(this.details);
    links.changed.connect(() => this.draw());
    sessions.runningChanged.connect(() => this.draw());
    links.ran.connect((_, link) => {
      if (this.timer) link.askKernels();
    });
  }

  /** Ask a kernel once. */
  ask(): void {
    const { current, all } = this.links;
    [current, ...all].find((link) => link?.isOpen && !link.isBusy)?.askKernels();
  }

  /** Ask the kernels from now on, while the panel is seen; or no longer. */
  follow(isSeen: boolean): void {
    window.clearInterval(this.timer);
    this.timer = 0;
    if (!isSeen) return;
    this.links.all.forEach((link) => link.askKernels());
    this.timer = window.setInterval(() => {
      // Each question counts as activity of the kernel, which a server may shut down for want of it.
      if (document.visibilityState !== "hidden") this.ask();
    }, ASK_MS);
  }

  override dispose(): void {
    this.follow(false);
    window.clearTimeout(this.later);
    super.dispose();
  }

  /** Each GPU once, by its UUID, with what all kernels know of it, the newest answer first. */
  private joinGpus(): JoinedGpu[] {
    const gpus = new Map<string, JoinedGpu>();
    for (const link of this.links.all.sort((one, other) => one.known.gpusAt - other.known.gpusAt)) {
      for (const gpu of link.known.gpus) {
        const kernels = { ...gpus.get(gpu.uuid)?.kernels };
        for (const [id, nBytes] of Object.entries(gpu.kernels)) kernels[id] = { nBytes, at: link.known.gpusAt };
        gpus.set(gpu.uuid, { ...gpu, kernels });
      }
    }
    return [...gpus.values()].sort((one, other) => one.device.localeCompare(other.device, "en", { numeric: true }));
  }

  private draw(): void {
    const sessions = new Map<string, Session.IModel>();
    for (const model of this.sessions.running()) if (model.kernel) sessions.set(model.kernel.id, model);
    const failure = this.links.current?.known.failures.kernels ?? "";
    const busySince = new Map(this.links.all.map(({ kernelId, busySince }) => [kernelId, busySince]));
    const now = Date.now();
    let mayTurnOld = false;
    const shown = this.joinGpus().map((gpu) => ({
      gpu,
      rows: Object.entries(gpu.kernels)
        .flatMap(([id, { nBytes, at }]) => {
          const model = sessions.get(id);
          // Read before its cell began; another notebook may have read it since.
          const since = busySince.get(id) ?? 0;
          const isOld = since > at && now - since >= BUSY_MS;
          if (since > at && !isOld) mayTurnOld = true;
          const oldAt = isOld ? at : null;
          return model && !this.ending.has(model.id) ? [{ model, nBytes, oldAt }] : [];
        })
        .sort((one, other) => (other.nBytes ?? 0) - (one.nBytes ?? 0)),
    }));
    window.clearTimeout(this.later);
    if (mayTurnOld) this.later = window.setTimeout(() => this.draw(), BUSY_MS);
    const focused = this.links.current?.kernelId;
    const state = JSON.stringify([shown, focused, failure]);
    if (state === this.drawn) return;
    this.drawn = state;
    this.line = describe(shown.flatMap(({ rows }) => rows));
    this.setHidden(failure === "" && this.line === "");
    this.details.replaceChildren(make("summary", {}, this.line || "GPU memory by notebook"));
    if (failure) this.details.append(make("p", {}, `The GPUs can't be read: ${failure}`));
    for (const { gpu, rows } of shown) {
      if (rows.length === 0) continue;
      const total = gpu.total_bytes === null ? "" : ` · ${formatBytes(gpu.total_bytes)}`;
      this.details.append(make("h4", { title: gpu.uuid }, `${gpu.name}${total}`));
      const list = make("ul", {});
      for (const { model, nBytes, oldAt } of rows) {
        const name = nameSession(model);
        const button = make("button", { type: "button", title: `Shut down the kernel of ${name}`, "aria-label": `Shut down the kernel of ${name}` }, "✕");
        button.addEventListener("click", () => void this.shutDown(model));
        const old = describeAge(oldAt);
        const row = make("li", { title: model.path }, make("span", { class: "gml-name" }, name), make("span", { class: "gml-bytes" }, formatBytes(nBytes), old), button);
        row.toggleAttribute("data-focused", model.kernel?.id === focused);
        row.toggleAttribute("data-old", oldAt !== null);
        list.append(row);
      }
      this.details.append(list);
    }
  }

  private async shutDown(model: Session.IModel): Promise<void> {
    const name = nameSession(model);
    const nBytes = this.joinGpus().reduce((sum, gpu) => sum + (gpu.kernels[model.kernel?.id ?? ""]?.nBytes ?? 0), 0);
    const freed = nBytes === 0 ? "" : ` This frees ${formatBytes(nBytes)} of GPU memory.`;
    const { button } = await showDialog({
      title: `Shut down the kernel of ${name}?`,
      body: `All of its variables are lost.${freed}`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "Shut Down" })],
      defaultButton: 0,
    });
    if (!button.accept) return;
    this.ending.add(model.id);
    this.draw();
    try {
      await this.sessions.shutdown(model.id);
    } catch (error) {
      await showErrorMessage(`The kernel of ${name} was not shut down`, error as Error);
    } finally {
      this.ending.delete(model.id);
      this.draw();
    }
  }
}

/** Return ``GPU: a.ipynb 20.50 GiB · b.ipynb 5.50 GiB``, of all GPUs together; ``""`` for none. */
function describe(rows: { model: Session.IModel; nBytes: number | null; oldAt: number | null }[]): string {
  const sums = new Map<string, { name: string; nBytes: number | null; oldAt: number | null }>();
  for (const { model, nBytes, oldAt } of rows) {
    const known = sums.get(model.id) ?? { nBytes: 0, oldAt };
    const sum = known.nBytes === null || nBytes === null ? null : known.nBytes + nBytes;
    sums.set(model.id, { name: nameSession(model), nBytes: sum, oldAt: known.oldAt ?? oldAt });
  }
  const sorted = [...sums.values()].sort((one, other) => (other.nBytes ?? 0) - (one.nBytes ?? 0));
  const named = sorted.slice(0, MOST_NAMED).map(({ name, nBytes, oldAt }) => `${name} ${formatBytes(nBytes)}${describeAge(oldAt)}`);
  const more = sorted.length > MOST_NAMED ? [`${sorted.length - MOST_NAMED} more`] : [];
  return sorted.length ? `GPU: ${[...named, ...more].join(" · ")}` : "";
}

function describeAge(oldAt: number | null): string {
  return oldAt === null ? "" : ` (busy, as of ${new Date(oldAt).toLocaleTimeString("en-GB")})`;
}

function nameSession(model: Session.IModel): string {
  return model.path.split("/").pop() || model.name;
}

export function make(tag: string, attributes: Record<string, string>, ...children: (Node | string)[]): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const GIB = 2 ** 30;

/** "12.3", and "80" for what has no tenths: a figure for a narrow place. */
export function formatShort(nBytes: number): string {
  return (nBytes / GIB).toFixed(1).replace(/\.0$/, "");
}

/** "12.30 GiB", or "512.00 MiB" for less than one. */
export function formatBytes(nBytes: number | null): string {
  if (nBytes === null) return "unknown";
  return nBytes < GIB ? `${((1024 * nBytes) / GIB).toFixed(2)} MiB` : `${(nBytes / GIB).toFixed(2)} GiB`;
}
