import { expect, test } from "bun:test";
import { join } from "node:path";
import { fakeHub } from "../support/fake-hub.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const SCRIPT = join(import.meta.dir, "../support/fetch-model.ts");

/** Proxies are read from the environment when a process starts, so it takes one. */
test.each([
  ["HTTP_PROXY leads through the proxy", "HTTP_PROXY", "", true],
  ["http_proxy too", "http_proxy", "", true],
  ["a host in NO_PROXY is asked directly", "HTTP_PROXY", "127.0.0.1", false],
])("%s", async (_, variable, noProxy, isProxied) => {
  using folder = temporaryFolder();
  using hub = fakeHub({ "org/model": { files: { "model.safetensors": "some weights" } } });
  let proxied = 0;
  const proxy = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch(request) {
      proxied++;
      return fetch(request.url, { headers: request.headers, redirect: "manual" });
    },
  });
  const child = Bun.spawn([process.execPath, SCRIPT, hub.url, folder.path, "1000"], {
    env: { PATH: process.env.PATH, [variable]: proxy.url.origin, NO_PROXY: noProxy },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [code, log] = [await child.exited, await new Response(child.stderr).text()];
  await proxy.stop(true);
  expect({ code, log }).toEqual({ code: 0, log: "" });
  expect(hub.servedBytes()).toBe(12);
  expect(proxied > 0).toBe(isProxied);
});
