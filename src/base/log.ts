export type LogLevel = "debug" | "info" | "warn" | "error";
export type LogFields = Record<string, string | number | boolean | undefined>;

/** One structured line per event. Prompts and token texts never go in here. */
export interface Logger {
  debug(event: string, fields?: LogFields): void;
  info(event: string, fields?: LogFields): void;
  warn(event: string, fields?: LogFields): void;
  error(event: string, fields?: LogFields): void;
}

const ORDER: Record<LogLevel, number> = { debug: 0, info: 1, warn: 2, error: 3 };

/**
 * A logger that hands each line to `write`: as `12:00:00 info  event key=value` for people, or one JSON object.
 * `level` is the lowest one that is written.
 */
export function createLogger(options: {
  level: LogLevel;
  format: "text" | "json";
  write: (line: string) => void;
  now?: () => Date;
}): Logger {
  const now = options.now ?? (() => new Date());
  const at =
    (level: LogLevel) =>
    (event: string, fields: LogFields = {}) => {
      if (ORDER[level] < ORDER[options.level]) return;
      options.write(
        options.format === "json"
          ? JSON.stringify({ time: now().toISOString(), level, event, ...fields })
          : `${now().toISOString().slice(11, 19)} ${level.padEnd(5)} ${event}${textFields(fields)}`,
      );
    };
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}

function textFields(fields: LogFields): string {
  return Object.entries(fields)
    .filter(([, value]) => value !== undefined)
    .map(([key, value]) => ` ${key}=${/[\s="]/.test(String(value)) ? JSON.stringify(value) : value}`)
    .join("");
}

export const silentLogger: Logger = { debug() {}, info() {}, warn() {}, error() {} };
