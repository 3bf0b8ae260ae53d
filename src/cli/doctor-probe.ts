import { writeSync } from "node:fs";
import { answerProbe, type ProbeRequest } from "../server/doctor/index.ts";

/**
 * `meshnet doctor-probe REQUEST`, which no help shows: one look at a driver, in a process that it may crash. Each line of
 * stdout is written at once, so that the last one before a crash tells how far it came.
 */
export async function doctorProbe([request = ""]: readonly string[]): Promise<number> {
  await answerProbe(JSON.parse(request) as ProbeRequest, (event) => writeSync(1, `${JSON.stringify(event)}\n`));
  return 0;
}
