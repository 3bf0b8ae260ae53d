/**
 * The `data` of server-sent events, from the bytes of a stream that is cut anywhere. Comments and other fields are passed over. An event
 * that the stream's end cuts off is none (WHATWG HTML, "Server-sent events").
 */
export async function* sseData(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<string> {
  const utf8 = new TextDecoder(); // a character may be cut as well
  let rest = "";
  let data: string[] = [];
  for await (const chunk of chunks) {
    const lines = (rest + utf8.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop()!;
    for (const text of lines) {
      const line = text.replace(/\r$/, "");
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || data.length === 0) continue;
      yield data.join("\n");
      data = [];
    }
  }
}
