/** Does `work` again and again, `ms` after it ended, while somebody sees the page. `work` does not throw. */
export function whileVisible(ms: number, work: () => Promise<void>): void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isWorking = false;
  const run = async () => {
    clearTimeout(timer);
    if (isWorking || document.hidden) return;
    isWorking = true;
    await work();
    isWorking = false;
    timer = setTimeout(() => void run(), ms);
  };
  document.addEventListener("visibilitychange", () => void run());
  void run();
}
