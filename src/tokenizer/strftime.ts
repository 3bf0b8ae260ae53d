/**
 * A local time by Python's `strftime` in English, for templates that write the date. Throws an Error for a directive that
 * is not among those below.
 */
export function strftime(date: Date, format: string): string {
  return format.replace(/%(-?)(.)/gsu, (directive, dash: string, letter: string) => {
    const value = Object.hasOwn(DIRECTIVES, letter) ? DIRECTIVES[letter]!(date) : undefined;
    if (value === undefined) throw new Error(`strftime_now does not know ${directive}`);
    return dash ? value.replace(/^0+(?=\d)/, "") : value;
  });
}

const MONTHS = "January February March April May June July August September October November December".split(" ");
const DAYS = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split(" ");

const two = (value: number): string => String(value).padStart(2, "0");

const DIRECTIVES: Record<string, (date: Date) => string> = {
  "%": () => "%",
  Y: (date) => String(date.getFullYear()),
  y: (date) => two(date.getFullYear() % 100),
  m: (date) => two(date.getMonth() + 1),
  B: (date) => MONTHS[date.getMonth()]!,
  b: (date) => MONTHS[date.getMonth()]!.slice(0, 3),
  d: (date) => two(date.getDate()),
  e: (date) => String(date.getDate()).padStart(2),
  A: (date) => DAYS[date.getDay()]!,
  a: (date) => DAYS[date.getDay()]!.slice(0, 3),
  H: (date) => two(date.getHours()),
  I: (date) => two(date.getHours() % 12 || 12),
  p: (date) => (date.getHours() < 12 ? "AM" : "PM"),
  M: (date) => two(date.getMinutes()),
  S: (date) => two(date.getSeconds()),
  F: (date) => strftime(date, "%Y-%m-%d"),
  T: (date) => strftime(date, "%H:%M:%S"),
};
