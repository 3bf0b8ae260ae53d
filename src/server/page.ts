import type { Env, Hono } from "hono";
import type { Page } from "../ui/page.ts";

/**
 * What the page may do, whatever a model makes of it: load its own files and call its own node. No markup is made of
 * text (`require-trusted-types-for`), and no other page may frame it.
 */
const POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "img-src 'self'",
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
  "require-trusted-types-for 'script'",
  "trusted-types 'none'",
].join("; ");

/** Serves the files of `page`. */
export function mountPage<E extends Env>(hono: Hono<E>, page: Page): void {
  for (const [path, { type, text }] of Object.entries(page)) {
    const bytes = new TextEncoder().encode(text);
    // The length is said here, for an answer to HEAD, which has no body, would be given that of nothing.
    const headers = { ...HEADERS, "Content-Type": type, "Content-Length": String(bytes.length) };
    hono.get(path, () => new Response(bytes, { headers }));
  }
}

const HEADERS = {
  "Content-Security-Policy": POLICY,
  "Cache-Control": "no-cache", // another version of the node has another page
  "Referrer-Policy": "no-referrer",
  "X-Content-Type-Options": "nosniff",
  "Cross-Origin-Resource-Policy": "same-origin",
};
