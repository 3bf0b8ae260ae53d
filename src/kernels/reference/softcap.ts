/** cap · tanh(x / cap) */
export const softcap = (x: number, cap: number): number => cap * Math.tanh(x / cap);
