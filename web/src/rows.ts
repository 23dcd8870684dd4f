// SPDX-License-Identifier: Apache-2.0
// Which rows the table and the plot show, and in which order.

import { type Page } from "./page";

export interface Filter {
  text: string;
  states: ReadonlySet<number>;
  module: string | null;
  phase: number | null;
  rank: number | null;
  step: number | null;
}

export const NO_FILTER: Filter = { text: "", states: new Set(), module: null, phase: null, rank: null, step: null };

export type SortKey = "order" | "state" | "module" | "call" | "phase" | "distance" | "multiple" | "source" | "step" | "rank";

/** Rows that pass, in execution order. Words must all occur; a word with `*` is a glob over `module/call`. */
export function filterRows(page: Page, filter: Filter): Int32Array {
  const tests = filter.text.toLowerCase().split(/\s+/).filter(Boolean).map(wordTest);
  const inModule = filter.module === null ? null : moduleTest(page, filter.module);
  const kept = new Int32Array(page.count);
  let size = 0;
  for (let row = 0; row < page.count; row++) {
    if (filter.states.size && !filter.states.has(page.state[row])) continue;
    if (filter.phase !== null && page.phase[row] !== filter.phase) continue;
    if (filter.rank !== null && page.rank[row] !== filter.rank) continue;
    if (filter.step !== null && page.step[row] !== filter.step) continue;
    if (inModule && !inModule(page.module[row])) continue;
    if (tests.length) {
      const text = page.searchText(row);
      if (!tests.every((test) => test(text))) continue;
    }
    kept[size++] = row;
  }
  return kept.subarray(0, size);
}

function wordTest(word: string): (text: string) => boolean {
  if (!word.includes("*")) return (text) => text.includes(word);
  const pattern = new RegExp(`^${word.split(/\*+/).map(escaped).join(".*")}(\\s|$)`, "s");
  return (text) => pattern.test(text);
}

function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

function moduleTest(page: Page, module: string): (id: number) => boolean {
  const answers = new Map<number, boolean>();
  return (id) => {
    let answer = answers.get(id);
    if (answer === undefined) {
      const text = page.text(id);
      answer = text === module || (module !== "" && text.startsWith(`${module}.`));
      answers.set(id, answer);
    }
    return answer;
  };
}

/** A sorted copy; rows that are equal, and rows without a value, keep execution order, the latter at the end. */
export function sortRows(page: Page, rows: Int32Array, key: SortKey, descending: boolean): Int32Array {
  if (key === "order") return descending ? rows.slice().reverse() : rows;
  const value = valuesOf(page, rows, key);
  const sign = descending ? -1 : 1;
  return rows.slice().sort((a, b) => {
    const [x, y] = [value[a], value[b]];
    if (x !== x || y !== y) return Number(x !== x) - Number(y !== y) || a - b;
    return x === y ? a - b : x < y ? -sign : sign;
  });
}

/** One number a row that sorts like the column; texts are numbered in their alphabetical order. */
function valuesOf(page: Page, rows: Int32Array, key: SortKey): ArrayLike<number> {
  switch (key) {
    case "state":
    case "phase":
    case "distance":
    case "multiple":
    case "step":
    case "rank":
      return page[key];
    case "module":
      return ranked(page, rows, (row) => page.moduleOf(row));
    case "call":
      return ranked(page, rows, (row) => `${page.shortOp(row)}\u0000${String(page.index[row]).padStart(9, "0")}`);
    case "source":
      return ranked(page, rows, (row) => page.sourceOf(row).replace(/\d+$/, (line) => line.padStart(9, "0")));
    default:
      return page.order;
  }
}

function ranked(page: Page, rows: Int32Array, text: (row: number) => string): Float64Array {
  const texts = Array.from(rows, text);
  const places = new Map([...new Set(texts)].sort(naturally).map((value, place) => [value, place]));
  const values = new Float64Array(page.count).fill(NaN);
  rows.forEach((row, i) => (values[row] = texts[i] === "" ? NaN : places.get(texts[i])!));
  return values;
}

/** `layers.2` before `layers.10`. */
const naturally = new Intl.Collator("en", { numeric: true }).compare;
