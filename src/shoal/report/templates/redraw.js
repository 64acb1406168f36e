// Sizes are ours and one drawing waits for the other: when a chart's size changes while it still draws, plotly.js
  // keeps the old size or never returns.
  let drawn = draw();
  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    drawn = drawn.then(() => {
      waiting = false;
      return draw();
    });
  }
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
