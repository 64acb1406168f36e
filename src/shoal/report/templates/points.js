// What the two charts of a frontier draw alike: the fastest plans by budget, or by batch, and what they do.
  const paints = { whole: "kept", fused: "good", patches: "recomputed" };
  const panel = (element, xaxis, edge) => ({
    ...base(sizeOf(element), { l: 8, r: 12, t: 14, b: 8 }),
    xaxis: { ...line(), ...xaxis },
    shapes: edge === null ? [] : [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: edge, x1: edge, line: { color: colour("budget"), width: 2, dash: "dash" } }],
  });
  const bound = (x, y, end) => [
    { x, y: x.map(() => end), mode: "lines", line: { width: 0 }, hoverinfo: "skip" },
    { x, y, mode: "lines", fill: "tonexty", fillcolor: `${colour("resident")}40`, line: { color: colour("resident"), width: 1.4, dash: "dot" }, hoverinfo: "skip" },
  ];
  const plans = (x, y, shape) => ({ x, y, mode: "lines", line: { color: colour("plain"), width: 1.6, shape }, hoverinfo: "skip" });
  const points = (x, y, size, lines, hover) => ({
    x,
    y,
    mode: "markers",
    marker: { size, opacity: 1, color: data.kind.map((kind) => colour(paints[kind])), line: { width: 1.5, color: colour("card") } },
    hovertext: x.map((_, i) => lines(i).join("<br>")),
    hovertemplate: `%{hovertext}<br>${hover}<extra></extra>`,
  });
  const plain = (x, y, hover) => ({ x, y, mode: "markers", marker: { symbol: "diamond", size: 12, color: colour("text") }, hovertemplate: `${hover}<extra></extra>` });
  const bars = (x, heights, hover, more) =>
    Object.entries({ kept: "kept", recomputed: "recomputed", offloaded: "fetched", encoded: "gradients" }).map(([name, paint]) => ({
      type: "bar",
      name,
      x,
      y: heights(data.uses[name]),
      marker: { color: colour(paint), line: { width: 1, color: colour("card") } },
      hovertemplate: `${hover(name)}<extra></extra>`,
      ...more,
    }));
  const draw = () => Promise.all([drawPoints(document.getElementById("points-chart")), drawUses(document.getElementById("uses-chart"))]);
