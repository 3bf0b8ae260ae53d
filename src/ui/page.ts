import { bundle, contents } from "./build.ts" with { type: "macro" };

export interface PageFile {
  readonly type: string;
  readonly text: string;
}

/** The files of a page, by their paths. */
export type Page = Readonly<Record<string, PageFile>>;

/** The page that a head has at `/`. Its own addresses are relative: a proxy may put it below another path. */
export const page: Page = {
  "/": { type: "text/html; charset=utf-8", text: contents("page.html") },
  "/ui/page.css": { type: "text/css; charset=utf-8", text: contents("page.css") },
  "/ui/page.js": { type: "text/javascript; charset=utf-8", text: bundle("browser/main.ts") },
  "/ui/icon.svg": { type: "image/svg+xml", text: contents("icon.svg") },
};
