"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const units = (largest, steps) => steps.findLast(([, size]) => largest >= size) ?? steps[0];
  const isDrawn = data.told && data.told <= 1.15 * data.plain.bytes; // a budget further right is told in words
  const most = Math.max(data.plain.bytes, ...data.budget, isDrawn ? data.told : 0);
  const [byteUnit, byteSize] = units(most, [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]]);
  const slowest = Math.max(data.plain.seconds, ...data.seconds);
  const fastest = Math.min(data.narrowest * slowest, ...data.bound); // small differences stay small
  const [timeUnit, timeSize] = units(slowest, [["µs", 1e-6], ["ms", 1e-3], ["s", 1]]);
  const inBytes = (values) => values.map((value) => value / byteSize);
  const inTime = (values) => values.map((value) => value / timeSize);
  const least = Math.min(data.budget[0], isDrawn ? data.told : most);
  const room = most - least || most;
  const across = [Math.max(0, least - 0.06 * room) / byteSize, (most + 0.05 * room) / byteSize];
  const high = slowest - fastest || slowest || 1;
  const up = [Math.max(0, fastest - 0.12 * high) / timeSize, (slowest + 0.1 * high) / timeSize];
  const paints = { whole: "kept", fused: "good", patches: "recomputed" };

  const line = () => ({ gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true, color: colour("soft") });
  const family = getComputedStyle(document.body).fontFamily;
  const base = (element) => ({
    width: element.clientWidth,
    height: element.clientHeight,
    paper_bgcolor: colour("card"),
    plot_bgcolor: colour("card"),
    showlegend: false,
    dragmode: false,
    margin: { l: 8, r: 12, t: 14, b: 8 },
    font: { family, size: 12.5, color: colour("soft") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), align: "left", font: { family, color: colour("text"), size: 12.5 } },
    xaxis: { ...line(), range: across, title: { text: `budget, ${byteUnit}`, standoff: 8 } },
  });
  const budgetLine = () =>
    isDrawn
      ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: data.told / byteSize, x1: data.told / byteSize, line: { color: colour("budget"), width: 2, dash: "dash" } }]
      : [];
  const config = { displaylogo: false, displayModeBar: false };

  function frontier() {
    const element = document.getElementById("frontier-chart");
    const x = inBytes(data.budget);
    const traces = [
      // From the floor of the chart up to the bound.
      { x, y: x.map(() => up[0]), mode: "lines", line: { width: 0 }, hoverinfo: "skip" },
      { x, y: inTime(data.bound), mode: "lines", fill: "tonexty", fillcolor: `${colour("resident")}40`, line: { color: colour("resident"), width: 1.4, dash: "dot" }, hoverinfo: "skip" },
      { x, y: inTime(data.seconds), mode: "lines", line: { color: colour("plain"), width: 1.6, shape: "hv" }, hoverinfo: "skip" },
      {
        x: [data.plain.bytes / byteSize],
        y: [data.plain.seconds / timeSize],
        mode: "markers",
        marker: { symbol: "diamond", size: 12, color: colour("text") },
        hovertemplate: "<b>plain PyTorch</b><extra></extra>",
      },
      {
        x,
        y: inTime(data.seconds),
        mode: "markers",
        marker: { size: 11, color: data.kind.map((kind) => colour(paints[kind])), line: { width: 1.5, color: colour("card") } },
        hovertext: data.size.map((size, i) =>
          [`<b>${size}</b>, peak ${data.peak[i]}`, `step ${data.added[i]} of plain`, data.variant[i]].join("<br>"),
        ),
        hovertemplate: `%{hovertext}<br>%{y:.4~g} ${timeUnit}<extra></extra>`,
      },
    ];
    return Plotly.react(element, traces, {
      ...base(element),
      shapes: budgetLine(),
      yaxis: { ...line(), range: up, ticksuffix: ` ${timeUnit}`, nticks: 7 },
    }, config);
  }

  function uses() {
    const element = document.getElementById("uses-chart");
    const gaps = data.budget.slice(1).map((budget, i) => budget - data.budget[i]);
    const width = (0.72 * (gaps.length ? Math.max(Math.min(...gaps), 0.02 * room) : 0.1 * room)) / byteSize;
    const colours = { kept: "kept", recomputed: "recomputed", offloaded: "fetched", encoded: "gradients" };
    const traces = Object.entries(data.bytes).map(([name, bytes]) => ({
      type: "bar",
      name,
      x: inBytes(data.budget),
      y: inBytes(bytes),
      width,
      marker: { color: colour(colours[name]) },
      hovertemplate: `${name} %{y:.4~g} ${byteUnit}<extra></extra>`,
    }));
    return Plotly.react(element, traces, {
      ...base(element),
      barmode: "stack",
      shapes: budgetLine(),
      yaxis: { ...line(), ticksuffix: ` ${byteUnit}`, nticks: 5, rangemode: "tozero" },
    }, config);
  }

  const draw = () => Promise.all([frontier(), uses()]);
  {% include "redraw.js" %}
})();
