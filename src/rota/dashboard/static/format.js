// Numbers and durations as text.

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** Two durations in one cell. A shared unit is written once. */
export function pair(first, second) {
  const [one, two] = [seconds(first), seconds(second)];
  const [number, unit] = one.split(" ");
  return two.endsWith(` ${unit}`) && !one.includes("min") ? `${number} · ${two}` : `${one} · ${two}`;
}

export function count(value) {
  const digits = value > 0 && value < 9.95 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

/** Whether a tenure or a drain has begun and not ended at `now`. */
export function isOn(one, now) {
  return one.begun_at <= now && now < (one.ended_at ?? Infinity);
}
