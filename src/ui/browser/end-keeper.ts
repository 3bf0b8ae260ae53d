/** So near the end is at the end: a line. */
const NEAR_PX = 32;

/** Whoever reads the end of something that grows or shrinks stays there; whoever reads above it is left alone. */
export class EndKeeper {
  readonly #scroller: HTMLElement;
  #isAtEnd = true;

  constructor(scroller: HTMLElement) {
    this.#scroller = scroller;
    scroller.addEventListener("scroll", () => {
      this.#isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
    });
    new ResizeObserver(() => this.changed()).observe(scroller); // a phone's keyboard came or went, say
  }

  changed(): void {
    if (this.#isAtEnd) this.go();
  }

  go(): void {
    this.#isAtEnd = true;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }
}
