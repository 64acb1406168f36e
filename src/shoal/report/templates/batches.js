"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const last = data.batch[data.batch.length - 1];
  const most = data.too_many ?? last;
  const fastest = Math.max(...data.bound);
  const slowest = Math.min(data.narrowest * fastest, ...data.rate, ...data.plain.filter((rate) => rate !== null));
  const high = fastest - slowest || fastest || 1;
  const across = [Math.max(0, data.batch[0] - 0.06 * most), 1.05 * most];
  const up = [Math.max(0, slowest - 0.1 * high), fastest + 0.1 * high];
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
    xaxis: { ...line(), range: across, title: { text: "images in a step", standoff: 8 } },
    shapes: data.too_many
      ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: data.too_many, x1: data.too_many, line: { color: colour("budget"), width: 2, dash: "dash" } }]
      : [],
  });
  const config = { displaylogo: false, displayModeBar: false };

  function batches() {
    const element = document.getElementById("batches-chart");
    const x = data.batch;
    const fitting = data.plain.findLastIndex((rate) => rate !== null);
    const plain = x.slice(0, fitting + 1);
    const traces = [
      // From the bound up to the ceiling of the chart.
      { x, y: x.map(() => up[1]), mode: "lines", line: { width: 0 }, hoverinfo: "skip" },
      { x, y: data.bound, mode: "lines", fill: "tonexty", fillcolor: `${colour("resident")}40`, line: { color: colour("resident"), width: 1.4, dash: "dot" }, hoverinfo: "skip" },
      { x: plain, y: data.plain.slice(0, fitting + 1), mode: "lines", line: { color: colour("soft"), width: 1.4, dash: "dot" }, hoverinfo: "skip" },
      { x, y: data.rate, mode: "lines", line: { color: colour("plain"), width: 1.6 }, hoverinfo: "skip" },
      {
        x: plain.slice(-1),
        y: data.plain.slice(fitting, fitting + 1),
        mode: "markers",
        marker: { symbol: "diamond", size: 12, color: colour("text") },
        hovertemplate: "<b>plain PyTorch</b>, %{x} images<br>%{y:.4~g} images/s<extra></extra>",
      },
      {
        x,
        y: data.rate,
        mode: "markers",
        marker: {
          size: x.map((_, i) => (i === data.best ? 15 : 10)),
          color: data.kind.map((kind) => colour(paints[kind])),
          line: { width: 1.5, color: colour("card") },
        },
        hovertext: x.map((batch, i) =>
          [`<b>${batch} images</b>${i === data.best ? ", the best" : ""}`, `step ${data.step[i]}, peak ${data.peak[i]}`, data.variant[i]].join("<br>"),
        ),
        hovertemplate: "%{hovertext}<br>%{y:.4~g} images/s<extra></extra>",
      },
    ];
    return Plotly.react(element, traces, { ...base(element), yaxis: { ...line(), range: up, title: { text: "images/s", standoff: 8 }, nticks: 7 } }, config);
  }

  function uses() {
    const element = document.getElementById("uses-chart");
    const colours = { kept: "kept", recomputed: "recomputed", offloaded: "fetched", encoded: "gradients" };
    // As wide as half way to the neighbours, so that close batches do not hide each other.
    const edges = data.batch.map((batch, i) => (i ? (data.batch[i - 1] + batch) / 2 : batch - 0.5)).concat([last + 0.5]);
    const traces = Object.entries(data.percent).map(([name, percent]) => ({
      type: "bar",
      name,
      x: data.batch.map((_, i) => (edges[i] + edges[i + 1]) / 2),
      y: percent,
      width: data.batch.map((_, i) => edges[i + 1] - edges[i]),
      customdata: data.batch,
      marker: { color: colour(colours[name]), line: { width: 1, color: colour("card") } },
      hovertemplate: `%{customdata} images: ${name} %{y:.3~g} %<extra></extra>`,
    }));
    return Plotly.react(element, traces, { ...base(element), barmode: "stack", yaxis: { ...line(), ticksuffix: " %", nticks: 5, range: [0, 100] } }, config);
  }

  const draw = () => Promise.all([batches(), uses()]);
  {% include "redraw.js" %}
})();
