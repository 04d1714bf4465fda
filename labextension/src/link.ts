// The line to the kernel of one notebook, where the gpumemwidget extension is loaded there.
// The kernel's side is gpumemwidget/widgets/lab.py.

import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel } from "@jupyterlab/services";
import type { IDisposable } from "@lumino/disposable";
import { Signal } from "@lumino/signaling";

const TARGET = "gpumemwidget";

/** What the notebook has of one device. */
export interface IMemory {
  device: string;
  name: string;
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

/** Why there is no line: the kernel has not loaded the extension, was restarted, or is gone. */
export type Lack = "unloaded" | "restarted" | "gone";

/** One for each notebook, however many views of it are open: they share a session. */
export class Link implements IDisposable {
  /** Emitted after any of the attributes below has changed. */
  readonly changed = new Signal<this, void>(this);
  lack: Lack | null = "unloaded";
  memory: IMemory[] = [];
  gpus: IGpu[] = [];
  /** When the kernel said so, in milliseconds: a busy one says nothing. */
  gpusAt = 0;
  /** The id of the dashboard's widget model; null until the kernel has answered. */
  modelId: string | null = null;
  /** A failure of the kernel's that concerns the panel. */
  failure = "";
  /** How often %memdash --side was run in this kernel. */
  nShown = 0;
  isDisposed = false;
  private comm: Kernel.IComm | null = null;
  private isAsking = false;
  private isAskingKernels = false;

  constructor(
    readonly session: ISessionContext,
    private readonly pageId: string,
  ) {
    session.statusChanged.connect(this.onStatus, this);
    session.kernelChanged.connect(this.onKernel, this);
    void this.find();
  }

  get isOpen(): boolean {
    return this.comm !== null;
  }

  get isBusy(): boolean {
    return this.session.session?.kernel?.status === "busy";
  }

  get kernelId(): string | null {
    return this.session.session?.kernel?.id ?? null;
  }

  dispose(): void {
    if (this.isDisposed) return;
    this.isDisposed = true;
    this.look(false);
    this.forget();
    Signal.clearData(this);
  }

  /** Tell the kernel whether this page shows what is said of it. */
  look(isSeen: boolean): void {
    this.send({ kind: "look", page: this.pageId, is_seen: isSeen });
  }

  askDashboard(): void {
    this.send({ kind: "dashboard" });
  }

  /** A busy kernel would answer all questions at the cell's end. */
  askKernels(): void {
    if (this.isBusy || this.isAskingKernels || !this.isOpen) return;
    this.isAskingKernels = true;
    this.send({ kind: "kernels" });
  }

  private send(content: { kind: string; page?: string; is_seen?: boolean }): void {
    if (this.comm && !this.comm.isDisposed) this.comm.send(content);
  }

  private onStatus(_: unknown, status: Kernel.Status): void {
    if (status === "restarting" || status === "autorestarting") this.lose("restarted");
    else if (status === "dead" || status === "terminating") this.lose("gone");
    // Any cell may have loaded the extension.
    else if (status === "idle") void this.find();
  }

  private onKernel(): void {
    this.lose(this.kernelId === null ? "gone" : "unloaded");
    void this.find();
  }

  /** Look for the comm among the kernel's own, which answers once it is idle. */
  private async find(): Promise<void> {
    const kernel = this.session.session?.kernel;
    if (!kernel || this.comm || this.isAsking || this.isDisposed) return;
    this.isAsking = true;
    try {
      const { content } = await kernel.requestCommInfo({ target_name: TARGET });
      const id = content.status === "ok" ? Object.keys(content.comms).pop() : undefined;
      const isStill = kernel === this.session.session?.kernel && !this.isDisposed;
      if (id !== undefined && isStill && !this.comm) this.open(kernel, id);
    } catch {
      // The kernel ended or was restarted meanwhile: its status tells that.
    } finally {
      this.isAsking = false;
    }
  }

  private open(kernel: Kernel.IKernelConnection, id: string): void {
    const comm = kernel.createComm(TARGET, id);
    comm.onMsg = ({ content }) => this.receive(content.data as Record<string, any>);
    comm.onClose = () => this.lose("unloaded");
    this.comm = comm;
    this.lack = null;
    this.changed.emit();
  }

  private receive(message: Record<string, any>): void {
    if (message.kind === "memory") this.memory = message.devices;
    else if (message.kind === "kernels") {
      this.isAskingKernels = false;
      this.gpus = message.gpus;
      this.gpusAt = performance.now();
    } else if (message.kind === "side") this.nShown = message.n_shown;
    else if (message.kind === "dashboard") {
      this.modelId = message.model_id;
      this.failure = "";
    } else if (message.kind === "failed") {
      this.isAskingKernels = false;
      this.failure = message.message;
    }
    this.changed.emit();
  }

  private lose(lack: Lack): void {
    // A kernel that is restarted has other states on its way.
    if (this.lack === "restarted" && lack !== "gone" && !this.comm) return;
    this.forget();
    this.lack = lack;
    this.changed.emit();
  }

  private forget(): void {
    const { comm } = this;
    this.comm = null;
    this.memory = [];
    this.gpus = [];
    this.modelId = null;
    this.failure = "";
    this.nShown = 0;
    this.isAskingKernels = false;
    // Not comm.close(): other pages speak to it.
    comm?.dispose();
  }
}
