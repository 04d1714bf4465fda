// The one place that thins lines with too many points.

/** Indices in [start, end) that keep the first, last, lowest and highest of each series in each of
 * ``buckets`` equal spans of time: what a line drawn through all points would show. */
export function pickExtremes(times, series, start, end, buckets) {
  if (end - start <= buckets * 2) return Array.from({ length: end - start }, (_, i) => start + i);
  const span = (times[end - 1] - times[start]) / Math.max(1, buckets) || 1;
  const keep = [];
  let from = start;
  while (from < end) {
    const until = times[start] + (Math.floor((times[from] - times[start]) / span) + 1) * span;
    let to = from + 1;
    while (to < end && times[to] < until) to++;
    const chosen = new Set([from, to - 1]);
    for (const values of series) {
      let low = from;
      let high = from;
      for (let i = from; i < to; i++) {
        if (!(values[i] >= values[low])) low = Number.isNaN(values[i]) ? low : i;
        if (!(values[i] <= values[high])) high = Number.isNaN(values[i]) ? high : i;
      }
      chosen.add(low).add(high);
    }
    keep.push(...[...chosen].sort((a, b) => a - b));
    from = to;
  }
  return keep;
}
