// SPDX-License-Identifier: Apache-2.0
// Reads the JSON block that report/comparison/html.py fills (its `page_data` says what stands there) into columns that are quick to walk.

export type Number_ = number | "inf" | "-inf" | "nan" | null;
export type Metric = Number_ | [string];
export type FrameData = [file: string, line: number, fn: string, code: string];

export interface Histogram {
  what: string;
  edges: Number_[];
  counts: number[];
}

export interface Finding {
  level: "fault" | "note";
  kind: string;
  headline: string;
  step: number | null;
  rank: number | null;
  phase: string | null;
  module: string;
  call: string;
  slot: string;
  source: FrameData | null;
  stack: FrameData[];
  evidence: string[];
  next: string;
  row: number | null;
  histograms: Histogram[];
}

export interface SlotDetail {
  level: string;
  rule: string;
  reason: string;
  whyNot: string;
  multiple: Number_;
  distance: Number_;
  metrics: [string, Metric][];
  counts: [string, number][];
  worst: [number[], Number_, Number_] | null;
  changes: [string, Metric][];
  statistics: { name: string; subject: Number_; reference: Number_ }[];
}

export interface SlotView {
  slot: string;
  subject: string;
  reference: string;
  detail: SlotDetail | null;
}

export interface Side {
  path: string;
  facts: [string, string][];
}

type Columns = Record<string, any[]>;

const SCHEMA = 1;

/** The state of a row: what its verdict and its part in the error come to, worst first. */
export const STATES = [
  { name: "contributed", symbol: "✖", hint: "clean inputs, wrong result: the error begins here" },
  { name: "differs", symbol: "◇", hint: "differs by more than rounding explains" },
  { name: "unmatched", symbol: "∅", hint: "has no partner on the other side" },
  { name: "amplified", symbol: "▲", hint: "magnifies an error that it was handed" },
  { name: "inherited", symbol: "↳", hint: "was handed an error" },
  { name: "masked", symbol: "◌", hint: "was handed an error that its result does not show" },
  { name: "unmeasured", symbol: "?", hint: "not compared: could not be measured, or need not agree and does not" },
  { name: "rounding", symbol: "≈", hint: "differs, but not more than rounding explains" },
  { name: "same", symbol: "=", hint: "bitwise the same" },
] as const;
export const STATE_INDEX = Object.fromEntries(STATES.map((state, index) => [state.name, index])) as Record<string, number>;
export const PHASE_SYMBOLS: Record<string, string> = { start: "■", forward: "→", backward: "←", optimizer: "■" };
export const isCalm = (state: number): boolean => state >= STATE_INDEX.masked;

export class Page {
  readonly verdict: "same" | "rounding" | "unknown" | "diverges";
  readonly answer: string;
  readonly notCompared: string;
  readonly rules: string;
  readonly elapsed: number;
  readonly subject: Side;
  readonly reference: Side;
  readonly findings: Finding[];
  readonly count: number;
  readonly numLeftOut: number;
  readonly numDetailsLeftOut: number;
  readonly phases: string[];
  readonly state: Uint8Array;
  readonly phase: Uint8Array;
  readonly rank: Int32Array;
  readonly step: Int32Array;
  readonly order: Int32Array;
  readonly module: Int32Array;
  readonly op: Int32Array;
  readonly index: Int32Array;
  readonly distance: Float64Array;
  readonly multiple: Float64Array;
  readonly stateCounts: number[];
  private readonly detailsOf = new Map<number, number[]>();
  private searchTexts: string[] | null = null;

  constructor(private readonly data: any) {
    const rows: Columns = data.rows;
    this.verdict = data.verdict;
    this.answer = data.answer ?? "";
    this.notCompared = data.not_compared ?? "";
    this.rules = data.rules;
    this.elapsed = data.elapsed_s;
    this.subject = data.subject;
    this.reference = data.reference;
    this.findings = data.findings;
    this.count = rows.op?.length ?? 0;
    this.numLeftOut = data.num_left_out;
    this.numDetailsLeftOut = data.details.num_left_out;
    this.phases = data.codes.phase;
    this.phase = Uint8Array.from(rows.phase ?? []);
    this.rank = Int32Array.from(rows.rank ?? []);
    this.step = Int32Array.from(rows.step ?? []);
    this.order = Int32Array.from(rows.order ?? []);
    this.module = Int32Array.from(rows.module ?? []);
    this.op = Int32Array.from(rows.op ?? []);
    this.index = Int32Array.from(rows.index ?? []);
    this.distance = Float64Array.from(rows.distance ?? [], toNumber);
    this.multiple = Float64Array.from(rows.multiple ?? [], toNumber);
    this.state = Uint8Array.from({ length: this.count }, (_, row) => this.stateOf(row));
    this.stateCounts = STATES.map((state) => data.counts[state.name] ?? 0); // of all calls, also those that did not fit into the page
    (data.details.slots.row ?? []).forEach((row: number, place: number) => {
      this.detailsOf.set(row, [...(this.detailsOf.get(row) ?? []), place]);
    });
  }

  private stateOf(row: number): number {
    const level: string = this.data.codes.level[this.data.rows.level[row]];
    const part: string = this.data.codes.contribution[this.data.rows.contribution[row]];
    if (part === "contributed") return STATE_INDEX.contributed;
    if (level === "differs" && part in STATE_INDEX) return STATE_INDEX[part];
    return STATE_INDEX[level];
  }

  get faults(): Finding[] {
    return this.findings.filter((finding) => finding.level === "fault");
  }

  text(place: number | null): string {
    return place === null ? "" : this.data.texts[place];
  }

  moduleOf = (row: number): string => this.text(this.module[row]);
  phaseOf = (row: number): string => this.phases[this.phase[row]];
  callOf = (row: number): string => `${this.shortOp(row)} (call ${this.index[row]})`;
  fullCallOf = (row: number): string => `${this.text(this.op[row])}.${this.index[row]}`;

  shortOp(row: number): string {
    const parts = this.text(this.op[row]).split(".").filter(Boolean);
    if (this.kindOf(row) === "state") return parts.join(" ");
    return (parts[0] === "aten" ? parts[1] : parts.at(-1)) ?? this.text(this.op[row]);
  }

  kindOf(row: number): string {
    return this.data.codes.kind[this.data.rows.kind[row]];
  }

  otherOf(row: number): string {
    return this.text(this.data.rows.other[row]);
  }

  matchedBy(row: number): string {
    return this.data.codes.matched_by[this.data.rows.matched_by[row]];
  }

  isRecompute(row: number): boolean {
    return this.data.rows.recompute[row] === 1;
  }

  argumentsOf(row: number): string {
    return this.text(this.data.rows.arguments[row]);
  }

  stackOf(row: number): FrameData[] {
    const stack: [number, number, number, number][] = this.data.stacks[this.data.rows.stack[row]];
    return stack.map(([file, line, fn, code]) => [this.text(file), line, this.text(fn), this.text(code)]);
  }

  sourceOf(row: number): string {
    const first = this.data.stacks[this.data.rows.stack[row]][0];
    return first ? `${fileName(this.text(first[0]))}:${first[1]}` : "";
  }

  differencesOf(row: number): { what: string; subject: string; reference: string }[] {
    const found: [number, number, number][] = this.data.differences[String(row)] ?? [];
    return found.map(([what, subject, reference]) => ({
      what: this.text(what),
      subject: this.text(subject),
      reference: this.text(reference),
    }));
  }

  slotsOf(row: number): SlotView[] {
    const details = new Map((this.detailsOf.get(row) ?? []).map((place) => [this.data.details.slots.place[place], place]));
    const signature: [number, number, number][] = this.data.signatures[this.data.rows.signature[row]];
    return signature.map(([slot, subject, reference], place) => ({
      slot: this.text(slot),
      subject: this.text(subject),
      reference: this.text(reference),
      detail: details.has(place) ? this.slotDetail(details.get(place)!) : null,
    }));
  }

  /** True where a row has slots that differ but whose numbers did not fit into the page. */
  lacksDetails(row: number): boolean {
    return this.numDetailsLeftOut > 0 && this.state[row] !== STATE_INDEX.same && !this.detailsOf.has(row);
  }

  private slotDetail(place: number): SlotDetail {
    const { slots, metrics, counts, statistics } = this.data.details;
    const [subject, reference] = [slots.subject[place], slots.reference[place]];
    return {
      level: this.data.codes.level[slots.level[place]],
      rule: this.text(slots.rule[place]),
      reason: this.text(slots.reason[place]),
      whyNot: this.text(slots.why_not[place]),
      multiple: slots.multiple[place],
      distance: slots.distance[place],
      metrics: zip(metrics, slots.metrics[place]),
      counts: zip(counts, slots.counts[place]),
      worst: slots.worst[place],
      changes: slots.changes[place] ?? [],
      statistics: statistics
        .map((name: string, i: number) => ({ name, subject: subject?.[i] ?? null, reference: reference?.[i] ?? null }))
        .filter((line: any) => line.subject !== null || line.reference !== null),
    };
  }

  /** What the filter looks at, one lower-case text a row, made when first needed. */
  searchText(row: number): string {
    this.searchTexts ??= Array.from({ length: this.count }, (_, at) => {
      return `${this.moduleOf(at)}/${this.fullCallOf(at)} ${this.sourceOf(at)}`.toLowerCase();
    });
    return this.searchTexts[row];
  }
}

export function readPage(): Page | string {
  const text = document.getElementById("comparison")?.textContent?.trim();
  if (!text) return "This page holds no comparison yet. One is written by: ulpscope compare SUBJECT REFERENCE --html report.html";
  try {
    const data = JSON.parse(text);
    if (data.schema !== SCHEMA) return `This page reads comparisons of schema ${SCHEMA}, and this one is of schema ${data.schema}.`;
    return new Page(data);
  } catch (error) {
    return `The comparison inside this page is damaged (${error}). Write the report again.`;
  }
}

/** NaN stands for "not known" in a column. */
export function toNumber(value: Number_): number {
  if (typeof value === "number") return value;
  return value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN;
}

export function fileName(path: string): string {
  return path.split(/[\\/]/).at(-1) ?? path;
}

function zip<T>(names: string[], values: T[] | null): [string, T][] {
  return (values ?? []).map((value, place) => [names[place], value]);
}
