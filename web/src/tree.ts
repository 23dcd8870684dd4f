// SPDX-License-Identifier: Apache-2.0
// The model as a tree: modules by their dotted paths, calls inside them, in the order in which they first run.

import { STATES, isCalm, type Page } from "./page";

export interface ModuleNode {
  name: string;
  path: string;
  children: Map<string, ModuleNode>;
  rows: number[];
  worst: number;
  num: number;
  numBad: number;
}

export type Item = { depth: number; module: ModuleNode; row: null } | { depth: number; module: ModuleNode; row: number };

export function buildTree(page: Page): ModuleNode {
  const root = emptyNode("", "");
  const nodes = new Map<number, ModuleNode[]>();
  for (let row = 0; row < page.count; row++) {
    const id = page.module[row];
    let chain = nodes.get(id);
    if (!chain) nodes.set(id, (chain = chainTo(root, page.text(id))));
    const state = page.state[row];
    for (const node of chain) {
      node.num++;
      if (!isCalm(state)) node.numBad++;
      if (state < node.worst) node.worst = state;
    }
    chain[chain.length - 1].rows.push(row);
  }
  return root;
}

function emptyNode(name: string, path: string): ModuleNode {
  return { name, path, children: new Map(), rows: [], worst: STATES.length - 1, num: 0, numBad: 0 };
}

/** The nodes from the root to a module, made where they are missing. */
function chainTo(root: ModuleNode, path: string): ModuleNode[] {
  const chain = [root];
  if (path === "") return chain;
  const parts = path.split(".");
  parts.forEach((part, depth) => {
    const parent = chain[depth];
    let child = parent.children.get(part);
    if (!child) parent.children.set(part, (child = emptyNode(part, parts.slice(0, depth + 1).join("."))));
    chain.push(child);
  });
  return chain;
}

/** What is visible with these modules open, top to bottom. */
export function visibleItems(root: ModuleNode, open: ReadonlySet<string>): Item[] {
  const items: Item[] = [];
  const stack: Item[] = inside(root, 0).reverse();
  for (let item = stack.pop(); item; item = stack.pop()) {
    items.push(item);
    if (item.row === null && open.has(item.module.path)) {
      for (const child of inside(item.module, item.depth + 1).reverse()) stack.push(child);
    }
  }
  return items;
}

function inside(module: ModuleNode, depth: number): Item[] {
  const modules: Item[] = [...module.children.values()].map((child) => ({ depth, module: child, row: null }));
  return modules.concat(module.rows.map((row) => ({ depth, module, row })));
}

/** Every module on the way to a path, itself included. */
export function ancestors(path: string): string[] {
  const parts = path.split(".");
  return path === "" ? [] : parts.map((_, depth) => parts.slice(0, depth + 1).join("."));
}
