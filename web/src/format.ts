// SPDX-License-Identifier: Apache-2.0
// How numbers and words look.

import type { Metric } from "./page";

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

export function formatNumber(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("e+", "e").replaceAll("-", "−");
}

/** For values whose difference is in the last digits. */
export function formatPrecisely(value: Metric): string {
  return typeof value === "number" ? String(value).replaceAll("-", "−") : formatMetric(value);
}

export function formatMultiple(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0×";
  const rounded = Number(value.toPrecision(value < 10 ? 2 : 3));
  return (rounded >= 1e5 || rounded < 1e-2 ? rounded.toExponential(1).replace("e+", "e").replaceAll("-", "−") : rounded.toString()) + "×";
}

export function formatMetric(value: Metric): string {
  if (value === null) return "not taken";
  if (Array.isArray(value)) return "undefined";
  if (typeof value === "number") return formatNumber(value);
  return { inf: "∞", "-inf": "−∞", nan: "NaN" }[value];
}

export function formatCount(value: number): string {
  return value.toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function powerOfTen(exponent: number): string {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[Number(digit)]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${digits}`;
}

export function plural(count: number, one: string, many: string): string {
  return `${formatCount(count)} ${count === 1 ? one : many}`;
}

/** A next step is a sentence, and often ends in a command: only the command is worth copying. */
export function splitNext(text: string): { prose: string; command: string } {
  const found = text.match(/^(.*?)(^|: |\()((?:ulpscope|python[0-9.]*|torchrun) .*)$/s);
  if (!found) return { prose: text, command: "" };
  const [, prose, opening, command] = found;
  return { prose: prose.trim(), command: opening === "(" ? command.replace(/\)\W*$/, "") : command };
}

/** A sentence begins with a capital, unless it begins with the name of something. */
export function capitalised(text: string): string {
  return /^[a-z]+(?=[ ,;]|$)/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
}
