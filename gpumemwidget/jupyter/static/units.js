// Bytes, seconds and small pieces of HTML as text: the front end's counterpart of units.py.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const UNKNOWN = "—";

function formatBytes(bytes) {
  if (bytes === null || bytes === undefined || Number.isNaN(bytes)) return UNKNOWN;
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 1023.995 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const sign = bytes < 0 ? "-" : "";
  return unit === 0 ? `${sign}${value} B` : `${sign}${value.toFixed(2)} ${UNITS[unit]}`;
}

function formatChange(bytes) {
  return bytes > 0 ? `+${formatBytes(bytes)}` : formatBytes(bytes);
}

function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.9995e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.99995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 59.995) return `${seconds.toFixed(2)} s`;
  return formatElapsed(seconds);
}

/** Whole seconds, for what is still going on. */
function formatElapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** Binary ticks for an axis from 0 to ``top`` bytes: a power of two of bytes apart. */
function binaryTicks(top, most = 4) {
  let step = 1;
  while (top / step > most) step *= 2;
  const values = [];
  for (let value = 0; value <= top * 1.0001; value += step) values.push(value);
  return { step, values };
}

function formatTick(bytes) {
  if (bytes === 0) return "0";
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${Number(value.toFixed(2))} ${UNITS[unit]}`;
}

/** An element with attributes and children; text is always set as text. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only where it differs, so that nothing is laid out again for nothing. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
