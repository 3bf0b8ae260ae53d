import { tell } from "./stderr.ts";

export interface Stdout {
  print(text: string): void;
  /** Resolves when all that was printed is out of this process. */
  flush(): Promise<void>;
}

/** Where results go. Nobody reads on (`| head`), which is no fault; or there is no room where they go: both end the process. */
export function openStdout(): Stdout {
  process.stdout.on("error", (error: Error & { code?: string }) => {
    if (error.code === "EPIPE") process.exit(0);
    tell(`meshnet: the text cannot be written: ${error.message}`);
    process.exit(1);
  });
  return {
    print: (text) => void process.stdout.write(text),
    flush: () => new Promise((resolve) => process.stdout.write("", () => resolve())),
  };
}
