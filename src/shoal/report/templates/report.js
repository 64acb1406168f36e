"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const step = data.memory;
  const moments = step.start.length;
  const categories = Object.keys(step.bytes);
  const totals = step.start.map((_, i) => categories.reduce((sum, name) => sum + step.bytes[name][i], 0));
  const narrow = matchMedia("(max-width: 720px)");
  const touch = matchMedia("(pointer: coarse)");
  let onPaper = false;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Plotly reads markup in texts; names of ops and layers are shown as they are.
  const plainText = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const text = (column, i) => plainText(step.texts[step[column][i]]);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const units = (largest, steps) => steps.findLast(([, size]) => largest >= size) ?? steps[0];
  const byteUnits = [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]];
  const timeUnits = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]];
  const show = (value, steps) => {
    const [unit, size] = units(Math.abs(value), steps);
    const scaled = value / size;
    return `${scaled.toFixed(unit === "B" || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)} ${unit}`;
  };
  const showBytes = (value) => show(value, byteUnits);
  const showTime = (value) => (value ? show(value, timeUnits) : "0 s");

  const plainPeak = data.plain ? data.plain.bytes.reduce((a, b) => Math.max(a, b)) : 0;
  const top = Math.max(step.budget, totals[step.peak], plainPeak);
  const [byteUnit, byteSize] = units(top, byteUnits);
  const [timeUnit, timeSize] = units(step.end, timeUnits);
  const inUnit = (values) => values.map((value) => value / byteSize);

  function hoverText(i) {
    const swatch = (name) => `<span style="color:${colour(name)}">■</span>`;
    const parts = categories
      .filter((name) => step.bytes[name][i] > 0)
      .reverse()
      .map((name) => `${swatch(name)} ${name} ${showBytes(step.bytes[name][i])}`);
    const layer = text("layer", i);
    return [
      `<b>${text("op", i)}</b>`,
      `${layer ? `${layer}, ` : ""}${text("phase", i)}`,
      text("target", i),
      `${showTime(step.seconds[i])}, op ${i + 1} of ${moments}`,
      `<b>${showBytes(totals[i])} in use</b>`,
      ...parts,
    ].join("<br>");
  }

  // Steps hold their height until the next op, so the last op's height is written twice.
  const held = (values) => [...values, values[values.length - 1]];

  function memoryFigure(axis) {
    const byTime = axis === "time";
    const edges = byTime ? [...step.start, step.end].map((t) => t / timeSize) : [...step.start.keys(), moments];
    const end = edges[moments] || 1;
    const widths = step.start.map((_, i) => edges[i + 1] - edges[i]);
    const areas = categories.map((name) => ({
      name,
      x: edges,
      y: held(inUnit(step.bytes[name])),
      stackgroup: "bytes",
      fillcolor: colour(name),
      line: { shape: "hv", width: 0 },
      hoverinfo: "skip",
    }));
    const outline = {
      x: edges,
      y: held(inUnit(totals)),
      mode: "lines",
      line: { shape: "hv", width: 1, color: colour("text") },
      opacity: 0.55,
      hoverinfo: "skip",
    };
    // The hover belongs to invisible bars as wide as their ops: the pointer always names the op it is over.
    const pointer = {
      type: "bar",
      x: edges.slice(0, moments),
      y: inUnit(totals),
      width: widths,
      offset: 0,
      marker: { color: "rgba(0,0,0,0)", line: { width: 0 } },
      hovertext: step.start.map((_, i) => hoverText(i)),
      hovertemplate: "%{hovertext}<extra></extra>",
    };
    const traces = [...areas, outline, pointer];
    if (data.plain) {
      const plainEdges = byTime
        ? [...data.plain.start, data.plain.end].map((t) => t / timeSize)
        : [...data.plain.at, moments];
      traces.push({
        x: plainEdges,
        y: held(inUnit(data.plain.bytes)),
        mode: "lines",
        line: { shape: "hv", width: 1.3, color: colour("plain") },
        hoverinfo: "skip",
      });
    }
    // A strip under the chart shows which pass runs.
    const passes = { forward: "kept", loss: "gradients", recompute: "recomputed", backward: "errors" };
    for (const [phase, paint] of Object.entries(passes)) {
      const runs = step.phase.map((place) => (step.texts[place] === phase ? 1 : 0));
      traces.push({
        x: edges,
        y: held(runs),
        yaxis: "y2",
        fill: "tozeroy",
        fillcolor: colour(paint),
        line: { shape: "hv", width: 0 },
        mode: "lines",
        hoverinfo: "skip",
      });
    }

    const boundary = step.phase.findIndex((place) => step.texts[place] !== "forward");
    const shapes = [];
    const annotations = [];
    const note = (more) =>
      annotations.push({ showarrow: false, font: { size: 12, color: colour("soft") }, ...more });
    if (boundary > 0) {
      const x = edges[boundary];
      shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { width: 1, dash: "dot", color: colour("soft") } });
      note({ x, yref: "paper", y: 1, text: "forward", xshift: -6, xanchor: "right", yanchor: "bottom" });
      note({ x, yref: "paper", y: 1, text: "backward", xshift: 6, xanchor: "left", yanchor: "bottom" });
    }
    if (step.budget) {
      const y = step.budget / byteSize;
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { width: 2, dash: "dash", color: colour("budget") } });
      note({ xref: "paper", x: 0, xshift: 4, y, text: `budget ${showBytes(step.budget)}`, xanchor: "left", yanchor: "bottom", font: { size: 12, color: colour("budget") } });
    }
    if (data.plain) {
      const highest = data.plain.bytes.indexOf(plainPeak);
      const x = byTime ? data.plain.start[highest] / timeSize : data.plain.at[highest];
      if (plainPeak > 1.1 * totals[step.peak]) {
        note({ x, y: plainPeak / byteSize, text: `plain PyTorch ${showBytes(plainPeak)}`, xanchor: x < end / 2 ? "left" : "right", yanchor: "bottom" });
      }
    }
    const peakX = (edges[step.peak] + edges[step.peak + 1]) / 2;
    const onLeft = peakX < end / 2;
    const where = text("layer", step.peak) || text("op", step.peak);
    annotations.push({
      x: peakX,
      y: totals[step.peak] / byteSize,
      text: `<b>peak ${showBytes(totals[step.peak])}</b>${narrow.matches ? "" : `<br>${where}, ${text("phase", step.peak)}`}`,
      font: { size: 12, color: colour("text") },
      align: "left",
      bgcolor: colour("card"),
      opacity: 0.95,
      borderpad: 4,
      arrowcolor: colour("text"),
      arrowwidth: 1,
      arrowhead: 0,
      standoff: 2,
      ax: onLeft ? 40 : -40,
      ay: -42,
      xanchor: onLeft ? "left" : "right",
    });

    const layout = {
      ...base(),
      ...size(document.getElementById("memory-chart"), 680, 330),
      margin: { l: 8, r: 8, t: 26, b: 8 },
      hovermode: "x",
      hoverdistance: -1,
      bargap: 0,
      dragmode: touch.matches ? false : "zoom",
      shapes,
      annotations,
      xaxis: {
        ...line(),
        range: [0, end],
        anchor: "y2",
        showgrid: false,
        title: { text: byTime ? `time (${timeUnit})` : "op, in the order they run", standoff: 6 },
        nticks: narrow.matches ? 5 : 10,
        showspikes: true,
        spikemode: "across",
        spikesnap: "hovered data",
        spikethickness: 1,
        spikedash: "solid",
        spikecolor: colour("soft"),
      },
      yaxis: {
        ...line(),
        domain: [0.05, 1],
        range: [0, ((totals[step.peak] > 0.8 * top ? 1.28 : 1.12) * top) / byteSize || 1], // room for the words at the peak
        fixedrange: true,
        nticks: 6,
        title: { text: `in use (${byteUnit})`, standoff: 8 },
      },
      yaxis2: { domain: [0, 0.025], range: [0, 1], fixedrange: true, visible: false },
    };
    return { traces, layout };
  }

  const line = () => ({ gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true, color: colour("soft") });
  const family = getComputedStyle(document.body).fontFamily;
  const base = () => ({
    paper_bgcolor: colour("card"),
    plot_bgcolor: colour("card"),
    showlegend: false,
    font: { family, size: 12.5, color: colour("soft") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), align: "left", font: { family, color: colour("text"), size: 12.5 } },
  });
  const config = { displaylogo: false, displayModeBar: false };
  // On paper nothing tells a chart how wide it is; the widths given here fit A4 and Letter.
  const size = (element, width, height) =>
    onPaper ? { width, height } : { width: element.clientWidth, height: element.clientHeight };

  function curve(id, x, y, title, suffix, axisTitle) {
    const element = document.getElementById(id);
    if (!element) return undefined;
    const shown = y.length > 60 ? "lines" : "lines+markers";
    const trace = {
      x,
      y,
      mode: shown,
      connectgaps: false,
      line: { color: colour("kept"), width: 1.8 },
      marker: { size: 6, color: colour("kept") },
      hovertemplate: `${axisTitle} %{x}<br>${title} <b>%{y:.4~g}${suffix}</b><extra></extra>`,
    };
    return Plotly.react(element, [trace], {
      ...base(),
      ...size(element, 325, 210),
      margin: { l: 8, r: 12, t: 30, b: 8 },
      title: { text: title, x: 0, xanchor: "left", xref: "paper", yref: "container", y: 0.97, font: { size: 13.5, color: colour("text") } },
      dragmode: false,
      xaxis: { ...line(), showgrid: false, title: { text: axisTitle, standoff: 6 }, nticks: 6, ...(x.length < 6 ? { dtick: 1 } : {}) },
      yaxis: { ...line(), ticksuffix: suffix, nticks: 5, rangemode: suffix ? "normal" : "tozero" },
    }, config);
  }

  function draw() {
    document.documentElement.classList.toggle("printing", onPaper);
    const axis = document.querySelector("input[name=axis]:checked").value;
    const { traces, layout } = memoryFigure(axis);
    const accuracies = data.accuracies.map((share) => (share === null ? null : 100 * share));
    return Promise.all([
      Plotly.react("memory-chart", traces, layout, config),
      curve("loss-chart", data.losses.step, data.losses.loss, "Loss", "", "training step"),
      curve("accuracy-chart", [...accuracies.keys()].map((i) => i + 1), accuracies, "Accuracy", " %", "evaluation"),
    ]);
  }

  if (!step.end) {
    // Ops without times: only their order can be drawn.
    document.querySelector("input[value=op]").checked = true;
    document.querySelector("input[value=time]").disabled = true;
  }
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
  for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", redraw);
  dark.addEventListener("change", redraw);
  const print = (paper) => () => {
    onPaper = paper;
    redraw();
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
})();
