// SPDX-License-Identifier: Apache-2.0
// Builds the page into one file with nothing outside it, the same bytes for the same sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [svelte(), singleFile("report.html")],
  build: {
    outDir: "../src/ulpscope/report/assets",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: Number.MAX_SAFE_INTEGER,
    rollupOptions: { output: { format: "iife" } },
  },
});

/** Puts script and styles into the page, allows that one script and no network, and adds the licences of what is inside. */
function singleFile(name) {
  return {
    name: "single-file",
    enforce: "post",
    generateBundle(_, bundle) {
      const page = bundle["index.html"];
      const chunks = Object.values(bundle).filter((item) => item.type === "chunk");
      const styles = Object.values(bundle).filter((item) => item.fileName.endsWith(".css"));
      const script = chunks.map((chunk) => insideScript(chunk.code.trim())).join("\n");
      const style = styles.map((item) => String(item.source).trim()).join("\n");
      const head = [
        `<meta http-equiv="Content-Security-Policy" content="${policy(script)}">`,
        `<style>${style}</style>`,
      ].join("\n    ");
      const html = String(page.source)
        .replace(/\s*<script[^>]*\ssrc="[^"]*"[^>]*><\/script>/g, "")
        .replace(/\s*<link rel="stylesheet"[^>]*>/g, "")
        .replace("<!doctype html>", () => `<!doctype html>\n<!--\n${licences(chunks)}\n-->`)
        .replace('<meta charset="utf-8" />', (meta) => `${meta}\n    ${head}`)
        .replace("</body>", () => `<script>${script}</script>\n  </body>`);
      for (const file of Object.keys(bundle)) delete bundle[file];
      this.emitFile({ type: "asset", fileName: name, source: html });
    },
  };
}

/** What would end or confuse the script element occurs only within string literals, where a backslash changes nothing. */
function insideScript(code) {
  return code.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
}

function policy(script) {
  const hash = createHash("sha256").update(script).digest("base64");
  return `default-src 'none'; script-src 'sha256-${hash}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'`;
}

function licences(chunks) {
  const modules = chunks.flatMap((chunk) => Object.keys(chunk.modules));
  const packages = new Set(modules.map((id) => id.match(/^.*\/node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0]).filter(Boolean));
  return [...packages].sort().map(licence).join("\n\n").replaceAll("--", "- -");
}

function licence(folder) {
  const { name, version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  return `This file contains ${name} ${version}:\n\n${readFileSync(join(folder, file), "utf8").trim()}`;
}
