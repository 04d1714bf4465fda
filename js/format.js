// Bytes, seconds and small pieces of HTML as text: the front end's counterpart of units.py.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export const UNKNOWN = "—";

export function isKnown(figure) {
  return typeof figure === "number" && !Number.isNaN(figure);
}

/** Return the power of 1024 in which bytes read best. */
export function findUnit(bytes) {
  let unit = 0;
  while (Math.abs(bytes) / 1024 ** unit >= 1023.995 && unit < UNITS.length - 1) unit += 1;
  return unit;
}

export function formatBytes(bytes) {
  if (!isKnown(bytes)) return UNKNOWN;
  const unit = findUnit(bytes);
  return unit === 0 ? `${bytes} B` : `${(bytes / 1024 ** unit).toFixed(2)} ${UNITS[unit]}`;
}

/** Bytes on each device as the kernel's ``describe_bytes`` words them: the one place that says
 * whether they are a lower bound. */
export function formatAmounts({ by_device: pairs, is_at_least: isAtLeast }) {
  const parts = pairs.filter(([, bytes]) => bytes > 0).map(([device, bytes]) => `${formatBytes(bytes)} on ${device}`);
  return isAtLeast ? `at least ${parts.join(", ") || formatBytes(0)}` : parts.join(", ");
}

/** Return the mark before a figure in a table that is a lower bound. */
export function markOf(amounts) {
  return amounts.is_at_least ? "≥ " : "";
}

/** Bytes with three figures or so, for where there is little room: ``35.2 GiB``. */
export function formatShort(bytes) {
  if (!isKnown(bytes)) return UNKNOWN;
  const [value, unit] = formatBytes(bytes).split(" ");
  return `${Number(value) >= 10 ? Number(Number(value).toFixed(1)) : Number(value)} ${unit}`;
}

/** A part of a whole, in the whole's unit: ``40.7 of 80 GiB``. */
export function formatOf(part, whole) {
  const unit = findUnit(whole);
  const short = (bytes) => {
    const value = bytes / 1024 ** unit;
    return Number(value.toFixed(value < 10 ? 2 : 1));
  };
  return `${short(part)} of ${short(whole)} ${UNITS[unit]}`;
}

export function formatChange(bytes) {
  return bytes > 0 ? `+${formatBytes(bytes)}` : formatBytes(bytes);
}

export function formatDuration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  if (seconds < 0.9995e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.99995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 59.995) return `${seconds.toFixed(2)} s`;
  return formatElapsed(seconds);
}

/** Whole seconds, for what is still going on. */
export function formatElapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** Binary ticks for an axis from 0 to ``top`` bytes: a power of two of bytes apart. */
export function binaryTicks(top, most = 4) {
  let step = 1;
  while (top / step > most) step *= 2;
  const values = [];
  for (let value = 0; value <= top * 1.0001; value += step) values.push(value);
  return { step, values };
}

export function formatTick(bytes) {
  const unit = findUnit(bytes);
  return bytes === 0 ? "0" : `${Number((bytes / 1024 ** unit).toFixed(2))} ${UNITS[unit]}`;
}

/** A time of today, or with its date. */
export function formatTime(seconds, now = new Date()) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const time = date.toLocaleTimeString([], { hour12: false });
  return date.toDateString() === now.toDateString() ? time : `${date.toLocaleDateString()}, ${time}`;
}
