// The line to the kernel of one notebook, where the gpumemwidget extension is loaded there.
// The kernel's side is gpumemwidget/widgets/lab.py.

import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel, KernelMessage } from "@jupyterlab/services";
import type { IDisposable } from "@lumino/disposable";
import { Signal } from "@lumino/signaling";

const TARGET = "gpumemwidget";
/** Milliseconds after which a question that was not answered may be asked again. */
const ASK_AGAIN_MS = 30_000;

/** What the notebook has of one device. */
export interface IMemory {
  device: string;
  name: string;
  /** What this notebook's process has there, as the driver shows it. */
  here_bytes: number | null;
  allocated_bytes: number | null;
  reserved_bytes: number | null;
  total_bytes: number | null;
  limit_bytes: number | null;
  budget_bytes: number | null;
  is_over_budget: boolean;
  is_at_limit: boolean;
}

/** A GPU that the notebook's kernel sees, and what each kernel of the machine takes of it. */
export interface IGpu {
  uuid: string;
  device: string;
  name: string;
  total_bytes: number | null;
  kernels: Record<string, number | null>;
}

/** Why there is no line. ``unknown``: the kernel was asked and has not answered yet. ``shared``:
 * another notebook of this page has the same kernel, and its line. ``foreign``: no Python kernel. */
export type Reason = "unknown" | "unloaded" | "restarted" | "gone" | "shared" | "foreign";

class Known {
  memory: IMemory[] = [];
  gpus: IGpu[] = [];
  /** When the kernel sent ``gpus``, in milliseconds since the epoch: a busy one says nothing. */
  gpusAt = 0;
  /** The id of the dashboard's widget model; null until the kernel has answered. */
  modelId: string | null = null;
  /** Why the kernel could not make the dashboard or the list of kernels, or load the extension;
   * empty if it could. */
  failures = { dashboard: "", kernels: "", load: "" };
  /** How often %memdash --side was run since the extension was loaded. */
  nShown = 0;
}

/** One for each notebook, however many views of it are open: they share a session. */
export class Link implements IDisposable {
  /** Emitted after anything below has changed. */
  readonly changed = new Signal<this, void>(this);
  /** Emitted when a cell has ended, or several in a row. */
  readonly ran = new Signal<this, void>(this);
  /** Why there is no line to the kernel; null if there is one. */
  reason: Reason | null = "unknown";
  /** What the kernel has sent since the line to it was opened. */
  known = new Known();
  /** Since when the kernel is busy, in milliseconds since the epoch; null if it is not. */
  busySince: number | null = null;
  isDisposed = false;
  private comm: Kernel.IComm | null = null;
  private isFinding = false;
  /** A cell began, or the kernel is new: the extension may be loaded when it is idle again. */
  private mayHaveLoaded = true;
  private askedKernelsAt = -Infinity;

  constructor(
    readonly session: ISessionContext,
    private readonly pageId: string,
  ) {
    session.statusChanged.connect(this.onStatus, this);
    session.kernelChanged.connect(this.onKernel, this);
    session.iopubMessage.connect(this.onMessage, this);
    void this.find();
  }

  get isOpen(): boolean {
    return this.comm !== null;
  }

  /** Whether the extension could be loaded in the kernel, and is not. */
  get canLoad(): boolean {
    return this.reason === "unloaded" || this.reason === "restarted";
  }

  get isBusy(): boolean {
    return this.kernel?.status === "busy";
  }

  get kernelId(): string | null {
    return this.kernel?.id ?? null;
  }

  /** The comm's id: another one each time that the extension is loaded. */
  get commId(): string | null {
    return this.comm?.commId ?? null;
  }

  dispose(): void {
    if (this.isDisposed) return;
    this.isDisposed = true;
    this.tellSeen(false);
    this.clear();
    Signal.clearData(this);
  }

  /** Report to the kernel whether this page shows its memory. */
  tellSeen(isSeen: boolean): void {
    this.send({ kind: "look", page: this.pageId, is_seen: isSeen });
  }

  askDashboard(): void {
    this.send({ kind: "dashboard" });
  }

  /** Load the extension in the kernel, as the user would in a cell. */
  async load(): Promise<void> {
    this.known.failures.load = "";
    try {
      // A failure is shown in the panel: cells that wait behind it run all the same.
      const options = { code: "%load_ext gpumemwidget", store_history: false, stop_on_error: false };
      const content = (await this.kernel?.requestExecute(options).done)?.content;
      if (content?.status === "error") {
        const isMissing = content.ename === "ModuleNotFoundError";
        this.known.failures.load = isMissing
          ? `${content.evalue}. Install gpumemwidget in the kernel's environment.`
          : `${content.ename}: ${content.evalue}`;
      }
    } catch {
      // The kernel ended or was restarted meanwhile: its status says that.
    }
    this.changed.emit();
  }

  /** Ask for the list of kernels. A busy one would answer all questions at the cell's end. */
  askKernels(): void {
    const isWaiting = performance.now() - this.askedKernelsAt < ASK_AGAIN_MS;
    if (this.isBusy || isWaiting || !this.isOpen) return;
    this.askedKernelsAt = performance.now();
    this.send({ kind: "kernels" });
  }

  private get kernel(): Kernel.IKernelConnection | null {
    return this.session.session?.kernel ?? null;
  }

  private send(content: { kind: string; page?: string; is_seen?: boolean }): void {
    if (this.comm && !this.comm.isDisposed) this.comm.send(content);
  }

  private onMessage(_: unknown, message: KernelMessage.IMessage): void {
    if (message.header.msg_type === "execute_input") this.mayHaveLoaded = true;
  }

  private onStatus(_: unknown, status: Kernel.Status): void {
    if (status === "restarting" || status === "autorestarting") this.disconnect("restarted");
    else if (status === "dead" || status === "terminating") this.disconnect("gone");
    else if (status === "idle" && this.mayHaveLoaded) {
      this.mayHaveLoaded = false;
      void this.find();
      this.ran.emit();
    }
    if ((this.busySince !== null) !== this.isBusy) {
      this.busySince = this.isBusy ? Date.now() : null;
      this.changed.emit();
    }
  }

  private onKernel(): void {
    this.disconnect(this.kernel ? "unknown" : "gone");
    void this.find();
  }

  /** Look for the comm among the kernel's own, which answers once it is idle. */
  private async find(): Promise<void> {
    const { kernel } = this;
    if (!kernel || this.comm || this.isFinding || this.isDisposed) return;
    if (!kernel.handleComms) {
      this.explain("shared");
      return;
    }
    this.isFinding = true;
    let id: string | undefined;
    let isForeign = false;
    try {
      isForeign = ((await kernel.spec)?.language ?? "python").toLowerCase() !== "python";
      if (!isForeign) {
        const { content } = await kernel.requestCommInfo({ target_name: TARGET });
        id = content.status === "ok" ? Object.keys(content.comms).pop() : undefined;
      }
    } catch {
      // The kernel ended or was restarted meanwhile: its status says that.
      return;
    } finally {
      this.isFinding = false;
    }
    if (kernel !== this.kernel || this.isDisposed || this.comm) return;
    if (id !== undefined) this.open(kernel, id);
    else if (this.reason === "unknown") this.explain(isForeign ? "foreign" : "unloaded");
  }

  private open(kernel: Kernel.IKernelConnection, id: string): void {
    const comm = kernel.createComm(TARGET, id);
    comm.onMsg = ({ content }) => this.receive(content.data as Record<string, any>);
    comm.onClose = () => this.disconnect("unloaded");
    this.comm = comm;
    this.reason = null;
    this.changed.emit();
  }

  private receive(message: Record<string, any>): void {
    const { known } = this;
    const kind: "memory" | "side" | "dashboard" | "kernels" = message.of ?? message.kind;
    if (kind === "kernels") this.askedKernelsAt = -Infinity;
    if (kind === "kernels" || kind === "dashboard") known.failures[kind] = message.message ?? "";
    if (message.kind === "memory") known.memory = message.devices;
    else if (message.kind === "side") known.nShown = message.n_shown;
    else if (message.kind === "kernels") [known.gpus, known.gpusAt] = [message.gpus, Date.now()];
    else if (message.kind === "dashboard") known.modelId = message.model_id;
    this.changed.emit();
  }

  /** There is no line any more, and why. */
  private disconnect(reason: Reason): void {
    this.clear();
    this.mayHaveLoaded = true;
    this.explain(reason);
  }

  private explain(reason: Reason): void {
    this.reason = reason;
    this.changed.emit();
  }

  private clear(): void {
    const { comm } = this;
    this.comm = null;
    this.known = new Known();
    this.askedKernelsAt = -Infinity;
    // Not comm.close(): other pages speak to it.
    comm?.dispose();
  }
}
