// Words and figures of a cell, and of the change that it made to a device.

import { UNKNOWN, formatBytes, formatChange, isKnown } from "./format.js";

/** Return the word for reserved memory, which on the host is the resident size. */
export function reservedName(device) {
  return device === "host" ? "resident" : "reserved";
}

/** Return which memory a peak is of: the host has no peak of allocated memory. */
export function peakName(device) {
  return device.peak_of === "reserved" ? `peak ${reservedName(device.device)}` : "peak";
}

export function cellName(cell) {
  return `In [${cell.execution_count ?? " "}]`;
}

/** Return the devices in view on which a cell went beyond its budget. */
export function crossedDevices(cell, choices) {
  return (cell.devices || []).filter((d) => d.crossed && choices.shows(d.device));
}

export function crossedText(device) {
  return `over the budget of ${formatBytes(device.crossed)}`;
}

/** Return how much a cell adds each time, once for each amount; a device is named where others may be meant. */
export function leakText(leaks, choices) {
  const marks = leaks.map(({ device, mark }) => (choices.device === device ? mark : `${device} ${mark}`));
  return [...new Set(marks)].join(", ");
}

export function peakText(device) {
  return isKnown(device.peak) ? markPeak(device.peak_is) + formatBytes(device.peak) : UNKNOWN;
}

export function riseText(device) {
  return isKnown(device.rise) ? markPeak(device.peak_is) + formatChange(Math.max(0, device.rise)) : UNKNOWN;
}

/** Return the mark before a peak; an exact high-water mark has none. */
function markPeak(peakIs) {
  return { exact: "", sampled: "~" }[peakIs] ?? "≥ ";
}

export const PEAK_MEANS = {
  exact: "The high-water mark itself",
  "at least": "Lower bound: the peak counter was reset during the cell",
  sampled: "The highest of what was seen at intervals",
};
