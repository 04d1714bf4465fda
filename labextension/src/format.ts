// Bytes as text.

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
