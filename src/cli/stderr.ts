/** Says something on stderr, on a line of its own. At a terminal `console.error` would write it in red, good news too. */
export function tell(text: string): void {
  if (process.stderr.isTTY) process.stderr.write(`${text}\n`);
  else console.error(text);
}
