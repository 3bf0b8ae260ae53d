import { generate as tokens } from "../mesh/generate.ts";
import { defineCommand } from "./command.ts";
import { wholeNumber } from "./flags.ts";

/** Nobody reads on (`| head`), which is no fault; or there is no room where the text goes. */
function cannotWrite(error: Error & { code?: string }): never {
  if (error.code === "EPIPE") process.exit(0);
  console.error(`meshnet: the text cannot be written: ${error.message}`);
  process.exit(1);
}

/** `meshnet generate`: prints what a chain makes of a prompt, as it comes. */
export const generate = defineCommand({
  name: "generate",
  description: "Continue a prompt on a chain of nodes, greedily",
  args: {
    prompt: { type: "positional", required: true, description: "The text to continue" },
    head: { type: "string", required: true, valueHint: "URL", description: "The node that holds layer 0" },
    "max-new-tokens": { type: "string", default: "64", valueHint: "N", description: "The most tokens to make" },
  },
  examples: ['meshnet generate "This program is free" --head http://127.0.0.1:8001 --max-new-tokens 24'],
  async run(args) {
    const maxNewTokens = wholeNumber("max-new-tokens", args["max-new-tokens"], 1)!;
    process.stdout.on("error", cannotWrite);
    let said = false;
    try {
      for await (const { text } of tokens({ head: args.head, prompt: args.prompt, maxNewTokens })) {
        process.stdout.write(said ? text : args.prompt + text);
        said = true;
      }
    } finally {
      if (said) process.stdout.write("\n"); // also after half a text: the error has a line of its own
    }
    return 0;
  },
});
