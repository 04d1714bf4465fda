// The item in the status bar: the focused notebook's GPU memory.

import { Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import { formatBytes, formatShort, type KernelsList } from "./kernels";
import type { IMemory } from "./link";
import type { Links } from "./links";

export class StatusItem extends Widget {
  /** Emitted after each drawing. */
  readonly drawn = new Signal<this, void>(this);
  private readonly button = document.createElement("button");

  constructor(
    private readonly links: Links,
    private readonly kernels: KernelsList,
    onClick: () => void,
  ) {
    super();
    this.addClass("gml-status");
    this.button.type = "button";
    this.button.addEventListener("click", onClick);
    this.button.addEventListener("pointerenter", () => kernels.ask());
    this.node.append(this.button);
    links.changed.connect(() => this.draw());
    this.draw();
  }

  /** Whether there is anything to show. */
  get isActive(): boolean {
    return (this.links.current?.known.memory.length ?? 0) > 0;
  }

  private draw(): void {
    const memory = this.links.current?.known.memory ?? [];
    this.setHidden(memory.length === 0);
    if (memory.length > 0) this.write(memory);
    this.drawn.emit();
  }

  private write(memory: IMemory[]): void {
    const gpus = memory.filter(({ device }) => device !== "host");
    const shown = gpus.length === 0 ? memory[0] : findFullest(gpus);
    const name = gpus.length === 0 ? "Host" : gpus.length === 1 ? "GPU" : shown.device;
    const used = shown.here_bytes === null ? "?" : formatShort(shown.here_bytes);
    const total = shown.total_bytes === null ? "" : ` / ${formatShort(shown.total_bytes)}`;
    const isOver = memory.some((each) => each.is_over_budget || each.is_at_limit);
    this.button.textContent = `${name} ${used}${total} GiB`;
    this.button.title = [...memory.map(describe), ...(this.kernels.line ? [this.kernels.line] : []), "Click to open the dashboard."].join("\n");
    this.button.toggleAttribute("data-over", isOver);
  }
}

/** The device of which this notebook has the largest share; one that is over its mark goes first. */
function findFullest(gpus: IMemory[]): IMemory {
  const rank = (each: IMemory) =>
    Number(each.is_over_budget || each.is_at_limit) + (each.here_bytes ?? 0) / (each.total_bytes ?? Infinity);
  return gpus.reduce((best, each) => (rank(each) > rank(best) ? each : best));
}

function describe(memory: IMemory): string {
  const { device, name, here_bytes, reserved_bytes, allocated_bytes, limit_bytes, budget_bytes } = memory;
  const isHost = device === "host";
  const parts = [`${isHost ? "Host" : `${device} (${name})`}: ${formatBytes(here_bytes)} ${isHost ? "resident" : "here"}`];
  if (!isHost) parts.push(`${formatBytes(reserved_bytes)} reserved`);
  parts.push(`${formatBytes(allocated_bytes)} allocated`);
  if (memory.is_over_budget) parts.push(`more than its budget of ${formatBytes(budget_bytes)}`);
  if (memory.is_at_limit) parts.push(`its limit of ${formatBytes(limit_bytes)} is reached`);
  return parts.join(", ");
}
