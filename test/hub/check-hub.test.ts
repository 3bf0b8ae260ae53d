import { describe, expect, test } from "bun:test";
import { checkHub } from "../../src/hub/check-hub.ts";

const TOKEN = "hf_good";
const DATE = "Tue, 01 Jun 2027 12:00:00 GMT";

/** A Hub that knows one token; `change` answers in its place. */
function hub(change: (url: URL) => Response | undefined = () => undefined) {
  const tokens: (string | null)[] = [];
  const server = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    fetch(request) {
      const url = new URL(request.url);
      const token = request.headers.get("authorization");
      tokens.push(token);
      const other = change(url);
      if (other) return other;
      if (url.pathname === "/api/models") return Response.json([{ id: "a/b" }], { headers: { date: DATE } });
      if (url.pathname !== "/api/whoami-v2") return new Response("", { status: 404 });
      return token === `Bearer ${TOKEN}`
        ? Response.json({ type: "user", name: "ada" })
        : Response.json({ error: "Invalid user token." }, { status: 401 });
    },
  });
  return { endpoint: server.url.origin, tokens, [Symbol.dispose]: () => void server.stop(true) };
}

describe("a look at the Hub", () => {
  test("says that it answers, how fast, and what its clock says", async () => {
    using server = hub();
    const state = await checkHub({ endpoint: server.endpoint, token: undefined });
    expect(state).toMatchObject({ problem: undefined, token: "none", user: undefined });
    expect(state.seconds).toBeGreaterThan(0);
    expect(state.clock!.theirMs).toBe(Date.parse(DATE));
    expect(server.tokens).toEqual([null]);
  });

  test("says whose the token is, and sends it only to ask that", async () => {
    using server = hub();
    const state = await checkHub({ endpoint: server.endpoint, token: TOKEN });
    expect(state).toMatchObject({ problem: undefined, token: "valid", user: "ada" });
    expect(server.tokens).toEqual([null, `Bearer ${TOKEN}`]);
  });

  test("says that a token is not known, and what to do", async () => {
    using server = hub();
    const state = await checkHub({ endpoint: server.endpoint, token: "hf_stale" });
    expect(state).toMatchObject({ token: "refused", problem: "the Hub does not know this token" });
    expect(state.remedy).toContain("HF_TOKEN");
  });

  test.each([
    ["a login page", () => new Response("<html>log in</html>", { headers: { "content-type": "text/html" } })],
    ["a redirection", () => Response.redirect("http://127.0.0.1:9/login")],
    ["an error", () => new Response("down", { status: 503 })],
    ["an object", () => Response.json({ models: [] })],
  ])("is not taken in by %s", async (_, answer) => {
    using server = hub(answer);
    const state = await checkHub({ endpoint: server.endpoint, token: TOKEN });
    expect(state).toMatchObject({ token: "unknown", problem: expect.stringContaining("not as a Hub does") });
    expect(server.tokens).toEqual([null]); // whoever answers so gets no token
  });

  test("leaves a token open that the Hub cannot tell about", async () => {
    using server = hub(({ pathname }) => (pathname === "/api/models" ? undefined : new Response("", { status: 500 })));
    const state = await checkHub({ endpoint: server.endpoint, token: TOKEN });
    expect(state).toMatchObject({ token: "unknown", problem: expect.stringContaining("HTTP 500") });
  });

  test("says that nobody answers, or that there is no address", async () => {
    const down = await checkHub({ endpoint: "http://127.0.0.1:9", token: undefined });
    expect(down.problem).toContain("http://127.0.0.1:9 cannot be reached");
    expect(down.remedy).toContain("HF_HUB_OFFLINE=1");
    expect(down.problem).not.toContain("verbose"); // Bun's advice to programmers
    const none = await checkHub({ endpoint: "the hub", token: undefined });
    expect(none.problem).toContain('HF_ENDPOINT is "the hub"');
  });
});
